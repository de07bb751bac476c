"""`linear_cross_entropy` under torch.compile: a node of the graph for each pass, which the compiler does not look into.

A node runs what a call without the compiler runs, validation included: the passes of the one autograd function, with a
context of ours in place of torch's. What that function saves travels from one node to the other as tensors. Beside the
passes a node has shapes, which is all that the compiler sees while it traces.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from megatron_lce.arguments import checked_options, make_call
from megatron_lce.backends.choice import load_backend
from megatron_lce.core import collectives
from megatron_lce.core.autograd import LinearCrossEntropyFunction
from megatron_lce.core.call import Call
from megatron_lce.core.logits_cache import LogitsCache, new_cache
from megatron_lce.core.options import DIFFERENTIABLE, LinearCrossEntropyOutput, Options, outputs_asked_for

_KEYWORDS = {  # the type of each in a schema
    "temperature": "Tensor",  # one a token; or a number, [] fp64: the compiler would make a graph for each float
    "candidates": "Tensor?",
    "tp_group": "str?",  # its name
    "sequence_parallel": "bool",
    "logits_scale": "Tensor",  # as the temperature
    "softcap": "float?",
    "ignore_index": "int",
    "vocab_start": "int?",
    "vocab_size": "int?",
    "entropy": "bool",
    "telemetry": "bool",
    "logits_dtype": "ScalarType?",
    "skip_ignored": "bool",
    "num_counted": "SymInt?",  # `skip_ignored` where it is a number
    "logits_cache_bytes": "int",
    "workspace_bytes": "int",
    "reduce_grad_hidden": "bool",
    "backend": "str",
    "needs_hidden": "bool",  # whether backward will make its gradient
    "needs_weight": "bool",
    "itself": "Tensor?",  # another one for each call that keeps logits
}
_TENSORS = ("temperature", "logits_scale", "candidates")  # that backward needs once more
_OF_OPTIONS = tuple(Options.__dataclass_fields__)
_SCHEMA_END = ", ".join(f"{kind} {name}" for name, kind in _KEYWORDS.items()) + ") -> Tensor[]"


def as_one_node(hidden: Tensor, weight: Tensor, labels: Tensor, options: Options) -> LinearCrossEntropyOutput:
    """The call as torch.compile traces it."""
    counted, temperature = not isinstance(options.skip_ignored, bool), options.temperature
    grad = torch.is_grad_enabled()
    values = {name: getattr(options, name) for name in _OF_OPTIONS} | {  # torch 2.11 traces no `vars(options) |`
        "temperature": temperature if isinstance(temperature, Tensor) else _as_tensor(temperature),
        "logits_scale": _as_tensor(options.logits_scale),
        "tp_group": None if options.tp_group is None else options.tp_group.group_name,
        "skip_ignored": False if counted else options.skip_ignored,
        "num_counted": options.skip_ignored if counted else None,
        "needs_hidden": grad and hidden.requires_grad,
        "needs_weight": grad and weight.requires_grad,
        # The compiler makes one node of equal ones, and one cache serves one backward. No two empty tensors are equal.
        "itself": torch.empty(0, dtype=torch.uint8, device=hidden.device) if options.logits_cache_bytes else None,
    }
    keywords = {name: values[name] for name in _KEYWORDS}
    outputs = torch.ops.megatron_lce.linear_cross_entropy(hidden, weight, labels, **keywords)
    given = dict(zip(_outputs(vars(options)), outputs, strict=False))
    return LinearCrossEntropyOutput(*(given.get(name) for name in LinearCrossEntropyOutput._fields))  # type: ignore[arg-type]


def _as_tensor(number: float) -> Tensor:
    """[] fp64 on the host. A product: of a float that changes, the compiler makes a number of its graph there alone."""
    return torch.ones((), dtype=torch.float64, device="cpu") * number


class _Context:
    """What torch hands to the passes of an autograd function, for calling them by hand."""

    def __init__(self, call: Call, keywords: dict[str, Any]) -> None:
        self.needs_input_grad = (keywords["needs_hidden"], keywords["needs_weight"])
        self.saved_tensors: Sequence[Tensor | None] = ()
        self.cache: LogitsCache | None = None
        self.cached = False
        self.num_tokens, self.call = call.labels.shape[0], call.without_tensors()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


def _arguments(values: Sequence[Any]) -> tuple[dict[str, Any], Options]:
    """The keywords of a node, and the options of the call that it is."""
    keywords = dict(zip(_KEYWORDS, values, strict=True))
    public = {name: value for name, value in keywords.items() if name in Options.__dataclass_fields__}
    for name in ("temperature", "logits_scale"):
        if public[name].dim() == 0:  # while shapes are traced nobody knows the number, and none is needed
            public[name] = 1.0 if isinstance(public[name], FakeTensor) else float(public[name])
    if keywords["num_counted"] is not None:
        public["skip_ignored"] = keywords["num_counted"]
    elif public["skip_ignored"]:
        public["logits_cache_bytes"] = 0  # how much that would hold depends on what is on the device
    if public["tp_group"] is not None:
        public["tp_group"] = collectives.group_named(public["tp_group"])
    return keywords, Options(**public)


@torch.library.custom_op(
    "megatron_lce::linear_cross_entropy",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor labels, {_SCHEMA_END}",
)
@torch.no_grad()
def _forward(hidden: Tensor, weight: Tensor, labels: Tensor, *values: Any) -> list[Tensor]:
    """The outputs that were asked for, of labels' shape; then, where a gradient is wanted, what backward needs."""
    keywords, options = _arguments(values)
    call = make_call(hidden.detach(), weight.detach(), labels, options)
    context = _Context(call, keywords)
    needs_grad = any(context.needs_input_grad)
    found = LinearCrossEntropyFunction.forward(context, call.hidden, call.weight, call, needs_grad)
    outputs = [output for output in found if output is not None]
    if not needs_grad:
        return outputs
    _, _, counted, *per_row = context.saved_tensors
    kept = [labels.new_empty(0) if counted is None else counted]
    kept += [row.clone() for row in per_row if row is not None]  # nodes may not return views of each other's memory
    return [*outputs, *kept, *(() if context.cache is None else context.cache.tensors)]


@_forward.register_fake
def _(hidden: Tensor, weight: Tensor, labels: Tensor, *values: Any) -> list[Tensor]:
    keywords, options = _arguments(values)
    num_counted, num_tokens = keywords["num_counted"], labels.numel()
    ranks = collectives.group_size(options.tp_group)
    options, shard, _ = checked_options(
        hidden, weight, labels, replace(options, skip_ignored=keywords["skip_ignored"]), ranks
    )
    names, candidates = _outputs(keywords), keywords["candidates"]
    outputs = [
        labels.new_empty(candidates.shape if name == "candidate_logprobs" else labels.shape, dtype=dtype)
        for name, dtype in names.items()
    ]
    if not (keywords["needs_hidden"] or keywords["needs_weight"]):
        return outputs
    computed: Any = num_tokens
    listed: Any = 0
    if keywords["skip_ignored"]:
        computed, listed = (torch.library.get_ctx().new_dynamic_size() for _ in range(2))
    elif num_counted is not None:
        computed, listed = num_counted, (0 if num_counted == num_tokens else num_counted)
    cache = None
    if options.logits_cache_bytes:
        flat, backend = hidden.reshape(-1, hidden.shape[-1]), load_backend(options.backend, hidden.device)
        call = Call(flat, weight, labels, 1.0, options, shard, backend, labels.shape)
        cache = new_cache(call.size, computed, shard.columns, options.logits_cache_bytes, flat)
    floats = 5 + keywords["entropy"] + keywords["telemetry"]
    per_row = [labels.new_empty(computed, dtype=dtype) for dtype in (torch.int32, *(torch.float32,) * floats)]
    if candidates is not None:
        width = candidates.shape[-1]
        per_row += [
            labels.new_empty(num_tokens, width),
            labels.new_empty(computed, width, dtype=torch.float32),
        ]
    kept = [labels.new_empty(listed), *per_row]
    return [*outputs, *kept, *(() if cache is None else cache.tensors)]


def _outputs(keywords: dict[str, Any]) -> dict[str, torch.dtype]:
    names = outputs_asked_for(keywords["entropy"], keywords["telemetry"])
    return names if keywords["candidates"] is None else names | {"candidate_logprobs": torch.float32}


@torch.library.custom_op(
    "megatron_lce::linear_cross_entropy_backward",
    mutates_args=(),  # but for the cache, which no other node has
    schema=f"(Tensor hidden, Tensor weight, Tensor labels, Tensor[] kept, Tensor?[] upstream, {_SCHEMA_END}",
)
@torch.no_grad()
def _backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    kept: list[Tensor],
    upstream: list[Tensor | None],  # of every output that was asked for, [...] each
    *values: Any,
) -> list[Tensor]:
    """The gradients that are wanted, of hidden's and of weight's shape."""
    keywords, options = _arguments(values)
    call = make_call(hidden.detach(), weight.detach(), labels, options)
    context = _Context(call, keywords)
    counted, *tensors = kept
    # Of `Rows` and `Saved`, and two of candidates.
    num_rows = 6 + keywords["entropy"] + keywords["telemetry"] + 2 * (keywords["candidates"] is not None)
    per_row, of_cache = tensors[:num_rows], tensors[num_rows:]
    left = iter(per_row[6:])
    saved = [*per_row[:6], *(next(left) if keywords[name] else None for name in ("entropy", "telemetry")), *left]
    everything = per_row[0].shape[0] == labels.numel()
    context.save_for_backward(call.hidden, call.weight, None if everything else counted, *saved)
    if of_cache:
        context.cache, context.cached = LogitsCache(*of_cache), True
    given = dict(zip(_outputs(keywords), upstream, strict=True))
    grads = (given.get(name) for name in LinearCrossEntropyOutput._fields)
    grad_hidden, grad_weight, *_ = LinearCrossEntropyFunction.backward(context, *grads)
    for tensor in of_cache[1:]:
        tensor.fill_(torch.nan)  # the kept logits are gradients now: a second backward raises, or gives NaN
    gradients = (grad_hidden, hidden.shape), (grad_weight, weight.shape)
    return [gradient[:, : shape[-1]].reshape(shape) for gradient, shape in gradients if gradient is not None]


@_backward.register_fake
def _(hidden: Tensor, weight: Tensor, labels: Tensor, kept: Any, upstream: Any, *values: Any) -> list[Tensor]:
    keywords, _ = _arguments(values)
    wanted = (hidden, keywords["needs_hidden"]), (weight, keywords["needs_weight"])
    return [tensor.new_empty(tensor.shape) for tensor, needed in wanted if needed]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    hidden, weight, labels, *values = inputs
    keywords = dict(zip(_KEYWORDS, values, strict=True))
    names = _outputs(keywords)
    kept = output[len(names) :]
    ctx.save_for_backward(hidden, weight, labels, *(keywords[name] for name in _TENSORS), *kept)
    ctx.values = [None if isinstance(value, Tensor) else value for value in values]
    with_gradient = (*DIFFERENTIABLE, "candidate_logprobs")
    others = (tensor for name, tensor in zip(names, output, strict=False) if name not in with_gradient)
    ctx.mark_non_differentiable(*others, *kept)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    hidden, weight, labels, *others = ctx.saved_tensors
    tensors, kept = others[: len(_TENSORS)], others[len(_TENSORS) :]
    keywords = dict(zip(_KEYWORDS, ctx.values, strict=True)) | dict(zip(_TENSORS, tensors, strict=True))
    upstream = grads[: len(_outputs(keywords))]
    found = iter(_backward(hidden, weight, labels, kept, upstream, *keywords.values()))
    needs = keywords["needs_hidden"], keywords["needs_weight"]
    return *(next(found) if needed else None for needed in needs), None, *itertools.repeat(None, len(_KEYWORDS))


_forward.register_autograd(_autograd, setup_context=_setup_context)
