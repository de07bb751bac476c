"""`linear_cross_entropy` of logits that are huge, infinite or NaN, and of rows that are broken."""

import pytest
import torch

import megatron_lce
from tests.oracle import largest_error, oracle
from tests.problems import make_problem

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("level", [-1e4, 1e4])
@pytest.mark.parametrize("columns", [70, 256, 300])
def test_logits_far_from_zero(level, columns, dtype, backend, device):
    """An epilogue whose maximum starts at 0, or whose masked columns count as 0, shows here."""
    problem = make_problem(9, 24, columns, device, dtype)
    problem.hidden[:, 0] = 100.0
    problem.weight[:, 0] = level / 100.0
    problem.check(backend)


@pytest.mark.parametrize("level", [1e4, 1e5])
def test_gradients_of_fp32_logits_far_from_zero(level, backend, device):
    """p = 2^(z - lse) of one fp32 lse would be off by a rounding of lse, the same for a whole row."""
    problem = make_problem(40, 24, 300, device)
    problem.hidden[:, 0] = 100.0
    problem.weight[:, 0] = level / 100.0
    problem.check(backend)


@pytest.mark.parametrize("softcap", [1e4, 1e6])
def test_a_softcap_far_above_the_logits(softcap, backend, device):
    """tanh to 1e-7 of 1 is cap x 1e-7 of a logit."""
    problem = make_problem(9, 24, 70, device)
    capped, plain = (problem.run(backend, softcap=cap).outputs for cap in (softcap, None))
    assert largest_error(capped.logprobs, oracle(*problem, softcap=softcap).outputs.logprobs) <= 5e-6
    assert largest_error(capped.lse, plain.lse) <= 1e-5


def test_a_nan_rows_argmax_is_no_id(backend, device):
    problem = make_problem(9, 24, 70, device)
    problem.hidden[4] = float("nan")
    problem.labels[2] = 99
    outputs = problem.run(backend, telemetry=True).outputs
    assert (outputs.argmax == -1).nonzero().flatten().tolist() == [2, 4]
    reference = megatron_lce.linear_cross_entropy(*problem[:3], telemetry=True, backend="reference")
    assert torch.equal(reference.argmax == -1, outputs.argmax == -1)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("forbidden", [[3], [3, 200], range(128, 256), range(256, 300), range(299)], ids=len)
def test_forbidden_ids_take_no_probability(forbidden, dtype, backend, device):
    """Their logits are -inf, by a constant feature of hidden: some of a chunk's, or all of them."""
    problem = make_problem(9, 24, 300, device, dtype)
    problem.hidden[:, 0] = 1.0
    problem.weight[list(forbidden)] = torch.tensor([-torch.inf] + 23 * [0.0], device=device, dtype=dtype)
    allowed = [column for column in range(300) if column not in forbidden]
    problem = problem._replace(labels=torch.tensor(allowed, device=device)[problem.labels % len(allowed)])
    out = problem.run(backend).outputs
    log_p = (problem.hidden.double() @ problem.weight[allowed].double().T).log_softmax(-1)
    rank = torch.searchsorted(torch.tensor(allowed, device=device), problem.labels)
    assert largest_error(out.logprobs, log_p.gather(1, rank[:, None])[:, 0]) <= 2e-6
    assert largest_error(out.entropy, -(log_p.exp() * log_p).sum(-1)) <= 2e-6


@pytest.mark.parametrize("columns", [70, 256, 300])
def test_logits_near_the_lowest_number(columns, backend, device):
    """-inf counts as the lowest, and so may nothing else."""
    problem = make_problem(9, 24, columns, device)
    problem.hidden.zero_()[:, 0] = 1.0
    problem.weight[:, 0] = -8e37  # -1.15e38 in base 2
    problem.weight[5, 0] = -7e37
    out = problem._replace(labels=torch.full((9,), 5, device=device)).run(backend).outputs
    assert (out.logprobs == 0).all()
    torch.testing.assert_close(out.lse, torch.full((9,), -7e37, device=device))


def test_very_large_logits(backend, device):
    """A spread of thousands: probabilities are 0 or 1 and nothing overflows."""
    result = make_problem(17, 24, 70, device, logit_std=2000.0).check(backend, telemetry=True)
    assert all(o.isfinite().all() for o in result.outputs[:-1])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("logit", [5.0, 16.0, 40.0, 300.0])
def test_logprobs_are_never_positive(logit, dtype, backend, device):
    """p(label) -> 1: the label's logit and the log-sum-exp meet."""
    problem = make_problem(64, 64, 64, device, dtype, logit_std=0.01)
    problem.hidden.copy_(torch.eye(64) * logit)
    problem.weight.add_(torch.eye(64, device=device).to(dtype))
    problem = problem._replace(labels=torch.arange(64, device=device))
    result = problem.check(backend)
    assert (result.outputs.logprobs <= 0).all()
    assert (result.outputs.logprobs > -0.7).all()


def test_an_ignored_row_may_have_any_logits(backend, device):
    """Its gradient is 0, not 0 times an overflow."""
    problem = make_problem(17, 24, 70, device, logit_std=2000.0)
    problem.labels[::2] = -100
    result = problem.check(backend)
    assert not result.grad_hidden[::2].any()


@pytest.mark.parametrize("skip_ignored", [False, True])
@pytest.mark.parametrize("logits_cache_bytes", [0, 2**20])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [FP32, BF16, None], ids=str)
def test_an_ignored_row_may_be_padding_memory(dtype, softcap, logits_cache_bytes, skip_ignored, backend, device):
    """Of finite numbers whose logits pass 1e30: the other rows' gradients are what they are without it.

    None: 16-bit hidden states beside an fp32 weight.
    """
    problem = make_problem(9, 24, 300, device, dtype or FP32)
    problem = problem._replace(hidden=problem.hidden.to(dtype or BF16))
    problem.labels[4] = -100
    expected = problem.check(backend, softcap=softcap, only_here={"logits_cache_bytes": logits_cache_bytes})
    problem.hidden[4] = 1e33
    problem.hidden[4, ::2] = -3e36
    only_here = {"softcap": softcap, "logits_cache_bytes": logits_cache_bytes, "skip_ignored": skip_ignored}
    actual = problem.run(backend, **only_here)
    assert not actual.grad_hidden[4].any()
    rounding = 1e-2 if dtype == BF16 else float(expected.grad_weight.abs().max()) * 2**-22
    assert largest_error(actual.grad_weight, expected.grad_weight) <= rounding


@pytest.mark.parametrize("temperature", [1e-30, 1e-36])
def test_the_entropys_gradient_at_a_tiny_temperature(temperature, backend, device):
    """Where p is 0, 0 times a term of any size is 0."""
    problem = make_problem(9, 24, 300, device)
    result = problem.run(backend, temperature=temperature)
    assert result.grad_hidden.isfinite().all()
    assert result.grad_weight.isfinite().all()


def test_an_ignored_row_needs_no_valid_temperature(backend, device):
    problem = make_problem(6, 24, 70, device)
    problem.labels[2:4] = -100
    temperature = torch.tensor([0.5, 1.0, float("nan"), 0.0, 2.0, 3.0], device=device)
    usable = torch.where(problem.labels == -100, 1.0, temperature)
    result = problem.run(backend, temperature=temperature, telemetry=True)
    expected = problem.check(backend, temperature=usable, telemetry=True)
    assert all(torch.equal(a, e) for a, e in zip(result.outputs[:-1], expected.outputs[:-1], strict=True))
    assert torch.equal(result.grad_hidden, expected.grad_hidden)
    assert torch.equal(result.grad_weight, expected.grad_weight)


@pytest.mark.parametrize("label", [-1, 61, 69, 70, 2**31 + 3, 2**40, -(2**40), -99])
def test_a_label_that_nobody_owns_makes_its_row_nan(label, backend, device):
    problem = make_problem(6, 24, 70, device)
    problem = problem._replace(labels=problem.labels % 61)
    problem.labels[4] = label
    check_only_row_is_nan(problem.check(backend, vocab_size=61, telemetry=True), 4)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf"), -float("inf")])
def test_an_unusable_temperature_makes_its_row_nan(temperature, backend, device):
    problem = make_problem(6, 24, 70, device)
    temperatures = torch.tensor([1.0, 0.5, 1.0, 2.0, temperature, 3.0], device=device)
    check_only_row_is_nan(problem.check(backend, temperature=temperatures, telemetry=True), 4)


def check_only_row_is_nan(result, row):
    for output in (o for name, o in result.outputs._asdict().items() if name != "argmax" and o is not None):
        assert output.double().isnan().nonzero().flatten().tolist() == [row]
    assert result.grad_hidden.isnan().all(dim=1).nonzero().flatten().tolist() == [row]
    assert result.grad_hidden.isnan().any(dim=1).nonzero().flatten().tolist() == [row]


@pytest.mark.parametrize("large", [1e20, float("inf"), float("nan")])
def test_logits_too_large_for_their_squares_give_nan_and_leave_the_others_alone(large, backend, device):
    problem = make_problem(6, 24, 70, device)
    expected = problem.run(backend, telemetry=True).outputs
    problem.hidden[4] = large
    out = problem.run(backend, telemetry=True).outputs
    others = [0, 1, 2, 3, 5]
    for name in ("logits_norm", "mean_logit"):
        assert getattr(out, name)[4].isnan()
        assert torch.equal(getattr(out, name)[others], getattr(expected, name)[others])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_telemetry_of_an_infinite_hidden_under_a_softcap(dtype, backend, device):
    """Its capped logits are finite; the columns past the vocabulary's end, of no weight at all, are not among them."""
    problem = make_problem(9, 24, 70, device, dtype)
    problem.hidden[4, 3] = float("inf")
    actual, expected = (
        megatron_lce.linear_cross_entropy(*problem[:3], softcap=5.0, telemetry=True, backend=name)
        for name in (backend, "reference")
    )
    for name, value, exact in zip(actual._fields[:-1], actual[:-1], expected[:-1], strict=True):  # no candidates
        torch.testing.assert_close(value, exact, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
