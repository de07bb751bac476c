"""The one entry of every operation: arguments are checked on all ranks together and become a `Call`."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from megatron_lce.backends.choice import load_backend
from megatron_lce.core import collectives, validation
from megatron_lce.core.agreement import Agreement, agreement
from megatron_lce.core.call import Call
from megatron_lce.core.options import Options, Shard, WeightGradSink
from megatron_lce.core.products import laid_out
from megatron_lce.dtensors import localised

T = TypeVar("T")
HEAD = ("hidden", "weight", "labels")
_OWN = ("tp_group", "vocab_start")  # what ranks need not have in common
_BY_TYPE = ("temperature", "weight_grad_sink")  # what may change from call to call, but for its type


def keyword_options(keywords: Mapping[str, Any], known: Collection[str], **own: Any) -> Options:
    """The options among the keywords of an operation that takes `known` ones."""
    return Options(**own, **{keyword: value for keyword, value in keywords.items() if keyword in known})


def check_keywords(name: str, keywords: Mapping[str, Any], known: Collection[str]) -> None:
    if unknown := sorted(keywords.keys() - {*known}):
        raise TypeError(f"{name} has no keyword {', '.join(unknown)}")


@contextlib.contextmanager
def checked_together(
    name: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Any,  # None where the operation makes them
    options: Options,
    *,
    names: tuple[str, str, str] = HEAD,
    group_name: str = "tp_group",
    takes_dtensors: bool = False,
    has_reference: bool = False,
    own: dict[str, Any] | None = None,
) -> Iterator["Checks"]:
    """Check an operation's arguments inside, the head first. If one rank refuses its own, all ranks of the group raise.

        with checked_together("linear_topk", hidden, weight, None, options, own={"k": k}) as checks:
            shape = checks.head()
            ...                       # what else the operation takes
            checks.rest(labels)
        call = checks.call()

    While torch.compile traces, ranks exchange nothing: the operator that it traces checks its arguments when it runs.

    Args:
        names: how the operation names hidden, weight and labels.
        takes_dtensors: replace DTensors by this rank's own tensors, and options by what their placements say.
        own: what else every rank must call with.
    """
    largest_shard = None
    if takes_dtensors:
        hidden, weight, labels, options, largest_shard = localised(hidden, weight, labels, options)
    hidden, weight, labels = (collectives.waited(tensor) for tensor in (hidden, weight, labels))
    temperature, candidates = collectives.waited(options.temperature), collectives.waited(options.candidates)
    options = replace(options, temperature=temperature, candidates=candidates)
    ranks = validation.check_group(options.tp_group, group_name)
    if torch.compiler.is_compiling():
        yield Checks(name, hidden, weight, labels, options, Agreement(ranks), names, has_reference, is_traced=True)
        return
    own, described = own or {}, _describe(hidden, weight, labels, options, names) if ranks > 1 else {}
    called_with = {"operation": name, **own, **described, **own}  # own first, and in place of an option of that name
    changing = {f"the shape of {names[0]}": validation.shape_of(hidden)}
    limits: dict[str, Any] = {"largest_shard": largest_shard, "vocab_size": options.vocab_size}
    with agreement(
        options.tp_group, called_with, weight, options.vocab_start, changing, group_name=group_name, **limits
    ) as agreed:
        yield Checks(name, hidden, weight, labels, options, agreed, names, has_reference)


class Checks:
    """Checks that all operations share, of plain tensors on this rank.

    Raises:
        TypeError, ValueError: see `linear_cross_entropy`.
    """

    def __init__(
        self,
        name: str,
        hidden: Tensor,
        weight: Tensor,
        labels: Any,  # a tensor; None where the operation makes it
        options: Options,
        agreed: Agreement,
        names: tuple[str, str, str] = HEAD,
        has_reference: bool = False,
        is_traced: bool = False,
    ) -> None:
        self.hidden, self.weight, self.labels, self.options, self.is_traced = hidden, weight, labels, options, is_traced
        self._name, self._agreed, self._names, self._has_reference = name, agreed, names, has_reference
        self._head_is_checked, self._shards = False, agreed.ranks if options.sequence_parallel else 1  # of hidden

    def head(self) -> tuple[int, ...]:
        """Check hidden and weight, and return the shape that labels must have."""
        options, (hidden_name, weight_name, _) = self.options, self._names
        self._head_is_checked = True
        if not self.is_traced:
            if options.backend == "reference" and not self._has_reference:
                raise ValueError(f"backend must be 'auto', 'triton' or 'torch' for {self._name}, got 'reference'")
            validation.check_flag("sequence_parallel", options.sequence_parallel)
            validation.check_tensor(hidden_name, self.hidden)
            validation.check_tensor(weight_name, self.weight)
            validation.check_head(hidden_name, self.hidden, weight_name, self.weight)
        return validation.labels_shape(hidden_name, self.hidden, self._shards)

    def rest(self, labels: Tensor | None = None, options: Options | None = None) -> None:
        """Check labels and options, and the head if it was not; an operation passes those that it made itself."""
        if not self._head_is_checked:
            self.head()
        self.labels = labels = self.labels if labels is None else labels
        self.options = options = self.options if options is None else options
        if self.is_traced:
            return
        ranks, hidden, weight = self._agreed.ranks, self.hidden, self.weight
        for name in ("entropy", "telemetry", "reduce_grad_hidden"):
            validation.check_flag(name, getattr(options, name))
        validation.check_labels_of(self._names[0], hidden, labels, self._shards, self._names[2])
        validation.check_temperature(options.temperature, labels.shape, labels.device)
        validation.check_number("logits_scale", options.logits_scale)
        if options.candidates is not None:
            validation.check_candidates(options.candidates, labels)
        validation.check_integer("ignore_index", options.ignore_index)
        validation.check_skip_ignored(options.skip_ignored, labels.numel())
        validation.check_options(options)
        self.shard = shard_of(weight, options.tp_group, options.vocab_start, options.vocab_size)
        if options.vocab_start is None or ranks == 1:  # else the group compares its shards
            first = 0 if options.vocab_start is None else options.vocab_start
            validation.check_vocab_size(options.vocab_size, first + ranks * weight.shape[0])
        if self._shards > 1 and not options.reduce_grad_hidden:
            raise ValueError("reduce_grad_hidden must be True with sequence_parallel, got False")
        sink, step = options.weight_grad_sink, 16 // hidden.element_size()
        if sink is not None and weight.shape[1] % step:
            shape = tuple(weight.shape)
            raise ValueError(f"weight_grad_sink must be None where H is no multiple of {step}, got {shape}")
        if options.backend == "reference":
            _check_reference(ranks, self.shard.start, sink)
        group = options.tp_group if ranks > 1 else None
        self.options = replace(options, tp_group=group, sequence_parallel=self._shards > 1)

    def call(self) -> Call:
        """Return the call, laid out."""
        hidden, labels, temperature = self.hidden, self.labels, self.options.temperature
        assert labels is not None
        largest, step = self._agreed.largest_shard, 16 // hidden.element_size()
        backend = load_backend(self.options.backend, hidden.device)
        return Call(
            hidden=laid_out(hidden.reshape(-1, hidden.shape[-1]), step),
            weight=laid_out(self.weight.contiguous(), step),
            labels=labels.reshape(-1),
            temperature=temperature.reshape(-1) if isinstance(temperature, Tensor) else float(temperature),
            options=self.options,
            shard=self.shard if largest is None else self.shard._replace(largest=largest),
            backend=backend,
            shape=labels.shape,
            product=backend.product,
        )


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
    """Return the arguments that must be equal on every rank, in comparable form."""
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
