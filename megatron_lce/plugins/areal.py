"""AReaL's `lm_head_loss_chunk_size`: logprobs, entropy and statistics of logits from hidden states in one pass.

import megatron_lce.plugins.areal  # in areal/engine/megatron_engine.py
"""

from typing import Any

from torch import Tensor

import megatron_lce
from megatron_lce.plugins.patching import Plugin

HEAD = "areal.models.mcore.vocab_parallel_head"


def logprobs_entropy(
    original: Any,
    output_layer: Any,
    hidden_states: Tensor,  # [s, b, H], under sequence parallel [s/tp, b, H]
    weight: Tensor,
    labels: Tensor,  # s * b ids, the sequence first or the batch of one
    *,
    temperature: float,
    chunk_size: int,
    logit_scale: float = 1.0,
) -> Any:
    """AReaL's ChunkedLMHeadOutput. Its statistics are of logits before the temperature."""
    out = megatron_lce.fused_output_processor(
        hidden_states=hidden_states,
        output_layer=output_layer,
        output_weight=weight,
        labels=labels.view(-1, hidden_states.shape[1]).transpose(0, 1),
        context=megatron_lce.FusedOutputContext(temperature, keywords={"telemetry": True, "skip_ignored": True}),
        scale_logits=lambda logits: logits * logit_scale,
        config=output_layer.config,
    )
    values = out.logprobs, out.entropy, out.min_logit, out.max_logit, out.mean_logit, out.logits_norm
    logprobs, entropy, *of_logits = (value.transpose(0, 1).reshape(labels.shape) for value in values)
    output = original.__globals__["ChunkedLMHeadOutput"]
    return output(logprobs, entropy, *(value.detach() * temperature for value in of_logits))


GIVEN = "output_layer, hidden_states, weight, labels, temperature, chunk_size, logit_scale"
replacements = {f"{HEAD}:chunked_lm_head_logprobs_entropy({GIVEN})": logprobs_entropy}
plugin = Plugin("areal", replacements, f"{HEAD}:ChunkedLMHeadOutput")
install, uninstall = plugin.install, plugin.uninstall
install()
