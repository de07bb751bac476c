"""Labels of packed and padded batches, and the cut of a batch over context-parallel ranks and back.

Bounds of packed sequences may lie on the host or on the device. On the host they are checked. On the device nobody
looks at them, which would wait for it: labels then never leave their row, and a cut that loses tokens fails.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.core import collectives, validation

Layout = Literal["zigzag", "contiguous"]


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


def context_parallel_shard(
    tensor: Tensor,  # [b, s, ...], or [1, total, ...] when packed
    cp_size: int,
    cp_rank: int,
    *,
    cu_seqlens_padded: Tensor | None = None,  # [n + 1]
    layout: Layout = "zigzag",
) -> Tensor:
    """The part of a batch that a context-parallel rank has: [b, s / cp_size, ...]; all of it where there is one rank.

    Args:
        tensor: tokens, labels, masks, positions or outputs, sequences along dimension 1.
        cp_size, cp_rank: of the context-parallel group.
        cu_seqlens_padded: bounds of packed sequences, which are cut one by one; what is behind the last one is cut as
            a sequence of its own. `None`: a row is one sequence.
        layout: "zigzag", as Megatron cuts: every sequence in `2 cp_size` chunks, of which rank r has the r-th from the
            front and the r-th from the back, so that causal attention costs all ranks the same. "contiguous": in
            `cp_size` chunks, of which rank r has the r-th.

    Raises:
        TypeError, ValueError: an argument is not as described, or a sequence cannot be cut into so many chunks. Bounds
            on the device are not looked at: where they cannot be cut, indexing fails on the device.
    """
    validation.check_is_tensor("tensor", tensor)
    validation.check_integer("cp_size", cp_size, minimum=1)
    validation.check_integer("cp_rank", cp_rank)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be in [0, {cp_size}), got {cp_rank}")
    chunks = _chunks(layout, cp_size)
    if tensor.dim() < 2 or tensor.shape[1] % chunks:
        raise ValueError(f"tensor must be [b, s, ...] with s a multiple of {chunks}, got {tuple(tensor.shape)}")
    bounds = _bounds_to_cut(tensor, tensor.shape[1], cu_seqlens_padded, chunks)
    return tensor.index_select(1, _positions(bounds, tensor.shape[1], cp_size, cp_rank, chunks))


def context_parallel_gather(
    tensor: Tensor,  # [b, s / cp, ...], or [1, total / cp, ...] when packed
    group: ProcessGroup | None,
    *,
    cu_seqlens_padded: Tensor | None = None,  # [n + 1]
    layout: Layout = "zigzag",
) -> Tensor:
    """The whole of what `context_parallel_shard` cut, on every rank: [b, s, ...].

    Its gradient is the part of this rank, without a collective: what is computed of the whole is meant to be the same
    on every rank, as a loss over whole sequences is. With a loss of its own on each rank, the parts of the others
    would be lost.

    Args:
        tensor: this rank's part of anything per token, say logprobs.
        group: the context-parallel group; `None`: one rank.
        cu_seqlens_padded, layout: as it was cut; the bounds are those of the whole.

    Raises:
        TypeError, ValueError: an argument is not as described, or no such cut makes parts of this length.
    """
    cp_size, cp_rank = validation.check_group(group, "group"), collectives.group_rank(group)
    validation.check_is_tensor("tensor", tensor)
    if tensor.dim() < 2:
        raise ValueError(f"tensor must be [b, s / cp, ...], got {tuple(tensor.shape)}")
    length, chunks = tensor.shape[1] * cp_size, _chunks(layout, cp_size)
    if length % chunks:
        raise ValueError(f"tensor must be [b, s / cp, ...] with s a multiple of {chunks}, got {tuple(tensor.shape)}")
    bounds = _bounds_to_cut(tensor, length, cu_seqlens_padded, chunks)
    positions = [_positions(bounds, length, cp_size, rank, chunks) for rank in range(cp_size)]
    parts = tensor.detach().movedim(1, 0)
    parts = parts if group is None else collectives.gather_rows(parts, group)
    whole = torch.empty_like(parts).index_copy_(0, torch.cat(positions), parts).movedim(0, 1)
    return whole.index_copy(1, positions[cp_rank], tensor)  # its own part once more, with its gradient


def _chunks(layout: Layout, cp_size: int) -> int:
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be 'zigzag' or 'contiguous', got {layout!r}")
    return 2 * cp_size if layout == "zigzag" and cp_size > 1 else cp_size


def _bounds_to_cut(tensor: Tensor, length: int, cu_seqlens_padded: Tensor | None, chunks: int) -> Tensor:
    """Bounds of all that is cut, each length a multiple of `chunks`, on the tensor's device."""
    if cu_seqlens_padded is None:
        return torch.tensor([0, length], dtype=torch.int64).to(tensor.device, non_blocking=True)
    bounds = _checked_bounds("cu_seqlens_padded", cu_seqlens_padded, tensor, length)
    if _on_host(cu_seqlens_padded):
        odd = cu_seqlens_padded.diff()[cu_seqlens_padded.diff() % chunks != 0]
        if odd.numel():
            raise ValueError(
                f"cu_seqlens_padded must have lengths that are multiples of {chunks} for this cut, got {int(odd[0])}"
            )
    return torch.cat([bounds, bounds.new_full((1,), length)])


def _positions(bounds: Tensor, length: int, cp_size: int, cp_rank: int, chunks: int) -> Tensor:
    """Where the tokens of a rank lie in the whole: [length / cp_size]; past its end if the bounds cannot be cut."""
    lengths = bounds.diff()
    local = torch.arange(length // cp_size, dtype=torch.int64, device=bounds.device)
    sequence = _sequence_of(local, bounds // cp_size)
    start, chunk = bounds[sequence], lengths[sequence] // chunks
    offset = local - start // cp_size
    # In a zigzag the front chunk fills the first half of what this rank has of a sequence, the back one the second.
    jump = torch.where(offset < chunk, cp_rank * chunk, (chunks - 2 - cp_rank) * chunk)
    can_be_cut = (bounds[0] == 0) & (lengths >= 0).all() & (lengths % chunks == 0).all()
    return torch.where(can_be_cut, start + offset + jump, length)


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


def _checked_bounds(name: str, bounds: Tensor, tensor: Tensor, length: int | None = None) -> Tensor:
    """Bounds of sequences in the tensor's one row, of `length` if not the tensor's own, on the tensor's device."""
    validation.check_is_tensor(name, bounds)
    length = tensor.shape[1] if length is None else length
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
