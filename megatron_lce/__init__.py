"""Fused linear cross-entropy for Megatron-LM: the loss of a vocab-sharded head without its logits."""

from megatron_lce import compat as compat
from megatron_lce.api.fused_linear_head import FusedLinearHead as FusedLinearHead
from megatron_lce.api.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from megatron_lce.api.linear_jsd import linear_jsd as linear_jsd
from megatron_lce.api.linear_logits_at import linear_logits_at as linear_logits_at
from megatron_lce.api.linear_token_loss import TokenLoss as TokenLoss
from megatron_lce.api.linear_token_loss import linear_token_loss as linear_token_loss
from megatron_lce.api.linear_topk import TopK as TopK
from megatron_lce.api.linear_topk import linear_topk as linear_topk
from megatron_lce.api.load_head_shard import load_head_shard as load_head_shard
from megatron_lce.api.shift_labels import shift_labels as shift_labels
from megatron_lce.api.support_logprobs import support_logprobs as support_logprobs
from megatron_lce.api.topk_divergence import topk_divergence as topk_divergence
from megatron_lce.checks.validation import check_labels as check_labels
from megatron_lce.command.explain import Explanation as Explanation
from megatron_lce.command.explain import explain as explain
from megatron_lce.core.options import LinearCrossEntropyOutput as LinearCrossEntropyOutput
from megatron_lce.megatron.capture import CapturedHead as CapturedHead
from megatron_lce.megatron.capture import capture_lm_head as capture_lm_head
from megatron_lce.megatron.enable import FusedLinearCE as FusedLinearCE
from megatron_lce.megatron.enable import enable_fused_linear_ce as enable_fused_linear_ce
from megatron_lce.megatron.heads import accept_head as accept_head
from megatron_lce.megatron.own_flag import (
    install_megatron_linear_cross_entropy as install_megatron_linear_cross_entropy,
)
from megatron_lce.megatron.processor import FusedOutputContext as FusedOutputContext
from megatron_lce.megatron.processor import fused_output_processor as fused_output_processor

__version__ = "0.2.0"
