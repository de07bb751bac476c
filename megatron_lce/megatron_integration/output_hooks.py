"""Forward hooks on a head that need nothing of the logits' values, and so are not in the way of a fused loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from megatron_lce.megatron_integration.uncomputed_logits import UncomputedLogits

# mcore_adapter's, of ROLL and LLaMA-Factory: it makes the gradient of the logits contiguous
_KNOWN = {"mcore_adapter.models.model_utils.mca_lora_logits_postprocess_hook"}


class _OfComputedLogits:
    """A hook that is run as it was on logits, and not on what stands for logits that are not computed."""

    def __init__(self, hook: Callable) -> None:
        self.hook = hook

    def __call__(self, head: nn.Module, *arguments: Any) -> Any:
        output = arguments[-1]
        uncomputed = isinstance(output, tuple) and isinstance(output[0], UncomputedLogits)
        return None if uncomputed else self.hook(head, *arguments)


def has_unknown_hooks(head: nn.Module) -> bool:
    """Whether hooks are on this head that expect logits, or their gradient."""
    # Forward pre-hooks see the hidden only, and DDP uses them to wait for parameters: they run and are welcome.
    unknown = [hook for hook in head._forward_hooks.values() if not _is_known(hook)]
    return bool(unknown or head._backward_hooks or head._backward_pre_hooks)


def keep_hooks_off_uncomputed_logits(head: nn.Module) -> None:
    """From now on this head's known hooks, in their places, wait for logits that are computed."""
    for place, hook in head._forward_hooks.items():
        if not isinstance(hook, _OfComputedLogits):
            head._forward_hooks[place] = _OfComputedLogits(hook)


def _is_known(hook: Callable) -> bool:
    return isinstance(hook, _OfComputedLogits) or f"{hook.__module__}.{getattr(hook, '__qualname__', '')}" in _KNOWN
