"""Which rows of a call are computed, and their hidden states in blocks.

Hidden states are gathered over the group where needed, and their gradients reduced.

hidden of a rank             a block                               its gradient
Tokens         [N, H]        a range of the computed rows          all-reduced
ShardedTokens  [N / tp, H]   the same range of every shard         reduce-scattered
GatheredTokens [N / tp, H]   a range of the computed rows of all   one reduce-scatter of all rows, after the last block
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.core import collectives
from megatron_lce.core.collectives import Pending
from megatron_lce.core.lm_head import RowInputs
from megatron_lce.core.options import Options
from megatron_lce.core.plan import ceil_div, slices


@dataclass(frozen=True)
class RowIndex:
    """Indices of the n computed rows among all N: ascending, until `Tokens` puts them in the order of its blocks."""

    num_tokens: int  # N
    index: Tensor | None = None  # [n] int64; None: every row in its place
    count_is_wrong: Tensor | None = None  # [] bool: the caller's number is not the number of unignored labels

    @classmethod
    def from_labels(cls, labels: Tensor, options: Options) -> Self:
        """Return the rows to compute under `skip_ignored`. With True the host waits for their number.

        Raises:
            RuntimeError: `skip_ignored=True` while a CUDA graph is captured.
        """
        num_tokens, skip = labels.shape[0], options.skip_ignored
        if skip is False:
            return cls(num_tokens)
        valid_mask = labels != options.ignore_index
        if skip is not True:
            index = None if skip == num_tokens else valid_mask.nonzero_static(size=skip, fill_value=0)[:, 0]
            return cls(num_tokens, index, valid_mask.sum() != skip)
        if collectives.is_cuda_graph_capturing():
            raise RuntimeError(
                "skip_ignored must be False or the number of counted rows while a CUDA graph is captured, got True: "
                "it reads the number from the device"
            )
        return cls.from_mask(valid_mask, options.tp_group)

    @classmethod
    def from_mask(cls, mask: Tensor, group: ProcessGroup | None) -> Self:
        """Return the rows whose mask [N] is true on any rank, the same ones on all ranks. The host waits."""
        if group is not None:
            mask = collectives.all_reduce_any(mask, group)
        index = mask.nonzero()[:, 0]
        return cls(mask.shape[0], None if index.shape[0] == mask.shape[0] else index)

    @property
    def count(self) -> int:
        """The number n of computed rows."""
        return self.num_tokens if self.index is None else self.index.shape[0]

    def subset(self, index: Tensor) -> Self:
        """Return some of the computed rows."""
        return replace(self, index=index if self.index is None else self.index[index])

    def select(self, per_row: Tensor, row_slice: slice = slice(None)) -> Tensor:
        """Return the computed rows [n, ...], or a range of them, of a tensor [N, ...]."""
        return per_row[row_slice] if self.index is None else per_row.index_select(0, self.index[row_slice])

    def select_rows(self, rows: RowInputs) -> RowInputs:
        """Return the computed rows, NaN if the caller's count is wrong."""
        rows = rows if self.index is None else rows.select(self.index)
        return rows if self.count_is_wrong is None else rows._replace(to_nats=self.nan_if_wrong(rows.to_nats))

    def scatter(self, per_row: Tensor) -> Tensor:
        """Return values [n, ...] of the computed rows as [N, ...], with 0 in skipped rows."""
        if self.index is None:
            return per_row
        return per_row.new_zeros(self.num_tokens, *per_row.shape[1:]).index_copy_(0, self.index, per_row)

    def scatter_hidden(self, grad: Tensor) -> Tensor:
        """Apply `scatter` to gradients of hidden states, whose rows are whole words: torch copies one at a time."""
        return grad if self.index is None else self.scatter(grad.view(torch.int64)).view(grad.dtype)

    def scatter_outputs(self, outputs: Any, shape: tuple[int, ...]) -> Any:
        """Return outputs [n, ...], in named tuples, in the caller's shape; they are NaN if its count is wrong."""
        if outputs is None:
            return None
        if not isinstance(outputs, Tensor):
            return outputs._make(self.scatter_outputs(output, shape) for output in outputs)
        if self.index is not None or self.count_is_wrong is not None:
            outputs = self.nan_if_wrong(self.scatter(outputs))
        return outputs.resize_((*shape, *outputs.shape[1:]))  # a view could not be changed in place

    def nan_if_wrong(self, values: Tensor) -> Tensor:
        """Return the values, or NaN (integers: -1) if the caller's count is wrong. The host does not wait."""
        if self.count_is_wrong is None:
            return values
        return values.masked_fill(self.count_is_wrong, torch.nan if values.is_floating_point() else -1)


class TokenBlock(NamedTuple):
    """A range of the computed rows, with their hidden states."""

    row_slice: slice
    hidden: Pending  # [rows, H]

    @property
    def num_tokens(self) -> int:
        return self.row_slice.stop - self.row_slice.start


def tokens_in_blocks(
    hidden: Tensor,  # [N, H], under sequence parallel [N / tp, H]
    row_index: RowIndex,
    block_tokens: int,  # most rows of a block
    options: Options,
    grad_dtype: torch.dtype | None = None,  # of the hidden gradient; None: hidden's
) -> "Tokens":
    """Return the tokens of a call. Their `row_index` has the rows in the order of the blocks."""
    group, grad_dtype = options.tp_group, grad_dtype or hidden.dtype
    if group is None or not options.sequence_parallel or row_index.count == 0:  # no rows: nothing to gather
        group = group if options.reduce_grad_hidden else None
        return Tokens(hidden, row_index, block_tokens, grad_dtype, group)
    if row_index.index is not None:
        return GatheredTokens(hidden, row_index, block_tokens, grad_dtype, group)
    ranks = collectives.group_size(group)
    shard_tokens = max(1, block_tokens // ranks)
    if shard_tokens < hidden.shape[0]:
        rows = torch.arange(row_index.num_tokens, dtype=torch.int64, device=hidden.device).view(ranks, -1)
        row_index = row_index.subset(torch.cat([part.reshape(-1) for part in rows.split(shard_tokens, dim=1)]))
    return ShardedTokens(hidden, row_index, shard_tokens * ranks, grad_dtype, group)


class Tokens:
    """Blocks of hidden states that every rank has whole. Each gradient is reduced as soon as it is complete."""

    def __init__(
        self,
        hidden: Tensor,
        row_index: RowIndex,
        block_tokens: int,
        grad_dtype: torch.dtype,
        group: ProcessGroup | None,  # over which gradients are summed
    ) -> None:
        self.hidden, self.row_index, self.grad_dtype, self._group = hidden, row_index, grad_dtype, group
        self._block_tokens = max(1, block_tokens)
        self.reduces = group is not None
        self.num_blocks = ceil_div(row_index.count, self._block_tokens)
        self._grad: Tensor | None = None  # [n, H]
        self._sums: list[Pending] = []

    def blocks(self, hidden: Tensor | None = None) -> Iterator[TokenBlock]:
        """Yield the blocks. `hidden`: of every rank, if gathered."""
        hidden = self.hidden if hidden is None else hidden
        for row_slice in slices(self.row_index.count, self._block_tokens):
            block = TokenBlock(row_slice, Pending(self.row_index.select(hidden, row_slice)))
            if row_slice.stop == self.row_index.count:
                del hidden  # if gathered, it is freed while its last block is computed
            yield block

    def grad_buffer(self, block: TokenBlock) -> Tensor:
        """Return the tensor [rows, H], of `grad_dtype`, for the gradient of the block."""
        if self._grad is None:
            self._grad = self.hidden.new_empty(self.row_index.count, self.hidden.shape[1], dtype=self.grad_dtype)
        return self._grad[block.row_slice]

    def reduce(self, block: TokenBlock, grad: Tensor) -> None:
        """Start reducing what was written to `grad_buffer`, unless the caller reduces it."""
        if self._group is not None:
            self._sums.append(collectives.all_reduce_async(grad, self._group))

    def grad_hidden(self) -> Tensor:
        """Return the gradient, of hidden's shape, after all blocks were reduced."""
        if self._grad is None:
            return torch.zeros_like(self.hidden, dtype=self.grad_dtype)
        for pending in self._sums:
            pending.wait()
        return self.row_index.scatter_hidden(self._grad)


class ShardedTokens(Tokens):
    """Blocks of shards whose rows are all computed. Each block is gathered, and its gradient scattered, separately.

    rank 0: a b | c d      first block: a b e f
    rank 1: e f | g h      second block: c d g h
    """

    _group: ProcessGroup

    def blocks(self, hidden: Tensor | None = None) -> Iterator[TokenBlock]:
        """Yield blocks. While one is computed, the next is gathered."""
        ranks = collectives.group_size(self._group)
        shard_slices = slices(self.hidden.shape[0], self._block_tokens // ranks)
        # Each starts when it is requested.
        gathering = (self._start_block(shard_slice, ranks) for shard_slice in shard_slices)
        block = next(gathering, None)
        while block is not None:
            next_block = next(gathering, None)
            yield block
            block.hidden.wait()  # even if unused: its memory must not be reused before the gather ends
            block = next_block

    def _start_block(self, shard_slice: slice, ranks: int) -> TokenBlock:
        row_slice = slice(shard_slice.start * ranks, shard_slice.stop * ranks)
        hidden = collectives.all_gather_async(self.hidden[shard_slice], self._group)
        return TokenBlock(row_slice, hidden)

    def grad_buffer(self, block: TokenBlock) -> Tensor:
        return torch.empty_like(block.hidden.tensor, dtype=self.grad_dtype)

    def reduce(self, block: TokenBlock, grad: Tensor) -> None:
        self._sums.append(collectives.reduce_scatter_async(grad, self._group))

    def grad_hidden(self) -> Tensor:
        shards = [pending.wait() for pending in self._sums]
        return shards[0] if len(shards) == 1 else torch.cat(shards)


class GatheredTokens(Tokens):
    """Blocks of some rows of the shards: gathered before the first block and reduce-scattered after the last."""

    _group: ProcessGroup

    def blocks(self, hidden: Tensor | None = None) -> Iterator[TokenBlock]:
        return super().blocks(collectives.all_gather_async(self.hidden, self._group).wait())

    def reduce(self, block: TokenBlock, grad: Tensor) -> None:
        if block.row_slice.stop == self.row_index.count:
            assert self._grad is not None
            self._sums.append(collectives.reduce_scatter_async(self.row_index.scatter_hidden(self._grad), self._group))

    def grad_hidden(self) -> Tensor:
        return self._sums[0].wait()
