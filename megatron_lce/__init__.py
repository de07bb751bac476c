"""Fused linear cross-entropy for Megatron-LM: the loss of a vocab-sharded head without its logits."""

from megatron_lce import compat
from megatron_lce.core.validation import check_labels
from megatron_lce.cross_entropy import linear_cross_entropy
from megatron_lce.jsd import linear_jsd
from megatron_lce.megatron_integration import (
    FusedOutputContext,
    accept_head,
    capture_lm_head,
    enable_fused_linear_ce,
    fused_output_processor,
    install_megatron_linear_cross_entropy,
)
from megatron_lce.token_loss import TokenLoss, linear_token_loss

__all__ = [
    "FusedOutputContext",
    "TokenLoss",
    "accept_head",
    "capture_lm_head",
    "check_labels",
    "compat",
    "enable_fused_linear_ce",
    "fused_output_processor",
    "install_megatron_linear_cross_entropy",
    "linear_cross_entropy",
    "linear_jsd",
    "linear_token_loss",
]
