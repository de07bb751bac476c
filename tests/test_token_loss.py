"""`linear_token_loss` against the fp64 oracle of the same loss, and against `linear_cross_entropy`."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megatron_lce
from megatron_lce.core.options import DIFFERENTIABLE_SCALARS
from tests.oracle import Result, Upstream, assert_within, comparisons, oracle, relative_error
from tests.problems import make_problem, smallest_workspace

FP32, BF16 = torch.float32, torch.bfloat16


def policy_loss(out, old_logprobs, advantages):
    """A clipped policy loss with an entropy bonus and a z-loss, and what one would log."""
    ratio = (out.logprobs - old_logprobs).exp()
    clipped = torch.min(ratio * advantages, ratio.clamp(0.5, 1.5) * advantages)
    loss = -clipped - 0.1 * out.entropy + 0.01 * out.lse.square()
    return loss if out.mean_logit is None else loss - 0.2 * out.mean_logit, {"ratio": ratio}


def nll(out):
    return -out.logprobs


def inputs_of(problem, loss, **keywords):
    """What the loss takes beside the outputs, and the upstream gradients it gives them in fp64."""
    exact = oracle(*problem, **keywords).outputs
    generator = torch.Generator().manual_seed(7)
    noise, advantages = torch.randn(2, *problem.labels.shape, generator=generator).to(problem.hidden.device)
    per_token = exact.logprobs.float() + 2 * noise, advantages
    leaves = [part.requires_grad_() for name in DIFFERENTIABLE_SCALARS if (part := getattr(exact, name)) is not None]
    losses, _ = loss(exact, *per_token)
    counted = problem.labels != -100
    total = losses[counted].sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return per_token, Upstream(*grads), total.detach()


def run(problem, loss, per_token, upstream=1.0, **keywords):
    hidden, weight = (t.clone().requires_grad_() for t in problem[:2])
    result = megatron_lce.linear_token_loss(hidden, weight, problem.labels, loss, *per_token, **keywords)
    assert not any(output.requires_grad for output in result.outputs if output is not None)
    (result.loss * upstream).backward()
    return result, Result(result.outputs, hidden.grad, weight.grad)


@pytest.mark.parametrize(("dtype", "workspace_bytes"), [(FP32, 110_000), (BF16, 300_000), (BF16, 60_000)], ids=str)
def test_a_policy_loss_matches_the_oracle(dtype, workspace_bytes, backend, device):
    """In blocks of tokens; losses that are linear in the outputs: test_cases.py."""
    problem = make_problem((20 if dtype == FP32 else 150, 2), 24, 601, device, dtype)
    problem = problem._replace(labels=problem.labels % 590)
    problem.labels[::4] = -100
    temperature = torch.linspace(0.7, 2.0, len(problem.labels) * 2, device=device).view(-1, 2)
    keywords = {"temperature": temperature, "softcap": 30.0, "telemetry": True}
    per_token, upstream, total = inputs_of(problem, policy_loss, **keywords)
    problem = problem._replace(upstream=upstream)
    result, actual = run(problem, policy_loss, per_token, backend=backend, workspace_bytes=workspace_bytes, **keywords)
    torch.testing.assert_close(result.loss.double(), total.double(), rtol=1e-5, atol=1e-3)
    assert_within(comparisons(actual, oracle(*problem, **keywords), *problem, **keywords))
    assert result.metrics["ratio"].shape == problem.labels.shape
    assert not result.metrics["ratio"][problem.labels == -100].any()


# Of a token of 600 columns: 16-bit exponentials and the largest logit of each 128; beside them 4 statistics of these.
KEPT_BYTES = 640 * 2 + 4 * 5 + 4 * 4 * 5


def test_blocks_are_as_wide_as_the_workspace_allows(device, monkeypatch):
    pytest.importorskip("triton")
    problem = make_problem(300, 24, 600, device, BF16)
    seen = []

    def loss(out):
        seen.append(out.logprobs.shape[0])
        return -out.logprobs

    run(problem, loss, (), backend="triton", workspace_bytes=128 * KEPT_BYTES)
    assert seen == [128, 128, 44, 301, 301]  # at last half of all tokens beside others, on which they must not depend


@pytest.mark.parametrize("frozen", [None, "hidden", "weight"])
@pytest.mark.parametrize("hidden_size", [1, 24])
def test_a_workspace_from_the_smallest_up_works(hidden_size, frozen, backend, device):
    """Where hidden and weight are copied for their alignment, too, and what is kept leaves little to the copies."""
    problem = make_problem(1, hidden_size, 640, device, BF16)
    hidden, weight = (t.requires_grad_(name != frozen) for name, t in zip(("hidden", "weight"), problem, strict=False))
    call = functools.partial(
        megatron_lce.linear_token_loss, hidden, weight, problem.labels, lambda out: -out.logprobs, backend=backend
    )
    smallest = smallest_workspace(call)
    for more in (0, 500, 1_000, 1_500, 2_000, 4_000, 10_000):
        call(workspace_bytes=smallest + more).loss.backward()


def test_an_upstream_is_not_rounded_to_the_gradients_dtype(backend, device):
    """It lies between two numbers of fp16, 3.7e-4 from either: all of the gradient would be off by as much."""
    upstream = 1.33349609375
    problem = make_problem(30, 24, 300, device, torch.float16)
    _, once = run(problem, nll, (), backend=backend)
    _, scaled = run(problem, nll, (), upstream=upstream, backend=backend)
    for name in ("grad_hidden", "grad_weight"):
        expected, actual = getattr(once, name).double() * upstream, getattr(scaled, name).double()
        assert abs((actual * expected).sum() / expected.square().sum() - 1).item() < 5e-5, name


@pytest.mark.parametrize("num_tokens", [0, 5])
@pytest.mark.parametrize("skip", [False, True, 0])
def test_nothing_that_counts(skip, num_tokens, backend, device):
    problem = make_problem(num_tokens, 8, 20, device)
    problem.labels.fill_(-100)
    result, actual = run(problem, policy_loss, torch.ones(2, num_tokens).to(device), backend=backend, skip_ignored=skip)
    assert result.loss == 0
    assert result.outputs.logprobs.shape == result.metrics["ratio"].shape == (num_tokens,)
    assert not actual.grad_hidden.any()
    assert not actual.grad_weight.any()


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_the_loss_of_no_token_runs_as_that_of_others(num_tokens, device):
    problem = make_problem(num_tokens, 8, 20, device)
    weight = problem.weight.clone().requires_grad_()
    seen = []

    def loss(out):
        seen.append(torch.is_autocast_enabled(device.type))
        return -out.logprobs, {"column": weight[: len(out.logprobs), 0]}

    labels = problem.labels.fill_(-100)
    with torch.autocast(device.type, torch.bfloat16):
        result = megatron_lce.linear_token_loss(problem.hidden, weight, labels, loss, skip_ignored=True)
    assert seen == [False]
    assert not result.metrics["column"].requires_grad


def test_a_checkpointed_region_is_computed_twice_and_not_for_every_block(device):
    """What the caller's loss saves is for its own gradient, in forward: a checkpoint's hooks must not make it again."""
    pytest.importorskip("triton")
    problem = make_problem(300, 24, 600, device, BF16)
    calls = []

    def region(hidden):
        calls.append(hidden)
        keywords = {"backend": "triton", "workspace_bytes": 128 * KEPT_BYTES}
        loss = megatron_lce.linear_token_loss(
            hidden.tanh(), problem.weight, problem.labels, lambda out: -(2 * out.logprobs).exp(), **keywords
        )
        return loss.loss

    checkpoint(region, problem.hidden.requires_grad_(), use_reentrant=False).backward()
    assert len(calls) == 2


def test_what_loss_returns_for_ignored_rows_is_not_counted(backend, device):
    problem = make_problem(20, 8, 30, device)
    problem.labels[::2] = -100

    def infinite_where_ignored(out):
        return -out.logprobs / (out.logprobs != 0)

    result, actual = run(problem, infinite_where_ignored, (), backend=backend)
    assert result.loss.isfinite()
    assert actual.grad_hidden.isfinite().all()
    assert actual.grad_weight.isfinite().all()


@pytest.mark.parametrize("shape", [(), (0,), (2,)], ids=str)
def test_tensors_of_any_width_beside_labels_of_any_shape(shape, device):
    """Also where neither width nor number of tokens can be told from the number of elements."""
    problem = make_problem(shape, 8, 20, device)

    def loss(out, nothing, ones):
        return -out.logprobs, {"nothing": nothing, "ones": ones, "logprobs": out.logprobs}

    wide = [torch.ones(*shape, width, device=device) for width in (0, 3)]
    result, _ = run(problem, loss, wide, backend="torch")
    for tensor, metric in zip((*wide, result.outputs.logprobs), result.metrics.values(), strict=True):
        assert torch.equal(metric, tensor)


@pytest.mark.parametrize("workspace_bytes", [2**29, 600_000])
def test_fp16_gradients_do_not_overflow_before_they_are_scaled(workspace_bytes, backend, device):
    """A tenth of the tokens has one label, and one feature of hidden is near 100: their sum is beyond 65,504."""
    problem = make_problem(1000, 24, 300, device, torch.float16)
    problem.hidden[:, 0], problem.weight[:, 0] = 100.0, 0.0
    problem.hidden[:, 1], problem.weight[:40, 1] = 0.0, 6e4  # so is hidden's gradient
    problem.labels.fill_(7)
    count = 1.0 / problem.labels.numel()
    options = {"temperature": 0.25, "workspace_bytes": workspace_bytes, "backend": backend}
    result, actual = run(problem, nll, (), upstream=count, **options)
    upstream = Upstream(torch.full_like(result.outputs.logprobs, -count), None, None, None)
    expected = oracle(problem.hidden, problem.weight, problem.labels, upstream, temperature=0.25)
    for name in ("grad_hidden", "grad_weight"):
        assert relative_error(getattr(actual, name), getattr(expected, name)) <= 2e-3, name
