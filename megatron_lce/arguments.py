"""From what a caller passes to a `Call`: checked, agreed over the group once, laid out."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from megatron_lce.backends.choice import load_backend
from megatron_lce.core import collectives, validation
from megatron_lce.core.agreement import agreed
from megatron_lce.core.call import Call
from megatron_lce.core.options import Options, Shard, WeightGradSink
from megatron_lce.core.products import laid_out

T = TypeVar("T")
HEAD = ("hidden", "weight", "labels")
_OWN = ("tp_group", "vocab_start")  # what ranks need not have in common
_BY_TYPE = ("temperature", "weight_grad_sink")  # what may change from call to call, but for its type


@dataclass(frozen=True)
class Operation:
    """How an operation names its arguments, and what it has beside those of `linear_cross_entropy`.

    tensors   names of hidden, weight and labels
    group     the name of the group
    prepare   checks what else the operation takes than hidden and weight, which are checked, and makes its labels and
              options those of `linear_cross_entropy`, whose labels have this shape
    own       what else every rank must call with
    refusal   of what the operation does not take at all

    Where one rank refuses what it was passed, all of them do at the first call of a kind.
    """

    name: str = "linear_cross_entropy"
    tensors: tuple[str, str, str] = HEAD
    group: str = "tp_group"
    prepare: Callable[[Any, Options, tuple[int, ...]], tuple[Tensor, Options]] = lambda ids, options, _: (ids, options)
    own: dict[str, Any] = field(default_factory=dict)
    refusal: Exception | None = None
    has_reference: bool = False


LINEAR_CROSS_ENTROPY = Operation(has_reference=True)


def keyword_options(
    name: str, keywords: Mapping[str, Any], known: Collection[str], **own: Any
) -> tuple[Options, TypeError | None]:
    """The options of an operation of this name that takes `known` keywords, and its refusal of others."""
    options = Options(**own, **{keyword: value for keyword, value in keywords.items() if keyword in known})
    unknown = sorted(keywords.keys() - {*known})
    return options, TypeError(f"{name} has no keyword {', '.join(unknown)}") if unknown else None


def make_call(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | None,
    options: Options,
    operation: Operation = LINEAR_CROSS_ENTROPY,
    largest_shard: int | None = None,
) -> Call:
    """The call of plain tensors, checked on every rank of the group at the first call of its kind.

    Args:
        labels: None where the operation prepares them.
        largest_shard: columns of the group's largest shard, where the caller knows it.

    Raises:
        TypeError, ValueError: see `linear_cross_entropy`.
    """
    hidden, weight, labels = (collectives.waited(tensor) for tensor in (hidden, weight, labels))
    options = replace(
        options,
        temperature=collectives.waited(options.temperature),
        candidates=collectives.waited(options.candidates),
    )

    (options_of_core, shard, ids), largest = agreed(
        options.tp_group,
        lambda ranks: checked_options(hidden, weight, labels, options, ranks, operation),
        lambda: {
            "operation": operation.name,
            **operation.own,
            **_describe(hidden, weight, labels, options, operation.tensors),
        },
        weight,
        options.vocab_start,
        {f"the shape of {operation.tensors[0]}": validation.shape_of(hidden)},
        largest_shard=largest_shard,
        vocab_size=options.vocab_size,
        group_name=operation.group,
    )
    temperature, step = options_of_core.temperature, 16 // hidden.element_size()
    backend = load_backend(options.backend, hidden.device)
    return Call(
        hidden=laid_out(hidden.reshape(-1, hidden.shape[-1]), step),
        weight=laid_out(weight.contiguous(), step),
        labels=ids.reshape(-1),
        temperature=temperature.reshape(-1) if isinstance(temperature, Tensor) else float(temperature),
        options=options_of_core,
        shard=shard if largest is None else shard._replace(largest=largest),
        backend=backend,
        shape=ids.shape,
        product=backend.product,
    )


def checked_options(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | None,
    options: Options,
    ranks: int,
    operation: Operation = LINEAR_CROSS_ENTROPY,
) -> tuple[Options, Shard, Tensor]:
    """The options as core takes them, this rank's shard, and the labels.

    Raises:
        TypeError, ValueError: see `linear_cross_entropy`.
    """
    if operation.refusal is not None:
        raise operation.refusal
    if options.backend == "reference" and not operation.has_reference:
        raise ValueError(f"backend must be 'auto', 'triton' or 'torch' for {operation.name}, got 'reference'")
    validation.check_flag("sequence_parallel", options.sequence_parallel)
    sequence_parallel, names = options.sequence_parallel and ranks > 1, operation.tensors
    for name, tensor in zip(names, (hidden, weight), strict=False):
        validation.check_tensor(name, tensor)
    validation.check_head(names[0], hidden, names[1], weight)
    shards = ranks if sequence_parallel else 1
    labels, options = operation.prepare(labels, options, validation.labels_shape(names[0], hidden, shards))
    for name in ("entropy", "telemetry", "reduce_grad_hidden"):
        validation.check_flag(name, getattr(options, name))
    validation.check_labels_of(names[0], hidden, labels, shards, names[2])
    validation.check_temperature(options.temperature, labels.shape, labels.device)
    validation.check_number("logits_scale", options.logits_scale)
    if options.candidates is not None:
        validation.check_candidates(options.candidates, labels)
    validation.check_integer("ignore_index", options.ignore_index)
    validation.check_skip_ignored(options.skip_ignored, labels.numel())
    validation.check_options(options)
    shard = shard_of(weight, options.tp_group, options.vocab_start, options.vocab_size)
    if options.vocab_start is None or ranks == 1:  # else the group compares its shards
        first = 0 if options.vocab_start is None else options.vocab_start
        validation.check_vocab_size(options.vocab_size, first + ranks * weight.shape[0])
    if sequence_parallel and not options.reduce_grad_hidden:
        raise ValueError("reduce_grad_hidden must be True with sequence_parallel, got False")
    sink, step = options.weight_grad_sink, 16 // hidden.element_size()
    if sink is not None and weight.shape[1] % step:
        raise ValueError(f"weight_grad_sink must be None where H is no multiple of {step}, got {tuple(weight.shape)}")
    if options.backend == "reference":
        _check_reference(ranks, shard.start, sink)
    tp_group = options.tp_group if ranks > 1 else None
    return replace(options, tp_group=tp_group, sequence_parallel=sequence_parallel), shard, labels


def shaped(results: T, shape: tuple[int, ...]) -> T:
    """Per-token results, [N, ...] each, in the caller's shape of labels."""
    return tree_map_only(Tensor, lambda result: result.view((*shape, *result.shape[1:])), results)


def check_per_token(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device, first: bool) -> None:
    """Check a tensor without gradient of labels' shape and device; `first`: it may have further dimensions."""
    validation.check_tensor(name, tensor)
    if tuple(tensor.shape[: len(shape)] if first else tensor.shape) != tuple(shape):
        what = "labels' shape first" if first else "labels' shape"
        raise ValueError(f"{name} must have {what}, {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on labels' device, {device}, got {tensor.device}")
    if tensor.requires_grad:
        raise ValueError(f"{name} must not require grad: it gets no gradient; got requires_grad=True")


def shard_of(weight: Tensor, tp_group: ProcessGroup | None, vocab_start: int | None, vocab_size: int | None) -> Shard:
    """This rank's part of the vocabulary, as far as it knows."""
    if vocab_start is not None:
        validation.check_integer("vocab_start", vocab_start, minimum=0)
    rows = weight.shape[0]
    start = collectives.group_rank(tp_group) * rows if vocab_start is None else vocab_start
    return Shard(start, rows if vocab_size is None else min(max(vocab_size - start, 0), rows), rows)


def _describe(
    hidden: Tensor, weight: Tensor, labels: Tensor | None, options: Options, names: tuple[str, str, str] = HEAD
) -> dict[str, Any]:
    """What every rank of a group must call with."""
    values = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _OWN}
    return {
        names[0]: validation.kind_of(hidden),
        names[1]: validation.kind_of(weight),
        names[2]: validation.kind_of(labels[..., None]) if isinstance(labels, Tensor) else type(labels),
        "gradients": (torch.is_grad_enabled(), *(getattr(x, "requires_grad", None) for x in (hidden, weight))),
        **{name: type(value).__name__ if name in _BY_TYPE else value for name, value in values.items()},
        "skip_ignored": validation.kind_of_skipping(options.skip_ignored),
        "candidates": validation.kind_of(options.candidates),
    }


def _check_reference(ranks: int, vocab_start: int, sink: WeightGradSink | None) -> None:
    if ranks > 1:
        raise ValueError("tp_group must have one rank for backend='reference', got a larger group")
    if vocab_start:
        raise ValueError(f"vocab_start must be 0 for backend='reference', got {vocab_start}")
    if sink is not None:
        raise ValueError(f"weight_grad_sink must be None for backend='reference', got a {type(sink).__name__}")
