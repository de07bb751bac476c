"""Ranges in a profiler's trace."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.profiler import record_function

_NO_RANGE = contextlib.nullcontext()


def trace_range(name: str) -> AbstractContextManager[Any]:
    """A range of that name where a profiler is on: `record_function` takes a slow host 18 us also where none is.

    As torch's own ranges of this kind it is not in the trace of a daemon, which turns its profiler on from outside.
    """
    # Also within `emit_nvtx`, and on autograd's threads. torch's own flag: were it gone, ranges are made always.
    profiling = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    return record_function(f"megatron_lce: {name}") if profiling else _NO_RANGE
