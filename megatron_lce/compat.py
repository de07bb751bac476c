"""The calls of other projects, so that a changed import is enough to use this package.

Each function replaces the one it is named after: `verl_`, `areal_` and `torch_linear_cross_entropy`. They share these
arguments; errors are those of `megatron_lce.linear_cross_entropy`.

hidden        [..., H], fp32, bf16 or fp16
weight        [V_local, H] of hidden's dtype, this rank's rows of the vocabulary; all shards equal
labels        global vocabulary ids of any integer dtype, in hidden's order; negative: ignored rows
skip_ignored  by name only, as in `megatron_lce.linear_cross_entropy`
"""

import math
import re
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.checks import validation
from megatron_lce.checks.together import checked_together, laying_out
from megatron_lce.core import collectives
from megatron_lce.core.eager import eager
from megatron_lce.core.lm_head import LMHead
from megatron_lce.core.one_head import OneHead
from megatron_lce.core.options import IGNORE_INDEX, Options, Telemetry
from megatron_lce.core.passes import forward_with_gradient

Reduction = Literal["none", "sum", "mean"]
# Autograd nodes, without "Backward0", that do not mix elements: views, casts, copies, concatenations, and additions and
# multiplications of numbers. No layer consists of them, not even a frozen one.
_KEEP_ELEMENTS = {
    *("Alias", "AsStrided", "Expand", "MakeViewlessTensor", "Permute", "ReshapeAlias", "Select", "Slice", "Split"),
    *("SplitWithSizes", "Squeeze", "T", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View"),
    *("Clone", "Gather", "Index", "IndexSelect", "MaskedSelect", "ToCopy", "torch::autograd::Copy"),
    *("BackwardHookFunction", "Cat", "ConstantPadNd", "IndexPut", "Stack", "torch::autograd::CopySlices"),
    *("Add", "Div", "Mul"),
}
_JOINS = {"BackwardHookFunction", "Cat", "IndexPut", "Stack", "torch::autograd::CopySlices"}  # take several tensors
# Each is a whole region of a model: torch.compile's, recomputation's, a CUDA graph's.
_OPAQUE = {
    "CompiledFunction",
    "CheckpointFunction",
    "_CheckpointFunction",
    "CheckpointWithoutOutputFunction",
    "Graphed",
}


@eager
def linear_cross_entropy(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V_local, H]
    labels: Tensor,  # as many ids as hidden has rows
    temperature: float | Tensor = 1.0,
    reduction: Reduction = "none",
    dist_process_group: ProcessGroup | None = None,
    *,
    skip_ignored: bool | int = False,
    reduce_grad_hidden: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropy, fp32 and flattened to [N]: the fused head's call of verl and AReaL.

    The hidden-state gradient is summed over the group once. If autograd's graph shows Megatron's
    `gather_from_sequence_parallel_region` or `copy_to_tensor_model_parallel_region` on the path to hidden, their
    backward sums it; otherwise this call does. If anything else in your model sums it, pass `reduce_grad_hidden=False`.

    Args:
        hidden: replicated on the group's ranks.
        labels: `[1, s]` also fits a hidden of `[s, 1, H]`. Both outputs are 0 in ignored rows.
        temperature: a positive float, or a floating tensor of one number, or of one per token, which may be anything in
            ignored rows.
        reduction: "none"; "sum" or "mean" of both outputs over all rows, ignored ones included.
        dist_process_group: the ranks that the vocabulary is sharded over; `None`: the weight is whole.
        reduce_grad_hidden: whether this call sums the hidden-state gradient over the group; `None`: as autograd's graph
            shows.

    Raises:
        ValueError: only a part of hidden comes out of an operation whose backward sums; or `reduce_grad_hidden` is
            `None`, and hidden comes out of a region that hides its graph: compiled, checkpointed with reentrant
            autograd, or a CUDA graph.
    """
    logprobs, entropy = areal_linear_cross_entropy(
        *(hidden, weight, labels, temperature, reduction, dist_process_group),
        skip_ignored=skip_ignored,
        reduce_grad_hidden=reduce_grad_hidden,
    )
    return logprobs, entropy


verl_linear_cross_entropy = linear_cross_entropy


@eager
def areal_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: Reduction = "none",
    dist_process_group: ProcessGroup | None = None,
    return_max_logits: bool = False,
    *,
    skip_ignored: bool | int = False,
    reduce_grad_hidden: bool | None = None,
) -> tuple[Tensor, ...]:
    """`linear_cross_entropy`; with `return_max_logits` a third result, the largest logit of each token.

    It is fp32 [N] for every reduction, before the temperature, without gradient, and 0 in ignored rows.
    """
    telemetry = return_max_logits is True
    options = Options(dist_process_group, temperature=temperature, telemetry=telemetry, skip_ignored=skip_ignored)
    compared: dict[str, Any] = {"reduction": reduction, "return_max_logits": return_max_logits}
    compared |= {"reduce_grad_hidden": reduce_grad_hidden, "rows of weight": validation.num_weight_rows(weight)}
    name, names = "areal_linear_cross_entropy", validation.NAMES | {"tp_group": "dist_process_group"}
    with checked_together(
        name, hidden, weight, labels, options, names=names, takes_dtensors=True, compared=compared
    ) as checks:
        validation.check_choice("reduction", reduction, get_args(Reduction))
        validation.check_scalar("return_max_logits", return_max_logits, bool)
        ids = _checked_labels(checks.labels, checks.shape)
        if isinstance(temperature, Tensor):
            temperature = temperature.reshape(-1)
            temperature = temperature.expand(ids.numel()) if temperature.numel() == 1 else temperature
            validation.check_logits(LMHead(hidden, weight, temperature), (ids.numel(),))
            temperature = temperature.view(ids.shape).where(ids >= 0, 1.0)  # anything in ignored rows
        if reduce_grad_hidden is None:
            reduce_grad_hidden = not is_summed_in_front(hidden, dist_process_group)
        validation.check_scalar("reduce_grad_hidden", reduce_grad_hidden, bool)
        checks.labels = ids.where(ids >= 0, IGNORE_INDEX)
        checks.options = replace(checks.options, temperature=temperature, reduce_grad_hidden=reduce_grad_hidden)
    out = forward_with_gradient(OneHead(checks.call)).outputs
    assert out.entropy is not None
    results = tuple(reduced(value.reshape(-1), reduction) for value in (out.logprobs, out.entropy))
    if out.max_logit is None:
        return results
    return *results, (out.max_logit * temperature).float().reshape(-1)


@eager
def torch_linear_cross_entropy(
    input: Tensor,  # [..., H]
    linear_weight: Tensor,  # [V_local, H]
    target: Tensor,  # [...]
    *,
    linear_bias: None = None,
    weight: Tensor | None = None,  # [V]
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    options: None = None,
    skip_ignored: bool | int = False,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """`torch.nn.functional.linear_cross_entropy`: the loss in input's dtype.

    Args:
        input: hidden; torch takes [N, H] and [H] alone. It is the same on every rank of the group.
        linear_weight: weight.
        target: [...], int64 class ids. An id outside [0, V) gives NaN, without looking at the device.
        linear_bias, options: torch's other keywords; NotImplementedError says why not.
        weight: [V] floating, of the whole vocabulary: a factor for each class, without gradient.
        reduction: "none", "sum", or "mean" over the rows that are not ignored, weighted by `weight` of their targets
            (NaN if all are ignored).
        ignore_index: target of ignored rows; `None` as in torch: -100.
        label_smoothing: in [0, 1], the share of the target's probability that goes to all classes alike.
        tp_group: the ranks that the vocabulary is sharded over; `None`: linear_weight is whole.

    Raises:
        NotImplementedError: a bias, chunking options, class probabilities, a linear_weight of further dimensions, or
            a weight together with label_smoothing.
    """
    ignored = IGNORE_INDEX if ignore_index is None else ignore_index
    compared = {
        "weight": validation.shape_of(weight),
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "rows of linear_weight": validation.num_weight_rows(linear_weight),
    }
    smooth: Telemetry = bool(label_smoothing) and "mean_logit"
    call_options = Options(tp_group, ignore_index=ignored, entropy=False, telemetry=smooth, skip_ignored=skip_ignored)
    name = "torch_linear_cross_entropy"
    names = validation.NAMES | {"hidden": "input", "weight": "linear_weight", "labels": "target"}
    shape, kind = validation.shape_of(linear_weight), target.dtype if isinstance(target, Tensor) else torch.int64
    deep = shape is not None and len(shape) > 2
    unsupported = {
        "linear_bias must be None: the fused head does not support a bias": linear_bias is not None,
        "options must be None: this head does not chunk the batch; to bound memory, use workspace_bytes of "
        "megatron_lce.linear_cross_entropy": options is not None,
        "weight must be None where label_smoothing is not 0, got both": weight is not None and smooth,
        f"linear_weight must be [V, H]: losses over further dimensions of classes are not supported, got {shape}": deep,
        f"target must be class ids: probabilities are not supported, got {kind}": kind.is_floating_point,
    }
    with (
        laying_out(*(NotImplementedError(reason) for reason, holds in unsupported.items() if holds)),
        checked_together(
            name, input, linear_weight, target, call_options, names=names, takes_dtensors=True, compared=compared
        ) as checks,
    ):
        validation.check_choice("reduction", reduction, get_args(Reduction))
        validation.check_fraction("label_smoothing", label_smoothing)
        num_classes = linear_weight.shape[0] * collectives.group_size(tp_group)
        if weight is not None:
            validation.check_tensor("weight", weight)
            fits = weight.shape == (num_classes,) and weight.is_floating_point() and weight.device == input.device
            requirement = f"be floating [{num_classes}] on {input.device}, a factor for each class"
            validation.require(fits, "weight", requirement, f"{weight.dtype} {tuple(weight.shape)} on {weight.device}")
            validation.check_no_gradient("weight", weight)
    out = forward_with_gradient(OneHead(checks.call)).outputs
    target = checks.labels
    valid_mask, loss = target != ignored, -out.logprobs
    factors = valid_mask.float()
    if weight is not None:
        factors *= weight.float()[target.clamp(0, num_classes - 1)]
        loss = loss * factors
    if out.mean_logit is not None:
        loss = (1 - label_smoothing) * loss + label_smoothing * (out.lse - out.mean_logit)
    return reduced(loss, reduction, factors).to(input.dtype)


def reduced(values: Tensor, reduction: Reduction, factors: Tensor | None = None) -> Tensor:
    """Return the values, their sum, or their mean: over all, or over the sum of the factors (NaN if it is 0)."""
    if reduction == "mean":
        return values.mean() if factors is None else values.sum() / factors.sum()
    return values if reduction == "none" else values.sum()


def _checked_labels(labels: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Return labels as int64 of the shape of hidden's rows, on all sequence-parallel ranks."""
    validation.check_tensor("labels", labels)
    # Flattened labels [b, s] would not match the rows of a hidden [s, b, H].
    order, ids = ([size for size in sizes if size != 1] for sizes in (rows, labels.shape))
    if labels.numel() != math.prod(rows) or (len(order) > 1 and len(ids) > 1 and order != ids):
        raise ValueError(f"labels must have hidden's order of rows, {rows}, got {tuple(labels.shape)}")
    labels = validation.as_int64(labels.reshape(rows))
    validation.check_tensor("labels", labels, torch.int64)
    return labels


def is_summed_in_front(hidden: Tensor, group: ProcessGroup | None) -> bool:
    """Return whether an operation of Megatron before the head sums the hidden-state gradient over the group.

    The search stops at the first node that mixes elements, and covers all parts of a concatenation.
    """
    answers: set[bool] = set()
    nodes: list[Any] = [] if hidden.grad_fn is None else [hidden.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        kind = re.sub(r"Backward\d*$", "", node.name())  # "CopySlices" ends without it
        summing = node.name() == "_CopyToModelParallelRegionBackward" or (
            # without the flag, its backward cuts this rank's part out of a whole gradient
            node.name() == "_GatherFromSequenceParallelRegionBackward" and node.tensor_parallel_output_grad
        )
        inputs = [function for function, _ in node.next_functions if function is not None]
        if kind in _OPAQUE and collectives.group_size(group) > 1:
            raise ValueError(
                "reduce_grad_hidden must be False or True where hidden comes out of a compiled, checkpointed or "
                "graphed region: False if the hidden-state gradient is summed inside, which the graph does not show; "
                f"got None behind {node.name()}"
            )
        if summing and collectives.same_ranks(node.group, group):
            answers.add(True)
        elif inputs and kind in _KEEP_ELEMENTS and (len(inputs) == 1 or kind in _JOINS):
            nodes += set(inputs) - seen
            seen.update(inputs)
        else:
            answers.add(False)
    if len(answers) > 1:
        raise ValueError(
            "hidden must come out of gather_from_sequence_parallel_region or copy_to_tensor_model_parallel_region as a "
            "whole or not at all: it has parts whose gradient is summed over the group there, and others"
        )
    return True in answers
