"""SkyRL's `fused_lm_head_logprob`: logprobs from hidden states in one pass, the temperature included."""

from typing import Any

from torch import Tensor

from megatron_lce.compat import linear_cross_entropy
from megatron_lce.plugins.patching import installed


def with_temperature(call: Any) -> Any:
    """SkyRL's function, which passes on the backend but would divide the weight by the temperature."""
    return call.run(temperature=1.0, fused_backend=call.temperature)


def logprobs(call: Any) -> Tensor:
    weight, target = call.weight, call.target
    temperature = 1.0 if isinstance(call.backend, str) else call.backend  # of the function above
    options: Any = {"dist_process_group": call.tp_group, "skip_ignored": True}
    values, _ = linear_cross_entropy(call.hidden.to(weight.dtype), weight, target, temperature, **options)
    return values.view(target.shape)


UTILS = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
GIVEN = "backend, hidden, weight, target, vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only"
functions = {
    f"{UTILS}:from_parallel_hidden_to_logprobs(temperature, fused_backend, ...)": with_temperature,
    f"{UTILS}:from_parallel_hidden_to_logprobs_packed_sequences(temperature, fused_backend, ...)": with_temperature,
    f"{UTILS}:_fused_lm_head_logprob_apply({GIVEN})": logprobs,
}
plugin, install, uninstall = installed("skyrl", "0.4.0, main", functions)
