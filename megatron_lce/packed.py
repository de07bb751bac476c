"""Labels of packed and padded batches, and the cut of a batch over context-parallel ranks.

Nothing here looks at the device's data: lengths may stay on the GPU.
"""

import torch
from torch import Tensor


def shift_labels(
    tokens: Tensor,  # [b, s], or [1, total] when packed
    *,
    cu_seqlens: Tensor | None = None,  # [n + 1]
    cu_seqlens_padded: Tensor | None = None,  # [n + 1]
    mask: Tensor | None = None,  # tokens' shape
    ignore_index: int = -100,
) -> Tensor:
    """Each token's label: the next token of its own sequence, `ignore_index` where that has none.

    Shift whole sequences first, and cut the result over context-parallel ranks after
    (`context_parallel_shard`, or Megatron's own `get_batch_on_this_cp_rank`): the next token of a chunk's last one
    lies on another rank.

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
    """
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be [b, s] or [1, total], got {tuple(tokens.shape)}")
    if tokens.dtype != torch.int64:
        raise TypeError(f"tokens must be int64, got {tokens.dtype}")
    if mask is not None and mask.shape != tokens.shape:
        raise ValueError(f"mask must have tokens' shape, {tuple(tokens.shape)}, got {tuple(mask.shape)}")
    if cu_seqlens_padded is not None and cu_seqlens is None:
        raise ValueError("cu_seqlens must be given with cu_seqlens_padded, got None")
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device)
    if cu_seqlens is None:
        has_next = (positions < length - 1).expand_as(tokens)
    else:
        _check_packed(tokens, cu_seqlens, cu_seqlens_padded)
        bounds = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
        sequence = _sequence_of(positions, bounds)
        has_next = (positions - bounds[sequence] + 1 < cu_seqlens.diff()[sequence])[None]
    if mask is not None:
        real = mask.bool()
        has_next = has_next & real & real.roll(-1, dims=1)
    return torch.where(has_next, tokens.roll(-1, dims=1), ignore_index)


def context_parallel_shard(
    tensor: Tensor,  # [b, s, ...], or [1, total, ...] when packed
    cp_size: int,
    cp_rank: int,
    *,
    cu_seqlens_padded: Tensor | None = None,  # [n + 1]
) -> Tensor:
    """The part of a batch that Megatron gives to a context-parallel rank: [b, s / cp_size, ...].

    Every sequence is cut into `2 cp_size` chunks; rank r has the r-th from the front and the r-th from the back, so
    that causal attention costs all ranks the same. Packed sequences are cut one by one.

    Args:
        tensor: tokens, labels, masks, positions or outputs, sequences along dimension 1.
        cp_size, cp_rank: of the context-parallel group.
        cu_seqlens_padded: bounds of packed sequences, each length a multiple of `2 cp_size`; what is behind the last
            one is cut as a sequence of its own. `None`: a row is one sequence.
    """
    chunks = 2 * cp_size
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be in [0, {cp_size}), got {cp_rank}")
    if tensor.dim() < 2 or tensor.shape[1] % chunks:
        raise ValueError(f"tensor must be [b, s, ...] with s a multiple of {chunks}, got {tuple(tensor.shape)}")
    if cu_seqlens_padded is None:
        bounds = torch.tensor([0, tensor.shape[1]], device=tensor.device)
    else:
        _check_packed(tensor, cu_seqlens_padded, None)
        bounds = torch.cat([cu_seqlens_padded, cu_seqlens_padded.new_full((1,), tensor.shape[1])])
    local = torch.arange(tensor.shape[1] // cp_size, device=tensor.device)
    sequence = _sequence_of(local, bounds // cp_size)
    start, chunk = bounds[sequence], bounds.diff()[sequence] // chunks
    offset = local - start // cp_size
    # The front chunk fills the first half of what this rank has of a sequence, the back one the second.
    jump = torch.where(offset < chunk, cp_rank * chunk, (chunks - 2 - cp_rank) * chunk)
    return tensor.index_select(1, start + offset + jump)


def _sequence_of(positions: Tensor, bounds: Tensor) -> Tensor:
    """Which sequence each position lies in; the last one for positions past the last bound."""
    last = bounds.shape[0] - 2
    return (torch.searchsorted(bounds.to(positions.dtype), positions, right=True) - 1).clamp(max=last)


def _check_packed(tensor: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None) -> None:
    for name, bounds in (("cu_seqlens", cu_seqlens), ("cu_seqlens_padded", cu_seqlens_padded)):
        if bounds is None:
            continue
        if bounds.is_floating_point() or bounds.dim() != 1 or bounds.shape[0] < 2:
            raise ValueError(f"{name} must be integers [n + 1], got {bounds.dtype} {tuple(bounds.shape)}")
        if bounds.shape != cu_seqlens.shape:
            raise ValueError(
                f"{name} must have as many bounds as cu_seqlens, {cu_seqlens.shape[0]}, got {bounds.shape[0]}"
            )
    if tensor.shape[0] != 1:
        raise ValueError(f"packed sequences must lie in one row, [1, total, ...], got {tuple(tensor.shape)}")
