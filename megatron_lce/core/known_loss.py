"""A scalar whose gradients are made in forward, while its logits are there; backward scales them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_lce.core.call import Call
from megatron_lce.core.head_gradients import Slab, head_gradients
from megatron_lce.core.products import own_arithmetic
from megatron_lce.core.rows import Rows
from megatron_lce.core.tokens import Counted, TokenBlock, Tokens, rows_to_compute, to_every_row
from megatron_lce.core.validation import refuse_double_backward


class KnownLossPass:
    """It is one pass over a call's tokens, block by block, that adds up their losses and makes their gradients."""

    name: str  # of the operation, as users call it
    factor: Callable[[Tensor], Tensor] = staticmethod(Tensor.float)
    """From the result's upstream gradient to the number, [] fp32, that gradients are multiplied by; of a sum itself."""

    def __init__(self, call: Call, rows: Rows, counted: Counted, block_tokens: int) -> None:
        self.call, self.counted, self._block_tokens = call, counted, block_tokens
        self.tokens = self.new_tokens(call.hidden)
        self.order = self.tokens.order()
        self.rows = rows_to_compute(rows, self.order, counted)

    def new_tokens(self, hidden: Tensor) -> Tokens:
        """Return the computed rows of a hidden in the blocks of the pass."""
        num_tokens, dtype = self.call.labels.shape[0], unscaled_dtype(self.call)
        return Tokens(hidden, num_tokens, self.counted, self._block_tokens, self.call.options, dtype)

    def slabs(self, block: TokenBlock, bytes_per_column: int) -> Iterator[Slab]:
        """Add a block's losses, then yield the gradients of its products if any were asked for."""
        raise NotImplementedError

    def result(self) -> Tensor:
        """Return what the call returns, after all blocks: the sum of the losses, or each of them."""
        raise NotImplementedError

    def to_every_row(self, output: Tensor) -> Tensor:
        """Spread an output of the computed rows over all rows; skipped rows are 0."""
        return to_every_row(output, self.counted._replace(rows=self.order), self.call.labels.shape[0])

    def unless_nan(self, total: Tensor) -> Tensor:
        """Return a sum over tokens, NaN if the caller's count is not the labels'."""
        return total if self.counted.unless_nan is None else total * self.counted.unless_nan


def known_loss(run: KnownLossPass, with_gradient: bool) -> Tensor:
    """The result of a pass, with a gradient of hidden and weight or without one."""
    if with_gradient:
        return _KnownLoss.apply(run.call.hidden, run.call.weight, run)
    with torch.no_grad(), own_arithmetic(run.call.hidden.device, run.name):
        head_gradients(run.tokens, run.call, run.slabs, needs_hidden=False, needs_weight=False)
    return run.result()


def unscaled_dtype(call: Call) -> torch.dtype:
    """What hidden's gradient is held in until it is scaled: before that, fp16 may have no number for it."""
    return torch.float32 if call.hidden.dtype == torch.float16 else call.hidden.dtype


def scales_a_sum(call: Call) -> bool:
    """Whether the weight's gradient of a single block, too, is held in fp32 until it is scaled."""
    return call.options.weight_grad_sink is not None or call.weight.dtype == torch.float16


class _KnownLoss(torch.autograd.Function):
    """A loss that is known in forward, where both gradients of its sum over tokens are made; backward scales them.

    hidden  replicated, or sharded along the sequence  -> its gradient is summed over the group
    weight  this rank's shard                          -> its gradient is complete on this rank
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, run: KnownLossPass) -> Tensor:
        call = run.call
        with own_arithmetic(hidden.device, f"{run.name} forward"):
            grad_hidden, weight_sum = head_gradients(
                run.tokens,
                call,
                run.slabs,
                needs_hidden=ctx.needs_input_grad[0],
                needs_weight=ctx.needs_input_grad[1],
                weight_sum=scales_a_sum(call) or run.tokens.num_blocks > 1,
            )
        ctx.save_for_backward(weight, grad_hidden, weight_sum)
        ctx.sink, ctx.name, ctx.scale, ctx.scaled = call.options.weight_grad_sink, run.name, call.backend.scale, False
        ctx.factor, ctx.hidden_dtype = run.factor, hidden.dtype
        return run.result()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(ctx.name)
        if ctx.scaled:
            raise RuntimeError(f"a second backward through {ctx.name} is not possible: the first scaled its gradients")
        factor = ctx.factor(grad_loss)
        ctx.scaled = True
        weight, grad_hidden, weight_sum = ctx.saved_tensors
        if grad_hidden is not None:
            unscaled = grad_hidden
            if unscaled.dtype != ctx.hidden_dtype:
                grad_hidden = torch.empty_like(unscaled, dtype=ctx.hidden_dtype)
            ctx.scale(unscaled, factor, grad_hidden, accumulate=False)
        grad_weight = None
        if weight_sum is not None and ctx.sink is not None:
            ctx.scale(weight_sum, factor, ctx.sink.buffer()[: weight_sum.shape[0]], accumulate=True)
            grad_weight = ctx.sink.finish()
        elif weight_sum is not None:
            num_columns, in_place = weight_sum.shape[0], weight_sum.dtype == weight.dtype
            grad_weight = weight_sum if in_place and num_columns == weight.shape[0] else torch.empty_like(weight)
            ctx.scale(weight_sum, factor, grad_weight[:num_columns], accumulate=False)
            grad_weight[num_columns:].zero_()
        return grad_hidden, grad_weight, None
