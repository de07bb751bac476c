"""What the calls of `megatron_lce.compat` check, compare between ranks and make of losses."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.core import validation
from megatron_lce.core.agreement import agreed

Reduction = Literal["none", "sum", "mean"]
_Checked = TypeVar("_Checked")


def reduce_loss(loss: Tensor, counted: Tensor, reduction: Reduction) -> Tensor:
    """The loss per token, its sum, or its mean over the rows that are counted (NaN where none is)."""
    check_reduction(reduction)
    return over_counted_rows(loss, counted, reduction)


def over_counted_rows(loss: Tensor, counted: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / counted.sum()


def over_all_rows(value: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return value
    return value.sum() if reduction == "sum" else value.mean()


def agreed_call(
    group: ProcessGroup | None,
    group_name: str,
    check: Callable[[int], _Checked],
    describe: Callable[[], dict[str, Any]],
    weight: Tensor,
) -> _Checked:
    """`core.agreement.agreed`: the operation's own, which follows, knows the arguments by other names or not at all."""
    # What torch.compile traces cannot ask the other ranks.
    exchange = not torch.compiler.is_compiling()
    return agreed(group, check, describe, weight, group_name=group_name, exchange=exchange)[0]


def describe_head(skip_ignored: bool | int, **head: Tensor) -> dict[str, Any]:
    """What a call is known by. `head`: hidden, weight and labels, under the names that the call has for them."""
    (hidden_name, hidden), (weight_name, weight), (labels_name, labels) = head.items()
    return {
        hidden_name: validation.kind_of(hidden),
        weight_name: validation.kind_of(weight),
        f"rows of {weight_name}": validation.rows_of(weight),
        labels_name: getattr(labels, "dtype", type(labels)),
        "gradients": (torch.is_grad_enabled(), *(getattr(x, "requires_grad", None) for x in (hidden, weight))),
        "skip_ignored": validation.kind_of_skipping(skip_ignored),
    }


def checked_labels(
    hidden: Tensor, weight: Tensor, labels: Tensor, skip_ignored: bool | int, sequence_shards: int
) -> Tensor:
    """Labels as int64 of the shape of hidden's rows, on all of `sequence_shards` ranks."""
    for name, tensor in (("hidden", hidden), ("weight", weight), ("labels", labels)):
        validation.check_is_tensor(name, tensor)
    validation.check_head("hidden", hidden, "weight", weight)
    rows = validation.labels_shape("hidden", hidden, sequence_shards)
    _check_order(rows, labels)
    labels = validation.as_int64(labels.reshape(rows))
    validation.check_labels_of("hidden", hidden, labels, sequence_shards)
    validation.check_skip_ignored(skip_ignored, labels.numel())
    return labels


def refuse_unsupported(linear_bias: object, options: object) -> None:
    if linear_bias is not None:
        raise NotImplementedError("linear_bias must be None: the fused head has no bias, as Megatron's has none")
    if options is not None:
        raise NotImplementedError(
            "options must be None: chunks of the batch are not what this head is cut into; "
            "megatron_lce.linear_cross_entropy has workspace_bytes"
        )


def check_torchs_head(input: Tensor, linear_weight: Tensor, target: Tensor, skip_ignored: bool | int) -> None:
    for name, tensor in (("input", input), ("linear_weight", linear_weight), ("target", target)):
        validation.check_is_tensor(name, tensor)
    if linear_weight.dim() > 2:
        raise NotImplementedError(
            "linear_weight must be [V, H]: losses over further dimensions of classes are not supported, "
            f"got {tuple(linear_weight.shape)}"
        )
    if target.is_floating_point():
        raise NotImplementedError(f"target must be class ids: probabilities are not supported, got {target.dtype}")
    validation.check_head("input", input, "linear_weight", linear_weight)
    validation.check_labels_of("input", input, target, 1, "target")
    validation.check_skip_ignored(skip_ignored, target.numel())


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


def _check_order(shape: Sequence[int], labels: Tensor) -> None:
    """Refuse labels [b, s] beside a hidden of [s, b, H]: flattened, they would meet in the wrong order."""
    rows, ids = ([size for size in sizes if size != 1] for sizes in (shape, labels.shape))
    if labels.numel() != math.prod(shape) or (len(rows) > 1 and len(ids) > 1 and rows != ids):
        raise ValueError(f"labels must have hidden's order of rows, {tuple(shape)}, got {tuple(labels.shape)}")
