"""Which heads FSDP shards, torch's or Megatron's, whose weight is whole only during the head's call.

`loss.py` computes their loss inside that call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

FREED = (
    "the head's weight is managed by FSDP, which frees it outside of the output layer's call: use "
    "enable_fused_linear_ce, or FusedLinearHead for a head of your own"
)


def is_freed(head: nn.Module, weight: Tensor | None) -> bool:
    """Whether FSDP may free this weight as soon as the head's call returns."""
    return isinstance(head, FSDPModule) or hasattr(weight, "__fsdp_param__")


def is_whole_in_forward(modules: list[nn.Module], weight: Tensor | None) -> bool:
    """Whether this weight, a shard now, is whole while these modules run: FSDP2 has one of them as a unit."""
    is_shard = isinstance(weight, Tensor) and isinstance(weight.data, DTensor)
    return is_shard and any(isinstance(module, FSDPModule) for module in modules)


def freed_reasons(config: TransformerConfig) -> tuple[str, ...]:
    """Return why the loss of such a head cannot be computed inside the head's call."""
    later = {
        "multi-token prediction shifts the labels": bool(config.mtp_num_layers),
        "MuP scales the logits": getattr(config, "use_mup", False),
    }
    why = "FSDP frees the head's weight after the output layer's call, behind which"
    return tuple(f"{why} {event}" for event, happens in later.items() if happens)


def is_hook_of_fsdp(hook: Callable) -> bool:
    """Whether FSDP put this hook on a module; it looks at no value of the outputs."""
    module = str(hook.__module__)
    return module.startswith("torch.distributed.fsdp.") or module.endswith("megatron_fsdp.megatron_fsdp")
