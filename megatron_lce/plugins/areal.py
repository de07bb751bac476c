"""AReaL's `lm_head_loss_chunk_size`: logprobs, entropy and statistics of logits from hidden states in one pass."""

from typing import Any

import megatron_lce
from megatron_lce.plugins.patching import installed


def logprobs_entropy(call: Any) -> Any:
    """AReaL's ChunkedLMHeadOutput. Its statistics are of logits before the temperature."""
    hidden, labels = call.hidden_states, call.labels  # [s, b, H] or [s/tp, b, H]; the ids as [s, b] or [1, s], flat
    out = megatron_lce.fused_output_processor(
        hidden_states=hidden,
        output_layer=call.output_layer,
        output_weight=call.weight,
        labels=labels.view(-1, hidden.shape[1]).transpose(0, 1),
        context=megatron_lce.FusedOutputContext(call.temperature, keywords={"telemetry": True, "skip_ignored": True}),
        scale_logits=lambda logits: logits * call.logit_scale,
        config=call.output_layer.config,
    )
    values = out.logprobs, out.entropy, out.min_logit, out.max_logit, out.mean_logit, out.logits_norm
    logprobs, entropy, *of_logits = (value.transpose(0, 1).reshape(labels.shape) for value in values)
    output = call.original.__globals__["ChunkedLMHeadOutput"]
    return output(logprobs, entropy, *(value.detach() * call.temperature for value in of_logits))


HEAD = "areal.models.mcore.vocab_parallel_head"
GIVEN = "output_layer, hidden_states, weight, labels, temperature, chunk_size, logit_scale"
functions = {f"{HEAD}:chunked_lm_head_logprobs_entropy({GIVEN})": logprobs_entropy, f"{HEAD}:ChunkedLMHeadOutput": None}
plugin, install, uninstall = installed("areal", "main, from ea306c9ca on", functions)
