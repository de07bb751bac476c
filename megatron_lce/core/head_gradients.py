"""Gradients of hidden and weight: two matrix products per slab of logit gradients, in one order for every operation."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_lce.core.call import Call
from megatron_lce.core.call_plan import Plan
from megatron_lce.core.matmul import with_zeros_behind
from megatron_lce.core.plan import aligned_slices, slab_row_stride, slices
from megatron_lce.core.tokens import TokenBlock, Tokens


class GradLogits(Protocol):
    """The gradients of the logits of a block."""

    def take_cached(self) -> Tensor | None:
        """Return finished gradients of all products, [N, C] of weight's dtype, once; None: `write` makes them."""

    def write(self, grad: Tensor, token_slice: slice, col_slice: slice) -> None:
        """Write the gradients of these products to a slab [tokens, columns] of weight's dtype."""


class HeadGradients:
    """Sums of the hidden and weight gradients over slabs and blocks."""

    def __init__(
        self, tokens: Tokens, call: Call, plan: Plan, needs: Sequence[bool], *, keep_fp32_sum: bool = False
    ) -> None:
        """`needs`: of hidden and weight. `keep_fp32_sum`: return the weight gradient as its fp32 sum, [columns, H]."""
        self._tokens, self._call, self._plan, (self._needs_hidden, needs_weight) = tokens, call, plan, needs
        self._weight = _WeightGrad(call, tokens.num_blocks, keep_fp32_sum) if needs_weight else None
        self._open_block: TokenBlock | None = None  # whose hidden gradient is not yet cast and reduced
        self._hidden_acc: Tensor | None = None  # [n, H], the gradient of this block or its fp32 sum
        self._buffer: Tensor | None = None  # of every slab, one after the other

    def add_block(self, block: TokenBlock, grad_logits: GradLogits) -> None:
        """Add the gradients of a block's logits: the cached ones, which are freed, or slabs, columns outside."""
        plan, num_tokens, num_columns = self._plan, block.num_tokens, self._call.shard.num_columns
        self._open_block = block if self._needs_hidden else None
        slab_tokens, slab_columns = plan.slab_tokens, plan.slab_columns
        cached = grad_logits.take_cached()
        if cached is not None:
            slab_tokens, slab_columns = num_tokens, num_columns
        for col_slice in aligned_slices(num_columns, max(slab_columns, 1)):
            for token_slice in slices(num_tokens, slab_tokens):
                if cached is not None:
                    grad = cached[:, col_slice]
                else:
                    grad = self._slab(token_slice, col_slice)
                    grad_logits.write(grad, token_slice, col_slice)
                if self._needs_hidden:
                    self._add_hidden(block, grad, token_slice, col_slice)
                    is_last = token_slice.stop == num_tokens and col_slice.stop == num_columns
                    if is_last and self._tokens.reduces:  # it runs under the last product for the weight
                        self._close_block()
                if self._weight is not None:
                    self._weight.add(block, grad, token_slice, col_slice)
        if self._tokens.reduces or self._tokens.num_blocks > 1:
            self._close_block()  # if not yet done: without columns there is no last slab

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of hidden and weight, after all blocks."""
        self._buffer = None  # its memory is free for casts
        self._close_block()
        grad_hidden = self._tokens.grad_hidden() if self._needs_hidden else None
        return grad_hidden, None if self._weight is None else self._weight.finish()

    def _add_hidden(self, block: TokenBlock, grad: Tensor, token_slice: slice, col_slice: slice) -> None:
        call, num_columns = self._call, self._call.shard.num_columns
        if self._hidden_acc is None:
            grad_dtype = self._tokens.grad_dtype
            if grad_dtype == torch.float32 or (col_slice == slice(0, num_columns) and grad_dtype == grad.dtype):
                self._hidden_acc = self._tokens.grad_buffer(block)
            else:
                shape = block.num_tokens, call.head.weight.shape[1]
                self._hidden_acc = call.head.weight.new_empty(shape, dtype=torch.float32)
        call.matmul(grad, call.head.weight[col_slice], self._hidden_acc[token_slice], accumulate=col_slice.start > 0)

    def _close_block(self) -> None:
        """Cast the hidden gradient of the open block, 0 without slabs, and start reducing it."""
        block, grad = self._open_block, self._hidden_acc
        self._open_block = self._hidden_acc = None
        if block is None:
            return
        if grad is None:
            grad = self._tokens.grad_buffer(block).zero_()
        elif grad.dtype != self._tokens.grad_dtype:
            grad = self._tokens.grad_buffer(block).copy_(grad)  # the sum is freed before `reduce` allocates
        self._tokens.reduce(block, grad)

    def _slab(self, token_slice: slice, col_slice: slice) -> Tensor:
        """Return the memory of a slab, in the one buffer of all."""
        plan, num_tokens = self._plan, token_slice.stop - token_slice.start
        num_columns = col_slice.stop - col_slice.start
        if self._buffer is None:
            self._buffer = self._call.head.weight.new_empty(plan.slab_tokens * slab_row_stride(plan.slab_columns))
        stride = slab_row_stride(num_columns)
        return with_zeros_behind(self._buffer[: num_tokens * stride].view(num_tokens, stride), num_columns)


class _WeightGrad:
    """The weight gradient of this shard: a tensor of weight's dtype, an fp32 sum, or the fp32 buffer of a sink."""

    def __init__(self, call: Call, num_blocks: int, keep_fp32_sum: bool) -> None:
        weight, self._matmul = call.head.weight, call.matmul
        self._weight, self._num_columns, self._keep_fp32_sum = weight, call.shard.num_columns, keep_fp32_sum
        self._sink = None if keep_fp32_sum else call.options.weight_grad_sink
        # fp32 gradients need no separate sum over blocks.
        self._is_fp32_sum = keep_fp32_sum or (self._sink is None and weight.dtype != torch.float32 and num_blocks > 1)
        if self._is_fp32_sum:
            self._out = weight.new_empty(self._num_columns, weight.shape[1], dtype=torch.float32)
        else:
            self._out = torch.empty_like(weight) if self._sink is None else self._sink.buffer()
        self._columns_acc: Tensor | None = None  # fp32 sum of one slab's columns over the block's tokens
        self._is_empty = num_blocks == 0

    def add(self, block: TokenBlock, grad: Tensor, token_slice: slice, col_slice: slice) -> None:
        """Add a slab of the block."""
        is_first, is_last = token_slice.start == 0, token_slice.stop == block.num_tokens
        hidden, out = block.hidden.wait()[token_slice], self._out[col_slice]
        if out.dtype == torch.float32 or (is_first and is_last):
            accumulate = self._sink is not None or not (block.row_slice.start == 0 and is_first)
            self._matmul(grad.T, hidden, out, accumulate=accumulate)
            return
        if is_first:
            self._columns_acc = hidden.new_empty(out.shape, dtype=torch.float32)
        assert self._columns_acc is not None
        self._matmul(grad.T, hidden, self._columns_acc, accumulate=not is_first)
        if is_last:
            out.copy_(self._columns_acc)
            self._columns_acc = None

    def finish(self) -> Tensor | None:
        if self._sink is not None:
            return self._sink.finish()
        grad = self._out.zero_() if self._is_empty else self._out
        if self._keep_fp32_sum:
            return grad
        if self._is_fp32_sum:
            grad = torch.empty_like(self._weight)
            grad[: self._num_columns].copy_(self._out)
        grad[self._num_columns :].zero_()  # padding
        return grad
