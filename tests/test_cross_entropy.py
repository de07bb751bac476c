"""`linear_cross_entropy`: labels, padding, ties, broken rows, large and infinite logits. Values: test_cases.py."""

import pytest
import torch

import megatron_lce
from megatron_lce.backends.choice import load_backend
from tests.oracle import Upstream, assert_within, comparisons, largest_error, oracle, relative_error
from tests.problems import make_problem
from tests.reference import reference_linear_cross_entropy

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("columns", [(3, 8), (255, 256), (0, 299), (256, 299)])
def test_argmax_is_the_lowest_id_on_ties(columns, backend, device):
    problem = make_problem(5, 16, 300, device)
    problem.hidden.abs_()
    problem.weight[list(columns)] = 4.0
    result = problem.run(backend, telemetry=True)
    assert (result.outputs.argmax == columns[0]).all()


@pytest.mark.parametrize("logit_std", [0.0, 1e-25, 6.0])
def test_statistics_keep_their_relative_precision(logit_std, backend, device):
    problem = make_problem(50, 64, 300, device, logit_std=logit_std)
    out = problem.run(backend, temperature=0.8, telemetry=True).outputs
    logits = problem.hidden.double() @ problem.weight.double().T / 0.8
    torch.testing.assert_close(out.sum_pi_squared.double(), logits.softmax(-1).square().sum(-1), rtol=3e-5, atol=0.0)
    largest = float(logits.abs().max())
    torch.testing.assert_close(out.mean_logit.double(), logits.mean(-1), rtol=0.0, atol=1e-6 * largest)
    torch.testing.assert_close(out.logits_norm.double(), logits.norm(dim=-1), rtol=1e-6, atol=1e-18)


def test_one_token_without_dimensions(backend, device):
    problem = make_problem((), 16, 40, device)
    assert problem.check(backend).outputs.logprobs.shape == ()


def test_auto_is_triton_on_a_gpu_and_torch_elsewhere(device):
    pytest.importorskip("triton")
    for elsewhere in ("cpu", "meta"):  # Triton's interpreter, which these tests switch on, must be asked for by name
        assert load_backend("auto", torch.device(elsewhere)).__name__ == "megatron_lce.backends.torch.primitives"
    if device.type == "cuda":
        assert load_backend("auto", device).__name__ == "megatron_lce.backends.triton.primitives"


FP32_ERRORS, BF16_ERRORS = (1e-5, 1e-4, 5e-4), (2e-5, 2.5e-3, 2.5e-3)  # of logprobs and both gradients
ON_A_GPU = [(backend, 2048, FP32, 0, FP32_ERRORS) for backend in ("torch", "triton")]
ON_A_GPU += [("triton", 1024, BF16, size, BF16_ERRORS) for size in (0, 2**26, 2**30)]


@pytest.mark.gpu
@pytest.mark.parametrize(("backend_on_gpu", "hidden_size", "dtype", "logits_cache_bytes", "most"), ON_A_GPU)
def test_accuracy_on_gpu(backend_on_gpu, hidden_size, dtype, logits_cache_bytes, most, device):
    problem = make_problem(2048, hidden_size, 32768, device, dtype)
    actual, expected = problem.run(backend_on_gpu, logits_cache_bytes=logits_cache_bytes), oracle(*problem)
    assert largest_error(actual.outputs.logprobs, expected.outputs.logprobs) <= most[0]
    assert relative_error(actual.grad_hidden, expected.grad_hidden) <= most[1]
    assert relative_error(actual.grad_weight, expected.grad_weight) <= most[2]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_candidates_where_one_token_takes_all_the_probability(dtype, backend, device):
    """A gradient of 1 - p, where p is near 1, keeps its digits though p itself has 16 bits."""
    problem = make_problem(8, 64, 200, device, dtype, logit_std=6.0)
    best = megatron_lce.linear_cross_entropy(*problem[:3], telemetry=True, backend=backend).argmax
    ids = torch.stack([problem.labels, best, torch.full_like(best, -1)], dim=-1)
    drawn = torch.randn(8, 3, generator=torch.Generator().manual_seed(3)).to(device)
    problem = problem._replace(upstream=Upstream(candidate_logprobs=drawn))
    problem.check(backend, candidates=ids, telemetry=True)  # which tells the budget how large logits are


# Logits that are huge, infinite or NaN, and rows that are broken.


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
    reference = reference_linear_cross_entropy(*problem[:3], telemetry=True)
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


@pytest.mark.parametrize("skip_ignored", [False, True])
@pytest.mark.parametrize("logits_cache_bytes", [0, 2**20])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [FP32, BF16, None], ids=str)  # None: bf16 hidden states beside an fp32 weight
def test_an_ignored_row_may_be_padding_memory(dtype, softcap, logits_cache_bytes, skip_ignored, backend, device):
    """Of finite numbers whose logits pass 1e30: the other rows' gradients are what they are without it."""
    problem = make_problem(9, 24, 300, device, dtype or FP32)
    problem = problem._replace(hidden=problem.hidden.to(dtype or BF16))
    problem.labels[4] = -100
    without = problem._replace(hidden=problem.hidden.clone())
    problem.hidden[4] = 1e33
    problem.hidden[4, ::2] = -3e36
    only_here = {"logits_cache_bytes": logits_cache_bytes, "skip_ignored": skip_ignored}
    actual = problem.run(backend, softcap=softcap, **only_here)
    assert not actual.grad_hidden[4].any()
    assert_within(comparisons(actual, oracle(*without, softcap=softcap), *without, softcap=softcap))


@pytest.mark.parametrize("temperature", [1e-30, 1e-36])
def test_the_entropys_gradient_at_a_tiny_temperature(temperature, backend, device):
    """Where p is 0, 0 times a term of any size is 0."""
    problem = make_problem(9, 24, 300, device)
    result = problem.run(backend, temperature=temperature)
    assert result.grad_hidden.isfinite().all()
    assert result.grad_weight.isfinite().all()


@pytest.mark.parametrize("telemetry", [True, "mean_logit"])
@pytest.mark.parametrize("large", [1e20, float("inf"), float("nan")])
def test_logits_too_large_for_their_squares_give_nan_and_leave_the_others_alone(large, telemetry, backend, device):
    problem = make_problem(6, 24, 70, device)
    expected = problem.run(backend, telemetry=telemetry).outputs
    problem.hidden[4] = large
    out = problem.run(backend, telemetry=telemetry).outputs
    others = [0, 1, 2, 3, 5]
    for name in ("logits_norm", "mean_logit") if telemetry is True else ("mean_logit",):
        assert getattr(out, name)[4].isnan()
        assert torch.equal(getattr(out, name)[others], getattr(expected, name)[others])


@pytest.mark.parametrize("telemetry", [True, "mean_logit"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_telemetry_of_an_infinite_hidden_under_a_softcap(dtype, telemetry, backend, device):
    """Its capped logits are finite; the columns past the vocabulary's end, of no weight at all, are not among them."""
    problem = make_problem(9, 24, 70, device, dtype)
    problem.hidden[4, 3] = float("inf")
    actual = megatron_lce.linear_cross_entropy(*problem[:3], softcap=5.0, telemetry=telemetry, backend=backend)
    head = problem.hidden.double(), problem.weight.double()
    expected = reference_linear_cross_entropy(*head, problem.labels, softcap=5.0, telemetry=True)
    for name, value, exact in zip(actual._fields, actual, expected, strict=True):
        if value is None:
            continue
        torch.testing.assert_close(
            value, exact.to(value), rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
