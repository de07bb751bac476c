"""`linear_jsd` against the fp64 divergence of materialised logits; its graph and its bits."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron_lce import linear_cross_entropy, linear_jsd
from tests.jsd_oracle import JsdInputs, make_inputs, materialised_jsd
from tests.live_bytes import Products
from tests.problems import BETAS, ignored_labels, workspace_of

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
PROBLEMS = [  # tokens, H of student and teacher, V_local; dtype
    ((1, 1, 1, 1), FP32),
    ((1, 1, 1, 1), BF16),
    ((5, 1, 3, 2), FP16),
    ((3, 64, 8, 1), FP32),
    ((7, 33, 20, 101), FP16),
    ((7, 33, 20, 101), BF16),
    ((70, 17, 24, 130), FP32),  # several tiles, none of them full at the end
    ((130, 17, 24, 257), BF16),
    ((64, 64, 128, 128), FP32),  # full tiles
    ((128, 64, 128, 256), FP16),
    (((2, 3), 12, 40, 70), FP32),
    (((5, 2, 3), 16, 16, 300), BF16),
]
BOTH_HEADS = {"student_logits_scale": 1.5, "student_softcap": 2.0}
BOTH_HEADS |= {"teacher_logits_scale": -0.5, "teacher_softcap": 5.0}
FORMS = [
    ({"student_logits_scale": 0.3, "teacher_softcap": 3.0}, FP32),
    ({"student_softcap": 2.0, "teacher_logits_scale": 0.5}, FP32),
    (BOTH_HEADS, FP32),
    (BOTH_HEADS, BF16),
]


def test_oracle_is_the_definition():
    """The materialised form against torch's own KL divergence, so that the oracle is not this project's word alone."""
    inputs = make_inputs(9, 8, 12, 50, torch.device("cpu")).to(torch.float64)
    p_s, p_t = ((hidden @ weight.T / 2).softmax(-1) for hidden, weight in (inputs[:2], inputs[2:4]))
    m = 0.3 * p_t + 0.7 * p_s

    def kl(p, q):
        return F.kl_div(q.log(), p, reduction="none").sum(-1)

    for beta, expected in ((0.3, 0.3 * kl(p_t, m) + 0.7 * kl(p_s, m)), (0, kl(p_t, p_s)), (1, kl(p_s, p_t))):
        torch.testing.assert_close(materialised_jsd(*inputs[:4], beta=beta, temperature=2.0), expected)


@pytest.mark.parametrize(("shape", "dtype"), PROBLEMS, ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_loss_and_gradients_match_the_oracle(beta, shape, dtype, backend, device):
    result = make_inputs(*shape, device, dtype).check(backend, beta=beta)
    assert result.loss.dtype == FP32
    assert result.grad_hidden.dtype == result.grad_weight.dtype == dtype


@pytest.mark.parametrize(("dtype", "temperature"), [(FP32, 0.5), (BF16, 4.0)], ids=str)
@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_betas_and_temperatures_match_the_oracle(beta, dtype, temperature, backend, device):
    make_inputs(33, 24, 40, 130, device, dtype).check(backend, beta=beta, temperature=temperature)


@pytest.mark.parametrize("beta", BETAS)
def test_heads_of_different_dtypes(beta, backend, device):
    for dtypes in ((BF16, FP32), (FP32, FP16)):
        make_inputs(9, 24, 40, 70, device, *dtypes).check(backend, beta=beta)


@pytest.mark.parametrize("beta", BETAS)
def test_temperature_per_token_ignored_rows_and_padding(beta, backend, device):
    inputs = make_inputs((11, 3), 24, 16, 70, device)
    labels = torch.arange(33, device=device).view(11, 3) % 5
    temperature = torch.linspace(0.5, 4.0, 33, device=device).view(11, 3)
    result = inputs.check(backend, beta=beta, labels=labels, ignore_index=3, vocab_size=37, temperature=temperature)
    assert (result.loss[labels == 3] == 0).all()
    assert (result.grad_hidden[labels == 3] == 0).all()
    assert (result.grad_weight[37:] == 0).all()


@pytest.mark.parametrize(("form", "dtype"), FORMS)
@pytest.mark.parametrize("beta", BETAS)
def test_scale_and_softcap_of_either_head(form, beta, dtype, backend, device):
    temperature = torch.linspace(0.5, 4.0, 9, device=device)
    make_inputs(9, 24, 40, 130, device, dtype).check(backend, beta=beta, temperature=temperature, **form)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("beta", BETAS)
def test_the_teachers_own_temperature(beta, weighted, backend, device):
    inputs = make_inputs(9, 24, 40, 130, device)
    per_token = torch.linspace(0.5, 4.0, 9, device=device)
    for own, teachers in ((1.5, 0.7), (per_token, 2.0), (1.5, per_token)):
        keywords = {"temperature": own, "teacher_temperature": teachers, "teacher_softcap": 5.0, "beta": beta}
        inputs.check(backend, only_here={"weighted": weighted}, **keywords)
    per_token[4] = -1.0
    result = inputs.run(backend, beta=beta, temperature=1.5, teacher_temperature=per_token)
    assert result.loss.isnan().nonzero().flatten().tolist() == [4]
    assert result.grad_hidden.isnan().any(dim=1).nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("workspace_bytes", [2**29, 2**17])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("beta", BETAS)
def test_the_students_outputs_come_with_the_loss(beta, weighted, workspace_bytes, backend, device):
    """The loss and its gradients are what they are without them."""
    inputs = make_inputs((5, 2), 24, 40, 2000, device)
    labels = (torch.arange(10, device=device).view(5, 2) * 221) % 2000
    labels[1], labels[4, 1] = -100, 2000  # ignored, and no column
    keywords = {"labels": labels, "beta": beta, "temperature": 1.7, "student_softcap": 6.0, "backend": backend}
    keywords |= {"workspace_bytes": workspace_bytes, "token_weights": inputs.upstream if weighted else None}
    expected = linear_cross_entropy(*inputs[:2], labels, temperature=1.7, softcap=6.0, backend=backend)
    alone = linear_jsd(*inputs[:4], **keywords)
    hidden = inputs.student_hidden.requires_grad_()
    for skip in (False, True, 8):
        loss, student = linear_jsd(*inputs[:4], return_student=True, skip_ignored=skip, **keywords)
        torch.testing.assert_close(loss.detach(), alone)
        for name in ("logprobs", "entropy", "lse"):
            value = getattr(student, name)
            assert not value.requires_grad
            torch.testing.assert_close(value, getattr(expected, name), equal_nan=True, rtol=1e-5, atol=1e-5)
        assert not student.logprobs.gt(0).any()
        (gradient,) = torch.autograd.grad(loss.sum(), hidden)
        assert gradient[0].any()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_no_tokens(dtype, backend, device):
    for beta in BETAS:
        result = make_inputs((0, 3), 24, 16, 70, device, dtype).run(backend, beta=beta)
        assert result.loss.shape == (0, 3)
        assert result.grad_hidden.shape == (0, 3, 24)
        assert (result.grad_weight == 0).all()


def test_teacher_gets_no_gradient(backend, device):
    inputs = JsdInputs(*(t.requires_grad_() for t in make_inputs(5, 8, 12, 20, device)[:4]), None)
    linear_jsd(*inputs[:4], backend=backend).sum().backward()
    assert [tensor.grad is None for tensor in inputs[:4]] == [False, False, True, True]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_teacher_that_ran_in_inference_mode(weighted, backend, device):
    inputs = make_inputs(5, 8, 12, 20, device)
    with torch.inference_mode():
        teacher = inputs._replace(teacher_hidden=inputs.teacher_hidden + 0, teacher_weight=inputs.teacher_weight + 0)
    expected, actual = (given.run(backend, weighted=weighted) for given in (inputs, teacher))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_loss_that_takes_no_part_gives_no_gradient_and_no_error(backend, device):
    inputs = make_inputs(5, 8, 12, 20, device)
    inputs.student_hidden.requires_grad_()
    loss = linear_jsd(*inputs[:4], backend=backend)
    (loss.detach().sum() + inputs.student_hidden.sum()).backward()
    assert (inputs.student_hidden.grad == 1).all()


def test_gradient_of_one_side_alone(backend, device):
    inputs = make_inputs(9, 24, 16, 70, device)
    both = inputs.run(backend)
    for index, expected in ((0, both.grad_hidden), (1, both.grad_weight)):
        tensors = [t.clone() for t in inputs[:4]]
        tensors[index].requires_grad_()
        linear_jsd(*tensors, backend=backend).backward(inputs.upstream)
        assert torch.equal(tensors[index].grad, expected)


@pytest.mark.parametrize("beta", [0.5, 1])
def test_same_bits_from_run_to_run_and_within_autocast(beta, backend, device):
    inputs = make_inputs(33, 24, 16, 130, device)
    first = inputs.run(backend, beta=beta)
    with torch.autocast(device.type, dtype=BF16):
        second = inputs.run(backend, beta=beta)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_a_large_problem_matches_the_oracle(beta, dtypes, backend, device):
    """Many tiles, and blocks of tokens; H and V odd."""
    make_inputs(1000, 513, 770, 20011, device, *dtypes).check(backend, beta=beta)


# With `token_weights`: a scalar whose gradients are made in forward.


@pytest.mark.parametrize(
    ("dtypes", "beta", "tokens", "keywords"),
    [
        ((FP32, FP32), 0.5, 300, {}),
        ((BF16, BF16), 0.5, 140, {"student_softcap": 3.0}),  # blocks of 128 and less
        ((BF16, FP32), 0, 140, {"vocab_size": 70}),
        ((BF16, BF16), 0, 300, {"student_softcap": 3.0}),
        ((BF16, BF16), 1, 300, {"student_logits_scale": 0.7}),
        ((FP32, BF16), 0.5, 40, {}),  # too few for what is kept
    ],
    ids=str,
)
def test_known_weights_give_the_gradients_of_the_weighted_sum(dtypes, beta, tokens, keywords, backend, device):
    inputs = make_inputs((75, 2), 24, 16, 90, device, *dtypes)
    inputs.upstream[::3] = 0.0
    labels = ignored_labels(slice(0, None, 7), (75, 2), device)
    temperature = torch.linspace(0.5, 4.0, 150, device=device).view(75, 2)
    for skip in (False, True) if tokens == 140 else (False,):
        only_here = {"workspace_bytes": workspace_of(tokens, inputs, backend), "skip_ignored": skip, "weighted": True}
        keywords = {**keywords, "beta": beta, "labels": labels, "temperature": temperature}
        result = inputs.check(backend, only_here=only_here, **keywords)
        assert result.loss.shape == ()
        assert result.loss.dtype == FP32
        assert (result.grad_hidden[(labels == -100) | (inputs.upstream == 0)] == 0).all()


@pytest.mark.parametrize("beta", BETAS)
def test_gradients_are_as_small_as_the_weights(beta, backend, device):
    """To the last bit: what rounding leaves of a number that should be nothing is not, beside a small gradient."""
    inputs = make_inputs(20, 8, 16, 1300, device)  # columns of several programs
    whole = inputs.check(backend, only_here={"weighted": True}, beta=beta)
    tiny = inputs._replace(upstream=inputs.upstream * 2.0**-30).run(backend, weighted=True, beta=beta)
    assert torch.equal(tiny.grad_hidden * 2.0**30, whole.grad_hidden)
    assert torch.equal(tiny.grad_weight * 2.0**30, whole.grad_weight)


def test_known_weights_need_each_heads_logits_once(backend, device):
    """In blocks whose gradients are collected: products that sum over tokens are of more of them than logits are."""
    inputs = make_inputs(400, 8, 16, 60, device, BF16)
    with Products() as products:
        inputs.run(backend, weighted=True, workspace_bytes=workspace_of(200, inputs, backend))
    for size in (8, 16):
        computed = [(rows, width) for rows, inner, width in products.shapes if inner == size]
        assert sum(rows * width for rows, width in computed) == 400 * 60
        assert max(rows for rows, _ in computed) <= 256


def test_a_token_of_weight_zero_is_ignored(backend, device):
    """Whatever is in it; and `skip_ignored=True` leaves it out."""
    inputs = make_inputs(12, 8, 12, 30, device)
    inputs.upstream[:5] = 0.0
    clean = inputs.run(backend, weighted=True)
    inputs.student_hidden[2] = math.nan
    for skip in (True, 12):
        result = inputs.run(backend, weighted=True, skip_ignored=skip)
        torch.testing.assert_close(result.loss, clean.loss)
        assert not result.grad_hidden[:5].any()
        if skip is True:  # a CPU's library may take another order of sums for seven rows than for twelve
            torch.testing.assert_close(result.grad_weight, clean.grad_weight, rtol=1e-6, atol=1e-7)


def test_what_is_not_finite_makes_the_weighted_sum_nan(backend, device):
    inputs = make_inputs(12, 8, 12, 30, device)
    miscounted = inputs.run(backend, weighted=True, skip_ignored=0)
    assert miscounted.loss.isnan()
    inputs.teacher_hidden[2, 1] = math.nan
    result = inputs.run(backend, weighted=True)
    assert result.loss.isnan()
    assert result.grad_hidden.isnan().any(dim=1).nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("shape", [(0, 3), 5])
def test_known_weights_where_nothing_counts(shape, backend, device):
    inputs = make_inputs(shape, 8, 12, 30, device)
    result = inputs._replace(upstream=inputs.upstream * 0).run(backend, weighted=True)
    assert result.loss == 0
    assert not result.grad_weight.any()


def test_backward_scales_what_forward_made_once(backend, device):
    inputs = make_inputs(9, 24, 16, 70, device)
    once, scaled = inputs.run(backend, weighted=True), inputs.run(backend, weighted=True, factor=-0.25)
    assert torch.equal(scaled.grad_hidden, once.grad_hidden * -0.25)
    assert torch.equal(scaled.grad_weight, once.grad_weight * -0.25)
    tensors = [t.clone() for t in inputs[:4]]
    tensors[1].requires_grad_()
    loss = linear_jsd(*tensors, token_weights=inputs.upstream, backend=backend)
    with pytest.raises(RuntimeError, match="linear_jsd has no double backward"):
        torch.autograd.grad(loss, tensors[1], create_graph=True)
    loss.backward(retain_graph=True)
    assert torch.equal(tensors[1].grad, once.grad_weight)
    with pytest.raises(RuntimeError, match="a second backward through linear_jsd is not possible"):
        loss.backward()
    with torch.no_grad():
        alone = linear_jsd(*tensors, token_weights=inputs.upstream, backend=backend)
    torch.testing.assert_close(alone, loss.detach())
