"""What an output layer and a model's loss make of `hidden @ weight.T`, and why some are left to Megatron.

`reasons.py` calls these functions for the flag and for a capture.

`loss.py` computes the loss of a head that FSDP, torch's or Megatron's, frees inside the head's call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_lce.checks.validation import DTYPES, check_scalar
from megatron_lce.megatron.gtp import is_gtp_sharded

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

_OURS = "megatron_lce.megatron."  # a captured or fused head's own methods
# mcore_adapter's hook makes the gradient of the logits contiguous.
_KNOWN_HOOKS = {"mcore_adapter.models.model_utils.mca_lora_logits_postprocess_hook"}
# Plain losses other than LanguageModule's. mcore_adapter's (ROLL, LLaMA-Factory) may use another kernel.
_PLAIN_LOSSES = {"mcore_adapter.models.model_factory.McaGPTModel.compute_language_model_loss"}
_PRODUCT = ("forward", "_forward_impl")  # the methods that decide what a ColumnParallelLinear returns
# Returns the softcap and the dtype of a head's logits; None: not changed.
_LogitsForm = Callable[[Any], tuple[float | None, torch.dtype | None]]


def _gemma(head: Any) -> tuple[float | None, None]:
    return head.config.final_logit_softcapping, None


_accepted: dict[object, _LogitsForm] = {  # by class, function or name
    # Megatron-LM's dev branch: the plain head, which can also return the loss
    "megatron.core.transformer.linear_cross_entropy.LinearCrossEntropyModule": lambda head: (None, None),
    # Megatron-Bridge
    "megatron.bridge.models.gemma.gemma2_provider.Gemma2OutputLayer": _gemma,
    "megatron.bridge.models.gemma.modeling_gemma4.Gemma4OutputLayer": _gemma,
    # AReaL: its head, and the function it sets as _forward_impl
    "areal.models.mcore.vocab_parallel_head._AReaLVocabParallelLMHeadMixin": lambda head: (
        None,
        torch.float32 if head.fp32_output or head.fp32_operands else None,
    ),
    "areal.models.mcore.registry._fp32_lm_head_forward_impl": lambda head: (None, torch.float32),
}


def accept_head(
    head: type | Callable,
    *,
    softcap: float | Callable[[nn.Module], float | None] | None = None,
    logits_dtype: torch.dtype | Callable[[nn.Module], torch.dtype | None] | None = None,
) -> None:
    """Let `capture_lm_head` and `enable_fused_linear_ce` take heads of this class.

    The logits of such a head must be `hidden @ weight.T`, softcapped or not, and nothing else: a fused loss does not
    run the head's own code. Megatron's LinearCrossEntropyModule (dev), Megatron-Bridge's Gemma output layers and
    AReaL's heads are accepted without this call.

    Args:
        head: a subclass of megatron-core's ColumnParallelLinear with its own `forward` or `_forward_impl`, a mixin for
            one, or a function that is set as a head's `_forward_impl`. Subclasses that override neither are accepted
            with it.
        softcap: c of logits `c * tanh(hidden @ weight.T / c)`: a positive float, or a function of the head that returns
            it; None or 0: no cap.
        logits_dtype: dtype of the logits that the head returns, or a function of the head that returns it; `None`:
            hidden's. The fused loss is computed in fp32 in any case.

    Raises:
        TypeError: `head` is neither a class nor a function, or `softcap` is neither a number nor a function.
        ValueError: the class overrides neither method, or `softcap` is negative.
    """
    if not isinstance(head, type):
        if not callable(head) or isinstance(head, nn.Module):
            raise TypeError(f"head must be a class or a function, got {type(head).__name__}")
    elif not _overrides(head):
        raise ValueError(f"head must define forward or _forward_impl, {head.__name__} defines neither")
    if softcap is not None and not callable(softcap) and softcap != 0:
        check_scalar("softcap", softcap, positive=True)
    _accepted[head] = lambda own: (
        softcap(own) if callable(softcap) else softcap,
        logits_dtype(own) if callable(logits_dtype) else logits_dtype,
    )


def logits_reasons(language_model: LanguageModule) -> tuple[str, ...]:
    """Return why `hidden` and the weight that the head is called with do not determine the model's logits."""
    head = language_model.output_layer
    vocab_size = getattr(language_model, "vocab_size", None)
    reasons = product_reasons(head, language_model.config)
    if getattr(head, "output_size", vocab_size) == vocab_size:
        return reasons
    sizes = f"output_layer has {head.output_size} outputs, not the vocabulary's {vocab_size}"
    return (f"{sizes}: a critic's or classifier's head", *reasons)


def product_reasons(head: nn.Module, config: TransformerConfig) -> tuple[str, ...]:
    """Return why `hidden` and the weight that this head is called with do not determine what it returns."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    kind = type(head).__name__
    if not isinstance(head, ColumnParallelLinear):
        adapted = any(isinstance(module, ColumnParallelLinear) for module in head.modules())
        hint = ", but holds one: leave it out of the adapter's targets, or merge the adapter" if adapted else ""
        return (f"output_layer is a {kind}, which is no ColumnParallelLinear of megatron-core{hint}",)
    unknown = [_describe_unknown(part, kind) for part, form in _own_parts(head) if form is None]
    if unknown:
        return tuple(unknown)
    another, cls = "was replaced by another library", ColumnParallelLinear
    forward_replaced = _is_replaced(head, "forward") or _is_patched(cls.forward, cls)
    reasons = {
        f"output_layer is a {kind} with several softcaps": len([cap for cap, _ in _forms(head) if cap]) > 1,
        f"output_layer.forward {another}": forward_replaced,
        f"ColumnParallelLinear._forward_impl {another}": _is_patched(cls._forward_impl, cls),
        "output_layer has forward or backward hooks, which expect logits": _has_unknown_hooks(head),
        "output_layer has a bias": head.bias is not None,
        "output_layer has disable_grad_reduce set": head.disable_grad_reduce,
        "defer_embedding_wgrad_compute is set": config.defer_embedding_wgrad_compute,
        "config_logger_dir is set, which writes the logits to disk": bool(getattr(config, "config_logger_dir", "")),
    }
    return tuple(reason for reason, holds in reasons.items() if holds)


def _describe_unknown(part: type | Callable, kind: str) -> str:
    if not isinstance(part, type):
        return "output_layer's _forward_impl was replaced"
    methods, whose = " and ".join(_overrides(part)), "its own" if part.__name__ == kind else f"{part.__name__}'s"
    return f"output_layer is a {kind} with {whose} {methods}, which megatron_lce.accept_head was not told of"


def _has_unknown_hooks(head: nn.Module) -> bool:
    """Whether hooks are on this head that expect logits, or their gradient."""
    # Forward pre-hooks see the hidden states only. They run: DDP waits for parameters in one.
    for hook in head._forward_hooks.values():
        name = _name_of(getattr(hook, "func", hook))
        if name not in _KNOWN_HOOKS and not name.startswith(_OURS) and not is_hook_of_fsdp(hook):
            return True
    return bool(head._backward_hooks or head._backward_pre_hooks)


def is_hook_of_fsdp(hook: Callable) -> bool:
    """Whether FSDP put this hook on a module; it reads no values of the outputs."""
    module = str(hook.__module__)
    return module.startswith("torch.distributed.fsdp.") or module.endswith("megatron_fsdp.megatron_fsdp")


def loss_reasons(language_model: LanguageModule) -> tuple[str, ...]:
    """Return why the loss that this model computes from its logits is not the plain cross-entropy."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    kind, method = type(language_model), "compute_language_model_loss"
    loss, plain = getattr(kind, method), getattr(LanguageModule, method)
    is_own = loss is not plain and _name_of(loss) not in _PLAIN_LOSSES
    gathers = bool(getattr(language_model.output_layer, "gather_output", False))
    reasons = {
        "output_layer gathers its output (parallel_output=False)": gathers,
        f"{kind.__name__} has its own {method}": is_own,
        f"{method} was replaced by another library": _is_replaced(language_model, method),
        f"LanguageModule.{method} was replaced by another library": _is_patched(plain, LanguageModule),
    }
    # Chosen by the backend's spec provider when the model is built (Megatron-LM's main from September 2026 on).
    chosen: Any = getattr(language_model, "vocab_parallel_cross_entropy", None)
    if chosen is not None:
        name = _name_of(getattr(chosen, "func", chosen))
        reasons[f"the model was built with another cross-entropy, {name}"] = not name.startswith("megatron.core.")
    return tuple(reason for reason, holds in reasons.items() if holds)


def _is_replaced(module: nn.Module, method: str) -> bool:
    """Whether another library set this method on the module itself."""
    replacement = vars(module).get(method)
    return replacement is not None and not type(getattr(replacement, "__self__", None)).__module__.startswith(_OURS)


def _is_patched(method: Callable, owner: type) -> bool:
    """Whether another library put this method on Megatron's own class, for every model at once."""
    return method.__module__ != owner.__module__ or hasattr(method, "__wrapped__")


def weight_of(language_model: LanguageModule) -> Tensor | None:
    """Return what the head is called with: the embedding's weight if tied, else its own, if it has one."""
    if language_model.share_embeddings_and_output_weights:
        return language_model.shared_embedding_or_output_weight()
    return getattr(language_model.output_layer, "weight", None)


def weight_reasons(weight: Tensor | None) -> tuple[str, ...]:
    """Return why no backend multiplies with this weight."""
    if weight is None or (type(weight.data) is Tensor and weight.dtype in DTYPES):
        return ()
    return (f"the head's weight is a {type(weight.data).__name__} of {weight.dtype}, not a plain fp32, bf16 or fp16",)


def reasons_after_call(head: nn.Module, weight: Tensor | None, freed_with_model: bool = False) -> tuple[str, ...]:
    """Return why this weight cannot be used after the head's call."""
    if is_gtp_sharded(head):
        why = "output_layer is sharded by generalized tensor parallelism, which gathers its weight for each product"
        return (f"{why}: use enable_fused_linear_ce",)
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
    why = "FSDP frees the head's weight after the output layer's call, behind which"
    mtp = (f"{why} multi-token prediction shifts the labels",) if config.mtp_num_layers else ()
    mup = (f"{why} MuP scales the logits",) if getattr(config, "use_mup", False) else ()
    return mtp + mup


def own_softcap(head: ColumnParallelLinear, given: float | None = None) -> float | None:
    """Return the softcap of a head that `product_reasons` accepts. Raise ValueError if the caller gives one, too."""
    own = next((softcap for softcap, _ in _forms(head) if softcap), None)
    if given is not None and own is not None:
        raise ValueError(f"softcap must not be given: the head has its own, {own}; got {given}")
    return own


def logits_dtype_of(head: ColumnParallelLinear) -> torch.dtype | None:
    """Return the logits dtype of a head that `product_reasons` accepts; None: the hidden states'."""
    own = getattr(head, "output_dtype", None)  # of ColumnParallelLinear, from 0.20
    return next((dtype for _, dtype in (*_forms(head), (None, own)) if dtype is not None), None)


def _forms(head: nn.Module) -> list[tuple[float | None, torch.dtype | None]]:
    return [form(head) for _, form in _own_parts(head) if form is not None]


def _own_parts(head: nn.Module) -> list[tuple[type | Callable, _LogitsForm | None]]:
    """Return classes before ColumnParallelLinear and the instance's own function that change the product.

    Each has its form, or None if it is not known.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear

    order = type(head).__mro__
    parts: list[Any] = [cls for cls in order[: order.index(ColumnParallelLinear)] if _overrides(cls)]
    if "_forward_impl" in vars(head):
        own = head._forward_impl
        parts.append(getattr(own, "__func__", own))
    return [(part, _accepted.get(part) or _accepted.get(_name_of(part))) for part in parts]


def _overrides(cls: type) -> list[str]:
    return [method for method in _PRODUCT if method in vars(cls)]


def _name_of(definition: Any) -> str:
    return f"{definition.__module__}.{getattr(definition, '__qualname__', '')}"
