"""Our own heads: `linear_cross_entropy` and `linear_token_loss` with their options, as a benchmark's step."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import megatron_lce
from benchmark.shapes import Inputs
from megatron_lce.api.model_loss import model_loss
from megatron_lce.core.known_loss import UpstreamCheck
from megatron_lce.core.options import WORKSPACE_BYTES

MIB = 2**20
Step = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # outputs, and the gradients of hidden and weight


@dataclass
class Ours:
    """One way to call our head.

    cache_bytes     `logits_cache_bytes`
    token_loss      `linear_token_loss`, which is told the upstream gradients in forward; without a cache
    known_loss      as the flag's: losses per token, whose upstream is to be one number; without a cache, mode sft alone
    """

    cache_bytes: int | None = None
    workspace_bytes: int = WORKSPACE_BYTES
    skip_ignored: bool | int = False
    token_loss: bool = False
    known_loss: bool = False
    _upstream: UpstreamCheck = field(default_factory=lambda: UpstreamCheck(known=True))

    def step(self, inputs: Inputs, mode: str) -> Step:
        keywords: dict[str, Any] = {"entropy": mode in ("fwd", "rl"), "workspace_bytes": self.workspace_bytes}
        keywords |= {"skip_ignored": self.skip_ignored}
        keywords |= {"tp_group": inputs.tp_group, "sequence_parallel": inputs.tp_group is not None}
        tensors = inputs.hidden, inputs.weight, inputs.labels
        with torch.set_grad_enabled(mode != "fwd"):
            if self.token_loss:
                told = inputs.grad_logprobs, inputs.grad_entropy
                result = megatron_lce.linear_token_loss(*tensors, _LOSSES[mode], *told, **keywords)
                outputs = as_mode(mode, result.outputs.logprobs, result.outputs.entropy)
                total = result.loss / len(inputs.labels) if mode == "sft" else result.loss
                gradients = torch.autograd.grad(total, tensors[:2])
            elif self.known_loss:
                assert mode == "sft"
                losses, _ = model_loss(*tensors, upstream=self._upstream, logits_cache_bytes=0, **keywords)
                outputs = (losses.mean(),)
                gradients = torch.autograd.grad(outputs, tensors[:2])
            else:
                out = megatron_lce.linear_cross_entropy(*tensors, logits_cache_bytes=self.cache_bytes, **keywords)
                outputs = as_mode(mode, out.logprobs, out.entropy)
                gradients = gradients_of(outputs, inputs, mode)
        return outputs, gradients


_LOSSES = {
    "rl": lambda out, grad_logprobs, grad_entropy: grad_logprobs * out.logprobs + grad_entropy * out.entropy,
    "logprob": lambda out, grad_logprobs, _: grad_logprobs * out.logprobs,
    "sft": lambda out, *_: -out.logprobs,
}


def gradients_of(outputs: tuple[Tensor, ...], inputs: Inputs, mode: str) -> tuple[Tensor, ...]:
    """Those of hidden and weight, by the mode's upstream gradients; none for `fwd`."""
    if mode == "fwd":
        return ()
    upstream = None if mode == "sft" else (inputs.grad_logprobs, inputs.grad_entropy)[: len(outputs)]
    return torch.autograd.grad(outputs, (inputs.hidden, inputs.weight), upstream)


def as_mode(mode: str, logprobs: Tensor, entropy: Tensor | None) -> tuple[Tensor, ...]:
    if mode == "sft":
        return (-logprobs.mean(),)
    return (logprobs,) if entropy is None else (logprobs, entropy)
