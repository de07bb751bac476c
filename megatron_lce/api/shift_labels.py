"""`shift_labels`: labels of packed and padded batches."""

import torch
from torch import Tensor

from megatron_lce.checks import validation
from megatron_lce.checks.validation import require


def shift_labels(
    tokens: Tensor,  # [b, s], or [1, total] when packed
    *,
    cu_seqlens: Tensor | None = None,  # [n + 1]
    cu_seqlens_padded: Tensor | None = None,  # [n + 1]
    mask: Tensor | None = None,  # tokens' shape
    ignore_index: int = -100,
) -> Tensor:
    """Return the label of each token: the next token in the same sequence, or `ignore_index` at its end.

    With context parallelism, shift whole sequences first, and cut the labels afterwards with Megatron's
    `get_batch_on_this_cp_rank`, because a chunk's last token has its label on another rank.

    Args:
        tokens: int64 ids, one sequence per row, or all sequences one after another in one row (`thd`).
        cu_seqlens: integer bounds of the packed sequences, 0 first, as in Megatron's `PackedSeqParams`. Ids past the
            last bound belong to no sequence.
        cu_seqlens_padded: bounds of sequences that are padded at their ends; `cu_seqlens` then gives their lengths.
        mask: true (or not 0) where a token is real; padding, left or right, neither has a label nor is one.
        ignore_index: label of ignored rows.

    Returns:
        int64 labels of tokens' shape.

    Raises:
        TypeError, ValueError: an argument is not as described. Bounds on the device are not checked, because the host
            would wait: one past the row's end is taken as its end, and a sequence longer than its place is cut.
    """
    validation.check_tensor("tokens", tokens, torch.int64)
    validation.check_scalar("ignore_index", ignore_index, int)
    require(tokens.dim() == 2, "tokens", "be [b, s] or [1, total]", tuple(tokens.shape))
    if mask is not None:
        validation.check_tensor("mask", mask)
        shape = tuple(tokens.shape)
        require(mask.shape == tokens.shape, "mask", f"have tokens' shape, {shape}", tuple(mask.shape))
    has_bounds = cu_seqlens is not None or cu_seqlens_padded is None
    require(has_bounds, "cu_seqlens", "be given with cu_seqlens_padded", None)
    length = tokens.shape[1]
    positions = torch.arange(length, dtype=torch.int64, device=tokens.device)
    has_next = (positions < length - 1).expand_as(tokens)
    if cu_seqlens is not None:
        bounds = _checked_bounds("cu_seqlens", cu_seqlens, tokens)
        lengths = bounds.diff()
        if cu_seqlens_padded is not None:
            bounds = _checked_bounds("cu_seqlens_padded", cu_seqlens_padded, tokens)
            num_bounds, num_padded = len(cu_seqlens), len(cu_seqlens_padded)
            requirement = f"have as many bounds as cu_seqlens, {num_bounds}"
            require(num_padded == num_bounds, "cu_seqlens_padded", requirement, num_padded)
            if _on_host(cu_seqlens) and _on_host(cu_seqlens_padded):
                sizes, padded_sizes = cu_seqlens.diff(), cu_seqlens_padded.diff()
                if (longer := sizes > padded_sizes).any():
                    got = f"a sequence of {int(sizes[longer][0])} in {int(padded_sizes[longer][0])}"
                    raise ValueError(f"cu_seqlens must fit into cu_seqlens_padded, got {got}")
            lengths = torch.minimum(lengths, bounds.diff())
        # Positions outside all sequences take the first or the last one, which ends before them.
        sequence = torch.searchsorted(bounds.to(positions.dtype), positions, right=True) - 1
        sequence = sequence.clamp(min=0, max=bounds.shape[0] - 2)
        has_next = has_next & (positions - bounds[sequence] + 1 < lengths[sequence])
    if mask is not None:
        real = mask.bool()
        has_next = has_next & real & real.roll(-1, dims=1)
    return torch.where(has_next, tokens.roll(-1, dims=1), ignore_index)


def _checked_bounds(name: str, bounds: Tensor, tensor: Tensor) -> Tensor:
    """Return bounds of sequences in the tensor's one row, on its device."""
    validation.check_tensor(name, bounds)
    length = tensor.shape[1]
    are_bounds = validation.holds_integers(bounds) and bounds.dim() == 1 and bounds.shape[0] >= 2
    require(are_bounds, name, "be integers [n + 1]", f"{bounds.dtype} {tuple(bounds.shape)}")
    require(tensor.shape[0] == 1, "packed sequences", "lie in one row, [1, total, ...]", tuple(tensor.shape))
    if _on_host(bounds):
        require(int(bounds[0]) == 0, name, "start with 0", int(bounds[0]))
        validation.check_ascending(name, bounds)
        require(int(bounds[-1]) <= length, name, f"end within the row of {length}", int(bounds[-1]))
        return bounds.to(tensor.device, non_blocking=True)
    require(bounds.device == tensor.device, name, f"be on the host or {tensor.device}", bounds.device)
    return bounds


def _on_host(bounds: Tensor) -> bool:
    return bounds.is_cpu
