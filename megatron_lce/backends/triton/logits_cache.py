"""What is kept of logits from forward to backward, within the bytes that it may take."""

from collections.abc import Callable, Iterator
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

    @property
    def whole(self) -> Self:
        return self

    def of(self, rows: slice) -> Self:
        return type(self)(self.exp[rows], self.reference[:, rows])

    def columns(self, columns: slice) -> Self:
        """Of whole chunks."""
        chunk = tiles.chunk_columns(self.exp)
        return type(self)(self.exp[:, columns], self.reference[columns.start // chunk :])

    def pieces(self) -> Iterator[Self]:
        """What is filled by one launch, or one for each copy of columns: here, everything."""
        yield self


class CacheAhead:
    """A cache as large as the rows that count, begun before the host knows how many they are.

    Its first columns are kept for every row, until the others' launch is there for the device to go on with.
    """

    def __init__(self, first: LogitsCache, allocate: Callable[[], LogitsCache | None]) -> None:
        self._first: LogitsCache | None = first
        self._allocate = allocate  # waits for the number
        self.whole: LogitsCache | None = None  # None: not there yet, or of no row

    def of(self, rows: slice) -> Self:
        """All rows are one block."""
        return self

    def pieces(self) -> Iterator[LogitsCache]:
        assert self._first is not None
        yield self._first
        self.whole = self._allocate()
        if self.whole is not None:
            num_rows, num_columns = self.whole.exp.shape[0], self._first.exp.shape[1]
            yield self.whole.columns(slice(num_columns, self.whole.exp.shape[1]))
            first = self._first.of(slice(0, num_rows))
            _words(self.whole.exp, num_columns).copy_(_words(first.exp, num_columns))
            self.whole.reference[: first.reference.shape[0]].copy_(first.reference)
        self._first = None


def new_cache(num_tokens: int, hidden: Tensor, options: Options) -> LogitsCache | None:
    """Room for what `logits_cache_bytes` allows; None: nothing is kept."""
    columns = cache_columns(num_tokens, options.num_columns, hidden, options.logits_cache_bytes)
    return LogitsCache.allocate(num_tokens, columns, hidden) if columns else None


def begin_cache(num_tokens: int, hidden: Tensor, options: Options, look: Callable[[], int]) -> CacheAhead | None:
    """As `new_cache`, for as many of the tokens as `look` waits for."""
    begun, block_v = begun_columns(num_tokens, hidden, options) or 0, _tile_columns(hidden)
    # All of the largest shard may be no whole number of tiles, and less than this one's: it may be an earlier head's.
    columns = options.num_columns if begun >= options.num_columns else begun // block_v * block_v
    if columns == 0:
        return None
    first = LogitsCache.allocate(num_tokens, columns, hidden)
    return CacheAhead(first, lambda: new_cache(look(), hidden, options))


def begun_columns(num_tokens: int, hidden: Tensor, options: Options) -> int | None:
    """How many columns of every row are kept before their number is known: of an eighth of the workspace at most.

    That is 0.2 ms of work for an H200 where 60 % of 16384 x 4096 are ignored, about what the host takes to go on. Of
    the largest shard, so that ranks agree. 0: nothing is to be kept; None: a cache has to wait for the number.
    """
    if kept_row_bytes(hidden, 0) is None or options.logits_cache_bytes == 0:
        return 0
    room = min(options.logits_cache_bytes, options.workspace_bytes // 8)
    return cache_columns(num_tokens, options.largest_shard, hidden, room) or None


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


def _words(exp: Tensor, num_columns: int) -> Tensor:
    """The first columns, and as many zeros as fill a step, eight bytes at a time: a copy takes half as long."""
    return exp.as_strided((exp.shape[0], slab_row_stride(num_columns)), exp.stride()).view(torch.float64)
