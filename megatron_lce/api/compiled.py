"""`linear_cross_entropy` under torch.compile: one opaque operator for each pass.

Each checks its arguments and runs its pass of the autograd function. Saved tensors are the forward operator's outputs.
"""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.library import custom_op, get_ctx

from megatron_lce.backends.choice import load_backend
from megatron_lce.checks.together import Checks, checked_together
from megatron_lce.core import collectives
from megatron_lce.core.call import Call
from megatron_lce.core.cross_entropy import LinearCrossEntropyFunction
from megatron_lce.core.logits_cache import LogitsCache, new_cache
from megatron_lce.core.options import WITH_GRADIENT, LinearCrossEntropyOutput, Options, new_outputs, outputs_asked_for
from megatron_lce.core.rows import Rows, SoftmaxOfRow

# Tensors first. torch would infer a SymInt for every int of a signature.
_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor labels, Tensor itself, Tensor temperature, Tensor logits_scale, "
    "Tensor? candidates, str? tp_group, bool sequence_parallel, float? softcap, int ignore_index, int? vocab_start, "
    "int? vocab_size, bool entropy, bool telemetry, ScalarType? logits_dtype, Scalar skip_ignored, "
    "int logits_cache_bytes, int workspace_bytes, bool reduce_grad_hidden, str backend, bool[] needs_grad"
)
_BACKWARD = f"(Tensor?[] upstream, Tensor[] kept, {_INPUTS}) -> Tensor[]"
_NAMES = [argument.split()[1] for argument in _INPUTS.split(", ")]
_NUM_TENSORS = _NAMES.index("tp_group")


def as_one_node(hidden: Tensor, weight: Tensor, labels: Tensor, options: Options) -> LinearCrossEntropyOutput:
    """Return the outputs of a call that torch.compile traces."""
    # The compiler keeps a changing float symbolic only as a factor.
    one, temperature, group = torch.ones((), dtype=torch.float64, device="cpu"), options.temperature, options.tp_group
    # The compiler merges equal nodes, but cached logits serve one backward. A new empty tensor makes nodes differ.
    tensors = hidden, weight, labels, torch.empty(0, dtype=torch.uint8, device=hidden.device)
    given = {name: getattr(options, name) for name in Options.__dataclass_fields__} | {
        "temperature": temperature if isinstance(temperature, Tensor) else one * temperature,
        "logits_scale": one * options.logits_scale,
        "tp_group": None if group is None else group.group_name,
        "needs_grad": [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight)],
    }
    inputs = *tensors, *(given[name] for name in _NAMES[len(tensors) :])
    return _by_name(options, torch.ops.megatron_lce.linear_cross_entropy(*inputs)[0])


def _by_name(options: Options, outputs: Any) -> LinearCrossEntropyOutput:
    """Return outputs, or their upstream gradients, under their names."""
    names = outputs_asked_for(options)
    given = {n: x if x is None or n in WITH_GRADIENT else x.detach() for n, x in zip(names, outputs, strict=True)}
    return LinearCrossEntropyOutput(*(given.get(name) for name in LinearCrossEntropyOutput._fields))  # type: ignore[arg-type]


def _options(inputs: Any) -> Options:
    """Return the options among an operator's inputs."""
    values = {name: x for name, x in zip(_NAMES, inputs, strict=True) if name in Options.__dataclass_fields__}
    for name in ("temperature", "logits_scale"):
        if values[name].dim() == 0:  # a number, which is unknown while shapes are traced, and not needed
            values[name] = 1.0 if isinstance(values[name], FakeTensor) else float(values[name])
    if values["skip_ignored"] is True or not any(inputs[-1]):
        values["logits_cache_bytes"] = 0  # the cache's size is unknown if the device counts the rows
    if values["tp_group"] is not None:
        values["tp_group"] = collectives.group_named(values["tp_group"])
    return Options(**values)


def _call_and_context(inputs: Any) -> tuple[Call, Any]:
    """Return the call, and what stands in for the context that torch hands to an autograd function."""
    with checked_together("linear_cross_entropy", inputs[0], inputs[1], inputs[2], _options(inputs)) as checks:
        checks.all()
    call = checks.call()
    ctx = SimpleNamespace(call=call, num_tokens=call.labels.shape[0], needs_input_grad=inputs[-1], cached=False)
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    ctx.set_materialize_grads = ctx.mark_non_differentiable = lambda *_: None
    return call, ctx


@custom_op("megatron_lce::linear_cross_entropy", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor[], Tensor[])")
def _forward(*inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that are not None; and the cache and what is saved for backward, with scalars for None."""
    call, ctx = _call_and_context(inputs)
    outputs = LinearCrossEntropyFunction.forward(ctx, call.hidden, call.weight, call, True)
    _, _, index, *others = ctx.saved_tensors
    saved = [call.labels if index is None else index, *others]  # cloned: an operator's outputs share no memory
    kept = [*(ctx.cache or (None, None)), *(None if x is None else x.clone() for x in saved)]
    return [x for x in outputs if x is not None], [call.hidden.new_empty(()) if x is None else x for x in kept]


@_forward.register_fake
def _(*inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    (hidden, weight, labels, *_), options = inputs, _options(inputs)
    num_rows, ranks = options.skip_ignored, collectives.group_size(options.tp_group)
    checks = Checks("linear_cross_entropy", hidden, weight, labels, replace(options, skip_ignored=False), ranks)
    checks.all()
    options, flat, backend = checks.options, hidden.flatten(0, -2), load_backend(options.backend, hidden.device)
    if isinstance(num_rows, bool):
        num_rows = get_ctx().new_dynamic_size() if num_rows else labels.numel()  # type: ignore[assignment]
    size = Call(flat, weight, labels, 1.0, options, checks.shard, backend, labels.shape).size
    cache = new_cache(size, num_rows, checks.shard.columns, options.logits_cache_bytes, flat)
    row = functools.partial(flat.new_empty, num_rows, dtype=torch.float32)
    ids = log_p = nothing = flat.new_empty((), dtype=torch.float32)
    if options.candidates is not None:
        ids = torch.empty_like(options.candidates.flatten(0, -2))
        log_p = flat.new_empty((num_rows, ids.shape[1]), dtype=torch.float32)
    entropy, telemetry = (row() if there else nothing for there in (options.entropy, options.telemetry))
    softmax = SoftmaxOfRow(row(), row(), row(), entropy, telemetry)
    kept = (nothing, nothing) if cache is None else cache
    outputs = [x for x in new_outputs(labels.numel(), options, labels.device) if x is not None]
    index, columns = row(dtype=torch.int64), row(dtype=torch.int32)
    saved = index, *Rows(columns, row(), row()), *softmax, ids, log_p
    return [x.view(*labels.shape, *x.shape[1:]) for x in outputs], [*kept, *saved]  # type: ignore[list-item]


@custom_op("megatron_lce::linear_cross_entropy_backward", mutates_args=(), schema=_BACKWARD)
def _backward(upstream: Any, kept: Any, *inputs: Any) -> list[Tensor]:
    """Return the gradients that are needed. They overwrite the cached logits, which no other node uses."""
    call, ctx = _call_and_context(inputs)
    exp, reference, index, *others = kept
    index = None if index.shape == call.labels.shape else index
    ctx.saved_tensors = call.hidden, call.weight, index, *(None if x.dim() == 0 else x for x in others)
    ctx.cache = LogitsCache(exp, reference) if exp.dim() else None
    pairs = zip(LinearCrossEntropyFunction.backward(ctx, *_by_name(call.options, upstream)), inputs, strict=False)
    if exp.dim():
        reference.fill_(torch.nan)  # cached logits are gradients now: a second backward raises, or gives NaN
    return [grad[:, : x.shape[-1]].reshape(x.shape).contiguous() for grad, x in pairs if grad is not None]


@_backward.register_fake
def _(upstream: Any, kept: Any, hidden: Tensor, weight: Tensor, *others: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, needed in zip((hidden, weight), others[-1], strict=True) if needed]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], list[Tensor]]) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output[1])
    ctx.others = inputs[_NUM_TENSORS:]
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, upstream: list[Any], _: Any) -> tuple[Any, ...]:
    found = iter(_backward(upstream, ctx.saved_tensors[_NUM_TENSORS:], *ctx.saved_tensors[:_NUM_TENSORS], *ctx.others))
    return *(next(found) if needed else None for needed in ctx.others[-1]), *[None] * (len(_NAMES) - 2)


_forward.register_autograd(_autograd, setup_context=_setup_context)
