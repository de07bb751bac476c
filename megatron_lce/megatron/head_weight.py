"""The weight a head is called with: whether it is a plain tensor, and when FSDP, torch's or Megatron's, has it whole.

`loss.py` computes the loss of a head that FSDP frees inside the head's call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_lce.checks.validation import DTYPES

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer import TransformerConfig


def weight_of(language_model: LanguageModule) -> Tensor | None:
    """Return what the head is called with: the embedding's weight if tied, else its own, if it has one."""
    if language_model.share_embeddings_and_output_weights:
        return language_model.shared_embedding_or_output_weight()
    return getattr(language_model.output_layer, "weight", None)


def weight_reasons(weight: Tensor | None) -> tuple[str, ...]:
    """Return why no backend multiplies with this weight."""
    if weight is None or (type(weight.data) is Tensor and weight.dtype in DTYPES):
        return ()
    kind = type(weight.data).__name__
    return (f"the head's weight is a {kind} of {weight.dtype}, not a plain fp32, bf16 or fp16",)


def reasons_after_call(head: nn.Module, weight: Tensor | None, freed_with_model: bool = False) -> tuple[str, ...]:
    """Return why this weight cannot be used after the head's call."""
    if not freed_with_model and not is_freed(head, weight):
        return weight_reasons(weight)
    return (
        "the head's weight is managed by FSDP, which frees it outside of the output layer's call: use "
        "enable_fused_linear_ce, or FusedLinearHead for a head of your own",
    )


def reasons_in_call(language_model: LanguageModule, modules: list[nn.Module]) -> tuple[str, ...]:
    """Return why the head's weight cannot be used in the model's forward; `modules`: all that may be units of FSDP.

    FSDP2 keeps the weight as a shard, and has it whole while the unit that holds it runs.
    """
    weight = weight_of(language_model)
    if is_freed(language_model.output_layer, weight):
        return freed_reasons(language_model.config)
    is_shard = isinstance(weight, Tensor) and isinstance(weight.data, DTensor)
    is_whole_in_forward = is_shard and any(isinstance(module, FSDPModule) for module in modules)
    return () if is_whole_in_forward else weight_reasons(weight)


def is_freed(head: nn.Module, weight: Tensor | None) -> bool:
    """Whether FSDP may free this weight as soon as the head's call returns."""
    return isinstance(head, FSDPModule) or hasattr(weight, "__fsdp_param__")


def freed_reasons(config: TransformerConfig) -> tuple[str, ...]:
    """Return why the loss of a head that FSDP frees cannot be computed inside the head's call."""
    later = {
        "multi-token prediction shifts the labels": bool(config.mtp_num_layers),
        "MuP scales the logits": getattr(config, "use_mup", False),
    }
    why = "FSDP frees the head's weight after the output layer's call, behind which"
    return tuple(f"{why} {event}" for event, happens in later.items() if happens)
