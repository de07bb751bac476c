"""The public interface: what `import megatron_lce` offers. Importing it imports torch, which takes seconds."""

from megatron_lce import compat
from megatron_lce.api.fused_linear_head import FusedLinearHead
from megatron_lce.api.linear_cross_entropy import linear_cross_entropy
from megatron_lce.api.linear_divergence import DivergenceLoss, linear_divergence, linear_divergence_loss, linear_jsd
from megatron_lce.api.linear_logits_at import linear_logits_at
from megatron_lce.api.linear_token_loss import TokenLoss, linear_token_loss
from megatron_lce.api.linear_topk import TopK, linear_topk
from megatron_lce.api.shift_labels import shift_labels
from megatron_lce.api.support_logprobs import support_logprobs
from megatron_lce.api.topk_divergence import topk_divergence
from megatron_lce.checks.validation import check_labels
from megatron_lce.core.divergence_types import LinearDivergenceOutput
from megatron_lce.core.options import LinearCrossEntropyOutput
from megatron_lce.megatron.capture import capture_lm_head
from megatron_lce.megatron.captured_head import CapturedHead
from megatron_lce.megatron.enable import FusedLinearCE, enable_fused_linear_ce
from megatron_lce.megatron.head_call import StoredHead
from megatron_lce.megatron.heads import accept_head
from megatron_lce.megatron.output_processor import FusedOutputContext, fused_output_processor

__all__ = [
    "CapturedHead",
    "DivergenceLoss",
    "FusedLinearCE",
    "FusedLinearHead",
    "FusedOutputContext",
    "LinearCrossEntropyOutput",
    "LinearDivergenceOutput",
    "StoredHead",
    "TokenLoss",
    "TopK",
    "accept_head",
    "capture_lm_head",
    "check_labels",
    "compat",
    "enable_fused_linear_ce",
    "fused_output_processor",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_divergence_loss",
    "linear_jsd",
    "linear_logits_at",
    "linear_token_loss",
    "linear_topk",
    "shift_labels",
    "support_logprobs",
    "topk_divergence",
]
