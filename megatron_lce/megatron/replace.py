"""Replacement of a head's forward and a model's loss, and its removal."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron_lce.core.eager import eager
from megatron_lce.megatron.heads import is_hook_of_fsdp
from megatron_lce.megatron.logits import UncomputedLogits

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import ColumnParallelLinear

_METHODS = ("forward", "compute_language_model_loss")  # of the head, of the model


class MethodOverride:
    """One method of one module, answered by the last owner's method of the same name.

    Owners come and go in any order; without one the module has what it had before. If another library has replaced the
    method since, this stays underneath and passes calls on, so that the other library can still undo its replacement.
    """

    def __init__(self, module: nn.Module, name: str):
        self.module, self.name = module, name
        self.owners: list[object] = []  # captures and fused losses
        self._before: Callable | None = vars(module).get(name)  # None: the class's
        setattr(module, name, self.call)

    @eager
    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._of(self.owners)(*args, **kwargs)

    def below(self, owner: object) -> Callable:
        """Return what the method was before this owner came."""
        return self._of(self.owners[: self.owners.index(owner)])

    def is_answered_by(self, owner: object) -> bool:
        """Whether neither another owner nor another library's method hides this owner's."""
        return override_of(self.module, self.name) is self and self.owners[-1] is owner

    def close(self, owner: object) -> None:
        if owner in self.owners:
            self.owners.remove(owner)
        if self.owners or override_of(self.module, self.name) is not self:
            return
        if self._before is None:
            delattr(self.module, self.name)
        else:
            setattr(self.module, self.name, self._before)

    def _of(self, owners: list[object]) -> Callable:
        if owners:
            return getattr(owners[-1], self.name)
        return MethodType(getattr(type(self.module), self.name), self.module) if self._before is None else self._before


def override_of(module: nn.Module, name: str) -> MethodOverride | None:
    """Return the override in place, unless another library's method hides it."""
    override = getattr(vars(module).get(name), "__self__", None)
    return override if isinstance(override, MethodOverride) else None


def open_override(module: nn.Module, name: str, owner: object) -> MethodOverride:
    """Let this owner answer until it is closed."""
    override = override_of(module, name)
    if override is None or override.module is not module:  # a shallow copy's attribute is a copy of the original's
        override = MethodOverride(module, name)
    override.owners.append(owner)
    return override


class ReplacedHead:
    """Replaces an output layer's forward and a model's loss, and follows the model's forward passes.

    A subclass has methods of these two names. `forward` of LinearCrossEntropyModule, of Megatron's dev branch, also
    takes `of_loss`: with `output_cross_entropy_loss` it returns the loss for the labels, reduction and ignore_index
    given there.
    """

    def __init__(self, language_model: LanguageModule):
        self.language_model = language_model
        self.head: ColumnParallelLinear = language_model.output_layer
        self.mtp_layers: int = language_model.config.mtp_num_layers or 0
        self.mtp_losses_left = 0  # in this pass; they precede the main loss
        self.in_pass: nn.Module | None = None  # the model whose forward runs; a shallow copy has the original's hooks
        for place, hook in self.head._forward_hooks.items():
            if getattr(hook, "func", None) is not _on_logits and not is_hook_of_fsdp(hook):
                self.head._forward_hooks[place] = functools.partial(_on_logits, hook)
        self._hooks = (
            language_model.register_forward_pre_hook(self._start_pass, with_kwargs=True),
            language_model.register_forward_hook(self._end_pass, always_call=True),
        )
        modules = (self.head, language_model)
        self.overrides = [open_override(module, name, self) for module, name in zip(modules, _METHODS, strict=True)]

    def close(self) -> None:
        for override in self.overrides:
            override.close(self)
        for hook in self._hooks:
            hook.remove()

    def start_pass(self, given: dict[str, Any], takes_labels: bool) -> Tensor | None:
        """Called before the model's forward with the arguments `given`: return labels to replace its own, or None."""

    def _start_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        names = _argument_names(type(model).forward)
        self.in_pass, self.mtp_losses_left = model, self.mtp_layers
        labels = self.start_pass(dict(zip(names, args, strict=False)) | kwargs, "labels" in names)
        if labels is None:
            return None
        place = names.index("labels")
        return args[:place], dict(zip(names[place:], args[place:], strict=False)) | kwargs | {"labels": labels}

    def _end_pass(self, *_: Any) -> None:
        self.in_pass = None


def _on_logits(hook: Callable, head: nn.Module, *arguments: Any) -> Any:
    """Run a head's forward hook, on real logits only."""
    output = arguments[-1]
    uncomputed = isinstance(output, tuple) and isinstance(output[0], UncomputedLogits)
    return None if uncomputed else hook(head, *arguments)


def has_open(modules: Sequence[nn.Module], kind: type[ReplacedHead]) -> bool:
    """Whether a replacement of this kind is open on any of these modules."""
    overrides = (override_of(module, name) for module, name in itertools.product(modules, _METHODS))
    return any(isinstance(owner, kind) for override in overrides if override is not None for owner in override.owners)


def close_all(modules: Sequence[nn.Module], kind: type[ReplacedHead]) -> None:
    """Close replacements of this kind whose model is among these modules."""
    for module, name in itertools.product(modules, _METHODS):
        override = override_of(module, name)
        if override is not None and override.module is not module:  # a shallow copy's attribute is the original's
            delattr(module, name)
        elif override is not None:
            for owner in list(override.owners):
                if isinstance(owner, kind) and any(owner.language_model is one for one in modules):
                    owner.close()


@functools.cache
def _argument_names(method: Callable) -> list[str]:
    return list(inspect.signature(method).parameters)[1:]  # without self
