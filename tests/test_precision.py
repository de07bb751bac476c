"""Logits rounded as a sampler's, against the fp64 oracle; the products are exact in fp32, so that all round alike."""

import pytest
import torch

import megatron_lce
from tests.oracle import Upstream
from tests.problems import Problem, assert_same_outputs, logits_of, make_problem

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROUNDED = {"logits_dtype": BF16}


def on_a_grid(problem: Problem) -> Problem:
    """Hidden in eighths and weight in 64ths of small integers: bf16 holds them, and fp32 every sum of products."""
    hidden = (problem.hidden.float() * 8).round().clamp(-31, 31) / 8
    weight = (problem.weight.float() * 64).round().clamp(-127, 127) / 64
    return problem._replace(hidden=hidden.to(problem.hidden.dtype), weight=weight.to(problem.weight.dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "logits_scale": -1.5, "telemetry": True},
        {"softcap": 3.0, "logits_scale": 0.3, "vocab_size": 290, "telemetry": True, "temperature": 1.7},
    ],
    ids=["plain", "scaled", "softcap"],
)
def test_products_are_rounded_once_before_everything(options, dtype, backend, device):
    problem = on_a_grid(make_problem(33, 48, 300, device, dtype))
    problem = problem._replace(labels=problem.labels % 290)
    products = logits_of(problem)
    assert (products.float() == products).all()
    assert (products.to(BF16) != products).float().mean() > 0.5  # the rounding is there to be seen
    rounded = problem.check(backend, **options, **ROUNDED)
    exact = problem.run(backend, **options)
    assert not torch.equal(rounded.outputs.logprobs, exact.outputs.logprobs)


def test_ties_go_to_even_and_what_is_no_number_stays(backend, device):
    """One column of H numbers times 1: 1 + 2^-8 lies between 1 and 1 + 2^-7, 1 + 3 * 2^-8 between that and 1 + 2^-6."""
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, torch.inf, torch.nan])
    for value, expected in zip(values, (1.0, 1 + 2**-6, -1.0, 1 + 2**-7, torch.nan, torch.nan), strict=True):
        weight = torch.stack([value, torch.tensor(0.0)])[:, None].to(device)
        inputs = torch.ones(1, 1, device=device), weight, torch.tensor([0], device=device)
        out = megatron_lce.linear_cross_entropy(*inputs, telemetry=True, backend=backend, **ROUNDED)
        assert float(out.mean_logit) == pytest.approx(expected / 2, abs=1e-7, nan_ok=True)


@pytest.mark.parametrize("kept", [0, 2**14, 2**20])
def test_recomputed_and_kept_logits_are_rounded_alike(kept, device):
    pytest.importorskip("triton")
    problem = on_a_grid(make_problem(40, 24, 600, device, BF16))
    result = problem.check("triton", only_here={"logits_cache_bytes": kept}, **ROUNDED)
    assert_same_outputs(result, problem.run("triton", **ROUNDED))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_token_loss_rounds_too(dtype, backend, device):
    problem = on_a_grid(make_problem(40, 24, 300, device, dtype))
    problem = problem._replace(upstream=Upstream(torch.ones(40, device=device)))
    expected = problem.check(backend, **ROUNDED)
    hidden, weight = (tensor.clone().requires_grad_() for tensor in problem[:2])
    result = megatron_lce.linear_token_loss(
        hidden, weight, problem.labels, lambda out: out.logprobs, backend=backend, **ROUNDED
    )
    result.loss.backward()
    assert_same_outputs(expected, expected._replace(outputs=result.outputs))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == FP32 else {"rtol": 2.0**-6, "atol": 1e-3}
    torch.testing.assert_close(hidden.grad, expected.grad_hidden, **tolerance)
    torch.testing.assert_close(weight.grad, expected.grad_weight, **tolerance)


def test_the_reference_rounds(device):
    on_a_grid(make_problem(9, 24, 70, device)).check("reference", telemetry=True, **ROUNDED)


@pytest.mark.parametrize("dtype", [FP32, FP16, "bfloat16"], ids=str)
def test_no_other_rounding(dtype, device):
    problem = make_problem(4, 8, 20, device)
    with pytest.raises(ValueError, match=r"logits_dtype must be torch.bfloat16 or None, got "):
        megatron_lce.linear_cross_entropy(*problem[:3], logits_dtype=dtype)
