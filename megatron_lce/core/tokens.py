"""Tokens decide which rows of a call are computed, block by block, and carry hidden states there and gradients back."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.collectives import Pending
from megatron_lce.core.options import LinearCrossEntropyOutput, Options, outputs_asked_for
from megatron_lce.core.plan import ceil_div, cut
from megatron_lce.core.rows import Rows


class Counted(NamedTuple):
    """They are the rows that are computed if ignored rows are skipped."""

    rows: Tensor | None  # int64, ascending; None: every row
    unless_nan: Tensor | None = None  # 1, or NaN if the caller's count is not the labels'; None: nothing to check

    def of(self, num_tokens: int) -> int:
        """Return the number of computed rows of so many tokens."""
        return num_tokens if self.rows is None else self.rows.shape[0]


class TokenBlock(NamedTuple):
    """It is a range of the computed rows with their hidden states."""

    rows: slice
    hidden: Pending  # [rows, H]
    is_first: bool
    is_last: bool


def counted_rows(labels: Tensor, options: Options) -> Counted:
    """Return the rows that are not ignored, all unless they are skipped. With `skip_ignored=True` the host waits.

    Raises:
        RuntimeError: `skip_ignored=True` while a CUDA graph is captured.
    """
    if options.skip_ignored is False:
        return Counted(None)
    counts = labels != options.ignore_index
    if options.skip_ignored is True:
        if collectives.is_captured():
            raise RuntimeError(
                "skip_ignored must be False or the number of counted rows while a CUDA graph is captured, got True: "
                "it reads the number from the device"
            )
        return rows_that_count(counts, options)
    count = options.skip_ignored
    if count == labels.shape[0]:
        return Counted(None, nan_unless(counts.all()))
    return Counted(counts.nonzero_static(size=count, fill_value=0)[:, 0], nan_unless(counts.sum() == count))


def rows_that_count(counts: Tensor, options: Options) -> Counted:
    """Return the rows whose `counts` [N] is true on any rank, so that ranks do not part. The host waits."""
    if options.tp_group is not None:
        counts = collectives.any_over_group(counts, options.tp_group)
    rows = counts.nonzero()[:, 0]
    return Counted(None if rows.shape[0] == counts.shape[0] else rows)


def rows_to_compute(rows: Rows, order: Tensor | None, counted: Counted) -> Rows:
    """Return the computed rows in the order of the blocks, NaN if the caller's count is not the labels'."""
    if order is not None:
        rows = rows.select(order)
    if counted.unless_nan is not None:
        rows = rows._replace(to_nats=rows.to_nats * counted.unless_nan)
    return rows


def new_outputs(
    shape: Sequence[int], counted: Counted, options: Options, device: torch.device
) -> LinearCrossEntropyOutput:
    """Allocate outputs of every row, in any shape, to which counted rows are written; skipped rows are 0.

    If the caller's count is not the labels', skipped rows are NaN, and -1 as an argmax.
    """
    asked_for = outputs_asked_for(options.entropy, options.telemetry)
    new = {name: _room(shape, counted, dtype, device) for name, dtype in asked_for.items()}
    if options.candidates is not None:
        shape = (*shape, options.candidates.shape[-1])
        new["candidate_logprobs"] = _room(shape, counted, torch.float32, device)
    return LinearCrossEntropyOutput(*(new.get(name) for name in LinearCrossEntropyOutput._fields))  # type: ignore[arg-type]


def to_every_row(output: Tensor, counted: Counted, num_tokens: int) -> Tensor:
    """Spread an output [n, ...] of the counted rows over all rows, as `new_outputs` fills the skipped ones."""
    if counted.rows is None:
        return output
    all_rows = _room((num_tokens, *output.shape[1:]), counted, output.dtype, output.device)
    return all_rows.index_copy_(0, counted.rows, output)


def in_order(per_row: Tensor, order: Tensor | None) -> Tensor:
    """Return the computed rows of a tensor of every row, in the order of the blocks."""
    return per_row if order is None else per_row.index_select(0, order)


def nan_unless(condition: Tensor) -> Tensor:
    """Return 1 in fp32 if the condition [] holds, else NaN, without a wait for it."""
    return condition.new_ones((), dtype=torch.float32).masked_fill_(~condition, torch.nan)


def _room(shape: Sequence[int], counted: Counted, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return room for an output; skipped rows are 0, NaN (integers: -1) if the caller's count is not the labels'."""
    if counted.rows is None:
        return torch.empty(shape, dtype=dtype, device=device)
    room = torch.zeros(shape, dtype=dtype, device=device)
    if counted.unless_nan is not None:
        room.masked_fill_(counted.unless_nan.isnan(), torch.nan if dtype.is_floating_point else -1)
    return room


class Tokens:
    """They yield the hidden states of a call's computed rows block by block, and take their gradients back.

    Under sequence parallel, if all rows are computed, a block holds the same rows of every rank's shard: it is
    gathered, and its gradient reduce-scattered, by itself. If rows are skipped, all of hidden is gathered at once.
    """

    def __init__(
        self,
        hidden: Tensor,  # [N, H], under sequence parallel [N / tp, H]
        num_tokens: int,  # N
        rows: Counted,  # the computed rows
        block_tokens: int,  # most rows of a block
        options: Options,
        grad_dtype: torch.dtype | None = None,  # of hidden's gradient; None: hidden's
    ) -> None:
        counted = rows.rows
        self.grad_dtype = hidden.dtype if grad_dtype is None else grad_dtype
        self.hidden, self.num_tokens, self._counted, self._options = hidden, num_tokens, counted, options
        self.num_computed = rows.of(num_tokens)
        ranks = num_tokens // hidden.shape[0] if options.sequence_parallel and num_tokens else 1
        self._block_tokens = max(1, block_tokens // ranks) * ranks if counted is None else max(1, block_tokens)
        self.num_blocks = ceil_div(self.num_computed, self._block_tokens)
        self._by_shard = ranks > 1 and counted is None and self.num_blocks > 1
        self._ranks = ranks
        self._grad: Tensor | None = None
        self._reductions: list[Pending] = []

    def order(self) -> Tensor | None:
        """Return the computed rows' numbers in the order of the blocks, or None if all rows keep theirs."""
        if not self._by_shard:
            return self._counted
        rows = torch.arange(self.num_tokens, dtype=torch.int64, device=self.hidden.device).view(self._ranks, -1)
        return torch.cat([rows[:, part].reshape(-1) for part in self._shard_parts()])

    def blocks(self) -> Iterator[TokenBlock]:
        """Yield the blocks; the next part of the shards is gathered while one is computed."""
        if self.num_computed == 0:
            return
        parts = self._shard_parts()
        gathering = self._start_gather(parts[0])
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            gathered = gathering
            if following is not None:
                gathering = self._start_gather(following)
            if self._by_shard:
                rows = slice(part.start * self._ranks, part.stop * self._ranks)
                yield TokenBlock(rows, gathered, part.start == 0, following is None)
            else:
                for rows in cut(self.num_computed, self._block_tokens):
                    hidden = self._select(gathered, rows)
                    yield TokenBlock(rows, hidden, rows.start == 0, rows.stop == self.num_computed)
            gathered.wait()  # even if nothing read it: its memory must not be used again before it is filled

    def grad_rows(self, block: TokenBlock) -> Tensor:
        """Return the tensor [rows, H], of `grad_dtype`, to which the block's gradient is written before `reduce`."""
        num_rows, hidden_size = block.rows.stop - block.rows.start, self.hidden.shape[1]
        if self._by_shard:
            self._grad = self.hidden.new_empty(num_rows, hidden_size, dtype=self.grad_dtype)
            return self._grad
        if self._grad is None:
            zero_row = self._counted is not None  # the gradient of every skipped row, behind the others
            self._grad = self.hidden.new_empty(self.num_computed + zero_row, hidden_size, dtype=self.grad_dtype)
        return self._grad[block.rows]

    @property
    def reduces(self) -> bool:
        """Whether gradients of hidden are summed over the group."""
        return self._options.tp_group is not None and self._options.reduce_grad_hidden

    def reduce(self, block: TokenBlock) -> None:
        """Start to sum over the group what was written to `grad_rows`, unless the caller sums it."""
        if not self.reduces:
            return
        options, grad = self._options, self._grad
        assert grad is not None
        assert options.tp_group is not None
        if self._by_shard:
            self._reductions.append(collectives.start_reduce_scatter(grad, options.tp_group))
        elif not options.sequence_parallel:
            self._reductions.append(collectives.start_all_reduce(grad[block.rows], options.tp_group))
        elif block.rows.stop == self.num_computed:
            self._reductions.append(collectives.start_reduce_scatter(self._spread(grad), options.tp_group))

    def grad_hidden(self) -> Tensor:
        """Return the gradient, of hidden's shape, after every block's `reduce`."""
        if self.num_computed == 0:
            return torch.zeros_like(self.hidden, dtype=self.grad_dtype)
        summed = [reduction.wait() for reduction in self._reductions]
        if self._options.sequence_parallel:
            return summed[0] if len(summed) == 1 else torch.cat(summed)
        assert self._grad is not None
        return self._spread(self._grad)

    def _spread(self, grad: Tensor) -> Tensor:
        """Spread the computed rows' gradients over all rows, [N, H]; skipped rows are 0."""
        if self._counted is None:
            return grad
        grad[self.num_computed :].zero_()
        places = self._counted.new_full((self.num_tokens,), self.num_computed)
        places.index_copy_(0, self._counted, torch.arange(self.num_computed, dtype=torch.int64, device=places.device))
        return grad.index_select(0, places)

    def _select(self, gathered: Pending, rows: slice) -> Pending:
        """Return a block's rows of all hidden states."""
        if self._counted is not None:
            return Pending(gathered.wait().index_select(0, self._counted[rows]))
        return gathered if self.num_blocks == 1 else Pending(gathered.wait()[rows])

    def _shard_parts(self) -> list[slice]:
        """Return the parts of a rank's shard that are gathered one after another."""
        rows = self.hidden.shape[0]
        return list(cut(rows, self._block_tokens // self._ranks)) if self._by_shard else [slice(0, rows)]

    def _start_gather(self, part: slice) -> Pending:
        if self._ranks == 1:
            return Pending(self.hidden[part])
        assert self._options.tp_group is not None
        return collectives.start_gather_rows(self.hidden[part], self._options.tp_group)
