"""What is kept of logits from forward to backward, within the bytes that it may take."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.core.blocks import ceil_div
from megatron_lce.core.options import Options
from megatron_lce.core.products import slab_row_stride, with_zeros_behind


@dataclass
class LogitsCache:
    """2^(z - reference) of the first columns in the inputs' dtype, with one reference for each row of each chunk.

    The reference is the chunk's largest logit or, as far as the dtype's range allows, 0: exponentials of a whole row
    then have their denominator in common. Not where a gradient takes their logarithm, for an entropy or a softcap: of
    the largest, which counts most, that must be exact. Both together stay within the bytes they were asked to.
    """

    exp: Tensor  # [N, C], rows `SLAB_ROW_STEP` apart, zeros behind them
    reference: Tensor  # [chunks, N] fp32, base 2

    @classmethod
    def allocate(cls, num_tokens: int, num_columns: int, hidden: Tensor) -> Self:
        exp = with_zeros_behind(hidden.new_empty(num_tokens, slab_row_stride(num_columns)), num_columns)
        num_chunks = ceil_div(num_columns, tiles.chunk_columns(hidden))
        return cls(exp, hidden.new_empty(num_chunks, num_tokens, dtype=torch.float32))

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.exp, self.reference

    def select(self, rows: slice) -> Self:
        return type(self)(self.exp[rows], self.reference[:, rows])

    def columns(self, columns: slice) -> Self:
        """A view of whole chunks."""
        chunk = tiles.chunk_columns(self.exp)
        return type(self)(self.exp[:, columns], self.reference[columns.start // chunk :])


def new_cache(num_tokens: int, hidden: Tensor, options: Options) -> LogitsCache | None:
    """Room for what `logits_cache_bytes` allows; None: nothing is kept."""
    columns = cache_columns(num_tokens, options.num_columns, hidden, options.logits_cache_bytes)
    return LogitsCache.allocate(num_tokens, columns, hidden) if columns else None


def cache_columns(num_tokens: int, num_columns: int, hidden: Tensor, logits_cache_bytes: int) -> int:
    """How many columns a cache of that many bytes keeps: all, or a whole number of tiles."""
    row_bytes = kept_row_bytes(hidden, num_columns)
    if row_bytes is None or num_tokens == 0:
        return 0
    if num_tokens * row_bytes <= logits_cache_bytes:
        return num_columns
    block_v = _tile_columns(hidden)
    tile_bytes = num_tokens * _row_bytes(hidden, block_v)
    return logits_cache_bytes // tile_bytes * block_v


def kept_row_bytes(hidden: Tensor, num_columns: int) -> int | None:
    """What a cache of these columns takes for a token; None: nothing is kept of fp32 inputs."""
    return None if hidden.dtype == torch.float32 else _row_bytes(hidden, num_columns)


def _tile_columns(hidden: Tensor) -> int:
    return tiles.choose_tiles(hidden.dtype, hidden.device).block_v


def _row_bytes(hidden: Tensor, num_columns: int) -> int:
    num_chunks = ceil_div(num_columns, tiles.chunk_columns(hidden))
    return slab_row_stride(num_columns) * hidden.element_size() + 4 * num_chunks
