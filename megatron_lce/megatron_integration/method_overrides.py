"""Methods of one module replaced on the instance, for as long as somebody wants them replaced; and its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn


@functools.cache
def uncompiled() -> Callable:
    """`uncompiled()(f, ...)` is f(...) outside torch.compile; made when wanted, as it imports the compiler."""
    return torch.compiler.disable(_call)


def _call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class MethodOverride:
    """One method of one module, which the last of its owners answers by their own method of that name.

    Owners come and go in any order; without one the module has what it had before. Where another library's method is on
    top by then, this stays under it and passes calls on, so that whoever puts it back puts back what is under it.
    """

    def __init__(self, module: nn.Module, name: str):
        self.module, self.name = module, name
        self.owners: list[object] = []  # captures and fused losses
        self._before: Callable | None = vars(module).get(name)  # None: the class's
        self._uncompiled = uncompiled()
        setattr(module, name, self.call)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._uncompiled(self._of(self.owners), *args, **kwargs)

    def below(self, owner: object) -> Callable:
        """What the method was before this owner came."""
        return self._of(self.owners[: self.owners.index(owner)])

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
    """The one in place, unless another library's method hides it."""
    override = getattr(vars(module).get(name), "__self__", None)
    return override if isinstance(override, MethodOverride) else None


def open_override(module: nn.Module, name: str, owner: object) -> MethodOverride:
    """From now on this owner answers, until it is closed."""
    override = override_of(module, name)
    if override is None or override.module is not module:  # a shallow copy's attribute is a copy of the original's
        override = MethodOverride(module, name)
    override.owners.append(owner)
    return override


@functools.cache
def argument_names(method: Callable) -> list[str]:
    """The names of what a class's method takes beside self."""
    return list(inspect.signature(method).parameters)[1:]


def with_labels(names: list[str], args: tuple, kwargs: dict[str, Any], labels: Any) -> tuple[tuple, dict[str, Any]]:
    """A forward's arguments, by position and by name, with these labels."""
    place = names.index("labels")
    if place < len(args):
        return (*args[:place], labels, *args[place + 1 :]), kwargs
    return args, kwargs | {"labels": labels}
