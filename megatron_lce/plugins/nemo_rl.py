"""NeMo-RL's `use_fused_linear_logprobs`: logprobs from hidden states in one pass.

import megatron_lce.plugins.nemo_rl  # in nemo_rl/models/policy/workers/megatron_policy_worker.py
"""

from typing import Any

from torch import Tensor

import megatron_lce
from megatron_lce.plugins.patching import Plugin


def logprobs(
    original: Any,
    hidden: Tensor,  # [s, b, H], under sequence parallel [s/tp, b, H]
    weight: Tensor,
    runtime_gather_output: Any,
    target: Tensor,  # [b, s], not shifted
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
) -> Tensor:
    if cp_group is not None and cp_group.size() > 1:
        raise ValueError(f"use_fused_linear_logprobs needs context_parallel_size=1, got {cp_group.size()}")
    options: Any = {"tp_group": tp_group, "sequence_parallel": hidden.shape[0] < target.shape[1]}
    labels = target.roll(-1, -1).transpose(0, 1)  # the last row of each sequence is dropped
    out = megatron_lce.linear_cross_entropy(hidden, weight, labels, entropy=False, skip_ignored=True, **options)
    return out.logprobs.transpose(0, 1)[:, :-1]


GIVEN = "tensor_parallel_hidden_states, output_weight_layer, runtime_gather_output, target"
GIVEN += ", vocab_start_index, vocab_end_index, tp_group, inference_only, cp_group, chunk_size"
UTILS = "nemo_rl.distributed.model_utils"
plugin = Plugin("nemo_rl", {f"{UTILS}:from_parallel_hidden_states_to_logprobs({GIVEN})": logprobs})
install, uninstall = plugin.install, plugin.uninstall
install()
