"""The autograd function: upstream gradients, what is computed for whom, and which bits depend on what."""

import dataclasses

import pytest
import torch

import megatron_lce
from megatron_lce.backends.torch import primitives as torch_backend
from megatron_lce.core.options import DIFFERENTIABLE_SCALARS, Options
from tests.operations import OPERATIONS, tensors_of
from tests.oracle import Upstream, oracle, relative_error
from tests.problems import make_problem

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("used", ["logprobs", "entropy", "lse"])
def test_entropy_costs_nothing_where_it_is_not_used(used, monkeypatch, device):
    """Neither in forward when it is not asked for, nor in backward when no gradient comes through it."""
    asked = []
    for name in ("softmax_stats", "grad_logits"):
        primitive = getattr(torch_backend, name)

        def spy(*arguments, primitive=primitive, **keywords):
            entropy = [argument.entropy for argument in arguments if isinstance(argument, Options)]
            asked.append(keywords.get("entropy", *entropy))
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


@pytest.mark.parametrize("name", ["candidates", "logits at ids", "jsd"])
def test_a_node_keeps_no_tensor_but_those_that_are_saved(name, device):
    """Hooks of saved tensors, as of CPU offload, see no others."""
    problem, temperature = make_problem(4, 8, 24, device), torch.ones(4, device=device)
    inputs = problem.hidden.requires_grad_(), problem.weight, problem.labels
    node = tensors_of(OPERATIONS[name](*inputs, temperature=temperature))[0].grad_fn
    node = node if hasattr(node, "call") or hasattr(node, "source") else node.next_functions[0][0]  # behind a view
    kept = node.source if hasattr(node, "source") else node.call
    assert not [tensor for tensor in tensors_in(kept) if tensor.numel()]


def tensors_in(value):
    """Tensors in the fields of dataclasses and of tuples, to any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    fields = value.__dict__.values() if dataclasses.is_dataclass(value) else value if isinstance(value, tuple) else ()
    return [tensor for field in fields for tensor in tensors_in(field)]


def test_sums_over_slabs_and_blocks_are_fp32(backend, device):
    """Cut into many slabs and blocks of tokens, both gradients are as exact as in one piece."""
    problem = make_problem(128, 16, 1024, device, BF16, logit_std=0.5)
    upstream = Upstream(torch.ones(128, device=device))
    problem.hidden.abs_()
    problem = problem._replace(upstream=upstream, labels=problem.labels % 8)
    expected = oracle(*problem)
    whole, cut = problem.run(backend), problem.run(backend, workspace_bytes=60_000)
    for name in ("grad_hidden", "grad_weight"):
        in_one_piece = relative_error(getattr(whole, name), getattr(expected, name))
        assert relative_error(getattr(cut, name), getattr(expected, name)) <= 1.1 * in_one_piece, name


def test_of_telemetry_the_mean_alone_has_a_gradient(backend, device):
    problem = make_problem(4, 8, 20, device)
    hidden = problem.hidden.clone().requires_grad_()
    out = megatron_lce.linear_cross_entropy(hidden, *problem[1:3], telemetry=True, backend=backend)
    assert [name for name, o in out._asdict().items() if o is not None and o.requires_grad] == list(
        DIFFERENTIABLE_SCALARS
    )


def test_saves_no_logits(backend, device):
    """What a call keeps alive for backward beside its inputs is a few floats a token."""
    problem = make_problem(64, 8, 600, device)
    saved = []
    hidden, weight = problem.hidden.requires_grad_(), problem.weight.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        megatron_lce.linear_cross_entropy(hidden, weight, problem.labels, backend=backend)
    others = [t for t in saved if t.data_ptr() not in (hidden.data_ptr(), weight.data_ptr())]
    assert sum(t.numel() for t in others) <= 8 * 64


def test_inputs_changed_in_place_before_backward_are_noticed(backend, device):
    problem = make_problem(4, 8, 20, device)
    weight = problem.weight.clone().requires_grad_()
    out = megatron_lce.linear_cross_entropy(problem.hidden, weight, problem.labels, backend=backend)
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.logprobs.sum().backward()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("rows", [slice(0, 1), slice(149, 150), slice(3, 70), slice(64, 150, 2)], ids=str)
def test_a_tokens_bits_do_not_depend_on_the_other_tokens(rows, dtype, device):
    pytest.importorskip("triton")
    problem = make_problem(150, 72, 600, device, dtype)
    ids = torch.arange(-1, 599, device=device).view(150, 4)

    def outputs_of(rows):
        inputs = problem.hidden[rows], problem.weight, problem.labels[rows]
        keywords = {"candidates": ids[rows], "telemetry": True, "backend": "triton"}
        return megatron_lce.linear_cross_entropy(*inputs, **keywords)

    everyone, some = outputs_of(slice(None)), outputs_of(rows)
    assert all(torch.equal(a[rows], b) for a, b in zip(everyone, some, strict=True))
