"""A loss whose gradients of hidden and weight are made in forward, while its logits are there; backward scales them."""

from typing import Any

import torch
from torch import Tensor

from megatron_lce.core.call import Call
from megatron_lce.core.head_gradients import HeadGradients
from megatron_lce.core.tokens import Tokens
from megatron_lce.core.validation import check_backward


def unscaled_gradients(tokens: Tokens, call: Call) -> HeadGradients:
    """Return empty sums of gradients that backward will scale by the loss's upstream gradient."""
    return HeadGradients(
        tokens,
        call,
        needs_hidden=call.hidden.requires_grad,
        needs_weight=call.weight.requires_grad,
        weight_sum=scales_a_sum(call) or tokens.num_blocks > 1,
    )


def unscaled_dtype(call: Call) -> torch.dtype:
    """Return the dtype of the unscaled hidden gradient: fp32 for fp16, whose range it may exceed until it is scaled."""
    return torch.float32 if call.hidden.dtype == torch.float16 else call.hidden.dtype


def scales_a_sum(call: Call) -> bool:
    """Return whether even a single block's weight gradient is held in fp32 until it is scaled."""
    return call.options.weight_grad_sink is not None or call.weight.dtype == torch.float16


def with_gradients(loss: Tensor, gradients: HeadGradients | None, call: Call, name: str) -> Tensor:
    """Return the loss of an operation of this name with these gradients, or without any."""
    return loss if gradients is None else _KnownLoss.apply(call.hidden, call.weight, loss, gradients, call, name)


class _KnownLoss(torch.autograd.Function):
    """A scalar loss whose gradients forward has made; backward scales them by its upstream gradient.

    hidden  replicated, or sharded along the sequence  -> its gradient is summed over the group
    weight  this rank's shard                          -> its gradient is complete on this rank
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, loss: Tensor, gradients: HeadGradients, call: Call, name: str
    ) -> Tensor:
        ctx.save_for_backward(weight, *gradients.results())
        ctx.sink, ctx.name, ctx.scale, ctx.scaled = call.options.weight_grad_sink, name, call.backend.scale, False
        ctx.hidden_dtype = hidden.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(ctx.name, grad_loss)
        if ctx.scaled:
            raise RuntimeError(f"a second backward through {ctx.name} is not possible: the first scaled its gradients")
        factor, ctx.scaled = grad_loss.float(), True
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
        return grad_hidden, grad_weight, None, None, None, None
