"""`capture_lm_head` and `enable_fused_linear_ce` for megatron-core, which is imported when they are called."""

from megatron_lce.megatron_integration.capture import CapturedHead, capture_lm_head
from megatron_lce.megatron_integration.enable import FusedLinearCE, enable_fused_linear_ce
from megatron_lce.megatron_integration.heads import accept_head
from megatron_lce.megatron_integration.output_processor import FusedOutputContext, fused_output_processor
from megatron_lce.megatron_integration.own_flag import install_megatron_linear_cross_entropy

__all__ = [
    "CapturedHead",
    "FusedLinearCE",
    "FusedOutputContext",
    "accept_head",
    "capture_lm_head",
    "enable_fused_linear_ce",
    "fused_output_processor",
    "install_megatron_linear_cross_entropy",
]
