"""Gradients of hidden and weight: two matrix products per slab of logit gradients."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.call import Call
from megatron_lce.core.call_plan import Plan
from megatron_lce.core.plan import cut, cut_columns, slab_row_stride
from megatron_lce.core.products import with_zeros_behind
from megatron_lce.core.tokens import TokenBlock, Tokens


class Slab(NamedTuple):
    """Gradients of some logits of a block."""

    columns: slice  # of the shard
    tokens: slice  # of the block
    grad: Tensor  # [tokens, columns] gradient of the products, in weight's dtype
    factor: Tensor | None = None  # [tokens] fp32: the gradient is factor * grad; in all slabs of a token or in none


class HeadGradients:
    """Sums of the hidden and weight gradients over slabs.

    With a group, the hidden gradient of a block is reduced as soon as its last slab is added, while the last product
    for the weight runs. Without a group, it is cast to its dtype after the memory of the slabs is freed.
    """

    def __init__(self, tokens: Tokens, call: Call, needs: Sequence[bool], *, weight_sum: bool = False) -> None:
        """`needs`: of hidden and weight. `weight_sum`: return the weight's gradient as its fp32 sum, [columns, H]."""
        self._tokens, self._call, (self._needs_hidden, needs_weight) = tokens, call, needs
        self._weight = _WeightGrad(call, tokens.num_blocks, weight_sum) if needs_weight else None

    def add(self, block: TokenBlock, slabs: Iterator[Slab]) -> None:
        """Add the slabs of a block, which together hold the gradient of all its products."""
        tokens, num_columns = self._tokens, self._call.shard.columns
        total: Tensor | None = None  # of hidden
        for slab in slabs:
            if self._needs_hidden:
                total = self._new_sum(block, slab) if total is None else total
                self._add_hidden(slab, total[slab.tokens])
                is_last = slab.tokens.stop == block.hidden.tensor.shape[0] and slab.columns.stop == num_columns
                if is_last and tokens.reduces:
                    total = self._of_grad_dtype(block, total)  # frees an fp32 sum before `reduce` allocates
                    tokens.reduce(block, total)
                    total = None
            if self._weight is not None:
                self._weight.add(slab, block.hidden.wait(), first_block=block.rows.start == 0)
            del slab  # its memory is freed before the next buffer, or a sink's placeholder, is allocated
        if self._needs_hidden and (not tokens.reduces or num_columns == 0):
            tokens.reduce(block, self._of_grad_dtype(block, total))

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of hidden and weight, after all blocks."""
        grad_hidden = self._tokens.grad_hidden() if self._needs_hidden else None
        return grad_hidden, None if self._weight is None else self._weight.finish()

    def _new_sum(self, block: TokenBlock, first: Slab) -> Tensor:
        """Return the gradient itself for one product or an fp32 gradient, else an fp32 sum over slabs."""
        weight, grad_dtype = self._call.weight, self._tokens.grad_dtype
        one_product = first.columns == slice(0, self._call.shard.columns)
        if grad_dtype == torch.float32 or (one_product and grad_dtype == weight.dtype):
            return self._tokens.grad_rows(block)
        return weight.new_empty(block.rows.stop - block.rows.start, weight.shape[1], dtype=torch.float32)

    def _add_hidden(self, slab: Slab, rows: Tensor) -> None:
        call = self._call
        call.product(slab.grad, call.weight[slab.columns], rows, accumulate=slab.columns.start > 0)
        if slab.factor is not None and slab.columns.stop == call.shard.columns:
            call.backend.scale(rows, slab.factor, rows, accumulate=False)

    def _of_grad_dtype(self, block: TokenBlock, total: Tensor | None) -> Tensor:
        """Return the gradient of a block, 0 without slabs."""
        if total is not None and total.dtype == self._tokens.grad_dtype:
            return total
        grad = self._tokens.grad_rows(block)
        return grad.zero_() if total is None else grad.copy_(total)


def computed_slabs(
    like: Tensor,
    num_tokens: int,
    all_columns: slice,
    plan: Plan,
    compute: Callable[[slice, slice, Tensor], None],
) -> Iterator[Slab]:
    """Yield slabs of `all_columns` that `compute(tokens, columns, grad)` fills, in one buffer of like's dtype."""
    if all_columns.start == all_columns.stop:
        return
    buffer = like.new_empty(plan.slab_tokens * slab_row_stride(plan.slab_columns))
    for columns in cut_columns(all_columns.stop, plan.slab_columns, start=all_columns.start):
        width = columns.stop - columns.start
        stride = slab_row_stride(width)
        for tokens in cut(num_tokens, plan.slab_tokens):
            length = tokens.stop - tokens.start
            grad = with_zeros_behind(buffer[: length * stride].view(length, stride), width)
            compute(tokens, columns, grad)
            yield Slab(columns, tokens, grad)


def kept_slabs(grad: Tensor, factor: Tensor | None = None) -> Iterator[Slab]:
    """Yield slabs of a finished gradient of the first C columns, factor * grad [N, C]."""
    num_tokens, num_columns = grad.shape
    for columns in cut_columns(num_columns, max(num_columns, 1)):
        yield Slab(columns, slice(0, num_tokens), grad[:, columns], factor)


class _WeightGrad:
    """The weight gradient of this shard: a tensor of weight's dtype, an fp32 sum, or the fp32 buffer of a sink."""

    def __init__(self, call: Call, num_blocks: int, as_sum: bool) -> None:
        weight, self._product, self._scale = call.weight, call.product, call.backend.scale
        self._weight, self._num_columns, self._as_sum = weight, call.shard.columns, as_sum
        self._sink = None if as_sum else call.options.weight_grad_sink
        # fp32 gradients need no separate sum over blocks.
        self._is_sum = as_sum or (self._sink is None and weight.dtype != torch.float32 and num_blocks > 1)
        if self._is_sum:
            self._out = weight.new_empty(self._num_columns, weight.shape[1], dtype=torch.float32)
        else:
            self._out = torch.empty_like(weight) if self._sink is None else self._sink.buffer()
        self._partial: Tensor | None = None  # fp32 sum of one slab's columns over the block's tokens
        self._is_empty = num_blocks == 0

    def add(self, slab: Slab, hidden: Tensor, *, first_block: bool) -> None:
        """Add a slab; `hidden` belongs to the whole block."""
        is_first, is_last = slab.tokens.start == 0, slab.tokens.stop == hidden.shape[0]
        hidden = hidden[slab.tokens]
        if slab.factor is not None:  # the sum over tokens includes the factor
            rows, hidden = hidden, torch.empty_like(hidden)
            self._scale(rows, slab.factor, hidden, accumulate=False)
        out = self._out[slab.columns]
        if out.dtype == torch.float32 or (is_first and is_last):
            accumulate = self._sink is not None or not (first_block and is_first)
            self._product(slab.grad.T, hidden, out, accumulate=accumulate)
            return
        if is_first:
            self._partial = hidden.new_empty(out.shape, dtype=torch.float32)
        assert self._partial is not None
        self._product(slab.grad.T, hidden, self._partial, accumulate=not is_first)
        if is_last:
            out.copy_(self._partial)
            self._partial = None

    def finish(self) -> Tensor | None:
        if self._sink is not None:
            return self._sink.finish()
        grad = self._out.zero_() if self._is_empty else self._out
        if self._as_sum:
            return grad
        if self._is_sum:
            grad = torch.empty_like(self._weight)
            grad[: self._num_columns].copy_(self._out)
        grad[self._num_columns :].zero_()  # padding
        return grad
