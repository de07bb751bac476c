"""The graph break of `eager`. Importing it imports torch's compiler."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


@torch.compiler.disable(reason="megatron_lce runs outside compiled graphs: call torch.compile without fullgraph=True")
def uncompiled(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    return function(*args, **kwargs)
