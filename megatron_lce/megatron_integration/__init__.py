"""What is said and done to megatron-core models; megatron-core is imported when these are called."""

from megatron_lce.megatron_integration.capture import CapturedHead, capture_lm_head
from megatron_lce.megatron_integration.enable import FusedLinearCE, enable_fused_linear_ce
from megatron_lce.megatron_integration.explanation import Explanation, explain

__all__ = ["CapturedHead", "Explanation", "FusedLinearCE", "capture_lm_head", "enable_fused_linear_ce", "explain"]
