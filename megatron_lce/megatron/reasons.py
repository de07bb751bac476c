"""Where a model's head is, and the reasons why it cannot be captured or its loss not be fused.

They are read from configuration, types and shapes, which all ranks share, and from hooks and patches, which they may
not: `reasons_of_group` makes the ranks decide alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_lce.checks.validation import DTYPES
from megatron_lce.core import collectives
from megatron_lce.megatron.fsdp import FREED, freed_reasons, is_freed, is_hook_of_fsdp, is_whole_in_forward
from megatron_lce.megatron.heads import unknown_head_reasons

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer import TransformerConfig

NO_HEAD = "this pipeline stage has no LM head"
_OURS = "megatron_lce.megatron."  # a captured or fused head's own methods
# Of models, beside LanguageModule's. mcore_adapter's, of ROLL and LLaMA-Factory, can take another kernel for it.
_PLAIN_LOSSES = {"mcore_adapter.models.model_factory.McaGPTModel.compute_language_model_loss"}
# Of heads. mcore_adapter's makes the gradient of the logits contiguous.
_KNOWN_HOOKS = {"mcore_adapter.models.model_utils.mca_lora_logits_postprocess_hook"}


def find_fusable_model(model: nn.Module | Sequence[nn.Module]) -> tuple[LanguageModule | None, tuple[str, ...]]:
    """Return the language model whose head makes the logits, and why its loss cannot be fused: all ranks' reasons."""
    language_model = find_language_model(model)
    if language_model is None:
        return None, (NO_HEAD,)
    return language_model, reasons_of_group(language_model, fusing_reasons(language_model, modules_of(model)))


def weight_reasons(weight: Tensor | None) -> tuple[str, ...]:
    if weight is None or (type(weight.data) is Tensor and weight.dtype in DTYPES):
        return ()
    kind = type(weight.data).__name__
    return (f"the head's weight is a {kind} of {weight.dtype}, not a plain fp32, bf16 or fp16",)


def find_language_model(model: nn.Module | Sequence[nn.Module]) -> LanguageModule | None:
    """Return the megatron-core language model in `model` whose output layer makes the logits; None on other stages.

    Args:
        model: a GPTModel, MambaModel or HybridModel, in any nesting of wrappers (DistributedDataParallel,
            Float16Module, a VLM), or the list of virtual pipeline chunks that Megatron's schedules take.

    Raises:
        TypeError: `model` is not and holds no megatron-core language model.
        ValueError: `model` holds several heads.
    """
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer.module import MegatronModule

    modules = modules_of(model)
    if not any(isinstance(module, MegatronModule) for module in modules):
        chunks = [model] if isinstance(model, nn.Module) else model
        kinds = ", ".join(type(chunk).__name__ for chunk in chunks) or "an empty list"
        raise TypeError(
            f"model must be or hold a megatron-core language model, got {kinds}; for other models (Hugging Face, FSDP) "
            "there are megatron_lce.linear_cross_entropy(hidden, weight, labels) and megatron_lce.FusedLinearHead"
        )
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


def head_reasons(language_model: LanguageModule) -> tuple[str, ...]:
    """Return why `hidden` and the head's weight do not determine this model's logits, also behind the head's call."""
    head, weight = language_model.output_layer, weight_of(language_model)
    freed = is_freed(head, weight) or isinstance(language_model, FSDPModule)
    of_weight = (FREED,) if freed else weight_reasons(weight)
    return (*_output_reasons(language_model), *_product_reasons(head, language_model.config), *of_weight)


def fusing_reasons(language_model: LanguageModule, modules: list[nn.Module]) -> tuple[str, ...]:
    """Return why this model's loss cannot be fused; `modules` are all that FSDP may have as units."""
    head, weight = language_model.output_layer, weight_of(language_model)
    if is_freed(head, weight):
        of_weight = freed_reasons(language_model.config)
    else:
        of_weight = () if is_whole_in_forward(modules, weight) else weight_reasons(weight)
    of_head = _product_reasons(head, language_model.config)
    return (*_output_reasons(language_model), *of_head, *of_weight, *_loss_reasons(language_model))


def _output_reasons(language_model: LanguageModule) -> Iterator[str]:
    head, vocab_size = language_model.output_layer, getattr(language_model, "vocab_size", None)
    if getattr(head, "output_size", vocab_size) != vocab_size:
        wrong = f"output_layer has {head.output_size} outputs, not the vocabulary's {vocab_size}"
        yield f"{wrong}: a critic's or classifier's head"


def weight_of(language_model: LanguageModule) -> Tensor | None:
    """Return what the head is called with: the embedding's weight if tied, else its own, if it has one."""
    if language_model.share_embeddings_and_output_weights:
        return language_model.shared_embedding_or_output_weight()
    return getattr(language_model.output_layer, "weight", None)


def reasons_of_head(head: nn.Module, config: TransformerConfig, weight: Tensor | None) -> tuple[str, ...]:
    """Return why `hidden` and the weight that this head is called with do not determine what it returns."""
    of_weight = (FREED,) if is_freed(head, weight) else weight_reasons(weight)
    return (*_product_reasons(head, config), *of_weight)


def _product_reasons(head: nn.Module, config: TransformerConfig) -> tuple[str, ...]:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    unknown = tuple(unknown_head_reasons(head))
    if unknown:
        return unknown
    assert isinstance(head, ColumnParallelLinear)
    reasons = {
        "output_layer.forward was replaced by another library": (
            _replaced(head, "forward") or _patched(ColumnParallelLinear.forward, ColumnParallelLinear)
        ),
        "ColumnParallelLinear._forward_impl was replaced by another library": (
            _patched(ColumnParallelLinear._forward_impl, ColumnParallelLinear)
        ),
        "output_layer has forward or backward hooks, which expect logits": _has_unknown_hooks(head),
        "output_layer has a bias": head.bias is not None,
        "output_layer has disable_grad_reduce set": head.disable_grad_reduce,
        "output_layer is sharded by generalized tensor parallelism": getattr(head, "gtp_remat_size", 1) > 1,
        "defer_embedding_wgrad_compute is set": config.defer_embedding_wgrad_compute,
        "config_logger_dir is set, which writes the logits to disk": bool(getattr(config, "config_logger_dir", "")),
    }
    return tuple(reason for reason, holds in reasons.items() if holds)


def _loss_reasons(language_model: LanguageModule) -> tuple[str, ...]:
    """Return why the loss that this model computes from its logits is not the plain cross-entropy."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    kind = type(language_model)
    loss = kind.compute_language_model_loss
    reasons = {
        "output_layer gathers its output (parallel_output=False)": bool(
            getattr(language_model.output_layer, "gather_output", False)
        ),
        f"{kind.__name__} has its own compute_language_model_loss": (
            loss is not LanguageModule.compute_language_model_loss
            and f"{loss.__module__}.{loss.__qualname__}" not in _PLAIN_LOSSES
        ),
        "compute_language_model_loss was replaced by another library": _replaced(
            language_model, "compute_language_model_loss"
        ),
        "LanguageModule.compute_language_model_loss was replaced by another library": _patched(
            LanguageModule.compute_language_model_loss, LanguageModule
        ),
    }
    return tuple(reason for reason, holds in reasons.items() if holds)


def reasons_of_group(language_model: LanguageModule, reasons: tuple[str, ...]) -> tuple[str, ...]:
    """Return the union of the reasons of all ranks that share the head (a hook may exist on one rank only)."""
    group = getattr(language_model.output_layer, "tp_group", None)  # another class of head is so on every rank
    if group is None or group.size() == 1:
        return reasons
    return tuple(dict.fromkeys(reason for of_rank in collectives.gather_objects(reasons, group) for reason in of_rank))


def _has_unknown_hooks(head: nn.Module) -> bool:
    """Whether hooks are on this head that expect logits, or their gradient."""
    # Forward pre-hooks see the hidden only, and DDP uses them to wait for parameters: they run and are welcome.
    unknown = [hook for hook in head._forward_hooks.values() if not _is_known_hook(hook)]
    return bool(unknown or head._backward_hooks or head._backward_pre_hooks)


def _is_known_hook(hook: Callable) -> bool:
    name = f"{hook.__module__}.{getattr(hook, '__qualname__', '')}"
    return name in _KNOWN_HOOKS or name.startswith(_OURS) or is_hook_of_fsdp(hook)


def _patched(method: Callable, owner: type) -> bool:
    """Whether another library put this method on Megatron's own class, for every model at once."""
    return method.__module__ != owner.__module__ or hasattr(method, "__wrapped__")


def _replaced(module: nn.Module, method: str) -> bool:
    replacement = vars(module).get(method)
    return replacement is not None and not type(getattr(replacement, "__self__", None)).__module__.startswith(_OURS)


def warn_on_one_rank(message: str) -> None:
    """Warn on the first tensor- and data-parallel rank of the stage that holds the head."""
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        rank = parallel_state.get_tensor_model_parallel_rank()
        rank += parallel_state.get_data_parallel_rank(with_context_parallel=True)
    else:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if rank == 0:
        warnings.warn(message, UserWarning, stacklevel=3)
