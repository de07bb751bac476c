"""Forward passes that end at a captured head, inside of functions that call the model themselves."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

import megatron_lce
from megatron_lce.plugins.targets import origin, version_of


@contextlib.contextmanager
def called_through(call: Callable[..., Any], chunks: Sequence[nn.Module]) -> Iterator[None]:
    """While open, calling a chunk of the model is `call(chunk, its own call, ...)`, before the chunk's hooks run."""
    kinds = [type(chunk) for chunk in chunks]
    for chunk, kind in zip(chunks, kinds, strict=True):
        own = functools.partial(kind.__call__, chunk)
        chunk.__class__ = type(kind.__name__, (kind,), {"__call__": functools.partialmethod(call, own)})
    try:
        yield
    finally:
        for chunk, kind in zip(chunks, kinds, strict=True):
            chunk.__class__ = kind


def to_head(chunk: nn.Module, own: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    """Returns hidden states whose `lm_head` is the captured head, or the output of a stage without a head."""
    with megatron_lce.capture_lm_head(chunk) as head:
        output = own(*inputs, **keywords)
    if head.hidden is None:
        return output
    output = head.hidden.view_as(head.hidden)  # the head holds hidden: a cycle would keep both for the collector
    output.lm_head = head  # type: ignore[attr-defined]
    return output


def captured_if(wanted: Callable[[Mapping[str, Any]], bool], through: Callable[..., Any] = to_head) -> Any:
    """Returns what makes a function call its `model`, a chunk or a list of them, `through` a capture if `wanted`."""

    def make(own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any, **keywords: Any) -> Any:
            given = inspect.signature(own).bind(*inputs, **keywords).arguments
            chunks = [given["model"]] if isinstance(given["model"], nn.Module) else given["model"]
            with called_through(through, chunks) if wanted(given) else contextlib.nullcontext():
                return own(*inputs, **keywords)

        return run

    return make


def rows_of(head: Any) -> Tensor:
    """Numbers of a captured head's tokens, [b, s]."""
    sequence = head.hidden.shape[0] * (head.tp_group.size() if head.sequence_parallel else 1)
    count = sequence * head.hidden.shape[1]
    return torch.arange(count, dtype=torch.long, device=head.hidden.device).view(-1, sequence)


def check_calls(function: Any, *names: str) -> None:
    for name in [name for name in names if name not in function.__code__.co_names]:
        version = version_of(origin(function).partition(".")[0])
        raise RuntimeError(f"megatron_lce: {function.__name__} of {origin(function)}, {version}, does not call {name}")


def rebound(function: Any, **names: Any) -> Any:
    """The function with ours in place of some that it calls."""
    copy = FunctionType(function.__code__, {**function.__globals__, **names}, argdefs=function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
