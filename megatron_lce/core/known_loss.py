"""A scalar whose gradients are made in forward, while its logits are there; backward scales them."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_lce.core.call import Call
from megatron_lce.core.head_gradients import Slab, head_gradients
from megatron_lce.core.products import own_arithmetic
from megatron_lce.core.tokens import TokenBlock, Tokens
from megatron_lce.core.validation import refuse_double_backward


class KnownLossPass(Protocol):
    """One pass over a call's tokens, that adds up their losses."""

    name: str  # of the operation, as users call it
    call: Call
    tokens: Tokens

    def slabs(self, block: TokenBlock, bytes_per_column: int) -> Iterator[Slab]:
        """Adds a block's losses, then yields the gradients of its products if any were asked for."""

    def result(self) -> Tensor:
        """What the call returns, once all blocks have been there: the sum of the losses, or each of them."""

    @property
    def factor(self) -> Callable[[Tensor], Tensor]:
        """From the result's upstream gradient to the number, [] fp32, that the gradients are to be multiplied by."""


def known_loss(run: KnownLossPass, with_gradient: bool) -> Tensor:
    """The result of a pass, with a gradient of hidden and weight or without one."""
    if with_gradient:
        return _KnownLoss.apply(run.call.hidden, run.call.weight, run)
    with torch.no_grad(), own_arithmetic(run.call.hidden.device, run.name):
        for block in run.tokens.blocks() if run.tokens.num_computed else ():
            for _ in run.slabs(block, 0):
                raise AssertionError("no gradient was asked for")
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
