"""Classes of output layers that can be fused beside megatron-core's own, and what each does to hidden @ weight.T."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_lce.checks.validation import check_number

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import ColumnParallelLinear

_PRODUCT = ("forward", "_forward_impl")  # the methods that decide what a ColumnParallelLinear returns
# From a head to the softcap and the dtype of its logits; None: not changed.
_Form = Callable[[Any], tuple[float | None, torch.dtype | None]]


def _gemma(head: Any) -> tuple[float | None, None]:
    return head.config.final_logit_softcapping, None


_accepted: dict[object, _Form] = {}
_KNOWN: dict[str, _Form] = {
    # Megatron-LM's dev branch: the plain head, or the loss at once
    "megatron.core.transformer.linear_cross_entropy.LinearCrossEntropyModule": lambda head: (None, None),
    # Megatron-Bridge
    "megatron.bridge.models.gemma.gemma2_provider.Gemma2OutputLayer": _gemma,
    "megatron.bridge.models.gemma.modeling_gemma4.Gemma4OutputLayer": _gemma,
    # AReaL: its head, and the function it puts in place of _forward_impl
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

    The logits of such a head must be `hidden @ weight.T`, softcapped or not, and nothing else: the head's own code is
    not run where the loss is fused. Accepted without this call: Megatron's LinearCrossEntropyModule (dev),
    Megatron-Bridge's Gemma output layers and AReaL's heads.

    Args:
        head: a subclass of megatron-core's ColumnParallelLinear that has its own `forward` or `_forward_impl`, a mixin
            put in front of one, or a function that is set as a head's `_forward_impl`. Subclasses that override neither
            are accepted with it.
        softcap: c where the logits are `c * tanh(hidden @ weight.T / c)`: a positive float, or a function of the head
            that gives it; None or 0: there is no cap.
        logits_dtype: dtype of the logits that the head returns, or a function of the head that gives it; `None`:
            hidden's. The fused loss is computed in fp32 from hidden and weight whatever this is; it is the dtype that
            uncomputed logits report.

    Raises:
        TypeError: `head` is neither a class nor a function, or `softcap` neither a number nor one.
        ValueError: a class has neither method of its own, so that there is nothing to accept; or `softcap` is negative.
    """
    if not isinstance(head, type):
        if not callable(head) or isinstance(head, nn.Module):
            raise TypeError(f"head must be a class or a function, got {type(head).__name__}")
    elif not _overrides(head):
        raise ValueError(f"head must have a forward or _forward_impl of its own, {head.__name__} has neither")
    if softcap is not None and not callable(softcap) and softcap != 0:
        check_number("softcap", softcap, positive=True)
    _accepted[head] = lambda own: (
        softcap(own) if callable(softcap) else softcap,
        logits_dtype(own) if callable(logits_dtype) else logits_dtype,
    )


def unknown_head_reasons(head: nn.Module) -> Iterator[str]:
    """Yield why the logits of a head of this class are not known; nothing when all its parts are."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    kind = type(head).__name__
    if not isinstance(head, ColumnParallelLinear):
        yield f"output_layer is a {kind}, which is no ColumnParallelLinear of megatron-core"
        return
    for part in _own_parts(head):
        if _form_of_part(part) is not None:
            continue
        if isinstance(part, type):
            methods = " and ".join(_overrides(part))
            whose = "its own" if part.__name__ == kind else f"{part.__name__}'s"
            yield f"output_layer is a {kind} with {whose} {methods}, which megatron_lce.accept_head was not told of"
        else:
            yield "output_layer's _forward_impl was replaced"
    if len(_softcaps(head)) > 1:
        yield f"output_layer is a {kind} with several softcaps"


def softcap_of(head: ColumnParallelLinear) -> float | None:
    """Return the softcap of a head that `unknown_head_reasons` has nothing against."""
    return next(iter(_softcaps(head)), None)


def logits_dtype_of(head: ColumnParallelLinear) -> torch.dtype | None:
    """Return the dtype of such a head's logits; None: hidden's."""
    own = getattr(head, "output_dtype", None)  # of ColumnParallelLinear, from 0.20
    return next((dtype for _, dtype in (*_forms(head), (None, own)) if dtype is not None), None)


def check_softcap(head: ColumnParallelLinear, softcap: float | None) -> None:
    """Raise ValueError where the caller gives a softcap and the head has its own."""
    own = softcap_of(head)
    if softcap is not None and own is not None:
        raise ValueError(f"softcap must not be given: the head has its own, {own}; got {softcap}")


def _overrides(cls: type) -> list[str]:
    return [method for method in _PRODUCT if method in vars(cls)]


def _own_parts(head: nn.Module) -> list[type | Callable]:
    """Return the classes before ColumnParallelLinear that change the product, and the instance's own function."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    order = type(head).__mro__
    parts: list[type | Callable] = [cls for cls in order[: order.index(ColumnParallelLinear)] if _overrides(cls)]
    if "_forward_impl" in vars(head):
        parts.append(head._forward_impl)  # type: ignore[arg-type]
    return parts


def _form_of_part(part: type | Callable) -> _Form | None:
    part = getattr(part, "__func__", part)
    name = f"{part.__module__}.{getattr(part, '__qualname__', '')}"
    return _accepted.get(part) or _KNOWN.get(name)


def _forms(head: nn.Module) -> list[tuple[float | None, torch.dtype | None]]:
    return [form(head) for part in _own_parts(head) if (form := _form_of_part(part)) is not None]


def _softcaps(head: nn.Module) -> list[float]:
    return [softcap for softcap, _ in _forms(head) if softcap]
