"""NeMo-RL's `use_fused_linear_logprobs`: logprobs from hidden states in one pass."""

from typing import Any

from torch import Tensor

import megatron_lce
from megatron_lce.plugins.patching import installed


def logprobs(call: Any) -> Tensor:
    if call.cp_group is not None and call.cp_group.size() > 1:
        raise ValueError(f"use_fused_linear_logprobs needs context_parallel_size=1, got {call.cp_group.size()}")
    hidden, weight = call.tensor_parallel_hidden_states, call.output_weight_layer  # [s, b, H] or [s/tp, b, H]
    labels = call.target.roll(-1, -1).transpose(0, 1)  # [s, b]; the last row of each sequence is dropped
    options: Any = {"tp_group": call.tp_group, "sequence_parallel": len(hidden) < len(labels)}
    out = megatron_lce.linear_cross_entropy(hidden, weight, labels, entropy=False, skip_ignored=True, **options)
    return out.logprobs.transpose(0, 1)[:, :-1]


HIDDEN = "tensor_parallel_hidden_states, output_weight_layer, runtime_gather_output, target"
SHARD = "vocab_start_index, vocab_end_index, tp_group, inference_only, cp_group, chunk_size"
FUNCTION = f"nemo_rl.distributed.model_utils:from_parallel_hidden_states_to_logprobs({HIDDEN}, {SHARD})"
plugin, install, uninstall = installed("nemo_rl", "0.7.0, main", {FUNCTION: logprobs})
