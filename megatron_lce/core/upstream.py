"""Losses of tokens whose upstream gradients are one number, that of their sum."""

from typing import Any

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.validation import check_backward


class Promise:
    """How many more backward passes have the host look whether the promise holds; each costs a wait."""

    def __init__(self, looks: int = 1) -> None:
        self.looks = looks


class LossesOfSum(torch.autograd.Function):
    """Each token's loss, whose one upstream gradient becomes that of their sum: 0 if none counts, NaN if they differ.

    Raises:
        RuntimeError: in a backward in which the host looks, if they differ. Ranks have the same upstream: all raise.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, losses: Tensor, counted: Tensor, promise: Promise) -> Tensor:
        ctx.counted, ctx.promise = counted, promise
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("linear_token_losses", upstream)
        if upstream.numel() == 0:
            return upstream.new_zeros((), dtype=torch.float32), None, None, None
        upstream, counted = upstream.reshape(-1).float(), ctx.counted
        largest = upstream.masked_fill(~counted, -torch.inf).amax()
        smallest = upstream.masked_fill(~counted, torch.inf).amin()
        if ctx.promise.looks and not collectives.is_captured():
            _look(float(smallest), float(largest), ctx.promise)
        one = largest.masked_fill(largest != smallest, torch.nan).masked_fill(~counted.any(), 0.0)
        return one, None, None, None


def _look(low: float, high: float, promise: Promise) -> None:
    if low > high:  # no token counts
        return
    promise.looks -= 1
    if low < high:
        raise RuntimeError(
            f"known_loss needs one upstream gradient for all counted tokens, got {low:g} to {high:g}: the loss "
            "weights its tokens (a loss_mask that is not 0 or 1, a weight or a mean for each sequence). Pass a 0/1 "
            "loss_mask, or enable with known_loss=False"
        )
