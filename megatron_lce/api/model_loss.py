"""`model_loss`: the loss of an enabled Megatron model, per token."""

from typing import Unpack

from torch import Tensor

from megatron_lce.api.keywords import TokenLossOptions
from megatron_lce.checks.together import checked_together
from megatron_lce.checks.validation import check_per_token
from megatron_lce.core.known_loss import UpstreamCheck, token_cross_entropies
from megatron_lce.core.losses import TokenCrossEntropy
from megatron_lce.core.options import LinearCrossEntropyOutput, Options

CROSS_ENTROPY = TokenCrossEntropy()


def model_loss(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V_local, H]
    labels: Tensor,  # [...]
    formula: TokenCrossEntropy = CROSS_ENTROPY,
    upstream: UpstreamCheck | None = None,
    counted: Tensor | None = None,  # [...] bool
    *,
    logits_cache_bytes: int | None = None,
    **options: Unpack[TokenLossOptions],
) -> tuple[Tensor, LinearCrossEntropyOutput]:
    """The loss of each token, fp32 of labels' shape, and the outputs.

    Without `upstream`, or if all logits are cached, any upstream gradient is right, and both have a gradient. If
    `upstream` says that the counted tokens share one (None: those that are not ignored) and the others have none, both
    gradients are computed in forward, in three products, and only the losses have one.

    Raises:
        RuntimeError: in backward if the upstream gradient was said to be one number and is not, and in a second one
            after gradients were computed in forward.
    """
    given = Options(logits_cache_bytes=logits_cache_bytes, **options)
    with checked_together("model_loss", hidden, weight, labels, given) as checks:
        if counted is not None:
            check_per_token("loss_mask", counted, checks.shape, hidden.device)
    return token_cross_entropies(checks.call, formula, upstream, counted)
