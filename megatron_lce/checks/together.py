"""The entry of every operation: ranks check their arguments together, and lay them out as a `Call`."""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megatron_lce.backends.choice import load_backend
from megatron_lce.checks import validation
from megatron_lce.checks.dtensors import to_local_tensors
from megatron_lce.checks.validation import NAMES, require
from megatron_lce.core import collectives
from megatron_lce.core.call import Call, Telling
from megatron_lce.core.lm_head import LMHead
from megatron_lce.core.matmul import aligned_rows, matmul
from megatron_lce.core.options import Options, Shard

_PER_RANK = ("tp_group", "vocab_start")  # may differ between ranks

# For each group the kinds of calls that its ranks have agreed on, and the columns of the largest shard under each.
# Ranks must agree whether a key is new. With vocab_start, shards may differ, so their size stays out of the key.
_agreed: WeakKeyDictionary[ProcessGroup, dict[tuple[Any, int | None], int]] = WeakKeyDictionary()
_refusals: ContextVar[list[Exception] | None] = ContextVar("refusals", default=None)  # see `laying_out`


def keyword_options(keywords: Mapping[str, Any], typed_dict: Any, **fixed: Any) -> Options:
    """Return the options among an operation's keywords, which `typed_dict` lists."""
    return Options(**fixed, **{name: value for name, value in keywords.items() if name in typed_dict.__optional_keys__})


def check_keywords(operation: str, keywords: Mapping[str, Any], typed_dict: Any) -> None:
    if unknown := sorted(keywords.keys() - typed_dict.__optional_keys__):
        raise TypeError(f"{operation} has no keyword {', '.join(unknown)}")


@contextlib.contextmanager
def checked_together(
    name: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Any,  # None where the operation makes them
    options: Options,
    *,
    names: Mapping[str, str] = NAMES,
    takes_dtensors: bool = False,
    compared: dict[str, Any] | None = None,
) -> Iterator["Checks"]:
    """Check arguments. In a call of a new kind all ranks raise, or none; of a known one, a rank raises alone.

        with checked_together("linear_topk", hidden, weight, None, options, compared={"k": k}) as checks:
            ...                       # what else the operation takes; hidden, weight and options are checked before
            checks.labels = labels    # what the operation makes itself, as its options; both are checked after
        call = checks.call

    In the first call of a kind, ranks exchange their arguments and errors in one gather of small objects, which blocks
    the host. If one rank refuses its arguments, or they differ, all ranks raise. Later calls of the kind compare
    nothing: a rank's own number is not noticed. But with `vocab_start` and plain tensors, each call still all-reduces
    the largest shard size, which blocks the host. If one rank alone changes to another kind, it hangs.

    The kind is what `_describe` and `compared` list, without what may change from call to call: values of floats, and
    the number of rows, of ids a row and of rows that are not ignored.

    Args:
        names: what the operation calls the arguments of its head, and the group.
        takes_dtensors: replace DTensors by this rank's own tensors, and options by what the placements imply.
        compared: further values that must be equal on every rank, and tensors that must be alike.
    """
    max_columns = None
    if takes_dtensors and (isinstance(hidden, DTensor) or isinstance(weight, DTensor)):
        hidden, weight, labels, options, max_columns = to_local_tensors(hidden, weight, labels, options)
    hidden, weight, labels = (collectives.wait_if_async(tensor) for tensor in (hidden, weight, labels))
    if isinstance(options.temperature, Tensor) or isinstance(options.candidates, Tensor):
        temperature, candidates = map(collectives.wait_if_async, (options.temperature, options.candidates))
        options = replace(options, temperature=temperature, candidates=candidates)
    if options.tp_group is not None and not isinstance(options.tp_group, ProcessGroup):
        got = type(options.tp_group).__name__
        raise TypeError(f"{names['tp_group']} must be a torch.distributed.ProcessGroup or None, got {got}")
    checks = Checks(name, hidden, weight, labels, options, collectives.group_size(options.tp_group), names)
    error = next(iter(_refusals.get() or ()), None)
    try:
        validation.check_options(options)
        shards = checks.ranks if options.sequence_parallel else 1
        checks.shape = validation.check_head(hidden, weight, names, shards)
        yield checks
        checks.rest()
    except (TypeError, ValueError, NotImplementedError) as raised:
        error = error or raised
    if checks.ranks > 1:
        # `compared` twice: the first fixes the order, the last overrides an option of the same name.
        compared = compared or {}
        described = {"operation": name, **compared, **_describe(hidden, weight, labels, options, names), **compared}
        checks.compare(described, error, max_columns)
    if error is not None:
        raise error
    checks.lay_out()


@contextlib.contextmanager
def laying_out(*refused: Exception) -> Iterator[None]:
    """Lay out arguments and call an operation inside: its check raises the first of the errors that were refused."""
    token = _refusals.set([*(_refusals.get() or ()), *refused])
    try:
        yield
    finally:
        _refusals.reset(token)


def refuse(error: Exception) -> None:
    """Have the operation's check raise this error, on all ranks of a group; go on with what the caller gave."""
    if (refusals := _refusals.get()) is None:
        raise error
    refusals.append(error)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Refuse an error inside, and go on."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        refuse(error)


def agree(
    group: ProcessGroup,
    arguments: Mapping[str, Any],  # "operation" first: ranks that are out of step differ there
    error: Exception | None,
    value: Any = None,
    group_name: str = "tp_group",
    fault: str = "refuses its arguments",  # what this rank's error is
) -> list[Any]:
    """Return every rank's `value`; all ranks raise if one has an error, or if their arguments differ."""
    given = {name: _described(value) for name, value in arguments.items()}
    entries = collectives.gather_objects((given, None if error is None else f"{fault}: {error}", value), group)
    if error is not None:
        raise error
    for rank, (_, fault_of_rank, _) in enumerate(entries):
        if fault_of_rank is not None:
            raise ValueError(f"rank {rank} of {group_name} {fault_of_rank}")
    for name in dict.fromkeys(name for given, *_ in entries for name in given):
        values = [given.get(name, "nothing") for given, *_ in entries]
        if len(set(values)) > 1:
            hint = ": has a rank gone on after an error?" if name == "operation" else ""
            raise ValueError(f"{name} must be the same on every rank of {group_name}, got {', '.join(values)}{hint}")
    return [rank_value for *_, rank_value in entries]


@dataclass
class _Telling(contextlib.AbstractContextManager[None, None]):
    """Raises what a caller's loss raises inside on all ranks; the next call of the kind is then its first again."""

    operation: str
    group: ProcessGroup
    group_name: str
    agreed: dict[tuple[Any, int | None], int]  # of the group
    key: tuple[Any, int | None]

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, Exception):  # else an interrupt
            max_columns, fault = self.agreed.pop(self.key), f"raises {type(error).__name__} in its loss"
            agree(self.group, {"operation": f"the loss of {self.operation}"}, error, None, self.group_name, fault)
            self.agreed[self.key] = max_columns


@dataclass
class Checks:
    """Checks that all operations share, of plain tensors on this rank, and the `Call`."""

    operation: str
    hidden: Tensor
    weight: Tensor
    labels: Any  # a tensor; None where the operation makes it
    options: Options
    ranks: int
    names: Mapping[str, str]
    shape: tuple[int, ...] = ()  # that labels must have
    telling: Telling = contextlib.nullcontext

    def rest(self) -> None:
        """Check labels and what goes with them, after `check_head`, and find this rank's shard."""
        labels, options, hidden, ranks = self.labels, self.options, self.hidden, self.ranks
        num_rows, shards = self.weight.shape[0], ranks if options.sequence_parallel else 1
        hidden_name, labels_name = self.names["hidden"], self.names["labels"]
        validation.check_tensor(labels_name, labels, torch.int64)
        if labels.device != hidden.device:
            raise ValueError(f"{labels_name} must be on {hidden_name}'s device, {hidden.device}, got {labels.device}")
        shape, gathered = tuple(labels.shape), f" gathered over {shards} sequence-parallel ranks" * (shards > 1)
        requirement = f"have {hidden_name}'s shape without H{gathered}, {self.shape}"
        require(shape == self.shape, labels_name, requirement, f"{shape} for {hidden_name} {tuple(hidden.shape)}")
        numbers = options.temperature, options.logits_scale, options.softcap, options.logits_dtype
        self.lm_head = LMHead(hidden, self.weight, *numbers)
        validation.check_logits(self.lm_head, self.shape, self.names)
        if (ids := options.candidates) is not None:
            validation.check_tensor("candidates", ids, torch.int64)
            validation.check_ids_shape("candidates", ids, labels.shape, "labels'")
            require(ids.device == labels.device, "candidates", f"be on labels' device, {labels.device}", ids.device)
        if not isinstance(skip := options.skip_ignored, bool):
            require(isinstance(skip, int), "skip_ignored", "be a bool or an int", type(skip).__name__, TypeError)
            within = f"be at least 0 and at most the number of rows, {labels.numel()}"
            require(0 <= skip <= labels.numel(), "skip_ignored", within, skip)
        start, vocab_size = options.vocab_start, options.vocab_size
        if start is None:
            start = collectives.group_rank(options.tp_group) * num_rows if ranks > 1 else 0
        last = validation.MAX_VOCABULARY - num_rows
        require(start <= last, "vocab_start", f"be at most {last}, so that ids fit int32", start)
        # Until ranks compare theirs, the largest shard is this rank's own.
        num_columns = num_rows if vocab_size is None else min(max(vocab_size - start, 0), num_rows)
        self.shard = Shard(start, num_columns, num_rows)
        if vocab_size is not None and ranks == 1:  # a group compares its shards
            validation.check_vocab_size(vocab_size, start + num_rows)
        is_reduced = options.reduce_grad_hidden or shards == 1
        require(is_reduced, "reduce_grad_hidden", "be True with sequence_parallel", False)
        sink, step = options.weight_grad_sink, 16 // hidden.element_size()
        is_aligned, requirement = self.weight.shape[1] % step == 0, f"be None where H is no multiple of {step}"
        require(sink is None or is_aligned, "weight_grad_sink", requirement, tuple(self.weight.shape))

    def compare(self, described: dict[str, Any], error: Exception | None, max_columns: int | None) -> None:
        """Compare what describes a call of a new kind over the group, and find the columns of the largest shard."""
        group, start = self.options.tp_group, self.options.vocab_start
        num_rows = validation.num_weight_rows(self.weight)
        assert group is not None
        columns_by_kind = _agreed.setdefault(group, {})
        described["largest shard"] = max_columns
        key = _kind(described), num_rows if start is None else None
        if key not in columns_by_kind:
            described[f"the shape of {self.names['hidden']}"] = validation.shape_of(self.hidden)
            group_name = self.names["tp_group"]
            sizes = agree(group, described, error, (num_rows, start), group_name)
            columns_by_kind[key] = _max_columns(sizes, self.options.vocab_size)
            self.telling = partial(_Telling, self.operation, group, group_name, columns_by_kind, key)
        elif error is None and start is not None and max_columns is None and not collectives.is_cuda_graph_capturing():
            columns_by_kind[key] = collectives.all_reduce_max(self.weight.shape[0], group, self.weight.device)
        if error is None:
            self.shard = self.shard._replace(max_columns=max_columns or columns_by_kind[key])

    def lay_out(self) -> None:
        """Make the `Call`."""
        labels, options, ids = self.labels, self.options, self.options.candidates
        group, gathers = options.tp_group if self.ranks > 1 else None, options.sequence_parallel and self.ranks > 1
        holds_tensors = isinstance(options.temperature, Tensor) or ids is not None
        if holds_tensors or (group, gathers) != (options.tp_group, options.sequence_parallel):  # a copy takes 10 us
            options = replace(options, tp_group=group, sequence_parallel=gathers, temperature=1.0, candidates=None)
        backend = load_backend(options.backend, self.hidden.device)
        self.call = Call(
            head=aligned_head(self.lm_head),
            labels=labels.reshape(-1),
            candidates=None if ids is None else ids.reshape(-1, ids.shape[-1]),
            options=options,
            shard=self.shard,
            backend=backend,
            shape=labels.shape,
            matmul=backend.matmul if self.weight.dtype == torch.float32 else matmul,
            telling=self.telling,
        )


def aligned_head(head: LMHead) -> LMHead:
    """Return the head of hidden [..., H] as one of [N, H], in the layout of a `Call`."""
    step, temperature = 16 // head.hidden.element_size(), head.temperature
    return head._replace(
        hidden=aligned_rows(head.hidden.reshape(-1, head.hidden.shape[-1]), step),
        weight=aligned_rows(head.weight.contiguous(), step),
        temperature=temperature.reshape(-1) if isinstance(temperature, Tensor) else float(temperature),
    )


def _describe(
    hidden: Tensor, weight: Tensor, labels: Tensor | None, options: Options, names: Mapping[str, str] = NAMES
) -> dict[str, Any]:
    """Return the arguments that must be equal on every rank, and tensors that must be alike."""
    return {
        names["hidden"]: validation.describe_tensor(hidden),
        names["weight"]: validation.describe_tensor(weight),
        names["labels"]: validation.describe_tensor(labels[..., None]) if isinstance(labels, Tensor) else type(labels),
        "gradients": (torch.is_grad_enabled(), *(getattr(x, "requires_grad", None) for x in (hidden, weight))),
        **{f.name: getattr(options, f.name) for f in fields(options) if f.name not in _PER_RANK},
        "weight_grad_sink": type(options.weight_grad_sink).__name__,
    }


def _described(value: Any) -> str:
    """Return what must be equal on every rank: of a function its name, so that code of one name is not told apart."""
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return validation.describe_tensor(value) if isinstance(value, Tensor) else repr(value)


def _kind(arguments: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return what is equal in every call of a kind: of floats, tensors and a number of rows their types alone."""

    def lasting(name: str, value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{value.dtype} on {value.device.type}"
        is_number = isinstance(value, float) or (name == "skip_ignored" and not isinstance(value, bool))
        return type(value).__name__ if is_number else _described(value)

    return tuple((name, lasting(name, value)) for name, value in arguments.items())


def _max_columns(gathered_sizes: list[tuple[int, int | None]], vocab_size: int | None) -> int:
    """Return the columns of the largest of the shards, (rows, vocab_start) each; raise if they do not fit."""
    shards, starts = zip(*gathered_sizes, strict=True)
    end = 0
    if None not in starts:
        for start, rows in sorted(zip(starts, shards, strict=True)):
            if start < end:
                got = f"{list(starts)} for rows {list(shards)}"
                raise ValueError(f"vocab_start must be where no other rank's shard lies, got {got}")
            end = start + rows
    elif any(start is not None for start in starts):
        raise ValueError(f"vocab_start must be given on every rank of tp_group or on none, got {list(starts)}")
    elif len(set(shards)) > 1:
        raise ValueError(f"vocab_start must be given on every rank where shards differ, got rows {list(shards)}")
    validation.check_vocab_size(vocab_size, end or sum(shards))
    return max(shards)
