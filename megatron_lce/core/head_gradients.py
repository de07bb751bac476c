"""Gradients of logits to gradients of hidden and weight: products, with the sum over the group under the last one."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.call import Call
from megatron_lce.core.plan import Blocks, cut, cut_columns, slab_row_stride
from megatron_lce.core.products import product, with_zeros_behind
from megatron_lce.core.protocols import Backend
from megatron_lce.core.tokens import TokenBlock, Tokens


class Slab(NamedTuple):
    columns: slice
    tokens: slice  # of the block
    grad: Tensor  # [tokens, columns] gradient of the products, in hidden's dtype
    first_tokens: bool  # no tokens of the block went before in these columns
    last_tokens: bool  # none follows
    is_last: bool  # of the block
    factor: Tensor | None = None  # [tokens] fp32: the gradient is this times `grad`, in all slabs of a token or in none


def head_gradients(
    tokens: Tokens,
    call: Call,
    slabs: Callable[[TokenBlock, int], Iterator[Slab]],
    *,
    needs_hidden: bool,
    needs_weight: bool,
    weight_sum: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients, block by block and slab by slab. A block's sum over the group runs under its last product.

    Without a group hidden's gradient gets its dtype when the slabs' memory is gone.

    `slabs(block, bytes_per_column)` yields the gradient of every product of a block, where a slab's column takes that
    many bytes of the workspace if its tokens come in several parts.
    `weight_sum`: give the weight's gradient as the fp32 sum that it is made of, [num_columns, H].
    """
    weight_grad = _WeightGrad(call, tokens.num_blocks, weight_sum) if needs_weight else None
    # `weight_sum` is beside the workspace, and every part of the tokens is added to it.
    per_column = call.size.weight_sum_column if needs_weight and not weight_sum else 0
    for block in tokens.blocks() if tokens.num_computed else ():
        hidden_grad = _HiddenGrad(tokens, block, call) if needs_hidden else None
        for slab in slabs(block, per_column):
            if hidden_grad is not None:
                hidden_grad.add(slab)
                if slab.is_last and tokens.reduces:
                    hidden_grad.finish()
            if weight_grad is not None:
                weight_grad.add(slab, _scaled_for_products(slab, block.hidden.wait(), call.backend), block.is_first)
            del slab  # its memory goes before the next buffer, or a sink's placeholder, comes
        if call.shard.columns == 0 and needs_hidden:
            tokens.grad_rows(block).zero_()
            tokens.reduce(block)
        elif hidden_grad is not None and not tokens.reduces:
            hidden_grad.finish()
    return (
        tokens.grad_hidden() if needs_hidden else None,
        None if weight_grad is None else weight_grad.finish(),
    )


def computed_slabs(
    like: Tensor,
    num_tokens: int,
    all_columns: slice,
    num_columns: int,
    blocks: Blocks,
    compute: Callable[[slice, slice, Tensor], None],
) -> Iterator[Slab]:
    """Slabs of some of `num_columns` that `compute(tokens, columns, grad)` fills, in one buffer of like's dtype."""
    buffer = like.new_empty(blocks.tokens * slab_row_stride(blocks.columns))
    for columns in cut_columns(all_columns.stop, blocks.columns, start=all_columns.start):
        width = columns.stop - columns.start
        stride = slab_row_stride(width)
        for tokens in cut(num_tokens, blocks.tokens):
            length = tokens.stop - tokens.start
            grad = with_zeros_behind(buffer[: length * stride].view(length, stride), width)
            compute(tokens, columns, grad)
            yield _slab(columns, tokens, grad, num_tokens, num_columns)


def kept_slabs(grad: Tensor, num_columns: int, factor: Tensor | None = None) -> Iterator[Slab]:
    """Slabs of a gradient [N, C] that is there already, up to its factor: of the first C of `num_columns`."""
    num_tokens, kept_columns = grad.shape
    for columns in cut_columns(kept_columns, max(kept_columns, 1)):
        slab = _slab(columns, slice(0, num_tokens), grad[:, columns], num_tokens, num_columns)
        yield slab._replace(factor=factor)


def _slab(columns: slice, tokens: slice, grad: Tensor, num_tokens: int, num_columns: int) -> Slab:
    last_tokens = tokens.stop == num_tokens
    return Slab(columns, tokens, grad, tokens.start == 0, last_tokens, last_tokens and columns.stop == num_columns)


class _HiddenGrad:
    """A block's gradient of hidden: one product's own sum where a slab holds all columns, else an fp32 accumulator."""

    def __init__(self, tokens: Tokens, block: TokenBlock, call: Call) -> None:
        self._tokens, self._block, self._call = tokens, block, call
        self._sum: Tensor | None = None

    def add(self, slab: Slab) -> None:
        if self._sum is None:
            self._sum = self._new_sum(slab.columns == slice(0, self._call.shard.columns))
        product(slab.grad, self._call.weight[slab.columns], self._sum[slab.tokens], accumulate=slab.columns.start > 0)
        if slab.factor is not None and slab.columns.stop == self._call.shard.columns:
            # No name for it: the sum goes before the reduction's memory comes.
            self._call.backend.scale(self._sum[slab.tokens], slab.factor, self._sum[slab.tokens], accumulate=False)

    def finish(self) -> None:
        """Behind the last slab: the gradient in hidden's dtype, and its sum over the group is started."""
        assert self._sum is not None
        grad = self._tokens.grad_rows(self._block)
        if grad.data_ptr() != self._sum.data_ptr():
            grad.copy_(self._sum)
        self._sum = None
        self._tokens.reduce(self._block)

    def _new_sum(self, one_product: bool) -> Tensor:
        if one_product or self._tokens.grad_dtype == torch.float32:
            return self._tokens.grad_rows(self._block)
        num_rows = self._block.rows.stop - self._block.rows.start
        weight = self._call.weight
        return weight.new_empty(num_rows, weight.shape[1], dtype=torch.float32)


class _WeightGrad:
    """This shard's weight gradient: a tensor of weight's dtype, or added into a sink's fp32 buffer."""

    def __init__(self, call: Call, num_blocks: int, as_sum: bool) -> None:
        weight = call.weight
        self._weight, self._num_columns, self._as_sum = weight, call.shard.columns, as_sum
        self._sink = None if as_sum else call.options.weight_grad_sink
        self._one_block = num_blocks <= 1
        # An fp32 sum over blocks; the gradient itself, where that is such a sum.
        sum_over_blocks = as_sum or (self._sink is None and weight.dtype != torch.float32 and not self._one_block)
        self._sum: Tensor | None = None
        self._grad: Tensor | None = None
        if sum_over_blocks:
            self._sum = weight.new_empty(self._num_columns, weight.shape[1], dtype=torch.float32)
        else:
            self._grad = torch.empty_like(weight) if self._sink is None else self._sink.buffer()
        self._partial: Tensor | None = None  # of one slab, where its gradient cannot be written in place
        self._nothing_added = True

    def add(self, slab: Slab, hidden: Tensor, first_block: bool) -> None:
        self._nothing_added = False
        first = first_block and slab.first_tokens
        if self._sum is not None:
            product(slab.grad.T, hidden, self._sum[slab.columns], accumulate=not first)
            return
        assert self._grad is not None
        grad = self._grad[slab.columns]
        if (self._one_block and slab.first_tokens and slab.last_tokens) or grad.dtype == torch.float32:
            product(slab.grad.T, hidden, grad, accumulate=self._sink is not None or not first)
            return
        if slab.first_tokens:
            self._partial = None  # the last slab's memory goes first
            self._partial = hidden.new_empty(grad.shape, dtype=torch.float32)
        assert self._partial is not None
        product(slab.grad.T, hidden, self._partial, accumulate=not slab.first_tokens)
        if slab.last_tokens:
            grad.copy_(self._partial)
            self._partial = None

    def finish(self) -> Tensor | None:
        if self._as_sum:
            assert self._sum is not None
            return self._sum.zero_() if self._nothing_added else self._sum
        if self._sink is not None:
            return self._sink.finish()
        if self._nothing_added:
            return torch.zeros_like(self._weight)
        grad = self._grad
        if self._sum is not None:
            grad = torch.empty_like(self._weight)
            grad[: self._num_columns].copy_(self._sum)
        assert grad is not None
        grad[self._num_columns :].zero_()  # padding
        return grad


def _scaled_for_products(slab: Slab, hidden: Tensor, backend: Backend) -> Tensor:
    """The slab's rows of hidden, times its factor: the weight's gradient sums over tokens."""
    rows = hidden[slab.tokens]
    if slab.factor is None:
        return rows
    scaled = torch.empty_like(rows)
    backend.scale(rows, slab.factor, scaled, accumulate=False)
    return scaled
