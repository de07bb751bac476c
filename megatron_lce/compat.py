"""The calls that other projects make, so that adopting this one is a changed import.

Each function stands in for the one it is named after: `verl_`, `areal_`, `megatron_` and `torch_linear_cross_entropy`.
Keywords that those do not have stand behind all of theirs and are taken by name only: `skip_ignored`, and `tp_group` of
`torch_linear_cross_entropy`.
"""

from dataclasses import replace

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.arguments import checked_together
from megatron_lce.compat_arguments import (
    Reduction,
    check_classes,
    check_reduction,
    check_supported,
    checked_labels,
    reduced,
)
from megatron_lce.core import collectives, validation
from megatron_lce.core.options import IGNORE_INDEX, Options
from megatron_lce.cross_entropy import outputs_of
from megatron_lce.megatron_integration.summed_in_front import is_summed_in_front


def linear_cross_entropy(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V_local, H]
    labels: Tensor,  # as many ids as hidden has rows
    temperature: float | Tensor = 1.0,
    reduction: Reduction = "none",
    dist_process_group: ProcessGroup | None = None,
    *,
    skip_ignored: bool | int = False,
) -> tuple[Tensor, Tensor]:
    """The fused head's call of verl and AReaL: logprobs and entropy, both fp32 and flattened to [N].

    hidden's gradient is summed over the group once: by what stands in front, where autograd's graph shows Megatron's
    `gather_from_sequence_parallel_region` or `copy_to_tensor_model_parallel_region`, whose backward sums, on the way to
    hidden; else here. A caller that sums by other means takes `megatron_lce.linear_cross_entropy` with
    `reduce_grad_hidden=False`.

    Args:
        hidden: [..., H], replicated on the group's ranks; fp32, bf16 or fp16.
        weight: [V_local, H] of hidden's dtype, this rank's rows; all shards equal.
        labels: any integer dtype, global vocabulary ids in hidden's order; `[1, s]` beside a hidden of `[s, 1, H]`
            will do. Negative ones are ignored rows: both outputs are 0 there.
        temperature: a positive float, or a floating tensor of one number, or of one a token; those of ignored rows may
            be anything.
        reduction: "none"; "sum" or "mean" over all rows, the ignored ones included, of logprobs and entropy alike.
        dist_process_group: the ranks that the vocabulary is sharded over; `None`: the weight is whole.
        skip_ignored: see `megatron_lce.linear_cross_entropy`.

    Raises:
        TypeError, ValueError: see `megatron_lce.linear_cross_entropy`.
        ValueError: parts of hidden come out of such an operation, and others do not.
    """
    logprobs, entropy = areal_linear_cross_entropy(
        hidden, weight, labels, temperature, reduction, dist_process_group, skip_ignored=skip_ignored
    )
    return logprobs, entropy


verl_linear_cross_entropy = linear_cross_entropy


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
) -> tuple[Tensor, ...]:
    """`linear_cross_entropy`; with `return_max_logits` a third result, the largest logit of each token.

    That is fp32 [N], whatever the reduction, before the temperature, without gradient, and 0 in ignored rows.
    """

    options = Options(
        dist_process_group, temperature=temperature, telemetry=return_max_logits, skip_ignored=skip_ignored
    )
    own = {"reduction": reduction, "return_max_logits": return_max_logits, "rows of weight": validation.rows_of(weight)}
    name = "areal_linear_cross_entropy"
    with checked_together(
        name, hidden, weight, labels, options, group_name="dist_process_group", takes_dtensors=True, own=own
    ) as checks:
        shape = checks.head()
        check_reduction(reduction)
        validation.check_flag("return_max_logits", return_max_logits)
        ids = checked_labels(checks.labels, shape)
        temperature = _checked_temperature(temperature, ids)
        summed = is_summed_in_front(hidden, dist_process_group)
        of_ids = replace(checks.options, temperature=temperature, reduce_grad_hidden=not summed)
        checks.rest(ids.where(ids >= 0, IGNORE_INDEX), of_ids)
    out = outputs_of(checks)
    assert out.entropy is not None
    results = tuple(reduced(value.reshape(-1), reduction) for value in (out.logprobs, out.entropy))
    if out.max_logit is None:
        return results
    return *results, (out.max_logit * temperature).float().reshape(-1)


def _checked_temperature(temperature: float | Tensor, labels: Tensor) -> float | Tensor:
    """One number, or one a token, of labels' shape; 1 in ignored rows, where it may be anything."""
    if not isinstance(temperature, Tensor):
        return temperature
    temperature = temperature.reshape(-1)
    if temperature.numel() == 1:
        temperature = temperature.expand(labels.numel())
    validation.check_temperature(temperature, (labels.numel(),), labels.device)
    return temperature.view(labels.shape).where(labels >= 0, 1.0)


def megatron_linear_cross_entropy(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V_local, H]
    labels: Tensor,  # as many ids as hidden has rows on all ranks
    tp_group: ProcessGroup | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    sequence_parallel: bool = False,
    *,
    skip_ignored: bool | int = False,
) -> Tensor:
    """The call of Megatron-LM's own fused linear cross-entropy (dev branch): the loss, positive, fp32.

    `megatron_lce.install_megatron_linear_cross_entropy` puts it in the place of Megatron's. hidden's gradient is summed
    over the group, or reduce-scattered under `sequence_parallel`.

    Args:
        hidden: [..., H], fp32, bf16 or fp16, replicated on the group's ranks; under `sequence_parallel` this rank's
            part of the first dimension.
        weight: [V_local, H] of hidden's dtype, this rank's rows; all shards equal.
        labels: any integer dtype, global vocabulary ids in hidden's order, of the whole sequence. Rows whose label is
            negative or `ignore_index` are ignored: loss 0, no gradient.
        tp_group: the ranks that the vocabulary is sharded over; `None`: the weight is whole.
        reduction: "none": [N], flattened; "sum"; or "mean" over the rows that are not ignored (NaN when all are).
        skip_ignored: see `megatron_lce.linear_cross_entropy`.

    Raises:
        TypeError, ValueError: see `megatron_lce.linear_cross_entropy`.
    """

    options = Options(tp_group, sequence_parallel, entropy=False, skip_ignored=skip_ignored)
    own = {"reduction": reduction, "ignore_index": ignore_index, "rows of weight": validation.rows_of(weight)}
    name = "megatron_linear_cross_entropy"
    with checked_together(name, hidden, weight, labels, options, takes_dtensors=True, own=own) as checks:
        shape = checks.head()
        check_reduction(reduction)
        validation.check_integer("ignore_index", ignore_index)
        ids = checked_labels(checks.labels, shape)
        counted = (ids >= 0) & (ids != ignore_index)
        checks.rest(ids.where(counted, IGNORE_INDEX))
    out = outputs_of(checks)
    return reduced(-out.logprobs.reshape(-1), reduction, counted.reshape(-1))


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
        input: [..., H], of which torch takes [N, H] and [H]; fp32, bf16 or fp16; the same on every rank of the group.
        linear_weight: [V, H] of input's dtype; over a group this rank's rows, all shards equal.
        target: [...], int64 class ids. An id outside [0, V) gives NaN, without looking at the device.
        linear_bias, options: torch's other keywords; NotImplementedError says why not.
        weight: [V] floating, of the whole vocabulary: a factor for each class, without gradient.
        reduction: "none", "sum", or "mean" over the rows that are not ignored (NaN when all are), each of which counts
            as much as its target's `weight`.
        ignore_index: the target of rows that take no part; `None` as in torch: -100.
        label_smoothing: in [0, 1], the share of the target's probability that goes to all classes alike.
        skip_ignored: see `megatron_lce.linear_cross_entropy`.
        tp_group: the ranks that the vocabulary is sharded over; `None`: linear_weight is whole.

    Raises:
        TypeError, ValueError: see `megatron_lce.linear_cross_entropy`.
        NotImplementedError: a bias, chunking options, class probabilities, a weight of further dimensions, or a
            weight beside label_smoothing.
    """
    ignored = IGNORE_INDEX if ignore_index is None else ignore_index

    own = {
        "weight": validation.shape_of(weight),
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "rows of linear_weight": validation.rows_of(linear_weight),
    }
    smooth = bool(label_smoothing)  # by the mean logit, which is among the telemetry
    call_options = Options(tp_group, ignore_index=ignored, entropy=False, telemetry=smooth, skip_ignored=skip_ignored)
    name, names = "torch_linear_cross_entropy", ("input", "linear_weight", "target")
    with checked_together(
        name, input, linear_weight, target, call_options, names=names, takes_dtensors=True, own=own
    ) as checks:
        check_supported(linear_weight, target, linear_bias, options, weight is not None and smooth)
        checks.head()
        check_reduction(reduction)
        check_classes(weight, label_smoothing, linear_weight.shape[0] * collectives.group_size(tp_group), input)
        checks.rest()
    out = outputs_of(checks)
    num_classes = linear_weight.shape[0] * collectives.group_size(tp_group)
    target = checks.labels
    takes_part, loss = target != ignored, -out.logprobs
    counted = takes_part.float()
    if weight is not None:
        counted *= weight.float()[target.clamp(0, num_classes - 1)]
        loss = loss * counted
    if out.mean_logit is not None:
        loss = (1 - label_smoothing) * loss + label_smoothing * (out.lse - out.mean_logit)
    return reduced(loss, reduction, counted).to(input.dtype)
