"""Which rows of a call are computed, in what order, and the way of their hidden states and gradients over the group."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.blocks import ceil_div, cut
from megatron_lce.core.collectives import Pending
from megatron_lce.core.options import LinearCrossEntropyOutput, Options, outputs_asked_for
from megatron_lce.core.products import is_aligned
from megatron_lce.core.protocols import CommonBackend
from megatron_lce.core.rows import Ahead, Rows


class RowNumber:
    """How many rows count. The device knows it at once; the host learns it while the device goes on."""

    def __init__(
        self, on_device: Tensor, on_host: Tensor, gather_rows: Callable[[Tensor, Tensor, Tensor, bool], Tensor]
    ) -> None:
        self.on_device, self._on_host = on_device, on_host  # [] int32
        self._gather_rows = gather_rows
        self._number: int | None = None
        self._written = torch.cuda.Event() if on_device.is_cuda else None
        if self._written is not None:
            self._written.record(torch.cuda.current_stream(on_device.device))

    def look(self) -> int:
        """Waits for what was enqueued so far when this was made, and for nothing behind it."""
        if self._number is None:
            if self._written is not None:
                self._written.synchronize()
            self._number = int(self._on_host)
        return self._number

    def gather(self, whole: Tensor, rows: Tensor) -> tuple[Tensor, Ahead]:
        """Hidden states [rows, H] of so many of the rows."""
        # Otherwise a copy is read anyway; or the rows that count are not all that are there.
        unless_all = is_aligned(whole) and rows.shape[0] == whole.shape[0]
        hidden = self._gather_rows(whole, rows, self.on_device, unless_all)
        return hidden, Ahead(self.on_device, whole if unless_all else None)


class Counted(NamedTuple):
    """The rows that take part where ignored ones are skipped."""

    rows: Tensor | None  # int64, ascending; None: every row
    unless_nan: Tensor | None = None  # a 1; NaN where the caller's count is not the labels'; None: nothing to check
    per_row: Sequence[Tensor] | None = None  # what was given for every row, [..., rows] of each; None: all of it
    number: RowNumber | None = None  # of them so many count, and rows that are there lie behind those; None: all

    def wait(self) -> "Counted":
        """The same once the host knows their number."""
        if self.number is None:
            return self
        assert self.rows is not None
        assert self.per_row is not None
        number = self.number.look()
        if number == self.rows.shape[0]:
            return Counted(None)
        return Counted(self.rows[:number], per_row=[tensor[..., :number] for tensor in self.per_row])


class TokenBlock(NamedTuple):
    rows: slice  # of the rows that are computed
    hidden: Pending  # [rows, H]
    is_first: bool
    is_last: bool
    ahead: Ahead | None = None  # where the host does not know yet how many of the rows count


def counted_rows(labels: Tensor, rows: Rows, options: Options, backend: CommonBackend) -> Counted:
    """The rows that are not ignored; with `skip_ignored=True` as the device counts them."""
    if options.skip_ignored is False:
        return Counted(None)
    counts = labels != options.ignore_index
    if options.skip_ignored is True:
        if labels.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "skip_ignored must be False or the number of counted rows while a CUDA graph is captured, got True: "
                "it reads the number from the device"
            )
        return rows_that_count(counts, rows, options, backend)
    count = options.skip_ignored
    if count == labels.shape[0]:
        return Counted(None, nan_unless(counts.all()))
    found = backend.compact_rows(counts, rows, to_host=False)
    unless_nan = nan_unless(found.number == count)
    return Counted(found.rows[:count], unless_nan, [tensor[:count] for tensor in found.per_row])


def rows_to_compute(rows: Rows, order: Tensor | None, counted: Counted) -> Rows:
    """Of all rows those that are computed, in their order."""
    if counted.per_row is not None:
        rows = Rows(*counted.per_row)
    elif order is not None:
        rows = rows.of(order)
    if counted.unless_nan is not None:
        rows = rows._replace(to_nats=rows.to_nats * counted.unless_nan)
    return rows


def rows_that_count(
    counts: Tensor,  # [N] bool
    per_row: Sequence[Tensor],  # [..., N] each
    options: Options,
    backend: CommonBackend,
) -> Counted:
    """Their indices and what they bring, as the device counts them.

    Rows that count on any rank count on all of them, so that ranks do not part.
    """
    if options.tp_group is not None:
        counts = collectives.any_over_group(counts, options.tp_group)
    found = backend.compact_rows(counts, per_row, to_host=True)
    assert found.on_host is not None
    number = RowNumber(found.number, found.on_host, backend.gather_rows)
    return Counted(found.rows, per_row=found.per_row, number=number)


def new_outputs(
    shape: Sequence[int], counted: Counted, options: Options, device: torch.device
) -> LinearCrossEntropyOutput:
    """Those of every row, in any shape, for the counted ones to be written; skipped rows are 0.

    NaN, and -1 as an argmax, where the caller's count is not the labels'.
    """
    new = {}
    for name, dtype in outputs_asked_for(options.entropy, options.telemetry).items():
        if counted.rows is None:
            new[name] = torch.empty(shape, dtype=dtype, device=device)
        else:
            new[name] = _skipped(shape, counted, dtype, device, -1 if name == "argmax" else torch.nan)
    return LinearCrossEntropyOutput(*(new.get(name) for name in LinearCrossEntropyOutput._fields))  # type: ignore[arg-type]


def to_every_row(output: Tensor, counted: Counted, num_tokens: int) -> Tensor:
    """An output of the counted rows to one of all rows, in the same way."""
    if counted.rows is None:
        return output
    whole = _skipped((num_tokens,), counted, output.dtype, output.device, torch.nan)
    return whole.index_copy_(0, counted.rows, output)


def nan_unless(condition: Tensor) -> Tensor:
    """A 1 in fp32; NaN where the condition [] does not hold."""
    return condition.new_ones((), dtype=torch.float32).masked_fill_(~condition, torch.nan)


def _skipped(shape: Sequence[int], counted: Counted, dtype: torch.dtype, device: torch.device, broken: float) -> Tensor:
    skipped = torch.zeros(shape, dtype=dtype, device=device)
    if counted.unless_nan is not None:
        skipped.masked_fill_(counted.unless_nan.isnan(), broken)
    return skipped


class Tokens:
    """The hidden states of a call's computed rows, block by block, and the same way back for their gradients.

    Under sequence parallel the blocks are made of the same rows of every rank's shard where all rows are computed, so
    that each is gathered, and its gradient reduce-scattered, by itself; otherwise hidden is gathered whole.
    """

    def __init__(
        self,
        hidden: Tensor,  # [N, H], under sequence parallel [N / tp, H]
        num_tokens: int,  # N
        those: Counted,  # rows that are computed
        block_tokens: int,  # most rows of a block
        options: Options,
        grad_dtype: torch.dtype | None = None,  # of hidden's gradient; None: hidden's
    ) -> None:
        counted = those.rows
        self.grad_dtype = hidden.dtype if grad_dtype is None else grad_dtype
        self.hidden, self._num_tokens, self._counted, self._options = hidden, num_tokens, counted, options
        self.num_computed = num_tokens if counted is None else counted.shape[0]
        self._number = those.number
        ranks = num_tokens // hidden.shape[0] if options.sequence_parallel and num_tokens else 1
        self._block_tokens = max(1, block_tokens // ranks) * ranks if counted is None else max(1, block_tokens)
        self.num_blocks = ceil_div(self.num_computed, self._block_tokens)
        self._by_shard = ranks > 1 and counted is None and self.num_blocks > 1
        self._ranks = ranks
        self._gathered: Pending | None = None
        self._taken: Pending | None = None
        self._grad: Tensor | None = None
        self._reductions: list[Pending] = []

    def of(self, those: Counted, block_tokens: int) -> "Tokens":
        """Other rows of the same hidden states, which are gathered once."""
        some = Tokens(self.hidden, self._num_tokens, those, block_tokens, self._options)
        some._gathered = self._gathered = self._start_gather()
        if some.num_computed == 0:
            some._gathered.wait()  # no block will
        return some

    def take(self, block: TokenBlock) -> None:
        """Hidden states of all these rows, which were gathered ahead, are not gathered again."""
        if self._counted is not None and self.num_blocks == 1:
            self._taken, self._gathered = block.hidden, None

    def order(self) -> Tensor | None:
        """The rows in the order in which blocks hold them; None: as they are."""
        if not self._by_shard:
            return self._counted
        rows = torch.arange(self._num_tokens, dtype=torch.int64, device=self.hidden.device).view(self._ranks, -1)
        return torch.cat([rows[:, part].reshape(-1) for part in self._shard_parts()])

    def blocks(self) -> Iterator[TokenBlock]:
        """Each block's hidden; the next one's gather runs while a block is worked on."""
        if self._by_shard:
            yield from self._blocks_by_shard()
            return
        if self._taken is not None:
            taken, self._taken = self._taken, None
            yield TokenBlock(slice(0, self.num_computed), taken, is_first=True, is_last=True)
            return
        whole, self._gathered = self._start_gather(), None  # its memory goes with the last block
        for rows in cut(self.num_computed, self._block_tokens):
            hidden, ahead = self._rows_of(whole, rows)
            yield TokenBlock(rows, hidden, rows.start == 0, rows.stop == self.num_computed, ahead)
        whole.wait()  # also where nothing read it: its memory must not go to others before it is filled

    def grad_rows(self, block: TokenBlock) -> Tensor:
        """Where the block's gradient [rows, H] goes, in `grad_dtype`, before `reduce`."""
        num_rows, hidden_size = block.rows.stop - block.rows.start, self.hidden.shape[1]
        if self._by_shard:
            self._grad = self.hidden.new_empty(num_rows, hidden_size, dtype=self.grad_dtype)
            return self._grad
        if self._grad is None:
            skips = self._counted is not None  # then a row comes behind: the gradient of every skipped one
            self._grad = self.hidden.new_empty(self.num_computed + skips, hidden_size, dtype=self.grad_dtype)
        return self._grad[block.rows]

    @property
    def reduces(self) -> bool:
        """Whether gradients of hidden are summed over the group."""
        return self._options.tp_group is not None and self._options.reduce_grad_hidden

    def reduce(self, block: TokenBlock) -> None:
        """Start the sum over the group of what was written to `grad_rows`, where it is summed."""
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
        """The gradient, of hidden's shape, once every block was reduced."""
        if self.num_computed == 0:
            return torch.zeros_like(self.hidden, dtype=self.grad_dtype)
        summed = [reduction.wait() for reduction in self._reductions]
        if self._options.sequence_parallel:
            return summed[0] if len(summed) == 1 else torch.cat(summed)
        assert self._grad is not None
        return self._spread(self._grad)

    def _spread(self, grad: Tensor) -> Tensor:
        """The gradients of the computed rows -> [N, H], zeros where a row was skipped."""
        if self._counted is None:
            return grad
        grad[self.num_computed :].zero_()
        places = self._counted.new_full((self._num_tokens,), self.num_computed)
        places.index_copy_(0, self._counted, torch.arange(self.num_computed, dtype=torch.int64, device=places.device))
        return grad.index_select(0, places)

    def _start_gather(self) -> Pending:
        if self._gathered is not None:
            return self._gathered
        if self._ranks == 1:
            return Pending(self.hidden)
        assert self._options.tp_group is not None
        return collectives.start_gather_rows(self.hidden, self._options.tp_group)

    def _rows_of(self, whole: Pending, rows: slice) -> tuple[Pending, Ahead | None]:
        if self._number is not None and self._counted is not None:
            assert self.num_blocks == 1
            hidden, ahead = self._number.gather(whole.wait(), self._counted)
            return Pending(hidden), ahead
        if self._counted is not None:
            return Pending(whole.wait().index_select(0, self._counted[rows])), None
        return whole if self.num_blocks == 1 else Pending(whole.wait()[rows]), None

    def _shard_parts(self) -> Iterator[slice]:
        return cut(self.hidden.shape[0], self._block_tokens // self._ranks)

    def _blocks_by_shard(self) -> Iterator[TokenBlock]:
        group = self._options.tp_group
        assert group is not None
        parts = list(self._shard_parts())
        gathering = collectives.start_gather_rows(self.hidden[parts[0]], group)
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            gathered = gathering
            if following is not None:
                gathering = collectives.start_gather_rows(self.hidden[following], group)
            rows = slice(part.start * self._ranks, part.stop * self._ranks)
            yield TokenBlock(rows, gathered, part.start == 0, following is None)
            gathered.wait()
