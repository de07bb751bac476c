"""The autograd function: upstream gradients, what is computed for whom, and which bits depend on what."""

import pytest
import torch

import megatron_lce
from megatron_lce.backends.torch import primitives as torch_backend
from megatron_lce.core.head_gradients import computed_slabs
from megatron_lce.core.options import DIFFERENTIABLE, Options
from tests.oracle import Upstream, differentiable, oracle, relative_error
from tests.problems import Problem, all_equal, make_problem

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    "used",
    [("logprobs",), ("entropy",), ("lse",), ("mean_logit",), ("logprobs", "entropy"), ("entropy", "lse", "mean_logit")],
)
def test_upstream_of_some_outputs(used, dtype, backend, device):
    problem = make_problem(17, 24, 70, device, dtype)
    upstream = Upstream(**{name: getattr(problem.upstream, name) for name in used})
    problem._replace(upstream=upstream).check(backend, temperature=0.7, telemetry="mean_logit" in used)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_upstream_that_is_zero_almost_everywhere(name, backend, device):
    """A gradient for one token: what another token's rows get must be exactly nothing."""
    problem = make_problem(17, 24, 70, device)
    one_hot = torch.zeros(17, device=device)
    one_hot[5] = 3.0
    result = problem._replace(upstream=Upstream(**{name: one_hot})).check(backend, telemetry=True)
    assert result.grad_hidden.any(dim=1).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_expanded_upstream(reduction, backend, device):
    """What `mean().backward()` passes is one number expanded over the tokens."""
    problem = make_problem((5, 3), 24, 70, device)
    hidden = problem.hidden.clone().requires_grad_()
    out = megatron_lce.linear_cross_entropy(hidden, problem.weight, problem.labels, backend=backend)
    getattr(-out.logprobs, reduction)().backward()
    scale = -1 / 15 if reduction == "mean" else -1.0
    dense = problem._replace(upstream=Upstream(torch.full((5, 3), scale, device=device))).check(backend)
    torch.testing.assert_close(hidden.grad, dense.grad_hidden, rtol=1e-6, atol=1e-8)


def test_mean_loss_is_torchs_cross_entropy(backend, device):
    problem = make_problem(40, 24, 70, device)
    problem.labels[::7] = -100
    hidden, weight = (t.double().requires_grad_() for t in (problem.hidden, problem.weight))
    loss = torch.nn.functional.cross_entropy(hidden @ weight.T, problem.labels)
    loss.backward()
    kept = problem.labels != -100
    upstream = Upstream(torch.where(kept, -1.0, 0.0) / kept.sum())
    result = problem._replace(upstream=upstream).run(backend)
    torch.testing.assert_close(-result.outputs.logprobs.sum() / kept.sum(), loss.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.grad_hidden, hidden.grad.float(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(result.grad_weight, weight.grad.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("used", ["logprobs", "entropy", "lse"])
def test_entropy_costs_nothing_where_it_is_not_used(used, monkeypatch, device):
    """Neither in forward when it is not asked for, nor in backward when no gradient comes through it."""
    asked = []
    for name in ("softmax_stats", "grad_logits"):
        primitive = getattr(torch_backend, name)

        def spy(*arguments, primitive=primitive, **keywords):
            options = next(argument for argument in arguments if isinstance(argument, Options))
            asked.append(keywords.get("entropy", options.entropy))
            return primitive(*arguments, **keywords)

        monkeypatch.setattr(torch_backend, name, spy)
    problem = make_problem(4, 8, 24, device)
    problem = problem._replace(upstream=Upstream(**{used: getattr(problem.upstream, used)}))
    problem.run("torch")
    assert asked == [True, used == "entropy"]
    if used != "entropy":
        asked.clear()
        problem.run("torch", entropy=False)
        assert asked == [False, False]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_sums_over_slabs_and_blocks_are_fp32(dtype, backend, device):
    """Cut into many slabs and blocks of tokens, both gradients are as exact as in one piece."""
    problem = make_problem(128, 16, 2048, device, dtype, logit_std=0.5)
    upstream = Upstream(torch.ones(128, device=device))
    problem.hidden.abs_()
    problem = problem._replace(upstream=upstream, labels=problem.labels % 8)
    expected = oracle(*problem)
    whole, cut = problem.run(backend), problem.run(backend, workspace_bytes=60_000)
    for name in ("grad_hidden", "grad_weight"):
        in_one_piece = relative_error(getattr(whole, name), getattr(expected, name))
        assert relative_error(getattr(cut, name), getattr(expected, name)) <= 1.1 * in_one_piece, name


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_changes_none(frozen, dtype, backend, device):
    problem = make_problem(17, 24, 70, device, dtype)
    both = problem.run(backend)
    inputs = {"hidden": problem.hidden.clone(), "weight": problem.weight.clone()}
    (trained,) = {"hidden", "weight"} - {frozen}
    inputs[trained].requires_grad_()
    out = megatron_lce.linear_cross_entropy(**inputs, labels=problem.labels, backend=backend)
    torch.autograd.backward(list(out[:3]), list(problem.upstream[:3]))
    assert inputs[frozen].grad is None
    assert torch.equal(inputs[trained].grad, getattr(both, f"grad_{trained}"))


def test_no_output_requires_grad_where_no_input_does(backend, device):
    problem = make_problem(4, 8, 20, device)
    hidden = problem.hidden.clone().requires_grad_()
    with torch.no_grad():
        outputs = [megatron_lce.linear_cross_entropy(hidden, *problem[1:3], telemetry=True, backend=backend)]
    outputs.append(megatron_lce.linear_cross_entropy(*problem[:3], telemetry=True, backend=backend))
    assert not any(o.requires_grad for out in outputs for o in out if o is not None)


def test_of_telemetry_the_mean_alone_has_a_gradient(backend, device):
    problem = make_problem(4, 8, 20, device)
    hidden = problem.hidden.clone().requires_grad_()
    out = megatron_lce.linear_cross_entropy(hidden, *problem[1:3], telemetry=True, backend=backend)
    assert [name for name, o in out._asdict().items() if o is not None and o.requires_grad] == list(DIFFERENTIABLE)


def test_saves_no_logits(backend, device):
    """What a call keeps alive for backward beside its inputs is a few floats a token."""
    problem = make_problem(64, 8, 600, device)
    saved = []
    hidden, weight = problem.hidden.requires_grad_(), problem.weight.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        megatron_lce.linear_cross_entropy(hidden, weight, problem.labels, backend=backend)
    others = [t for t in saved if t.data_ptr() not in (hidden.data_ptr(), weight.data_ptr())]
    assert sum(t.numel() for t in others) <= 8 * 64


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_same_bits_from_run_to_run(dtype, backend, device):
    problem = make_problem(70, 24, 600, device, dtype)
    first = problem.run(backend, telemetry=True)
    for _ in range(2):
        assert all_equal(first, problem.run(backend, telemetry=True))


def test_a_second_backward_without_a_cache(backend, device):
    problem = make_problem(17, 24, 70, device)
    hidden = problem.hidden.clone().requires_grad_()
    out = megatron_lce.linear_cross_entropy(hidden, *problem[1:3], backend=backend)
    (first,) = torch.autograd.grad(out.logprobs.sum(), hidden, retain_graph=True)
    (second,) = torch.autograd.grad(out.logprobs.sum(), hidden)
    assert torch.equal(first, second)


def test_double_backward_is_refused(backend, device):
    """Not left out: a penalty on the gradient would train as if it were not there."""
    problem = make_problem(4, 8, 20, device)
    hidden = problem.hidden.clone().requires_grad_()
    out = megatron_lce.linear_cross_entropy(hidden, *problem[1:3], backend=backend)
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        torch.autograd.grad(out.logprobs.sum(), hidden, create_graph=True)


def test_inputs_changed_in_place_before_backward_are_noticed(backend, device):
    problem = make_problem(4, 8, 20, device)
    weight = problem.weight.clone().requires_grad_()
    out = megatron_lce.linear_cross_entropy(problem.hidden, weight, problem.labels, backend=backend)
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.logprobs.sum().backward()


# What the triton backend promises of bits.


def outputs_without_gradient(problem, rows=slice(None), **keywords):
    hidden, labels = problem.hidden[rows], problem.labels[rows]
    with torch.no_grad():
        return megatron_lce.linear_cross_entropy(hidden, problem.weight, labels, backend="triton", **keywords)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("rows", [slice(0, 1), slice(149, 150), slice(3, 70), slice(64, 150, 2)], ids=str)
def test_a_tokens_bits_do_not_depend_on_the_other_tokens(rows, dtype, device):
    pytest.importorskip("triton")
    problem = make_problem(150, 72, 600, device, dtype)
    ids = torch.arange(-1, 599, device=device).view(150, 4)
    everyone = outputs_without_gradient(problem, telemetry=True, candidates=ids)
    some = outputs_without_gradient(problem, rows, telemetry=True, candidates=ids[rows])
    assert all(torch.equal(a[rows], b) for a, b in zip(everyone, some, strict=True))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_logprobs_keep_their_bits_whatever_else_is_asked(softcap, dtype, device):
    """The ratio of a policy to itself is exactly 1."""
    pytest.importorskip("triton")
    problem = make_problem(70, 72, 600, device, dtype)
    plain = outputs_without_gradient(problem, softcap=softcap)
    asked = [
        {"entropy": False},
        {"telemetry": True},
        {"entropy": False, "telemetry": True},
        {"logits_cache_bytes": 70 * 256 * 3},
        {"logits_cache_bytes": 2**30, "telemetry": True},
    ]
    weight = problem.weight.clone().requires_grad_()
    for keywords in asked:
        out = megatron_lce.linear_cross_entropy(
            problem.hidden, weight, problem.labels, softcap=softcap, backend="triton", **keywords
        )
        assert torch.equal(out.logprobs, plain.logprobs), keywords
        assert torch.equal(out.lse, plain.lse), keywords


def test_the_slab_fits_the_workspace_with_its_rows_aligned(monkeypatch, device):
    """A cap that all logits just fill has no room for the ends of odd rows."""
    pytest.importorskip("triton")
    buffers = []

    def spy(*arguments):
        for slab in computed_slabs(*arguments):
            buffers.append(slab.grad.untyped_storage().nbytes())
            yield slab

    monkeypatch.setattr("megatron_lce.core.logit_gradients.computed_slabs", spy)
    tokens, columns = 4, 16401
    workspace_bytes = tokens * columns * BF16.itemsize
    make_problem(tokens, 8, columns, device, BF16).run("triton", workspace_bytes=workspace_bytes)
    assert max(buffers) <= workspace_bytes


# What only a GPU can show.

BIG = {"tokens": 4096, "hidden_size": 512, "columns": 50257}


def big_problem(device, dtype) -> Problem:
    return make_problem(BIG["tokens"], BIG["hidden_size"], BIG["columns"], device, dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("usual_torch")
@pytest.mark.parametrize("logits_cache_bytes", [0, 2**26])
@pytest.mark.parametrize("workspace_bytes", [2**24, 2**27])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_memory_stays_within_what_the_caller_set(dtype, workspace_bytes, logits_cache_bytes, backend, device):
    problem = big_problem(device, dtype)
    hidden, weight = problem.hidden.requires_grad_(), problem.weight.requires_grad_()
    keywords = {"workspace_bytes": workspace_bytes, "logits_cache_bytes": logits_cache_bytes, "backend": backend}
    per_token = 64 * BIG["tokens"]  # outputs, statistics of the whole row, row terms: a few floats a token

    def requested(when):  # a block of the allocator may be up to 1 MiB larger
        return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]

    def step():
        base = requested("current")
        torch.cuda.reset_peak_memory_stats()
        out = megatron_lce.linear_cross_entropy(hidden, weight, problem.labels, **keywords)
        forward_peak = requested("peak") - base
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.backward(list(out[:3]), list(problem.upstream[:3]))
        return forward_peak, requested("peak") - base

    step()  # cuBLAS allocates its workspace on first use
    hidden.grad = weight.grad = None
    forward_peak, backward_peak = step()
    cache = logits_cache_bytes if dtype == BF16 and backend == "triton" else 0
    gradients = (hidden.numel() + weight.numel()) * dtype.itemsize
    accumulator = 4 * hidden.numel()
    assert forward_peak <= workspace_bytes + cache + 2 * per_token
    assert backward_peak <= workspace_bytes + cache + gradients + accumulator + 2 * per_token


@pytest.mark.gpu
@pytest.mark.usefixtures("usual_torch")
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "telemetry": True}, {"logits_cache_bytes": 2**24}], ids=str)
def test_no_host_synchronisation(options, backend, device):
    problem = make_problem(512, 128, 5003, device, BF16)
    temperature = torch.rand(512, device=device) + 0.5
    keywords = {"temperature": temperature, "backend": backend, **options}
    hidden, weight = problem.hidden.requires_grad_(), problem.weight.requires_grad_()

    def step():
        out = megatron_lce.linear_cross_entropy(hidden, weight, problem.labels, **keywords)
        torch.autograd.backward(*differentiable(out, problem.upstream))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
