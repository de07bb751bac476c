"""SkyRL's `fused_lm_head_logprob`: logprobs from hidden states in one pass, the temperature included.

import megatron_lce.plugins.skyrl  # in skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py
"""

from typing import Any

from torch import Tensor

from megatron_lce.compat import linear_cross_entropy
from megatron_lce.plugins.patching import Plugin


def logprobs(
    original: Any, *inputs: Any, temperature: float = 1.0, fused_backend: str = "torch", **keywords: Any
) -> Any:
    """SkyRL's function, which passes on the backend but would divide the weight by the temperature."""
    return original(*inputs, temperature=1.0, fused_backend=temperature, **keywords)


def fused(
    original: Any,
    backend: str | float,  # a temperature: it comes from the function above
    hidden: Tensor,  # [b, s, H], gathered
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: Any,
    inference_only: bool,
) -> Any:
    temperature = 1.0 if isinstance(backend, str) else backend
    options: Any = {"dist_process_group": tp_group, "skip_ignored": True}
    values, _ = linear_cross_entropy(hidden.to(weight.dtype), weight, target, temperature, **options)
    return values.view(target.shape)


UTILS = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
SHARD = "vocab_start_index, vocab_end_index"
GIVEN = f"hidden, weight, target, {SHARD}, chunk_size, tp_group, inference_only"
OF_HIDDEN = f"hidden, lm_head_weight, target, {SHARD}, tp_group, inference_only"
OF_HIDDEN += ", cp_group, chunk_size, temperature, fused_backend"
OF_PACKED = f"hidden, lm_head_weight, target, cu_seqlens_padded, unpacked_seqlen, {SHARD}, group, inference_only"
OF_PACKED += ", cp_group, chunk_size, attention_mask, sub_seq_lengths, temperature, fused_backend"
replacements = {f"{UTILS}:_fused_lm_head_logprob_apply(backend, {GIVEN})": fused}
replacements[f"{UTILS}:from_parallel_hidden_to_logprobs({OF_HIDDEN})"] = logprobs
replacements[f"{UTILS}:from_parallel_hidden_to_logprobs_packed_sequences({OF_PACKED})"] = logprobs
plugin = Plugin("skyrl", replacements)
install, uninstall = plugin.install, plugin.uninstall
install()
