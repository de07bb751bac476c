"""ms-swift: GRPO's logprobs and entropy, and the logprobs of old and reference policies, without logits.

    --external_plugins lce.py  # a file with the line `import megatron_lce.plugins.ms_swift`

Prompts and masked tokens are not computed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import megatron_lce
from megatron_lce.plugins.capturing import captured_if
from megatron_lce.plugins.replacing import Plugin

TRAINERS = "swift.megatron.trainers"


def to_divided(chunk: nn.Module, own: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    """Returns 1, on the host, for ms-swift to divide by the temperature, with the captured head."""
    with megatron_lce.capture_lm_head(chunk) as head:
        output = own(*inputs, **keywords)
    if head.hidden is None:  # not the last pipeline stage
        return output
    output = torch.ones((), dtype=torch.float64, device="cpu")
    output.lm_head = head  # type: ignore[attr-defined]
    return output


def logps_and_entropy(own: Callable[..., Any]) -> Callable[..., Any]:
    def ours(logits: Tensor, labels: Tensor, compute_entropy: bool = False, *rest: Any, **keywords: Any) -> Any:
        head = getattr(logits, "lm_head", None)
        if head is None:
            return own(logits, labels, compute_entropy, *rest, **keywords)
        out = head.linear_cross_entropy(labels, 1 / float(logits), entropy=compute_entropy, skip_ignored=True)
        return out.logprobs, out.entropy

    return ours


def always(given: Any) -> bool:
    return True


plugin = Plugin(
    "swift",
    {
        f"{TRAINERS}.vocab_parallel_utils:compute_logps_and_entropy_from_logits": logps_and_entropy,
        f"{TRAINERS}.utils:compute_per_token_logps_fn": captured_if(always, to_divided),
        f"{TRAINERS}.grpo_trainer:MegatronGRPOTrainer.forward_step": captured_if(always, to_divided),
    },
)
install, uninstall = plugin.install, plugin.uninstall
install()
