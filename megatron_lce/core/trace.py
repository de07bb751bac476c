"""Ranges in a profiler's trace."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.profiler import record_function

_NO_RANGE = contextlib.nullcontext()


def trace_range(name: str) -> AbstractContextManager[Any]:
    """Return a range of that name if a profiler is on: `record_function` costs a slow host 18 us even without one.

    A daemon, which turns its profiler on from outside, does not see the range.
    """
    # torch's own flag, also set under `emit_nvtx` and on autograd's threads. If torch lacks it, ranges are always made.
    profiling = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    return record_function(f"megatron_lce: {name}") if profiling else _NO_RANGE
