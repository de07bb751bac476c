"""The rows that count, brought together in front, in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lce.core.rows import Compacted


def compact_rows(
    counts: Tensor,  # [N] bool
    per_row: Sequence[Tensor],  # [..., N] each
    *,
    to_host: bool,
) -> Compacted:
    """See `CommonBackend`. Behind those that count comes row 0."""
    rows = counts.nonzero_static(size=counts.shape[0], fill_value=0)[:, 0]
    brought = [tensor.index_select(-1, rows) for tensor in per_row]
    number = counts.sum(dtype=torch.int32)
    return Compacted(rows, brought, number, copy_to_host(number) if to_host else None)


def copy_to_host(number: Tensor) -> Tensor:
    """Only a CUDA device's copy may be under way: there is no event for others."""
    return number.to("cpu", non_blocking=number.is_cuda)


def gather_rows(matrix: Tensor, rows: Tensor, number: Tensor, unless_all: bool) -> Tensor:
    return matrix.index_select(0, rows)
