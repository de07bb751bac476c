"""`linear_jsd` against the fp64 divergence of materialised logits; its graph and its bits."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lce import linear_cross_entropy, linear_jsd
from tests.jsd_oracle import JsdInputs, evaluate_jsd, evaluate_weighted_jsd, materialised_jsd
from tests.jsd_problems import BETAS, BF16, FP16, FP32, check, ignoring, make_inputs

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
    result = check(backend, make_inputs(*shape, device, dtype), beta=beta)
    assert result.loss.dtype == FP32
    assert result.grad_hidden.dtype == result.grad_weight.dtype == dtype


@pytest.mark.parametrize(("dtype", "temperature"), [(FP32, 0.5), (BF16, 4.0)], ids=str)
@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_betas_and_temperatures_match_the_oracle(beta, dtype, temperature, backend, device):
    check(backend, make_inputs(33, 24, 40, 130, device, dtype), beta=beta, temperature=temperature)


@pytest.mark.parametrize("beta", BETAS)
def test_heads_of_different_dtypes(beta, backend, device):
    check(backend, make_inputs(9, 24, 40, 70, device, BF16, FP32), beta=beta)
    check(backend, make_inputs(9, 24, 40, 70, device, FP32, FP16), beta=beta)


@pytest.mark.parametrize("beta", BETAS)
def test_temperature_per_token_ignored_rows_and_padding(beta, backend, device):
    inputs = make_inputs((11, 3), 24, 16, 70, device)
    labels = torch.arange(33, device=device).view(11, 3) % 5
    temperature = torch.linspace(0.5, 4.0, 33, device=device).view(11, 3)
    keywords = {"labels": labels, "ignore_index": 3, "vocab_size": 37, "temperature": temperature}
    result = check(backend, inputs, beta=beta, **keywords)
    assert (result.loss[labels == 3] == 0).all()
    assert (result.grad_hidden[labels == 3] == 0).all()
    assert (result.grad_weight[37:] == 0).all()


BOTH_HEADS = {
    "student_logits_scale": 1.5,
    "student_softcap": 2.0,
    "teacher_logits_scale": -0.5,
    "teacher_softcap": 5.0,
}


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ({"student_logits_scale": 0.3, "teacher_softcap": 3.0}, FP32),
        ({"student_softcap": 2.0, "teacher_logits_scale": 0.5}, FP32),
        (BOTH_HEADS, FP32),
        (BOTH_HEADS, BF16),
    ],
    ids=["scale and softcap", "softcap and scale", "both of both", "both of both, bf16"],
)
@pytest.mark.parametrize("beta", BETAS)
def test_scale_and_softcap_of_either_head(form, beta, dtype, backend, device):
    temperature = torch.linspace(0.5, 4.0, 9, device=device)
    check(backend, make_inputs(9, 24, 40, 130, device, dtype), beta=beta, temperature=temperature, **form)


@pytest.mark.parametrize("evaluate", [evaluate_jsd, evaluate_weighted_jsd])
@pytest.mark.parametrize("beta", BETAS)
def test_the_teachers_own_temperature(beta, evaluate, backend, device):
    inputs = make_inputs(9, 24, 40, 130, device)
    per_token = torch.linspace(0.5, 4.0, 9, device=device)
    for forms in ((1.5, 0.7), (per_token, 2.0), (1.5, per_token)):
        keywords = dict(zip(("temperature", "teacher_temperature"), forms, strict=True))
        check(backend, inputs, evaluate=evaluate, beta=beta, teacher_softcap=5.0, **keywords)
    broken = {**keywords, "teacher_temperature": per_token.index_fill(0, per_token.new_tensor([4]).long(), -1.0)}
    result = evaluate_jsd(linear_jsd, inputs, beta=beta, backend=backend, **broken)
    assert result.loss.isnan().nonzero().flatten().tolist() == [4]
    assert result.grad_hidden.isnan().any(dim=1).nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("workspace_bytes", [2**29, 2**17])
@pytest.mark.parametrize("token_weights", [False, True])
@pytest.mark.parametrize("beta", BETAS)
def test_the_students_outputs_come_with_the_loss(beta, token_weights, workspace_bytes, backend, device):
    """The loss and its gradients are what they are without them."""
    inputs = make_inputs((5, 2), 24, 40, 2000, device)
    labels = (torch.arange(10, device=device).view(5, 2) * 221) % 2000
    labels[1], labels[4, 1] = -100, 2000  # ignored, and no column
    keywords = {"labels": labels, "beta": beta, "temperature": 1.7, "student_softcap": 6.0, "backend": backend}
    keywords |= {"workspace_bytes": workspace_bytes, "token_weights": inputs.upstream if token_weights else None}
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
    with pytest.raises(ValueError, match="labels must be given for return_student, got None"):
        linear_jsd(*inputs[:4], return_student=True, backend=backend)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_no_tokens(beta, dtype, backend, device):
    inputs = make_inputs((0, 3), 24, 16, 70, device, dtype)
    result = evaluate_jsd(linear_jsd, inputs, beta=beta, backend=backend)
    assert result.loss.shape == (0, 3)
    assert result.grad_hidden.shape == (0, 3, 24)
    assert (result.grad_weight == 0).all()


def test_teacher_gets_no_gradient(backend, device):
    inputs = JsdInputs(*(t.requires_grad_() for t in make_inputs(5, 8, 12, 20, device)[:4]), None)
    linear_jsd(*inputs[:4], backend=backend).sum().backward()
    assert inputs.student_weight.grad is not None
    assert inputs.teacher_hidden.grad is None
    assert inputs.teacher_weight.grad is None


@pytest.mark.parametrize("token_weights", [False, True])
def test_a_teacher_that_ran_in_inference_mode(token_weights, backend, device):
    inputs = make_inputs(5, 8, 12, 20, device)
    with torch.inference_mode():
        teacher = inputs._replace(teacher_hidden=inputs.teacher_hidden + 0, teacher_weight=inputs.teacher_weight + 0)
    evaluate = evaluate_weighted_jsd if token_weights else evaluate_jsd
    expected, actual = (evaluate(linear_jsd, given, backend=backend) for given in (inputs, teacher))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_loss_that_takes_no_part_gives_no_gradient_and_no_error(backend, device):
    inputs = make_inputs(5, 8, 12, 20, device)
    inputs.student_hidden.requires_grad_()
    loss = linear_jsd(*inputs[:4], backend=backend)
    (loss.detach().sum() + inputs.student_hidden.sum()).backward()
    assert (inputs.student_hidden.grad == 1).all()


def test_double_backward_is_refused(backend, device):
    """A penalty on a gradient that has no graph would train as if it were not there."""
    inputs = make_inputs(5, 8, 12, 20, device)
    hidden = inputs.student_hidden.requires_grad_()
    loss = linear_jsd(*inputs[:4], backend=backend)
    with pytest.raises(RuntimeError, match=r"create_graph must be False: linear_jsd has no double backward"):
        torch.autograd.grad(loss.sum(), hidden, create_graph=True)
    assert torch.autograd.grad(loss.sum(), hidden)[0].isfinite().all()


def test_gradient_of_one_side_alone(backend, device):
    inputs = make_inputs(9, 24, 16, 70, device)
    both = evaluate_jsd(linear_jsd, inputs, backend=backend)
    for index, expected in ((0, both.grad_hidden), (1, both.grad_weight)):
        tensors = [t.clone() for t in inputs[:4]]
        tensors[index].requires_grad_()
        linear_jsd(*tensors, backend=backend).backward(inputs.upstream)
        assert torch.equal(tensors[index].grad, expected)


@pytest.mark.parametrize("beta", [0.5, 1])
def test_same_bits_from_run_to_run_and_within_autocast(beta, backend, device):
    inputs = make_inputs(33, 24, 16, 130, device)
    first = evaluate_jsd(linear_jsd, inputs, beta=beta, backend=backend)
    with torch.autocast(device.type, dtype=BF16):
        second = evaluate_jsd(linear_jsd, inputs, beta=beta, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("evaluate", [evaluate_jsd, evaluate_weighted_jsd])
@pytest.mark.parametrize("default", [BF16, FP16, torch.float64], ids=str)
def test_torchs_default_dtype_changes_no_bit(default, evaluate, backend, device):
    inputs = make_inputs(9, 24, 40, 2000, device, BF16)
    labels = ignoring(slice(0, 3), 9, device)
    forms = [{"beta": beta} for beta in BETAS]
    forms += [{"labels": labels, "skip_ignored": skip, "student_softcap": 3.0} for skip in (True, 6)]
    forms += [{"workspace_bytes": 2**17}]  # blocks of few tokens
    for keywords in forms:
        usual = evaluate(linear_jsd, inputs, backend=backend, **keywords)
        torch.set_default_dtype(default)
        try:
            result = evaluate(linear_jsd, inputs, backend=backend, **keywords)
        finally:
            torch.set_default_dtype(torch.float32)
        for name, value, expected in zip(result._fields, result, usual, strict=True):
            assert value.dtype == expected.dtype, name
            assert torch.equal(value, expected), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_a_large_problem_matches_the_oracle(beta, dtypes, backend, device):
    """Many tiles, and blocks of tokens; H and V odd."""
    check(backend, make_inputs(1000, 513, 770, 20011, device, *dtypes), beta=beta)
