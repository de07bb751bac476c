"""What torch.compile must not trace: a call of an operation is one break of the graph."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs as it is inside a compiled caller; under fullgraph=True it raises."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        from megatron_lce.core.uncompiled import uncompiled  # which imports the compiler, a second of work

        return uncompiled(function, *args, **kwargs)

    return call
