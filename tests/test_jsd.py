"""`linear_jsd` against the fp64 divergence of materialised logits; its ends, its bounds and its errors."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron_lce import linear_jsd
from megatron_lce.backends.choice import load_jsd_backend
from megatron_lce.core import jsd_autograd, tokens
from megatron_lce.core.jsd_stats import Head
from megatron_lce.core.products import slab_row_stride
from tests.jsd_oracle import JsdInputs, evaluate_jsd, evaluate_weighted_jsd, jsd_comparisons, materialised_jsd
from tests.live_bytes import peak_live_bytes

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BETAS = [0, 0.5, 1]  # both ends and between

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


SOME, ALL, NONE, ALL_BUT_ONE = slice(0, None, 3), slice(None), slice(0, 0), slice(1, None)


def make_inputs(tokens, student_size, teacher_size, columns, device, dtype=FP32, teacher_dtype=None, logit_std=2.0):
    """Normal hidden and weight of either head, whose products have a standard deviation of `logit_std`."""
    shape = (tokens,) if isinstance(tokens, int) else tokens
    generator = torch.Generator().manual_seed(0)
    heads = []
    for size, its_dtype in ((student_size, dtype), (teacher_size, teacher_dtype or dtype)):
        hidden = torch.randn(*shape, size, generator=generator)
        weight = torch.randn(columns, size, generator=generator) * (logit_std / size**0.5)
        heads += [hidden.to(device, its_dtype), weight.to(device, its_dtype)]
    return JsdInputs(*heads, torch.randn(shape, generator=generator).to(device))


def check(backend, inputs, *, only_here=None, evaluate=evaluate_jsd, **keywords):
    """Run, assert that loss and gradients are within their budget of the oracle's, and return them.

    `only_here`: keywords that the oracle does not have.
    """
    actual = evaluate(linear_jsd, inputs, backend=backend, **(only_here or {}), **keywords)
    interpreted = backend == "triton" and inputs.student_hidden.device.type == "cpu"
    for name, error, allowed in jsd_comparisons(actual, inputs, interpreted=interpreted, **keywords):
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.1e}"
    return actual


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


@pytest.mark.parametrize("beta", BETAS)
def test_unusable_temperatures_make_their_rows_nan_and_no_other(beta, backend, device):
    inputs = make_inputs(8, 24, 16, 70, device)
    temperature = torch.ones(8, device=device)
    temperature[:4] = torch.tensor([0.0, -1.0, math.nan, math.inf])
    labels = torch.tensor([-100, 5, 5, 5, 5, 5, 5, 5], device=device)
    result = evaluate_jsd(linear_jsd, inputs, beta=beta, temperature=temperature, labels=labels, backend=backend)
    assert result.loss.isnan().tolist() == [False, True, True, True, False, False, False, False]
    assert result.loss[0] == 0
    assert result.grad_hidden[1:4].isnan().all()
    assert not result.grad_hidden[[0, 4, 5, 6, 7]].isnan().any()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("argument", [0, 2], ids=JsdInputs._fields[:4:2])
def test_nan_in_a_tokens_hidden_makes_its_row_nan_and_no_other(argument, beta, backend, device):
    """Loss and gradients: a step that is skipped where a gradient is NaN must be skipped."""
    inputs = make_inputs(6, 8, 12, 20, device)
    clean = evaluate_jsd(linear_jsd, inputs, beta=beta, backend=backend)
    inputs[argument][2, 1] = math.nan
    broken = evaluate_jsd(linear_jsd, inputs, beta=beta, backend=backend)
    assert broken.loss[2].isnan()
    assert broken.grad_hidden[2].isnan().all()
    assert broken.grad_weight.isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(broken.loss[others], clean.loss[others])
    assert torch.equal(broken.grad_hidden[others], clean.grad_hidden[others])


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("argument", [1, 3], ids=JsdInputs._fields[1:4:2])
def test_what_is_not_finite_in_a_weight_makes_every_row_nan(argument, value, beta, backend, device):
    """One column of the logits; infinities of either sign, by the token's hidden."""
    inputs = make_inputs(6, 8, 12, 20, device)
    inputs[argument][2, 1] = value
    result = evaluate_jsd(linear_jsd, inputs, beta=beta, backend=backend)
    for part in result:
        assert part.isnan().all()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_gradient_vanishes_where_student_equals_teacher(beta, dtype, backend, device):
    inputs = make_inputs(9, 24, 24, 130, device, dtype)
    typical = evaluate_jsd(linear_jsd, inputs, beta=beta, backend=backend)
    equal = inputs._replace(teacher_hidden=inputs.student_hidden, teacher_weight=inputs.student_weight)
    result = evaluate_jsd(linear_jsd, equal, beta=beta, backend=backend)
    assert result.loss.abs().max() <= 1e-6
    for name in ("grad_hidden", "grad_weight"):
        assert getattr(result, name).norm() <= 1e-5 * getattr(typical, name).norm(), name


@pytest.mark.parametrize("beta", [0, 0.1, 0.9, 1])
def test_probabilities_that_underflow_on_either_side(beta, backend, device):
    """Logits of +-1000: each head's mass is on columns that are impossible to the other, or on the same one."""
    inputs = make_inputs(16, 8, 8, 130, device, logit_std=300.0)
    same = inputs._replace(teacher_hidden=inputs.student_hidden * 2, teacher_weight=inputs.student_weight)
    for problem in (inputs, same):
        result = check(backend, problem, beta=beta)
        assert result.loss.isfinite().all()
        assert result.grad_hidden.isfinite().all()
        assert result.grad_weight.isfinite().all()


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_loss_stays_within_its_bounds(beta, backend, device):
    """Zero where the heads agree, the entropy of (beta, 1 - beta) where they have nothing in common."""
    apart = make_inputs(64, 8, 8, 128, device, logit_std=300.0)
    near = make_inputs(64, 8, 8, 128, device)
    near = near._replace(teacher_hidden=near.student_hidden * 1.0001, teacher_weight=near.student_weight)
    largest = torch.tensor(-beta * math.log(beta) - (1 - beta) * math.log(1 - beta))
    losses = torch.cat([linear_jsd(*i[:4], beta=beta, backend=backend) for i in (apart, near)])
    assert losses.min() >= 0
    assert losses.max() <= largest * (1 + 2 * torch.finfo(FP32).eps)
    assert losses.max() >= 0.999 * largest


@pytest.mark.parametrize("beta", BETAS)
def test_very_negative_logits(beta, backend, device):
    inputs = make_inputs(8, 8, 8, 70, device)
    for hidden, weight in (inputs[:2], inputs[2:4]):
        hidden[:, 0], weight[:, 0] = 100.0, -100.0
    check(backend, inputs, beta=beta)


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


@pytest.mark.parametrize("beta", [0.5, 1])
def test_a_tokens_loss_depends_on_no_other_token(beta, device):
    pytest.importorskip("triton")
    inputs = make_inputs(200, 24, 16, 300, device, BF16)
    whole = linear_jsd(*inputs[:4], beta=beta, backend="triton")
    for rows in (slice(0, 1), slice(150, 200), slice(5, 140)):
        part = [inputs.student_hidden[rows], inputs.student_weight, inputs.teacher_hidden[rows], inputs.teacher_weight]
        assert torch.equal(linear_jsd(*part, beta=beta, backend="triton"), whole[rows])


@pytest.mark.parametrize(
    ("beta", "hidden_size", "dtype"), [(0.5, 24, FP32), (0, 21, FP32), (0.5, 21, BF16), (1, 24, BF16)]
)
def test_the_smallest_workspace_is_named_and_works(beta, hidden_size, dtype, backend, device):
    """In blocks of one token and of 256 columns, with and without copies of rows that are not aligned."""
    inputs = make_inputs(3, hidden_size, 40, 300, device, dtype)
    with pytest.raises(ValueError, match=r"workspace_bytes must be at least \d+ for these heads, got 1$") as error:
        linear_jsd(*inputs[:4], beta=beta, backend=backend, workspace_bytes=1)
    smallest = int(str(error.value).split("at least ")[1].split()[0])
    check(backend, inputs, beta=beta, only_here={"workspace_bytes": smallest})
    check(backend, inputs, beta=beta, only_here={"workspace_bytes": 3 * smallest})
    with pytest.raises(ValueError, match=f"workspace_bytes must be at least {smallest} .* got {smallest - 1}"):
        linear_jsd(*inputs[:4], beta=beta, backend=backend, workspace_bytes=smallest - 1)


def test_logits_are_computed_once_where_the_workspace_holds_them(backend, device, monkeypatch):
    """In blocks of at least 128 tokens with all their columns; the same bits either way."""
    inputs = make_inputs(140, 24, 16, 300, device, BF16)
    module = load_jsd_backend(backend, device)
    compute, computed = module.logits, []

    def spy(head, row_scale, out):
        computed.append(out.numel())
        compute(head, row_scale, out)

    monkeypatch.setattr(module, "logits", spy)
    losses = []
    few, enough = (workspace_of(tokens, inputs, backend) for tokens in (60, 90))
    for workspace_bytes, passes in ((2**29, 1), (enough, 1), (few, 2)):
        computed.clear()
        losses.append(linear_jsd(*inputs[:4], workspace_bytes=workspace_bytes, backend=backend))
        assert sum(computed) == passes * 2 * 140 * 300
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=1e-6)
        assert backend == "torch" or torch.equal(loss, losses[0])


@pytest.mark.parametrize(("dtype", "workspace_bytes"), [(FP32, 2**19), (FP32, 2**23), (BF16, 2**19)], ids=str)
@pytest.mark.parametrize("beta", [0.5, 1])
def test_torch_slabs_are_gone_before_the_next_ones_come(beta, dtype, workspace_bytes):
    inputs = make_inputs(200, 32, 48, 2300, torch.device("cpu"), dtype)
    hidden, weight = inputs.student_hidden.requires_grad_(), inputs.student_weight.requires_grad_()
    keywords = {"beta": beta, "workspace_bytes": workspace_bytes, "backend": "torch"}
    per_token = 192 * 200  # statistics and row terms: a few dozen floats a token
    forward_peak, loss = peak_live_bytes(lambda: linear_jsd(*inputs[:4], **keywords))
    backward_peak, _ = peak_live_bytes(lambda: loss.backward(inputs.upstream))
    assert forward_peak <= workspace_bytes + per_token
    assert backward_peak <= workspace_bytes + hidden.nbytes + weight.nbytes + 4 * hidden.numel() + per_token


def workspace_of(tokens, inputs, backend):
    """Bytes that both heads' logits of so many tokens take, and half as many: gradients, copies."""
    (num_columns, _), device = inputs.student_weight.shape, inputs.student_hidden.device
    module = load_jsd_backend(backend, device)
    per_logit, per_token, per_column = module.logits_bytes(Head(*inputs[:2]), Head(*inputs[2:4]), num_columns)
    return int(1.5 * tokens * (slab_row_stride(num_columns) * per_logit + per_token)) + 2 * num_columns * per_column


def ignoring(rows, shape, device):
    labels = torch.zeros(shape, dtype=torch.int64, device=device)
    labels.view(-1)[rows] = -100
    return labels


@pytest.mark.parametrize(
    ("rows", "dtypes", "beta"),
    [
        (SOME, (FP32, BF16), 0.5),
        (SOME, (BF16, BF16), 1),
        (ALL, (BF16, BF16), 0.5),
        (NONE, (BF16, BF16), 0),
        (ALL_BUT_ONE, (FP32, FP32), 0),
    ],
    ids=str,
)
def test_skipping_ignored_rows_changes_no_bit_of_the_loss(rows, dtypes, beta, backend, device):
    inputs = make_inputs((10, 3), 24, 16, 300, device, *dtypes)
    keywords = {"labels": ignoring(rows, (10, 3), device), "beta": beta}
    keywords["temperature"] = torch.linspace(0.5, 2.0, 30, device=device).view(10, 3)
    computed = evaluate_jsd(linear_jsd, inputs, backend=backend, **keywords)
    for skip in (True, int((keywords["labels"] != -100).sum())):
        skipped = check(backend, inputs, only_here={"skip_ignored": skip}, **keywords)
        if backend == "triton":
            assert torch.equal(skipped.loss, computed.loss)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_count_that_is_not_the_labels_makes_everything_nan(wrong, backend, device):
    inputs, labels = make_inputs(12, 8, 12, 30, device), ignoring(slice(0, 6), 12, device)
    result = evaluate_jsd(linear_jsd, inputs, labels=labels, skip_ignored=6 + wrong, backend=backend)
    assert result.loss.isnan().all()
    assert result.grad_weight.isnan().any()


def test_rows_without_an_upstream_gradient_take_no_part_in_backward(backend, device, monkeypatch):
    """But for a broken one, which is NaN whatever its upstream gradient."""
    inputs, labels = make_inputs(40, 24, 16, 300, device, BF16), ignoring(slice(0, 4), 40, device)
    inputs.upstream[::2] = 0.0
    seen = []

    def spy(hidden, num_tokens, counted, *others):
        seen.append(num_tokens if counted is None else counted.shape[0])
        return tokens.Tokens(hidden, num_tokens, counted, *others)

    monkeypatch.setattr(jsd_autograd, "Tokens", spy)
    check(backend, inputs, labels=labels, only_here={"skip_ignored": True})
    assert seen[-1] == 18
    temperature = torch.ones(40, device=device)
    temperature[6] = 0.0
    result = evaluate_jsd(
        linear_jsd, inputs, labels=labels, temperature=temperature, skip_ignored=True, backend=backend
    )
    assert seen[-1] == 19
    assert result.grad_hidden.isnan().any(dim=1).nonzero().flatten().tolist() == [6]


def test_no_upstream_gradient_at_all(backend, device):
    inputs = make_inputs(12, 8, 12, 30, device)._replace(upstream=torch.zeros(12, device=device))
    result = evaluate_jsd(linear_jsd, inputs, skip_ignored=True, backend=backend)
    assert not result.grad_hidden.any()
    assert not result.grad_weight.any()


@pytest.mark.parametrize(
    ("dtypes", "beta", "tokens", "keywords"),
    [
        ((FP32, FP32), 0.5, 300, {}),
        ((BF16, BF16), 0.5, 140, {"student_softcap": 3.0}),  # blocks of 128 and less
        ((BF16, FP32), 0, 140, {"vocab_size": 70}),
        ((BF16, BF16), 1, 300, {"student_logits_scale": 0.7}),
        ((FP32, BF16), 0.5, 40, {}),  # too few for what is kept
    ],
    ids=str,
)
def test_known_weights_give_the_gradients_of_the_weighted_sum(dtypes, beta, tokens, keywords, backend, device):
    inputs = make_inputs((75, 2), 24, 16, 90, device, *dtypes)
    inputs.upstream[::3] = 0.0
    labels = ignoring(slice(0, None, 7), (75, 2), device)
    temperature = torch.linspace(0.5, 4.0, 150, device=device).view(75, 2)
    for skip in (False, True) if tokens == 140 else (False,):
        only_here = {"workspace_bytes": workspace_of(tokens, inputs, backend), "skip_ignored": skip}
        keywords = {**keywords, "beta": beta, "labels": labels, "temperature": temperature}
        result = check(backend, inputs, only_here=only_here, evaluate=evaluate_weighted_jsd, **keywords)
        assert result.loss.shape == ()
        assert result.loss.dtype == FP32
        assert (result.grad_hidden[(labels == -100) | (inputs.upstream == 0)] == 0).all()


def test_known_weights_need_each_heads_logits_once(backend, device, monkeypatch):
    """In blocks whose gradients are collected: products that sum over tokens are of more of them than logits are."""
    inputs = make_inputs(400, 8, 16, 60, device, BF16)
    module = load_jsd_backend(backend, device)
    compute, computed = module.logits, []

    def spy(head, row_scale, out):
        computed.append(out.shape[0])
        compute(head, row_scale, out)

    monkeypatch.setattr(module, "logits", spy)
    evaluate_weighted_jsd(linear_jsd, inputs, workspace_bytes=workspace_of(200, inputs, backend), backend=backend)
    assert sum(computed) == 2 * 400
    assert max(computed) <= 256


def test_a_token_of_weight_zero_is_ignored(backend, device):
    """Whatever is in it; and `skip_ignored=True` leaves it out."""
    inputs = make_inputs(12, 8, 12, 30, device)
    inputs.upstream[:5] = 0.0
    clean = evaluate_weighted_jsd(linear_jsd, inputs, backend=backend)
    inputs.student_hidden[2] = math.nan
    for skip in (True, 12):
        result = evaluate_weighted_jsd(linear_jsd, inputs, skip_ignored=skip, backend=backend)
        torch.testing.assert_close(result.loss, clean.loss)
        assert not result.grad_hidden[:5].any()
        assert skip == 12 or torch.equal(result.grad_weight, clean.grad_weight)


def test_what_is_not_finite_makes_the_weighted_sum_nan(backend, device):
    inputs = make_inputs(12, 8, 12, 30, device)
    inputs.teacher_hidden[2, 1] = math.nan
    result = evaluate_weighted_jsd(linear_jsd, inputs, backend=backend)
    assert result.loss.isnan()
    assert result.grad_hidden.isnan().any(dim=1).nonzero().flatten().tolist() == [2]
    miscounted = evaluate_weighted_jsd(linear_jsd, make_inputs(12, 8, 12, 30, device), skip_ignored=0, backend=backend)
    assert miscounted.loss.isnan()


@pytest.mark.parametrize("shape", [(0, 3), 5])
def test_known_weights_where_nothing_counts(shape, backend, device):
    inputs = make_inputs(shape, 8, 12, 30, device)
    result = evaluate_weighted_jsd(linear_jsd, inputs._replace(upstream=inputs.upstream * 0), backend=backend)
    assert result.loss == 0
    assert not result.grad_weight.any()


def test_backward_scales_what_forward_made_once(backend, device):
    inputs = make_inputs(9, 24, 16, 70, device)
    once = evaluate_weighted_jsd(linear_jsd, inputs, backend=backend)
    scaled = evaluate_weighted_jsd(linear_jsd, inputs, upstream=-0.25, backend=backend)
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


def test_known_weights_take_the_workspace_and_the_sum_of_the_weights_gradient():
    inputs = make_inputs(600, 32, 48, 2300, torch.device("cpu"))
    hidden, weight = inputs.student_hidden.requires_grad_(), inputs.student_weight.requires_grad_()
    keywords = {"token_weights": inputs.upstream, "workspace_bytes": 2**23, "backend": "torch"}
    peak, _ = peak_live_bytes(lambda: linear_jsd(*inputs[:4], **keywords))
    assert peak <= 2**23 + weight.nbytes + hidden.nbytes + 192 * 600


def wrong(**changes):
    """Valid arguments with some of them replaced."""
    inputs = make_inputs((4, 2), 8, 12, 20, torch.device("cpu"))
    arguments = {**dict(zip(JsdInputs._fields[:4], inputs[:4], strict=True)), "backend": "torch"}
    return {**arguments, **{name: change(inputs) if callable(change) else change for name, change in changes.items()}}


ERRORS = [
    (TypeError, {"student_hidden": None}, r"student_hidden must be a torch.Tensor, got NoneType"),
    (TypeError, {"teacher_weight": [1]}, r"teacher_weight must be a torch.Tensor, got list"),
    (
        TypeError,
        {"student_weight": lambda i: i.student_weight.half()},
        r"student_weight must have student_hidden's dtype",
    ),
    (
        TypeError,
        {"teacher_hidden": lambda i: i.teacher_hidden.double()},
        r"teacher_hidden must be float32, bfloat16 or",
    ),
    (ValueError, {"teacher_weight": lambda i: i.student_weight}, r"teacher_hidden and teacher_weight must agree on H"),
    (
        ValueError,
        {"teacher_weight": lambda i: i.teacher_weight[:9]},
        r"teacher_weight must hold as many rows .* 20, got 9",
    ),
    (
        ValueError,
        {"teacher_hidden": lambda i: i.teacher_hidden[:3]},
        r"teacher_hidden must have student_hidden's shape but",
    ),
    (
        ValueError,
        {"labels": torch.zeros(4, dtype=torch.int64)},
        r"labels must have student_hidden's shape without H, \(4, 2\)",
    ),
    (TypeError, {"labels": torch.zeros(4, 2)}, r"labels must be int64, got torch.float32"),
    (ValueError, {"beta": 1.5}, r"beta must lie in \[0, 1\], got 1.5"),
    (ValueError, {"beta": -0.1}, r"beta must lie in \[0, 1\], got -0.1"),
    (ValueError, {"beta": math.nan}, r"beta must be finite, got nan"),
    (TypeError, {"beta": "0.5"}, r"beta must be a float, got str"),
    (ValueError, {"temperature": 0.0}, r"temperature must be positive and finite, got 0.0"),
    (ValueError, {"temperature": torch.ones(3)}, r"temperature must be a float or have labels' shape, \(4, 2\)"),
    (ValueError, {"temperature": torch.ones(4, 2, requires_grad=True)}, r"temperature must not require grad"),
    (TypeError, {"student_logits_scale": "2"}, r"student_logits_scale must be a float, got str"),
    (ValueError, {"teacher_logits_scale": math.inf}, r"teacher_logits_scale must be finite, got inf"),
    (ValueError, {"student_softcap": 0.0}, r"student_softcap must be positive and finite, got 0.0"),
    (TypeError, {"teacher_softcap": True}, r"teacher_softcap must be a float, got bool"),
    (TypeError, {"token_weights": 1.0}, r"token_weights must be a torch.Tensor, got float"),
    (
        TypeError,
        {"token_weights": torch.ones(4, 2).long()},
        r"token_weights must be a floating tensor, got torch.int64",
    ),
    (ValueError, {"token_weights": torch.ones(8)}, r"token_weights must have labels' shape, \(4, 2\), got \(8,\)"),
    (ValueError, {"token_weights": torch.ones(4, 2, requires_grad=True)}, r"token_weights must not require grad"),
    (TypeError, {"skip_ignored": 2.0}, r"skip_ignored must be a bool or an int, got float"),
    (ValueError, {"skip_ignored": 9}, r"skip_ignored must be a number of the 8 rows, got 9"),
    (TypeError, {"ignore_index": 1.0}, r"ignore_index must be an int, got float"),
    (ValueError, {"vocab_start": -1}, r"vocab_start must be at least 0, got -1"),
    (ValueError, {"vocab_size": 0}, r"vocab_size must be at least 1, got 0"),
    (TypeError, {"workspace_bytes": 1e9}, r"workspace_bytes must be an int, got float"),
    (TypeError, {"tp_group": 3}, r"tp_group must be a torch.distributed.ProcessGroup or None, got int"),
    (
        ValueError,
        {"backend": "reference"},
        r"backend must be 'auto', 'triton' or 'torch' for linear_jsd, got 'reference'",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "message"), ERRORS, ids=[message[:50] for *_, message in ERRORS])
def test_errors_name_the_argument(kind, changes, message):
    with pytest.raises(kind, match=message):
        linear_jsd(**wrong(**changes))


# What only a GPU can show.


def requested_bytes(when):
    """Without what the allocator adds: up to 1 MiB a tensor, where it gives a block whole."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


def gpu_step(inputs, **keywords):
    """Peak bytes over the resting state of forward, and of backward with the gradients it leaves."""
    hidden, weight = inputs.student_hidden.requires_grad_(), inputs.student_weight.requires_grad_()
    hidden.grad = weight.grad = None
    base = requested_bytes("current")
    torch.cuda.reset_peak_memory_stats()
    loss = linear_jsd(*inputs[:4], **keywords)
    forward_peak = requested_bytes("peak") - base
    torch.cuda.reset_peak_memory_stats()
    loss.backward(inputs.upstream)
    return forward_peak, requested_bytes("peak") - base


@pytest.mark.gpu
@pytest.mark.usefixtures("usual_torch")
@pytest.mark.parametrize("workspace_bytes", [2**24, 2**27])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_memory_stays_within_what_the_caller_set(beta, dtype, workspace_bytes, backend, device):
    inputs = make_inputs(4096, 512, 768, 50257, device, dtype)
    keywords = {"beta": beta, "workspace_bytes": workspace_bytes, "backend": backend}
    gpu_step(inputs, **keywords)  # cuBLAS allocates its workspace on first use
    forward_peak, backward_peak = gpu_step(inputs, **keywords)
    per_token = 192 * 4096  # both heads' statistics and their merge, row terms: a few dozen floats a token
    hidden, weight = inputs.student_hidden, inputs.student_weight
    gradients = hidden.nbytes + weight.nbytes + 4 * hidden.numel()
    assert forward_peak <= workspace_bytes + per_token
    assert backward_peak <= workspace_bytes + gradients + per_token


@pytest.mark.gpu
@pytest.mark.usefixtures("usual_torch")
@pytest.mark.parametrize("workspace_bytes", [2**24, 2**28])
def test_memory_of_known_weights(workspace_bytes, backend, device):
    inputs = make_inputs(4096, 512, 768, 50257, device, BF16)
    hidden, weight = inputs.student_hidden.requires_grad_(), inputs.student_weight.requires_grad_()
    keywords = {"token_weights": inputs.upstream, "workspace_bytes": workspace_bytes, "backend": backend}
    for _ in range(2):  # cuBLAS allocates its workspace on first use
        base = requested_bytes("current")
        torch.cuda.reset_peak_memory_stats()
        loss = linear_jsd(*inputs[:4], **keywords)
        peak = requested_bytes("peak") - base
        del loss
    assert peak <= workspace_bytes + 4 * weight.numel() + (2 + 4) * hidden.numel() + 192 * 4096


@pytest.mark.gpu
@pytest.mark.usefixtures("usual_torch")
@pytest.mark.parametrize("beta", BETAS)
def test_no_host_synchronisation(beta, backend, device):
    inputs = make_inputs(512, 128, 256, 5003, device, BF16)
    gpu_step(inputs, beta=beta, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gpu_step(inputs, beta=beta, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_a_large_problem_matches_the_oracle(beta, dtypes, backend, device):
    """Many tiles, and blocks of tokens; H and V odd."""
    check(backend, make_inputs(1000, 513, 770, 20011, device, *dtypes), beta=beta)
