"""NeMo-RL's `use_fused_linear_logprobs`: logprobs from hidden states in one pass, the temperature included."""

import contextvars
import dataclasses
from typing import Any

from torch import Tensor

import megatron_lce
from megatron_lce.plugins.patching import installed

TEMPERATURE: contextvars.ContextVar[float] = contextvars.ContextVar("temperature", default=1.0)  # of the forward step


def forward_step(call: Any) -> Any:
    """NeMo-RL's forward step, which would divide finished logprobs by the temperature."""
    name = "use_fused_linear_logprobs" if hasattr(call, "use_fused_linear_logprobs") else "use_linear_ce_fusion_loss"
    if not getattr(call, name) or call.sampling_params is None:
        return call.run()
    token = TEMPERATURE.set(call.sampling_params.temperature)
    try:
        return call.run(sampling_params=dataclasses.replace(call.sampling_params, temperature=1.0))
    finally:
        TEMPERATURE.reset(token)


def logprobs(call: Any) -> Tensor:
    if call.cp_group is not None and call.cp_group.size() > 1:
        raise ValueError(f"use_fused_linear_logprobs needs context_parallel_size=1, got {call.cp_group.size()}")
    hidden, weight = call.tensor_parallel_hidden_states, call.output_weight_layer  # [s, b, H] or [s/tp, b, H]
    labels = call.target.roll(-1, -1).transpose(0, 1)  # [s, b]; the last row of each sequence is dropped
    options: Any = {"tp_group": call.tp_group, "sequence_parallel": len(hidden) < len(labels), "entropy": False}
    options |= {"skip_ignored": True, "temperature": TEMPERATURE.get()}
    out = megatron_lce.linear_cross_entropy(hidden, weight, labels, **options)
    return out.logprobs.transpose(0, 1)[:, :-1]


HIDDEN = "tensor_parallel_hidden_states, output_weight_layer, runtime_gather_output, target"
SHARD = "vocab_start_index, vocab_end_index, tp_group, inference_only, cp_group, chunk_size"
functions = {
    f"nemo_rl.distributed.model_utils:from_parallel_hidden_states_to_logprobs({HIDDEN}, {SHARD})": logprobs,
    "nemo_rl.models.megatron.train:forward_with_post_processing_fn(model, sampling_params, ...)": forward_step,
}
plugin, install, uninstall = installed("nemo_rl", "0.7.0, main", functions)
