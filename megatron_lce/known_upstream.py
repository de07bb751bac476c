"""Each token's negative log-likelihood, whose gradients are made in forward for an upstream that is one number."""

from typing import Any

import torch
from torch import Tensor

from megatron_lce.arguments import Operation, make_call
from megatron_lce.core.autograd import check_workspace
from megatron_lce.core.known_loss import known_loss
from megatron_lce.core.options import LinearCrossEntropyOutput, Options
from megatron_lce.core.products import own_arithmetic
from megatron_lce.core.token_loss_pass import TokenLossesPass
from megatron_lce.core.upstream import Promise


def linear_token_losses(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V_local, H]
    labels: Tensor,  # [...]
    promise: Promise,
    **keywords: Any,
) -> tuple[Tensor, LinearCrossEntropyOutput]:
    """-log p(label) of each token, fp32 of labels' shape, three products; and the outputs without gradient.

    Backward scales both gradients by the upstream of the tokens that are not ignored, which must be one number: at
    first the host looks whether it is, and raises where it is not; later the gradients are NaN then.

    Args:
        hidden, weight, labels, keywords: as `linear_token_loss` takes them.
        promise: how often the host still looks.

    Raises:
        TypeError, ValueError: see `linear_cross_entropy`.
        RuntimeError: in a second backward, or where the upstream is not one number.
    """
    call = make_call(hidden, weight, labels, Options(**keywords), operation=Operation("linear_token_losses"))
    with_gradient = torch.is_grad_enabled() and (call.hidden.requires_grad or call.weight.requires_grad)
    check_workspace(call, with_gradient, call.weight.requires_grad)
    with torch.no_grad(), own_arithmetic(call.hidden.device, "linear_token_losses"):
        run = TokenLossesPass(call, promise, with_gradient)
    losses = known_loss(run, with_gradient)
    return losses.view(labels.shape), LinearCrossEntropyOutput(
        *(None if output is None else output.view(labels.shape) for output in run.outputs())  # type: ignore[arg-type]
    )
