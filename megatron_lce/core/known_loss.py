"""Losses whose gradients are computed and reduced in forward. Backward scales them, without collectives."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call, check_backward
from megatron_lce.core.head_gradients import HeadGradients
from megatron_lce.core.losses import Losses, Metrics, TokenLossFunction
from megatron_lce.core.matmul import without_autocast
from megatron_lce.core.one_head import OneHead
from megatron_lce.core.options import LinearCrossEntropyOutput
from megatron_lce.core.passes import Source, forward


class TokenLossResults(NamedTuple):
    """The sum of the losses, and outputs and metrics of every token without gradient: 0 in skipped rows."""

    loss_sum: Tensor  # [] fp32, with a gradient
    outputs: Any  # `LinearCrossEntropyOutput` or `LinearDivergenceOutput`, [N, ...] each
    metrics: Metrics  # [N, ...] each
    sample: Callable[[], tuple[Tensor, Tensor, Tensor]]  # losses of some tokens among all, and twice among others


def sum_of_losses(name: str, source: Source, loss: TokenLossFunction, per_token: Sequence[Tensor]) -> TokenLossResults:
    """Return the sum of the losses, with gradients if they are wanted, and per-token results."""
    call, needs = source.call, (False, False)
    if torch.is_grad_enabled():
        needs = call.hidden.requires_grad, call.weight.requires_grad
    losses = Losses(loss, per_token, source.differentiable, any(needs), call.hidden.device)
    with without_autocast(call.hidden.device, name):
        outputs, _, _, _, head_grads = forward(source, needs, losses)  # the cache is freed here
        loss_sum, metrics = losses.totals()
    if head_grads is not None:
        loss_sum = _KnownLoss.apply(call.hidden, call.weight, loss_sum, head_grads, call, name)
    return TokenLossResults(loss_sum, outputs, metrics, losses.sample)


def known_losses(
    name: str, call: Call, loss: Callable[[LinearCrossEntropyOutput], Tensor], upstream_check: "UpstreamCheck"
) -> tuple[Tensor, LinearCrossEntropyOutput]:
    """Return the loss of each token, [N], with one upstream gradient for all, and the outputs, without gradient."""
    results = sum_of_losses(name, OneHead(call), loss, ())
    valid_mask, losses = call.labels != call.options.ignore_index, loss(results.outputs)
    return KnownTokenLosses.apply(results.loss_sum, losses, valid_mask, upstream_check), results.outputs


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
