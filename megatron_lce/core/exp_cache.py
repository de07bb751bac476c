"""Exponentials of logits, cached from forward to backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.matmul import with_zeros_behind
from megatron_lce.core.plan import HeadSize, ceil_div, slab_row_stride, slices


class ExpCache(NamedTuple):
    """Exponentials 2^(z - shift) in the dtype of the inputs; the shift of a row and chunk is its largest logit."""

    exp: Tensor  # [N, C], rows a multiple of `SLAB_ROW_STEP` apart, zeros behind them
    shift: Tensor  # [chunks, N] fp32, base 2

    def select(self, rows: slice) -> "ExpCache":
        """Return a view of some of the rows."""
        return ExpCache(self.exp[rows], self.shift[:, rows])

    def keep(self, index: Tensor, moved_bytes: int) -> "ExpCache":
        """Move some rows, in ascending order, to the front, in place; so many bytes of them are copied at a time."""
        num_rows, stride = self.exp.shape[0], self.exp.stride(0)
        rows = self.exp.as_strided((num_rows, stride), (stride, 1)).view(torch.int64)  # torch copies whole words faster
        for part in slices(index.shape[0], max(1, moved_bytes // (stride * self.exp.element_size()))):
            rows[part] = rows.index_select(0, index[part])
        return ExpCache(self.exp[: index.shape[0]], self.shift.index_select(1, index))


def new_cache(size: HeadSize, num_tokens: int, num_columns: int, like: Tensor) -> ExpCache | None:
    """Allocate a cache of so many columns, of like's dtype; None for no columns."""
    if num_columns == 0:
        return None
    exp = with_zeros_behind(like.new_empty(num_tokens, slab_row_stride(num_columns)), num_columns)
    num_chunks = ceil_div(num_columns, size.scratch.chunk_columns)
    return ExpCache(exp, like.new_empty(num_chunks, num_tokens, dtype=torch.float32))
