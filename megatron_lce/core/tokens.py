"""Blocks of hidden states, gathered over the group where needed, and the reduction of their gradients.

hidden of a rank             a block                               its gradient
Tokens         [N, H]        a range of the computed rows          all-reduced
ShardedTokens  [N / tp, H]   the same range of every shard         reduce-scattered
GatheredTokens [N / tp, H]   a range of the computed rows of all   one reduce-scatter of all rows, after the last block
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.core import collectives
from megatron_lce.core.collectives import Pending
from megatron_lce.core.options import Options
from megatron_lce.core.plan import ceil_div, slices
from megatron_lce.core.row_index import RowIndex


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
