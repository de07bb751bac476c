"""The rows that count, brought together in front, in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lce.core.rows import Compacted


def compact_rows(
    counts: Tensor,  # [N] bool
    per_row: Sequence[Tensor],  # [..., N] each
) -> Compacted:
    """See `CommonBackend`. Behind those that count comes row 0."""
    rows = counts.nonzero_static(size=counts.shape[0], fill_value=0)[:, 0]
    return Compacted(rows, [tensor.index_select(-1, rows) for tensor in per_row], counts.sum(dtype=torch.int32))


def gather_rows(matrix: Tensor, rows: Tensor, number: Tensor, unless_all: bool) -> Tensor:
    return matrix.index_select(0, rows)
