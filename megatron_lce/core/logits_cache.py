"""Exponentials of logits, cached from forward to backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.matmul import with_zeros_behind
from megatron_lce.core.plan import HeadSize, ceil_div, slab_row_stride


class LogitsCache(NamedTuple):
    """Exponentials 2^(z - shift) in the dtype of the inputs; the shift of a row and chunk is its largest logit."""

    exp: Tensor  # [N, C], rows a multiple of `SLAB_ROW_STEP` apart, zeros behind them
    shift: Tensor  # [chunks, N] fp32, base 2

    def select(self, rows: slice) -> "LogitsCache":
        """Return a view of some of the rows."""
        return LogitsCache(self.exp[rows], self.shift[:, rows])


def new_cache(size: HeadSize, num_tokens: int, num_columns: int, like: Tensor) -> LogitsCache | None:
    """Allocate a cache of so many columns, of like's dtype; None for no columns."""
    if num_columns == 0:
        return None
    exp = with_zeros_behind(like.new_empty(num_tokens, slab_row_stride(num_columns)), num_columns)
    num_chunks = ceil_div(num_columns, size.scratch.chunk_columns)
    return LogitsCache(exp, like.new_empty(num_chunks, num_tokens, dtype=torch.float32))
