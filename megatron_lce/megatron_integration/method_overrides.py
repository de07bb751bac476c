"""Methods of one module replaced on the instance, for as long as somebody wants them replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from torch import nn


class MethodOverride:
    """One method of one module, replaced until `close`. Several of the same method close in any order.

    The last one opened that is still open answers. A closed one that others were put on top of stays in their chain
    and passes calls on to what it found, so that whoever puts it back puts back what is under it.
    """

    def __init__(self, module: nn.Module, name: str, method: Callable):
        self.module, self.name, self.method, self.is_open = module, name, method, True
        self._before: Callable | None = vars(module).get(name)  # None: the class's
        setattr(module, name, self.call)

    @property
    def owner(self) -> object:
        """The capture or fused loss that the method is of."""
        return getattr(self.method, "__self__", None)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return (self.method if self.is_open else self.below())(*args, **kwargs)

    def below(self) -> Callable:
        """What the method was before."""
        return MethodType(getattr(type(self.module), self.name), self.module) if self._before is None else self._before

    def close(self) -> None:
        self.is_open = False
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
