"""The calls that other projects make, so that adopting this one is a changed import."""

from typing import Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce import cross_entropy as api

Reduction = Literal["none", "sum", "mean"]

_IGNORED = -100


def linear_cross_entropy(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V_local, H]
    labels: Tensor,  # as many ids as hidden has rows
    temperature: float | Tensor = 1.0,
    reduction: Reduction = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """The fused head's call of verl and AReaL: logprobs and entropy, both fp32 and flattened to [N].

    hidden's gradient is summed over the group, as AReaL's is (`areal_linear_cross_entropy` is this function). verl's
    callers sum it themselves: `verl_linear_cross_entropy`.

    Args:
        hidden: [..., H], replicated on the group's ranks; fp32, bf16 or fp16.
        weight: [V_local, H] of hidden's dtype, this rank's rows; all shards equal.
        labels: any integer dtype, global vocabulary ids in hidden's order; `[1, s]` beside a hidden of `[s, 1, H]`
            will do. Negative ones are ignored rows: both outputs are 0 there.
        temperature: a positive float, or one floating number a token.
        reduction: "none"; "sum" or "mean" over all rows, the ignored ones included, of logprobs and entropy alike.
        dist_process_group: the ranks that the vocabulary is sharded over; `None`: the weight is whole.

    Raises:
        TypeError, ValueError: see `megatron_lce.linear_cross_entropy`.
    """
    return _logprobs_and_entropy(hidden, weight, labels, temperature, reduction, dist_process_group, True)


areal_linear_cross_entropy = linear_cross_entropy


def verl_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: Reduction = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` that leaves hidden's gradient as this rank's partial sum.

    For callers behind an operation whose backward sums over the group, such as Megatron's
    `gather_from_sequence_parallel_region`. Anywhere else the gradient would be that of one shard.
    """
    return _logprobs_and_entropy(hidden, weight, labels, temperature, reduction, dist_process_group, False)


def _logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    reduction: str,
    group: ProcessGroup | None,
    reduce_grad_hidden: bool,
) -> tuple[Tensor, Tensor]:
    _check_reduction(reduction)
    _check_order(hidden, labels)
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1)
    labels = labels.reshape(-1).long()
    out = api.linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.where(labels >= 0, _IGNORED),
        tp_group=group,
        temperature=temperature,
        ignore_index=_IGNORED,
        reduce_grad_hidden=reduce_grad_hidden,
    )
    assert out.entropy is not None
    return _reduce(out.logprobs, reduction), _reduce(out.entropy, reduction)


def torch_linear_cross_entropy(
    input: Tensor,  # [N, H] or [H]
    linear_weight: Tensor,  # [V, H]
    target: Tensor,  # [N] or a scalar
    *,
    linear_bias: None = None,
    weight: None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    options: None = None,
) -> Tensor:
    """`torch.nn.functional.linear_cross_entropy`: the loss in input's dtype.

    Args:
        input: [N, H] or [H]; fp32, bf16 or fp16.
        linear_weight: [V, H] of input's dtype.
        target: [N] or a scalar, int64 class ids. An id outside [0, V) gives NaN, without looking at the device.
        linear_bias, weight, label_smoothing, options: torch's other keywords; NotImplementedError says why not.
        reduction: "none", "sum", or "mean" over the rows that are not ignored (NaN when all are).
        ignore_index: the target of rows that take no part; `None` as in torch: -100.

    Raises:
        TypeError, ValueError: see `megatron_lce.linear_cross_entropy`.
        NotImplementedError: a bias, class weights, label smoothing, chunking options, class probabilities, or a loss
            over further dimensions.
    """
    _refuse_unsupported(linear_bias, weight, label_smoothing, options)
    if linear_weight.dim() > 2:
        raise NotImplementedError(
            "linear_weight must be [V, H]: losses over further dimensions of classes are not supported, "
            f"got {tuple(linear_weight.shape)}"
        )
    if target.is_floating_point():
        raise NotImplementedError(f"target must be class ids: probabilities are not supported, got {target.dtype}")
    ignored = _IGNORED if ignore_index is None else ignore_index
    logprobs = api.linear_cross_entropy(input, linear_weight, target, ignore_index=ignored, entropy=False).logprobs
    return reduce_loss(-logprobs, target != ignored, reduction).to(input.dtype)


def reduce_loss(loss: Tensor, counted: Tensor, reduction: Reduction) -> Tensor:
    """The loss per token, its sum, or its mean over the rows that are counted (NaN where none is)."""
    _check_reduction(reduction)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / counted.sum()


def _refuse_unsupported(linear_bias: object, weight: object, label_smoothing: float, options: object) -> None:
    if linear_bias is not None:
        raise NotImplementedError("linear_bias must be None: the fused head has no bias, as Megatron's has none")
    if weight is not None:
        raise NotImplementedError(
            "weight must be None: class weights are not supported; with reduction='none' multiply the loss by "
            "weight[target] and divide by its sum"
        )
    if label_smoothing:
        raise NotImplementedError(
            "label_smoothing must be 0: the mean of all logits that it takes is not computed by the fused head, "
            f"got {label_smoothing}"
        )
    if options is not None:
        raise NotImplementedError(
            "options must be None: chunks of the batch are not what this head is cut into; "
            "megatron_lce.linear_cross_entropy has workspace_bytes"
        )


def _check_reduction(reduction: str) -> None:
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")


def _check_order(hidden: Tensor, labels: Tensor) -> None:
    """Refuse labels [b, s] beside a hidden of [s, b, H]: flattened, they would meet in the wrong order."""
    rows, ids = ([size for size in shape if size != 1] for shape in (hidden.shape[:-1], labels.shape))
    if labels.numel() != hidden.shape[:-1].numel() or (len(rows) > 1 and len(ids) > 1 and rows != ids):
        raise ValueError(
            f"labels must have hidden's order of rows, {tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}"
        )


def _reduce(value: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return value
    return value.sum() if reduction == "sum" else value.mean()
