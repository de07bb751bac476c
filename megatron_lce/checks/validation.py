"""Checks of single arguments: an error names the argument, what it must be and what it was."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lce.core.eager import eager, warn
from megatron_lce.core.lm_head import LMHead
from megatron_lce.core.options import BackendName, Options

P = ParamSpec("P")
R = TypeVar("R")
_SMALLEST, _LARGEST = 1e-37, 1e38  # fp32 also holds the reciprocal, and log2 e times the number
MAX_VOCABULARY = 2**31  # kernels hold ids in int32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What operations call the arguments of a head, and the group; some call them otherwise.
NAMES = {name: name for name in ("hidden", "weight", "labels", "temperature", "logits_scale", "softcap", "tp_group")}
_DEFAULTS = Options()
_BOOLS = ("sequence_parallel", "entropy", "reduce_grad_hidden")  # options
_MINIMA = {"ignore_index": None, "vocab_start": 0, "vocab_size": 1, "logits_cache_bytes": 0, "workspace_bytes": 0}


def check_labels(labels: Tensor, vocab_size: int, ignore_index: int = -100) -> None:
    """Raise `ValueError` if any label, int64 of any shape, is neither in `[0, vocab_size)` nor `ignore_index`.

    Call it once before training: the host waits for the device. `linear_cross_entropy` makes such rows NaN instead.

    Raises:
        ValueError: with the number of such labels, and the first one and its place.
        TypeError: an argument is not as described.
    """
    check_tensor("labels", labels, torch.int64)
    check_scalar("vocab_size", vocab_size, int, least=1)
    check_scalar("ignore_index", ignore_index, int)
    bad = ((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)
    if count := int(bad.sum()):
        position = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"labels must lie in [0, {vocab_size}) or equal ignore_index ({ignore_index}), got {count} that do not; "
            f"the first is {int(labels[position])} at {position}"
        )


def renamed(name: str, other: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return an `eager` function that takes a keyword by another name as well, with a warning that says which it is."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        uncompiled = eager(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if other in kwargs:
                if name in kwargs:
                    raise TypeError(f"{other} must not be given beside {name}, its name here")
                warn(f"{other} is called {name} here")
                kwargs[name] = kwargs.pop(other)
            return uncompiled(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

        return call

    return decorate


def require(holds: bool, name: str, requirement: str, got: object, error: type[Exception] = ValueError) -> None:
    """Raise the error unless the requirement, such as "be int64", holds."""
    if not holds:
        raise error(f"{name} must {requirement}, got {got}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")


def check_tensor(name: str, value: object, dtype: torch.dtype | None = None) -> None:
    """Check a tensor of this rank's own; None: of any dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise TypeError(
            f"{name} must be a plain tensor, got one inside a transform of torch.func (grad, vmap): take the gradient "
            "with autograd, and batch by calling with more rows"
        )
    if isinstance(value, DTensor):
        raise TypeError(
            f"{name} must be this rank's own torch.Tensor, got a DTensor, which linear_cross_entropy alone takes. "
            "Tensor parallel: pass its to_local() and a tp_group. FSDP: never a tp_group, its ranks have other tokens; "
            "the weight is whole inside its module's call only, as in megatron_lce.FusedLinearHead"
        )
    if dtype is not None and value.dtype != dtype:
        raise TypeError(f"{name} must be {str(dtype).removeprefix('torch.')}, got {value.dtype}")


def holds_integers(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def as_int64(labels: Tensor) -> Tensor:
    """Return labels of any integer dtype as int64; others stay unchanged, to be refused on every rank."""
    return labels.long() if holds_integers(labels) else labels


def check_head(
    hidden: Tensor, weight: Tensor, names: Mapping[str, str] = NAMES, shards: int = 1, *, fp32_weight: bool = True
) -> tuple[int, ...]:
    """Check that hidden [..., H] and weight [V_local, H] fit, and return the shape that labels must have.

    shards: the number of sequence-parallel ranks; fp32_weight: weight may be fp32 with any hidden.
    """
    hidden_name, weight_name = names["hidden"], names["weight"]
    check_tensor(hidden_name, hidden)
    check_tensor(weight_name, weight)
    require(hidden.dtype in DTYPES, hidden_name, "be float32, bfloat16 or float16", hidden.dtype, TypeError)
    if weight.dtype != hidden.dtype and not (fp32_weight and weight.dtype == torch.float32):
        dtypes = f"{hidden.dtype}{' or torch.float32' if fp32_weight and hidden.dtype != torch.float32 else ''}"
        raise TypeError(f"{weight_name} must have {hidden_name}'s dtype, {dtypes}, got {weight.dtype}")
    if weight.device != hidden.device:
        raise ValueError(f"{weight_name} must be on {hidden_name}'s device, {hidden.device}, got {weight.device}")
    hidden_shape, weight_shape = tuple(hidden.shape), tuple(weight.shape)
    require(len(hidden_shape) > 0, hidden_name, "be [..., H]", "a scalar")
    require(len(weight_shape) == 2, weight_name, "be [V_local, H]", weight_shape)
    require(weight_shape[0] > 0, weight_name, "hold at least one row of the vocabulary", weight_shape)
    if hidden_shape[-1] != weight_shape[1]:
        raise ValueError(f"{hidden_name} and {weight_name} must agree on H, got {hidden_shape} and {weight_shape}")
    require(hidden_shape[-1] > 0, hidden_name, "have H of at least 1", hidden_shape)
    if shards == 1:
        return hidden_shape[:-1]
    require(len(hidden_shape) > 1, hidden_name, "be [s/tp, ..., H] under sequence_parallel", "one dimension")
    return hidden_shape[0] * shards, *hidden_shape[1:-1]


def check_logits(head: LMHead, shape: tuple[int, ...], names: Mapping[str, str] = NAMES) -> None:
    """Check what makes a head's logits of its products, and the quotients; `shape`: labels'."""
    temperature, name = head.temperature, names["temperature"]
    if not isinstance(temperature, Tensor):
        check_scalar(name, temperature, positive=True)
    else:
        is_floating, got = temperature.is_floating_point(), f"a tensor of {temperature.dtype}"
        require(is_floating, name, "be a float or a floating tensor", got, TypeError)
        check_per_token(name, temperature, shape, head.hidden.device, "be a float or have labels' shape")
    check_scalar(names["logits_scale"], head.logits_scale)
    check_scalar(names["softcap"], head.softcap, positive=True, optional=True)
    outer = "logits_scale" if head.softcap is None else "softcap"
    for above, below in ((outer, "temperature"), ("logits_scale", "softcap")):
        number, divisor = getattr(head, above), getattr(head, below)
        if isinstance(divisor, int | float) and abs(number / divisor) > _LARGEST:
            quotient = f"{names[above]} / {names[below]}"
            raise ValueError(f"{quotient} must be a number that fp32 holds, got {number} / {divisor}")


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
    require(tensor.device == device, name, f"be on labels' device, {device}", tensor.device)
    check_no_gradient(name, tensor)


def check_no_gradient(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise ValueError(f"{name} must not require grad: it gets no gradient; got requires_grad=True")


def check_ascending(name: str, bounds: Tensor) -> None:
    if (falls := bounds.diff() < 0).any():
        fall = int(falls.int().argmax())
        raise ValueError(f"{name} must not fall, got {int(bounds[fall + 1])} after {int(bounds[fall])}")


def check_ids_shape(name: str, ids: Tensor, shape: tuple[int, ...], of: str) -> None:
    if ids.dim() != len(shape) + 1 or tuple(ids.shape[:-1]) != tuple(shape) or ids.shape[-1] == 0:
        raise ValueError(f"{name} must be [..., K] with {of} shape, {tuple(shape)}, first, got {tuple(ids.shape)}")


def check_options(options: Options) -> None:
    """Check the keywords that do not depend on a call's tensors, but for those of `check_logits`."""
    for name in _BOOLS:
        check_scalar(name, getattr(options, name), bool)
    for name, least in _MINIMA.items():
        check_scalar(name, getattr(options, name), int, least, optional=getattr(_DEFAULTS, name) is None)
    telemetry, wanted = options.telemetry, 'be a bool or "mean_logit"'
    require(isinstance(telemetry, bool | str), "telemetry", wanted, type(telemetry).__name__, TypeError)
    require(isinstance(telemetry, bool) or telemetry == "mean_logit", "telemetry", wanted, repr(telemetry))
    dtype = options.logits_dtype
    require(dtype in (None, torch.bfloat16), "logits_dtype", "be torch.bfloat16 or None", repr(dtype))
    is_known = options.backend in get_args(BackendName)
    require(is_known, "backend", "be 'auto', 'triton' or 'torch'", repr(options.backend))


def check_vocab_size(vocab_size: int | None, columns: int) -> None:
    """Check that the vocabulary is no larger than the group's shards, which hold `columns` together."""
    limit, got = f"be at most the {columns} columns of all shards", f"{vocab_size}: is tp_group missing?"
    require(vocab_size is None or vocab_size <= columns, "vocab_size", limit, got)


def check_scalar(
    name: str, value: Any, kind: type = float, least: int | None = None, positive: bool = False, optional: bool = False
) -> None:
    """Check a number that fp32 holds, an int that int64 holds, or a bool; `optional`: or None."""
    if optional and value is None:
        return
    types: Any = (int, float) if kind is float else kind
    if not isinstance(value, types) or isinstance(value, bool) != (kind is bool):
        raise TypeError(f"{name} must be {'an' if kind is int else 'a'} {kind.__name__}, got {_type_name(value)}")
    if kind is int:
        require(least is None or value >= least, name, f"be at least {least}", value)
        require(-(2**63) <= value < 2**63, name, "be a number that int64 holds", value)
    elif kind is float:
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"{name} must be a number that fp32 holds, got an int of {value.bit_length()} bits")
        if not math.isfinite(value) or (positive and value <= 0):
            raise ValueError(f"{name} must be {'positive and ' * positive}finite, got {value}")
        is_held = (_SMALLEST if positive else -_LARGEST) <= value <= _LARGEST
        require(is_held, name, "be a number that fp32 holds", value)


def check_fraction(name: str, value: float) -> None:
    check_scalar(name, value)
    require(0 <= value <= 1, name, "lie in [0, 1]", value)


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
