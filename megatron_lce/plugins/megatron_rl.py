"""Megatron-RL: logprobs without logits, in fp32.

import megatron_lce.plugins.megatron_rl  # in train_rl.py
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import megatron_lce
from megatron_lce.plugins.patching import Plugin

heads: list[megatron_lce.CapturedHead] = []  # of the calls of `get_logprobs` that run


def get_logprobs(original: Any, model: Any, *inputs: Any, **keywords: Any) -> Any:
    with megatron_lce.capture_lm_head(model) as head:
        heads.append(head)
        try:
            return original(model, *inputs, **keywords)
        finally:
            heads.pop()


def log_softmax(original: Any, logits: Tensor, index: Tensor) -> Tensor:
    """Megatron's `selective_log_softmax`. A capture's logits have no columns."""
    if not heads or logits.shape[-1]:
        return original(logits, index)
    head, tokens = heads[-1], index.shape[1]
    assert head.hidden is not None
    assert head.tp_group is not None
    sequence = head.hidden.shape[0] * (head.tp_group.size() if head.sequence_parallel else 1)
    labels = pad(index, (0, sequence - tokens), value=-100)  # without context parallelism the last one is cut off
    return head.linear_cross_entropy(labels, entropy=False, skip_ignored=True).logprobs[:, :tokens]


def in_fp32(original: Any, **keywords: Any) -> Any:
    """Megatron's `compute_logprobs_batch`, which expects logprobs in the dtype of the logits."""
    return original(**keywords | {"dtype": torch.float32})


RL = "megatron.rl.rl_utils"
replacements: dict[str, Any] = {f"{RL}:get_logprobs(model, ...)": get_logprobs}
replacements[f"{RL}:selective_log_softmax(logits, index)"] = log_softmax
replacements[f"{RL}:compute_logprobs_batch(model, data_loader, dtype, ...)"] = in_fp32
plugin = Plugin("megatron.rl", replacements)
install, uninstall = plugin.install, plugin.uninstall
install()
