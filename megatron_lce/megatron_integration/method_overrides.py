"""Methods of one module replaced on the instance, for as long as somebody wants them replaced; and its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
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
    """One method of one module, replaced until `close`. Several of the same method close in any order.

    The last one opened that is still open answers. A closed one that others were put on top of stays in their chain
    and passes calls on to what it found, so that whoever puts it back puts back what is under it.
    """

    def __init__(self, module: nn.Module, name: str, method: Callable):
        self.module, self.name = module, name
        self.method: Callable | None = method  # None once closed: its owner and what that captured must not stay
        self._before: Callable | None = vars(module).get(name)  # None: the class's
        self._uncompiled = uncompiled()
        setattr(module, name, self.call)

    @property
    def is_open(self) -> bool:
        return self.method is not None

    @property
    def owner(self) -> object:
        """The capture or fused loss that the method is of."""
        return getattr(self.method, "__self__", None)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._uncompiled(self.method or self.below(), *args, **kwargs)

    def below(self) -> Callable:
        """What the method was before."""
        return MethodType(getattr(type(self.module), self.name), self.module) if self._before is None else self._before

    def close(self) -> None:
        self.method = None
        while (top := _override(vars(self.module).get(self.name))) is not None and not top.is_open:
            if top._before is None:
                delattr(self.module, self.name)
            else:
                setattr(self.module, self.name, top._before)


def overrides_of(module: nn.Module, name: str) -> Iterator[MethodOverride]:
    """Those in place, the last one first, as far down as no other library's replacement hides them."""
    override = _override(vars(module).get(name))
    while override is not None:
        yield override
        override = _override(override._before)


def _override(method: Callable | None) -> MethodOverride | None:
    owner = getattr(method, "__self__", None)
    return owner if isinstance(owner, MethodOverride) else None


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
