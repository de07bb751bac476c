"""Replacement of a head's forward and a model's loss, and its removal: the last one opened is closed first."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_lce.megatron.heads import is_hook_of_fsdp
from megatron_lce.megatron.logits import UncomputedLogits

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import ColumnParallelLinear


_METHODS = ("forward", "compute_language_model_loss")  # of the head, of the model


class ReplacedHead:
    """Replaces an output layer's forward and a model's loss, and follows the model's forward passes.

    A subclass has methods of these two names. `forward` of LinearCrossEntropyModule, of Megatron's dev branch, also
    takes `loss_kwargs`: with `output_cross_entropy_loss` it returns the loss for the labels, reduction and ignore_index
    given there.
    """

    opened_by: str  # the public function's name
    forward: Callable
    compute_language_model_loss: Callable

    def __init__(self, language_model: LanguageModule):
        self.language_model = language_model
        self.head: ColumnParallelLinear = language_model.output_layer
        self.mtp_layers: int = language_model.config.mtp_num_layers or 0
        self.mtp_losses_left = 0  # in this pass; they precede the main loss
        self.in_pass = False  # whether the model's forward runs
        self.is_open = False
        self._handles: list[RemovableHandle] = []  # of the model's hooks
        self._modules = dict(zip(_METHODS, (self.head, language_model), strict=True))
        self._originals = {name: vars(module).get(name) for name, module in self._modules.items()}  # None: the class's

    def open(self) -> None:
        """Put both methods in place."""
        hooks, model = self.head._forward_hooks, self.language_model
        for key, hook in list(hooks.items()):
            if not is_hook_of_fsdp(hook):
                hooks[key] = functools.partial(self._on_real_logits, hook)
        self._handles = [
            model.register_forward_pre_hook(self._start_pass, with_kwargs=True),
            model.register_forward_hook(self._end_pass, always_call=True),
        ]
        for name, module in self._modules.items():
            setattr(module, name, getattr(self, name))
        self.is_open = True

    def previous_method(self, name: str) -> Callable:
        """Return what the method of this name was before."""
        module, original = self._modules[name], self._originals[name]
        return MethodType(getattr(type(module), name), module) if original is None else original

    def is_in_place(self) -> bool:
        """Whether neither another replacement nor another library's method hides one of the two."""
        return all(vars(module).get(name) == getattr(self, name) for name, module in self._modules.items())

    def close(self) -> None:
        """Restore both methods, and all hooks. A second call has no effect.

        Raises RuntimeError, and changes nothing, if one of the methods was replaced again since.
        """
        if not self.is_open:
            return
        for name, module in self._modules.items():
            now = vars(module).get(name)
            if now is not None and now != getattr(self, name):
                above = _owner_of(now)
                by = getattr(now, "__module__", "other code") if above is None else above.opened_by
                target = f"{type(module).__name__}.{name}"
                raise RuntimeError(f"{by} has replaced {target} after {self.opened_by}: undo that first")
        for name, module in self._modules.items():
            if self._originals[name] is not None:
                setattr(module, name, self._originals[name])
            elif name in vars(module):
                delattr(module, name)
        for handle in self._handles:
            handle.remove()
        hooks = self.head._forward_hooks
        for key, hook in list(hooks.items()):
            if isinstance(hook, functools.partial) and hook.func == self._on_real_logits:
                hooks[key] = hook.args[0]
        self.is_open = False

    def start_pass(self, given: dict[str, Any], takes_labels: bool) -> Tensor | None:
        """Called before the model's forward with the arguments `given`: return labels to replace its own, or None."""

    def _start_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        names = _argument_names(type(model).forward)
        self.in_pass, self.mtp_losses_left = True, self.mtp_layers
        labels = self.start_pass(dict(zip(names, args, strict=False)) | kwargs, "labels" in names)
        if labels is None:
            return None
        place = names.index("labels")
        return args[:place], dict(zip(names[place:], args[place:], strict=False)) | kwargs | {"labels": labels}

    def _end_pass(self, *_: Any) -> None:
        self.in_pass = False

    def _on_real_logits(self, hook: Callable, head: nn.Module, *arguments: Any) -> Any:
        """Run a head's forward hook, unless its output is not computed."""
        output = arguments[-1]
        uncomputed = isinstance(output, tuple) and isinstance(output[0], UncomputedLogits)
        return None if uncomputed else hook(head, *arguments)


def _owner_of(method: Any) -> ReplacedHead | None:
    owner = getattr(method, "__self__", None)
    return owner if isinstance(owner, ReplacedHead) else None


def owners_on(*modules: nn.Module) -> Iterator[ReplacedHead]:
    """Yield who replaced methods of these modules, the last one first, down to another library's replacement."""
    for module, name in itertools.product(modules, _METHODS):
        owner = _owner_of(vars(module).get(name))
        while owner is not None:
            yield owner
            owner = _owner_of(owner._originals[name])


def close_all(modules: Sequence[nn.Module], kind: type[ReplacedHead]) -> None:
    """Close replacements of this kind whose model is among these modules."""
    for owner in list(owners_on(*modules)):
        if isinstance(owner, kind) and any(owner.language_model is module for module in modules):
            owner.close()


@functools.cache
def _argument_names(method: Callable) -> list[str]:
    return list(inspect.signature(method).parameters)[1:]  # without self
