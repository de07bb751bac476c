"""Fused linear cross-entropy for Megatron-LM: the loss of a vocab-sharded head without its logits."""

from megatron_lce.api import linear_cross_entropy
from megatron_lce.validation import check_labels

__all__ = ["check_labels", "linear_cross_entropy"]
