"""What is kept of logits from forward to backward."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megatron_lce.core.plan import HeadSize, ceil_div, slab_row_stride
from megatron_lce.core.products import with_zeros_behind


@dataclass
class LogitsCache:
    """2^(z - reference) of the first columns in the inputs' dtype, with one reference for each row of each chunk.

    The reference is the chunk's largest logit or, as far as the dtype's range allows, 0: exponentials of a whole row
    then have their denominator in common. Not where a gradient takes their logarithm, for an entropy or a softcap: of
    the largest, which counts most, that must be exact.
    """

    exp: Tensor  # [N, C], rows `SLAB_ROW_STEP` apart, zeros behind them
    reference: Tensor  # [chunks, N] fp32, base 2

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.exp, self.reference

    def select(self, rows: slice) -> Self:
        """A view of some of the rows."""
        return type(self)(self.exp[rows], self.reference[:, rows])


def new_cache(
    size: HeadSize,
    num_tokens: int,
    num_columns: int,
    num_bytes: int,
    like: Tensor,  # hidden, for its dtype and device
) -> LogitsCache | None:
    """Room for what that many bytes keep of the tokens' logits; None: of no column."""
    columns = size.cache_columns(num_tokens, num_columns, num_bytes)
    if columns == 0:
        return None
    exp = with_zeros_behind(like.new_empty(num_tokens, slab_row_stride(columns)), columns)
    num_chunks = ceil_div(columns, size.costs.chunk_columns)
    return LogitsCache(exp, like.new_empty(num_chunks, num_tokens, dtype=torch.float32))
