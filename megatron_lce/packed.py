"""Labels of packed and padded batches.

Bounds of packed sequences may lie on the host or on the device. On the host they are checked. On the device nobody
looks at them, which would wait for it: labels then never leave their row.
"""

import torch
from torch import Tensor

from megatron_lce.core import validation


def shift_labels(
    tokens: Tensor,  # [b, s], or [1, total] when packed
    *,
    cu_seqlens: Tensor | None = None,  # [n + 1]
    cu_seqlens_padded: Tensor | None = None,  # [n + 1]
    mask: Tensor | None = None,  # tokens' shape
    ignore_index: int = -100,
) -> Tensor:
    """Each token's label: the next token of its own sequence, `ignore_index` where that has none.

    With context parallelism, shift whole sequences first and cut the labels afterwards, by Megatron's
    `get_batch_on_this_cp_rank`: the next token of a chunk's last one lies on another rank.

    Args:
        tokens: int64 ids, a row a sequence, or all sequences one after another in one row (`thd`).
        cu_seqlens: integer bounds of the packed sequences, 0 first, as in Megatron's `PackedSeqParams`. Ids past the
            last bound belong to none.
        cu_seqlens_padded: bounds of where the sequences lie when each is padded at its end; then `cu_seqlens` only
            gives their lengths.
        mask: true (or not 0) where a token is real; padding, left or right, neither has nor is a label.
        ignore_index: the label of a row that is to be skipped.

    Returns:
        int64 of tokens' shape.

    Raises:
        TypeError, ValueError: an argument is not as described. Bounds on the device are not looked at: one past the
            row's end counts as its end, a sequence longer than its place as cut there.
    """
    validation.check_is_tensor("tokens", tokens)
    validation.check_integer("ignore_index", ignore_index)
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be [b, s] or [1, total], got {tuple(tokens.shape)}")
    if tokens.dtype != torch.int64:
        raise TypeError(f"tokens must be int64, got {tokens.dtype}")
    if mask is not None:
        validation.check_is_tensor("mask", mask)
        if mask.shape != tokens.shape:
            raise ValueError(f"mask must have tokens' shape, {tuple(tokens.shape)}, got {tuple(mask.shape)}")
    if cu_seqlens_padded is not None and cu_seqlens is None:
        raise ValueError("cu_seqlens must be given with cu_seqlens_padded, got None")
    length = tokens.shape[1]
    positions = torch.arange(length, dtype=torch.int64, device=tokens.device)
    has_next = (positions < length - 1).expand_as(tokens)
    if cu_seqlens is not None:
        places = _checked_bounds("cu_seqlens", cu_seqlens, tokens)
        lengths = places.diff()
        if cu_seqlens_padded is not None:
            places = _checked_bounds("cu_seqlens_padded", cu_seqlens_padded, tokens)
            _check_fit(cu_seqlens, cu_seqlens_padded)
            lengths = torch.minimum(lengths, places.diff())
        sequence = _sequence_of(positions, places)
        has_next = has_next & (positions - places[sequence] + 1 < lengths[sequence])
    if mask is not None:
        real = mask.bool()
        has_next = has_next & real & real.roll(-1, dims=1)
    return torch.where(has_next, tokens.roll(-1, dims=1), ignore_index)


def _sequence_of(positions: Tensor, bounds: Tensor) -> Tensor:
    """Which sequence each position lies in; the first or last one for positions outside of all."""
    last = bounds.shape[0] - 2
    return (torch.searchsorted(bounds.to(positions.dtype), positions, right=True) - 1).clamp(min=0, max=last)


def _check_fit(cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> None:
    """Check that each sequence of `cu_seqlens` fits into its place, where the host knows both."""
    if cu_seqlens_padded.shape != cu_seqlens.shape:
        num_bounds = f"{cu_seqlens.shape[0]}, got {cu_seqlens_padded.shape[0]}"
        raise ValueError(f"cu_seqlens_padded must have as many bounds as cu_seqlens, {num_bounds}")
    if _on_host(cu_seqlens_padded) and _on_host(cu_seqlens):
        lengths, places = cu_seqlens.diff(), cu_seqlens_padded.diff()
        if (longer := lengths > places).any():
            got = f"a sequence of {int(lengths[longer][0])} in {int(places[longer][0])}"
            raise ValueError(f"cu_seqlens must fit into cu_seqlens_padded, got {got}")


def _checked_bounds(name: str, bounds: Tensor, tensor: Tensor) -> Tensor:
    """Bounds of sequences in the tensor's one row, on the tensor's device."""
    validation.check_is_tensor(name, bounds)
    length = tensor.shape[1]
    if not validation.holds_integers(bounds) or bounds.dim() != 1 or bounds.shape[0] < 2:
        raise ValueError(f"{name} must be integers [n + 1], got {bounds.dtype} {tuple(bounds.shape)}")
    if tensor.shape[0] != 1:
        raise ValueError(f"packed sequences must lie in one row, [1, total, ...], got {tuple(tensor.shape)}")
    if _on_host(bounds):
        if bounds[0] != 0:
            raise ValueError(f"{name} must start with 0, got {int(bounds[0])}")
        if (bounds.diff() < 0).any():
            fall = int((bounds.diff() < 0).int().argmax())
            raise ValueError(f"{name} must not fall, got {int(bounds[fall + 1])} after {int(bounds[fall])}")
        if bounds[-1] > length:
            raise ValueError(f"{name} must end within the row of {length}, got {int(bounds[-1])}")
        return bounds.to(tensor.device, non_blocking=True)
    if bounds.device != tensor.device:
        raise ValueError(f"{name} must be on the host or {tensor.device}, got {bounds.device}")
    return bounds


def _on_host(bounds: Tensor) -> bool:
    """Whether looking at them waits for no device."""
    return bounds.device.type == "cpu"
