"""Megatron-RL: logprobs without logits, in fp32."""

from typing import Any

import torch
from torch.nn.functional import pad

import megatron_lce
from megatron_lce.plugins.patching import installed

heads: list[Any] = []  # of the calls of `get_logprobs` that run


def get_logprobs(call: Any) -> Any:
    with megatron_lce.capture_lm_head(call.model) as head:
        heads.append(head)
        try:
            return call.run()
        finally:
            heads.pop()


def log_softmax(call: Any) -> Any:
    """Megatron's `selective_log_softmax`. A capture's logits have no columns."""
    if not heads or call.logits.shape[-1]:
        return call.run()
    head, tokens = heads[-1], call.index.shape[1]
    sequence = head.hidden.shape[0] * (head.tp_group.size() if head.sequence_parallel else 1)
    labels = pad(call.index, (0, sequence - tokens), value=-100)  # without context parallelism the last one is cut off
    return head.linear_cross_entropy(labels, entropy=False, skip_ignored=True).logprobs[:, :tokens]


RL = "megatron.rl.rl_utils"
functions = {
    f"{RL}:get_logprobs(model, ...)": get_logprobs,
    f"{RL}:selective_log_softmax(logits, index)": log_softmax,
    # expects logprobs in the dtype of the logits
    f"{RL}:compute_logprobs_batch(model, data_loader, dtype, ...)": lambda call: call.run(dtype=torch.float32),
}
plugin, install, uninstall = installed("megatron.rl", "Megatron-LM main", functions)
