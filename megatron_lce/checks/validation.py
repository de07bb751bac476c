"""Checks of single arguments: an error names the argument, what it must be and what it was."""

import functools
import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lce.core.eager import warn
from megatron_lce.core.options import BackendName, Options

P = ParamSpec("P")
R = TypeVar("R")
_SMALLEST, _LARGEST = 1e-37, 1e38  # fp32 also holds the reciprocal, and log2 e times the number
MAX_VOCABULARY = 2**31  # kernels hold ids in int32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_labels(labels: Tensor, vocab_size: int, ignore_index: int = -100) -> None:
    """Raise `ValueError` if any label, int64 of any shape, is neither in `[0, vocab_size)` nor `ignore_index`.

    Call it once before training: the host waits for the device. `linear_cross_entropy` makes such rows NaN instead.

    Raises:
        ValueError: with the number of such labels, and the first one and its place.
        TypeError: an argument is not as described.
    """
    check_label_tensor(labels)
    check_integer("vocab_size", vocab_size, minimum=1)
    check_integer("ignore_index", ignore_index)
    bad = ((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)
    if count := int(bad.sum()):
        position = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"labels must lie in [0, {vocab_size}) or equal ignore_index ({ignore_index}), got {count} that do not; "
            f"the first is {int(labels[position])} at {position}"
        )


def renamed(name: str, other: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take a keyword by another name as well, with a warning that says which it is."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if other in kwargs:
                if name in kwargs:
                    raise TypeError(f"{other} must not be given beside {name}, its name here")
                warn(f"{other} is called {name} here")
                kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        return call

    return decorate


def require(holds: bool, name: str, requirement: str, got: object, error: type[Exception] = ValueError) -> None:
    """Raise the error unless the requirement, such as "be int64", holds."""
    if not holds:
        raise error(f"{name} must {requirement}, got {got}")


def check_same(name: str, requirement: str, expected: object, got: object) -> None:
    """Check that two values are equal; a requirement is "be on hidden's device", say."""
    require(got == expected, name, f"{requirement}, {expected}", got)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")


def check_is_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise TypeError(
            f"{name} must be a plain tensor, got one inside a transform of torch.func (grad, vmap): take the gradient "
            "with autograd, and batch by calling with more rows"
        )


def check_tensor(name: str, value: object) -> None:
    check_is_tensor(name, value)
    if isinstance(value, DTensor):
        raise TypeError(
            f"{name} must be this rank's own torch.Tensor, got a DTensor, which linear_cross_entropy alone takes. "
            "Tensor parallel: pass its to_local() and a tp_group. FSDP: never a tp_group, its ranks have other tokens; "
            "the weight is whole inside its module's call only, as in megatron_lce.FusedLinearHead"
        )


def check_label_tensor(labels: Tensor, name: str = "labels") -> None:
    check_tensor(name, labels)
    require(labels.dtype == torch.int64, name, "be int64", labels.dtype, TypeError)


def check_no_gradient(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise ValueError(f"{name} must not require grad: it gets no gradient; got requires_grad=True")


def holds_integers(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def as_int64(labels: Tensor) -> Tensor:
    """Return labels of any integer dtype as int64; others stay unchanged, to be refused on every rank."""
    return labels.long() if holds_integers(labels) else labels


def check_head(hidden_name: str, hidden: Tensor, weight_name: str, weight: Tensor, *, fp32_weight: bool = True) -> None:
    """Check that hidden [..., H] and weight [V_local, H] fit; `fp32_weight`: weight may be fp32 with any hidden."""
    require(hidden.dtype in DTYPES, hidden_name, "be float32, bfloat16 or float16", hidden.dtype, TypeError)
    if weight.dtype != hidden.dtype and not (fp32_weight and weight.dtype == torch.float32):
        dtypes = f"{hidden.dtype}{' or torch.float32' if fp32_weight and hidden.dtype != torch.float32 else ''}"
        raise TypeError(f"{weight_name} must have {hidden_name}'s dtype, {dtypes}, got {weight.dtype}")
    check_same(weight_name, f"be on {hidden_name}'s device", hidden.device, weight.device)
    hidden_shape, weight_shape = tuple(hidden.shape), tuple(weight.shape)
    require(len(hidden_shape) > 0, hidden_name, "be [..., H]", "a scalar")
    require(len(weight_shape) == 2, weight_name, "be [V_local, H]", weight_shape)
    require(weight_shape[0] > 0, weight_name, "hold at least one row of the vocabulary", weight_shape)
    if hidden_shape[-1] != weight_shape[1]:
        raise ValueError(f"{hidden_name} and {weight_name} must agree on H, got {hidden_shape} and {weight_shape}")
    require(hidden_shape[-1] > 0, hidden_name, "have H of at least 1", hidden_shape)


def check_temperature(
    temperature: float | Tensor, shape: tuple[int, ...], device: torch.device, name: str = "temperature"
) -> None:
    """Check that the temperature is a positive number, or a floating tensor of labels' shape and device."""
    if not isinstance(temperature, Tensor):
        check_number(name, temperature, positive=True)
        return
    check_tensor(name, temperature)
    is_floating, got = temperature.is_floating_point(), f"a tensor of {temperature.dtype}"
    require(is_floating, name, "be a float or a floating tensor", got, TypeError)
    check_per_token(name, temperature, shape, device, "be a float or have labels' shape")


def check_per_token(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    requirement: str = "have labels' shape",
    *,
    further: bool = False,
) -> None:
    """Check a tensor without gradient, of labels' shape (and `further` dimensions) and device."""
    check_tensor(name, tensor)
    if tuple(tensor.shape[: len(shape)] if further else tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must {requirement}{' first' * further}, {tuple(shape)}, got {tuple(tensor.shape)}")
    check_same(name, "be on labels' device", device, tensor.device)
    check_no_gradient(name, tensor)


def check_ascending(name: str, bounds: Tensor) -> None:
    if (falls := bounds.diff() < 0).any():
        fall = int(falls.int().argmax())
        raise ValueError(f"{name} must not fall, got {int(bounds[fall + 1])} after {int(bounds[fall])}")


def check_ids_shape(name: str, ids: Tensor, shape: tuple[int, ...], of: str) -> None:
    if ids.dim() != len(shape) + 1 or tuple(ids.shape[:-1]) != tuple(shape) or ids.shape[-1] == 0:
        raise ValueError(f"{name} must be [..., K] with {of} shape, {tuple(shape)}, first, got {tuple(ids.shape)}")


def check_options(options: Options) -> None:
    """Check the keywords that do not depend on a call's tensors."""
    if options.vocab_size is not None:
        check_integer("vocab_size", options.vocab_size, minimum=1)
    if options.softcap is not None:
        check_number("softcap", options.softcap, positive=True)
    dtype = options.logits_dtype
    require(dtype in (None, torch.bfloat16), "logits_dtype", "be torch.bfloat16 or None", repr(dtype))
    if options.logits_cache_bytes is not None:
        check_integer("logits_cache_bytes", options.logits_cache_bytes, minimum=0)
    check_integer("workspace_bytes", options.workspace_bytes, minimum=0)
    check_choice("backend", options.backend, get_args(BackendName))


def check_vocab_size(vocab_size: int | None, columns: int) -> None:
    """Check that the vocabulary is no larger than the group's shards, which hold `columns` together."""
    limit, got = f"be at most the {columns} columns of all shards", f"{vocab_size}: is tp_group missing?"
    require(vocab_size is None or vocab_size <= columns, "vocab_size", limit, got)


def check_bool(name: str, value: object) -> None:
    require(isinstance(value, bool), name, "be a bool", type(value).__name__, TypeError)


def check_number(name: str, value: object, *, positive: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, got {_type_name(value)}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError(f"{name} must be a number that fp32 holds, got an int of {value.bit_length()} bits")
    if not math.isfinite(value) or (positive and value <= 0):
        raise ValueError(f"{name} must be {'positive and ' if positive else ''}finite, got {value}")
    if abs(value) > _LARGEST or (positive and value < _SMALLEST):
        raise ValueError(f"{name} must be a number that fp32 holds, got {value}")


def check_quotients(
    logits_scale: float, softcap: float | None, temperature: float | Tensor, whose: str = "", of: str = "temperature"
) -> None:
    """Check the quotients of a head's numbers, each of which is checked."""
    outer, numerator = ("logits_scale", logits_scale) if softcap is None else ("softcap", softcap)
    pairs = [] if isinstance(temperature, Tensor) else [(whose + outer, numerator, of, temperature)]
    pairs += [] if softcap is None else [(f"{whose}logits_scale", logits_scale, f"{whose}softcap", softcap)]
    for one, above, other, below in pairs:
        holds = abs(above / below) <= _LARGEST
        require(holds, f"{one} / {other}", "be a number that fp32 holds", f"{above} / {below}")


def check_fraction(name: str, value: float) -> None:
    check_number(name, value)
    require(0 <= value <= 1, name, "lie in [0, 1]", value)


def check_integer(name: str, value: object, *, minimum: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {_type_name(value)}")
    require(minimum is None or value >= minimum, name, f"be at least {minimum}", value)
    require(-(2**63) <= value < 2**63, name, "be a number that int64 holds", value)


def _type_name(value: object) -> str:
    """Return a type's name with its module: numpy's float32 and int64 are neither a float nor an int."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def describe_tensor(tensor: object) -> str:
    """Describe a tensor by its dtype, last dimension and device type, without its number of rows."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{tensor.dtype} [..., {tensor.shape[-1] if tensor.dim() else ''}] on {tensor.device.type}"


def shape_of(tensor: object) -> tuple[int, ...] | None:
    return tuple(tensor.shape) if isinstance(tensor, Tensor) else None


def num_weight_rows(weight: object) -> int | None:
    return weight.shape[0] if isinstance(weight, Tensor) and weight.dim() == 2 else None
