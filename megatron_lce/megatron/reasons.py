"""Where a model's head is, and the reasons why it cannot be captured or its loss cannot be fused.

Reasons come from configuration, types and shapes, which all ranks share, and from hooks and patches, which may differ:
`reasons_of_group` makes the ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_lce.checks.together import agree
from megatron_lce.core.eager import warn
from megatron_lce.megatron.heads import logits_reasons, loss_reasons, reasons_after_call, reasons_in_call, weight_of

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule

_OTHER_MODELS = (
    "for other models (Hugging Face, FSDP) there are megatron_lce.linear_cross_entropy(hidden, weight, labels) and "
    "megatron_lce.FusedLinearHead"
)
NO_HEAD = "this pipeline stage has no LM head"


def find_language_model(model: nn.Module | Sequence[nn.Module]) -> LanguageModule | None:
    """Return the language model whose output layer makes the logits, None on other pipeline stages.

    Raises as `enable_fused_linear_ce` if there is no megatron-core, no model of it, or several heads.
    """
    try:
        from megatron.core.models.common.language_module.language_module import LanguageModule
        from megatron.core.transformer.module import MegatronModule
    except ModuleNotFoundError as error:
        if not "megatron.core.".startswith(f"{error.name}."):  # megatron-core needs something else
            raise
        needed = "megatron-core is not installed, which is an extra: pip install 'megatron-lce[megatron]'"
        raise ModuleNotFoundError(f"{needed}; {_OTHER_MODELS}", name=error.name) from None

    modules = modules_of(model)
    if not any(isinstance(module, MegatronModule) for module in modules):
        chunks = [model] if isinstance(model, nn.Module) else model
        kinds = ", ".join(type(chunk).__name__ for chunk in chunks) or "an empty list"
        raise TypeError(f"model must be or hold a megatron-core language model, got {kinds}; {_OTHER_MODELS}")
    owners = [module for module in modules if isinstance(module, LanguageModule) and _makes_logits(module)]
    if len(owners) > 1:
        kinds = ", ".join(type(owner).__name__ for owner in owners)
        raise ValueError(f"model must hold one LM head, got {len(owners)} ({kinds}): pass the language model itself")
    return owners[0] if owners else None


def modules_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return all modules inside a model or a list of chunks."""
    chunks = [model] if isinstance(model, nn.Module) else model
    if not isinstance(chunks, Sequence) or not all(isinstance(chunk, nn.Module) for chunk in chunks):
        raise TypeError(f"model must be a torch.nn.Module or a list of them, got {type(model).__name__}")
    return [module for chunk in chunks for module in chunk.modules()]


def _makes_logits(module: nn.Module) -> bool:
    # HybridModel builds an output layer on MTP stages too; only the post_process stage calls it.
    return bool(getattr(module, "post_process", False)) and getattr(module, "output_layer", None) is not None


def capturing_reasons(language_model: LanguageModule) -> tuple[str, ...]:
    """Return why `hidden` and the head's weight do not determine this model's logits, also after the head's call."""
    head, freed_with_model = language_model.output_layer, isinstance(language_model, FSDPModule)
    return (*logits_reasons(language_model), *reasons_after_call(head, weight_of(language_model), freed_with_model))


def fusing_reasons(language_model: LanguageModule, modules: list[nn.Module]) -> tuple[str, ...]:
    """Return why this model's loss cannot be fused; `modules` are all that FSDP may have as units."""
    return (*logits_reasons(language_model), *loss_reasons(language_model), *reasons_in_call(language_model, modules))


def reasons_of_group(
    language_model: LanguageModule,
    reasons: tuple[str, ...],
    arguments: Mapping[str, Any] | None = None,
    error: Exception | None = None,
) -> tuple[str, ...]:
    """Return the union of the reasons of all ranks that share the head (a hook may exist on one rank only).

    If a rank refuses its arguments, with `error`, or they differ, all ranks raise.
    """
    group = getattr(language_model.output_layer, "tp_group", None)  # another class of head is so on every rank
    if group is not None and group.size() > 1:
        operation = "capture_lm_head" if arguments is None else "enable_fused_linear_ce"
        gathered_reasons = agree(group, {"operation": operation, **(arguments or {})}, error, reasons)
        return tuple(dict.fromkeys(reason for rank_reasons in gathered_reasons for reason in rank_reasons))
    if error is not None:
        raise error
    return reasons


def warn_on_one_rank(message: str) -> None:
    """Warn on the first tensor- and data-parallel rank of the stage that holds the head."""
    from megatron.core import parallel_state

    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if parallel_state.is_initialized():
        of_data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        rank = parallel_state.get_tensor_model_parallel_rank() + of_data
    if rank == 0:
        warn(message)
