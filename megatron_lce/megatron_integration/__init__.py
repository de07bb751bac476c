"""What is said and done to megatron-core models; megatron-core is imported when these are called."""

from megatron_lce.megatron_integration.capture import capture_lm_head
from megatron_lce.megatron_integration.captured_head import CapturedHead
from megatron_lce.megatron_integration.enable import FusedLinearCE, enable_fused_linear_ce
from megatron_lce.megatron_integration.explanation import Explanation, explain
from megatron_lce.megatron_integration.heads import accept_head
from megatron_lce.megatron_integration.output_processor import FusedOutputContext, fused_output_processor
from megatron_lce.megatron_integration.own_flag import install_megatron_linear_cross_entropy

__all__ = [
    "CapturedHead",
    "Explanation",
    "FusedLinearCE",
    "FusedOutputContext",
    "accept_head",
    "capture_lm_head",
    "enable_fused_linear_ce",
    "explain",
    "fused_output_processor",
    "install_megatron_linear_cross_entropy",
]
