"""`linear_cross_entropy` under torch.compile: an operator for each pass, which the compiler does not look into.

They run what a call without the compiler runs, validation included: the passes of the one autograd function, with a
context of ours in place of torch's. What that function saves are outputs of the one and inputs of the other.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from megatron_lce.arguments import Checks, checked_together
from megatron_lce.backends.choice import load_backend
from megatron_lce.core import collectives
from megatron_lce.core.agreement import Agreement
from megatron_lce.core.autograd import LinearCrossEntropyFunction
from megatron_lce.core.call import Call
from megatron_lce.core.logits_cache import LogitsCache, new_cache
from megatron_lce.core.options import DIFFERENTIABLE, LinearCrossEntropyOutput, Options, new_outputs

# Not from a signature, of which torch makes SymInt of every int. Seven tensors come first; options from the fifth on.
_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor labels, Tensor itself, Tensor temperature, Tensor logits_scale, "
    "Tensor? candidates, str? tp_group, bool sequence_parallel, float? softcap, int ignore_index, int? vocab_start, "
    "int? vocab_size, bool entropy, bool telemetry, ScalarType? logits_dtype, Scalar skip_ignored, "
    "int logits_cache_bytes, int workspace_bytes, bool reduce_grad_hidden, str backend, bool[] needs_grad"
)
_NAMES = [argument.split()[1] for argument in _INPUTS.split(", ")]
_WITH_GRADIENT = (*DIFFERENTIABLE, "candidate_logprobs")


def as_one_node(hidden: Tensor, weight: Tensor, labels: Tensor, options: Options) -> LinearCrossEntropyOutput:
    """The call as torch.compile traces it."""
    # Of a float that changes, the compiler makes a number of its graph where it is a factor, and nowhere else.
    one, temperature, group = torch.ones((), dtype=torch.float64, device="cpu"), options.temperature, options.tp_group
    changed: dict[str, Any] = {
        "temperature": temperature if isinstance(temperature, Tensor) else one * temperature,
        "logits_scale": one * options.logits_scale,
        "tp_group": None if group is None else group.group_name,
    }
    given = replace(options, **changed)
    # It makes one node of equal ones, and kept logits serve one backward. No two empty tensors are equal.
    tensors = hidden, weight, labels, torch.empty(0, dtype=torch.uint8, device=hidden.device)
    needs_grad = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight)]
    inputs = *tensors, *(getattr(given, name) for name in _NAMES[4:-1]), needs_grad
    outputs, _ = torch.ops.megatron_lce.linear_cross_entropy(*inputs)
    return _by_name(options, outputs)


def _by_name(options: Options, outputs: list[Any]) -> LinearCrossEntropyOutput:
    """The outputs that were asked for, or their gradients."""
    names = LinearCrossEntropyOutput._fields[: 9 if options.telemetry else 3]
    names = (*(name for name in names if options.entropy or name != "entropy"), "candidate_logprobs")
    named = zip(names, outputs, strict=False)
    given = {name: x if x is None or name in _WITH_GRADIENT else x.detach() for name, x in named}
    return LinearCrossEntropyOutput(*(given.get(name) for name in LinearCrossEntropyOutput._fields))  # type: ignore[arg-type]


def _options(inputs: Any) -> Options:
    values = dict(zip(_NAMES[4:-1], inputs[4:-1], strict=True))
    for name in ("temperature", "logits_scale"):
        if values[name].dim() == 0:  # while shapes are traced nobody knows the number, and none is needed
            values[name] = 1.0 if isinstance(values[name], FakeTensor) else float(values[name])
    if values["skip_ignored"] is True or not any(inputs[-1]):
        values["logits_cache_bytes"] = 0  # how many rows the device counts, and so what is kept of them, is not known
    group = values["tp_group"]
    return Options(**values | {"tp_group": None if group is None else collectives.group_named(group)})


def _call_and_context(inputs: Any) -> tuple[Call, Any]:
    """The call, and what torch hands to the passes of an autograd function."""
    hidden, weight, labels = inputs[:3]
    with checked_together("linear_cross_entropy", hidden, weight, labels, _options(inputs)) as checks:
        checks.head()
        checks.rest()
    call = checks.call()
    ctx = SimpleNamespace(call=call, num_tokens=call.labels.shape[0], needs_input_grad=inputs[-1], cached=False)
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    ctx.set_materialize_grads = ctx.mark_non_differentiable = lambda *_: None
    return call, ctx


@torch.library.custom_op(
    "megatron_lce::linear_cross_entropy", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor[] outputs, Tensor[] kept)"
)
def _forward(*inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that were asked for; and kept logits, and what else is saved of each row, [] for None."""
    call, ctx = _call_and_context(inputs)
    outputs = LinearCrossEntropyFunction.forward(ctx, call.hidden, call.weight, call, True)
    _, _, counted, *per_row = ctx.saved_tensors
    rows = [call.labels if counted is None else counted, *per_row]
    kept = [*((None, None) if ctx.cache is None else ctx.cache.tensors)]
    kept += [None if row is None else row.clone() for row in rows]  # no views of inputs or of each other
    return [x for x in outputs if x is not None], [call.hidden.new_empty(()) if x is None else x for x in kept]


@_forward.register_fake
def _(*inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    options, (hidden, weight, labels) = _options(inputs), inputs[:3]
    rows, agreed = options.skip_ignored, Agreement(collectives.group_size(options.tp_group))
    checks = Checks("linear_cross_entropy", hidden, weight, labels, replace(options, skip_ignored=False), agreed)
    checks.head()
    checks.rest()
    options, shard = checks.options, checks.shard
    flat_outputs = new_outputs(labels.numel(), options, labels.device)
    outputs = [x.view(*labels.shape, *x.shape[1:]) for x in flat_outputs if x is not None]
    if isinstance(rows, bool):
        rows = torch.library.get_ctx().new_dynamic_size() if rows else labels.numel()  # type: ignore[assignment]
    flat, backend = hidden.reshape(-1, hidden.shape[-1]), load_backend(options.backend, hidden.device)
    size = Call(flat, weight, labels, 1.0, options, shard, backend, labels.shape).size
    cache = new_cache(size, rows, shard.columns, options.logits_cache_bytes, flat)
    kept = [flat.new_empty(()), flat.new_empty(())] if cache is None else [*cache.tensors]
    kept += [flat.new_empty(rows, dtype=dtype) for dtype in (torch.int64, torch.int32, *[torch.float32] * 5)]
    kept += [flat.new_empty(rows if x else (), dtype=torch.float32) for x in (options.entropy, options.telemetry)]
    if options.candidates is not None:
        ids = options.candidates.reshape(-1, options.candidates.shape[-1])
        kept += [torch.empty_like(ids), ids.new_empty(rows, ids.shape[1], dtype=torch.float32)]
    return outputs, kept


@torch.library.custom_op(
    "megatron_lce::linear_cross_entropy_backward",
    mutates_args=(),  # but for the kept logits, which no other node has
    schema=f"(Tensor?[] upstream, Tensor[] kept, {_INPUTS}) -> Tensor[]",
)
def _backward(upstream: list[Any], kept: list[Any], *inputs: Any) -> list[Tensor]:
    """The gradients that are wanted, of hidden's and of weight's shape."""
    call, ctx = _call_and_context(inputs)
    exp, reference, *rows = kept
    rows = [None if row.dim() == 0 else row for row in rows]
    counted = None if rows[0].shape == call.labels.shape else rows[0]
    ctx.saved_tensors = call.hidden, call.weight, counted, *rows[1:]
    ctx.cache = LogitsCache(exp, reference) if exp.dim() else None
    found = LinearCrossEntropyFunction.backward(ctx, *_by_name(call.options, upstream))
    if exp.dim():
        reference.fill_(torch.nan)  # the kept logits are gradients now: a second backward raises, or gives NaN
    pairs = zip(found, inputs[:2], strict=False)
    return [gradient[:, : x.shape[-1]].reshape(x.shape) for gradient, x in pairs if gradient is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], list[Tensor]]) -> None:
    ctx.save_for_backward(*inputs[:7], *output[1])
    ctx.others = inputs[7:]
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, upstream: list[Any], _: Any) -> tuple[Any, ...]:
    gradients = iter(_backward(upstream, ctx.saved_tensors[7:], *ctx.saved_tensors[:7], *ctx.others))
    return *(next(gradients) if x else None for x in ctx.needs_input_grad[:2]), *[None] * (len(_NAMES) - 2)


_backward.register_fake(
    lambda *inputs: [x.new_empty(x.shape) for x, needed in zip(inputs[2:4], inputs[-1], strict=True) if needed]
)
_forward.register_autograd(_autograd, setup_context=_setup_context)
