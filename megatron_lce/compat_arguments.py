"""What the calls of `megatron_lce.compat` check, and make of losses."""

import math
from typing import Literal

from torch import Tensor

from megatron_lce.core import validation

Reduction = Literal["none", "sum", "mean"]


def reduced(values: Tensor, reduction: Reduction, counted: Tensor | None = None) -> Tensor:
    """The values, their sum, or their mean over all, or over what each row counts if given (NaN where none does)."""
    if reduction == "mean":
        return values.mean() if counted is None else values.sum() / counted.sum()
    return values if reduction == "none" else values.sum()


def checked_labels(labels: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Labels as int64 of the shape of hidden's rows, on all sequence-parallel ranks."""
    validation.check_is_tensor("labels", labels)
    # Labels [b, s] beside a hidden of [s, b, H] would meet in the wrong order, flattened.
    order, ids = ([size for size in sizes if size != 1] for sizes in (rows, labels.shape))
    if labels.numel() != math.prod(rows) or (len(order) > 1 and len(ids) > 1 and order != ids):
        raise ValueError(f"labels must have hidden's order of rows, {rows}, got {tuple(labels.shape)}")
    labels = validation.as_int64(labels.reshape(rows))
    validation.check_label_tensor(labels)
    return labels


def check_supported(
    linear_weight: object, target: object, linear_bias: object, options: object, weight_and_smoothing: bool
) -> None:
    """Refuse what torch's function has and this package has not."""
    if linear_bias is not None:
        raise NotImplementedError("linear_bias must be None: the fused head has no bias, as Megatron's has none")
    if options is not None:
        raise NotImplementedError(
            "options must be None: chunks of the batch are not what this head is cut into; "
            "megatron_lce.linear_cross_entropy has workspace_bytes"
        )
    if weight_and_smoothing:
        raise NotImplementedError("weight must be None where label_smoothing is not 0, got both")
    if isinstance(linear_weight, Tensor) and linear_weight.dim() > 2:
        raise NotImplementedError(
            "linear_weight must be [V, H]: losses over further dimensions of classes are not supported, "
            f"got {tuple(linear_weight.shape)}"
        )
    if isinstance(target, Tensor) and target.is_floating_point():
        raise NotImplementedError(f"target must be class ids: probabilities are not supported, got {target.dtype}")


def check_classes(weight: Tensor | None, label_smoothing: float, num_classes: int, input: Tensor) -> None:
    validation.check_number("label_smoothing", label_smoothing)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {label_smoothing}")
    if weight is None:
        return
    validation.check_tensor("weight", weight)
    if weight.shape != (num_classes,) or not weight.is_floating_point() or weight.device != input.device:
        raise ValueError(
            f"weight must be floating [{num_classes}] on {input.device}, a factor for each class, "
            f"got {weight.dtype} {tuple(weight.shape)} on {weight.device}"
        )
    if weight.requires_grad:
        raise ValueError("weight must not require grad: it gets no gradient; got requires_grad=True")


def check_reduction(reduction: str) -> None:
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
