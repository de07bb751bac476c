"""What a call runs under: outside compiled graphs, each call one break of the graph; without autocast, and traced.

Its warnings point at the line of a user's that led to them.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import record_function

P = ParamSpec("P")
R = TypeVar("R")
_NO_RANGE = contextlib.nullcontext()
_OURS = ("megatron_lce.", "torch.", "megatron.core.", "contextlib.")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs as it is inside a compiled caller; under fullgraph=True it raises."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        from megatron_lce.core.uncompiled import uncompiled  # which imports the compiler, a second of work

        return uncompiled(function, *args, **kwargs)

    return call


def trace_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a profiler range if a profiler is on: without one, `record_function` costs up to 18 us on the host.

    Profilers that are turned on from outside the process do not see it.
    """
    # torch sets this flag under `emit_nvtx`, too, and on autograd's threads. Without it, ranges are always recorded.
    profiling = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    return record_function(f"megatron_lce: {name}") if profiling else _NO_RANGE


@contextlib.contextmanager
def without_autocast(device: torch.device, name: str) -> Iterator[None]:
    """Context with autocast off, traced under this name."""
    autocast = torch.is_autocast_enabled(device.type)
    without = torch.autocast(device.type, enabled=False) if autocast else contextlib.nullcontext()
    with without, trace_range(name):
        yield


@eager
def warn(message: str) -> None:
    """Warn at the last line before this package, torch and megatron-core, through which a model calls its head."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
