"""Losses whose gradients are computed and reduced in forward. Backward scales them, without collectives."""

from typing import Any

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call, check_backward
from megatron_lce.core.call_plan import Plan
from megatron_lce.core.head_gradients import HeadGradients
from megatron_lce.core.tokens import Tokens


def unscaled_gradients(tokens: Tokens, call: Call, plan: Plan) -> HeadGradients:
    """Return empty gradients, which backward will scale by the upstream gradient of the loss."""
    needs = call.hidden.requires_grad, call.weight.requires_grad
    return HeadGradients(tokens, call, plan, needs, keep_fp32_sum=keeps_fp32_weight_sum(call) or tokens.num_blocks > 1)


def unscaled_dtype(call: Call) -> torch.dtype:
    """Return the dtype of the unscaled hidden gradient: fp32 for fp16, whose range it may exceed."""
    return torch.float32 if call.hidden.dtype == torch.float16 else call.hidden.dtype


def keeps_fp32_weight_sum(call: Call) -> bool:
    """Return whether even the weight gradient of a single block is kept in fp32 until it is scaled."""
    return call.options.weight_grad_sink is not None or call.weight.dtype == torch.float16


def attach_gradients(loss: Tensor, head_grads: HeadGradients | None, call: Call, name: str) -> Tensor:
    """Attach gradients, if any, to the loss of the operation of this name."""
    return loss if head_grads is None else _KnownLoss.apply(call.hidden, call.weight, loss, head_grads, call, name)


class _KnownLoss(torch.autograd.Function):
    """A scalar loss with gradients from forward, which backward scales by the upstream gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, loss: Tensor, head_grads: HeadGradients, call: Call, name: str
    ) -> Tensor:
        ctx.save_for_backward(weight, *head_grads.results())  # `results` waits for the reductions
        ctx.sink, ctx.name, ctx.scaled = call.options.weight_grad_sink, name, False
        ctx.scale_rows, ctx.hidden_dtype = call.backend.scale_rows, hidden.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(ctx.name, grad_loss)
        if ctx.scaled:
            raise RuntimeError(f"a second backward through {ctx.name} is not possible: the first scaled its gradients")
        factor, ctx.scaled = grad_loss.float(), True
        weight, grad_hidden, weight_acc = ctx.saved_tensors
        if (unscaled := grad_hidden) is not None:
            if unscaled.dtype != ctx.hidden_dtype:
                grad_hidden = torch.empty_like(unscaled, dtype=ctx.hidden_dtype)
            ctx.scale_rows(unscaled, factor, grad_hidden, accumulate=False)
        grad_weight = None
        if weight_acc is not None and ctx.sink is not None:
            ctx.scale_rows(weight_acc, factor, ctx.sink.buffer()[: weight_acc.shape[0]], accumulate=True)
            grad_weight = ctx.sink.finish()
        elif weight_acc is not None:
            num_columns, in_place = weight_acc.shape[0], weight_acc.dtype == weight.dtype
            grad_weight = weight_acc if in_place and num_columns == weight.shape[0] else torch.empty_like(weight)
            ctx.scale_rows(weight_acc, factor, grad_weight[:num_columns], accumulate=False)
            grad_weight[num_columns:].zero_()
        return grad_hidden, grad_weight, None, None, None, None


class UpstreamCheck:
    """Number of backward passes in which the host still compares the tokens' upstream gradients, and so waits."""

    def __init__(self, checks_left: int = 1) -> None:
        self.checks_left = checks_left


class KnownTokenLosses(torch.autograd.Function):
    """The per-token losses of a sum.

    Backward forwards the one upstream gradient that all tokens share; 0 if all are masked. If upstream
    gradients differ, the result is NaN. In a pass in which the host checks, all ranks raise RuntimeError.
    """

    @staticmethod
    def forward(
        ctx: Any, loss_sum: Tensor, losses: Tensor, valid_mask: Tensor, upstream_check: UpstreamCheck
    ) -> Tensor:
        ctx.valid_mask, ctx.upstream_check = valid_mask, upstream_check
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("linear_token_losses", upstream)
        if upstream.numel() == 0:
            return upstream.new_zeros((), dtype=torch.float32), None, None, None
        upstream, valid_mask = upstream.reshape(-1).float(), ctx.valid_mask
        max_upstream = upstream.masked_fill(~valid_mask, -torch.inf).amax()
        min_upstream = upstream.masked_fill(~valid_mask, torch.inf).amin()
        if ctx.upstream_check.checks_left and not collectives.is_cuda_graph_capturing():
            low, high = float(min_upstream), float(max_upstream)
            if low <= high:  # else every token is masked
                ctx.upstream_check.checks_left -= 1
            if low < high:
                raise RuntimeError(
                    f"known_loss needs one upstream gradient for all counted tokens, got {low:g} to {high:g}: the loss "
                    "weights its tokens (a loss_mask that is not 0 or 1, a weight or a mean for each sequence). Pass a "
                    "0/1 loss_mask, or enable with known_loss=False"
                )
        grad = max_upstream.masked_fill(max_upstream != min_upstream, torch.nan).masked_fill(~valid_mask.any(), 0.0)
        return grad, None, None, None
