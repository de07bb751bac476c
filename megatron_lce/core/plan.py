"""How a call is cut into pieces that fit its budgets, and how many bytes they take, in plain integers.

shard  a rank's part of the vocabulary or of a sequence
slab   a range of columns of a shard, and of tokens of a block, as wide as the workspace allows
block  a range of tokens
tile   the logits that one program of a kernel computes
chunk  columns that share one set of statistics

All arguments that decide between paths are the same on all ranks of a group.
"""

from collections.abc import Iterator
from typing import NamedTuple

MIN_TOKENS = 128  # rows of a kernel's tile
COLUMN_STEP = 256  # slabs are a multiple of a kernel's tile wide, so that their rows are aligned
PREFERRED_COLUMNS = 16384  # width of a slab
SLAB_LOGITS = 2**27  # logits of a slab: larger slabs gain nothing (8192 x 4096 x 151936 on an H200)
WIDE_BLOCK = 4096  # tokens of a block: with fewer, products that sum over tokens are slower
KNOWN_LOSS_STEP = 2048  # tokens: multiples fill a Hopper GPU in the product for the hidden gradient
# Products of 8192 x (2048, 4096) x 151936 take 30.4, 23.4, 22.3 and 24.5 ms in blocks of 256, 384, 512, 640 tokens.
WIDE_PRODUCTS = 512  # tokens of a block of two heads' products: more gain nothing, unless the shard is narrow
WIDE_LOGITS = 2**26  # logits per head of a block of a narrow shard
ALIGNED_COLUMNS = 8  # cuBLAS takes five times as long for a slab whose width is not a multiple of this
SLAB_ROW_STEP = 64  # elements: rows of slabs and caches start at cache lines and hold whole vectors of a CPU


class Blocks(NamedTuple):
    """Tokens and columns of the largest slab."""

    tokens: int
    columns: int


class BlockBytes(NamedTuple):
    """Bytes of a block per logit, per token and per column."""

    per_logit: int
    per_token: int = 0
    per_column: int = 0

    def of(self, tokens: int, columns: int) -> int:
        """Return the bytes of a block."""
        return tokens * (self.per_token + columns * self.per_logit) + columns * self.per_column

    def most_tokens(self, room: int, columns: int) -> int:
        """Return the most tokens of a block of so many columns."""
        return (room - columns * self.per_column) // (self.per_token + columns * self.per_logit)

    def most_columns(self, room: int, tokens: int) -> int:
        """Return the most columns of a block of so many tokens."""
        return (room - tokens * self.per_token) // max(1, self.per_column + tokens * self.per_logit)


class Costs(NamedTuple):
    """Bytes of intermediates of a backend's primitives, for inputs of one dtype."""

    chunk_columns: int  # number of columns that share one set of statistics
    tile_columns: int = 0  # a partial cache holds a multiple of this many columns; 0: there is no cache
    logit: int = 0  # bytes per logit of a slab
    stats_token: int = 0  # bytes per token of statistics
    stats_column: int = 0  # bytes of a copied row of the weight for statistics
    slab_token: int = 0  # bytes of a copied row of hidden for a slab
    slab_column: int = 0  # bytes of a copied row of the weight for a slab


def costs_of_parts(hidden_size: int, hidden_parts: int, chunk_columns: int) -> Costs:
    """Return the costs with an fp32 weight: fp16 parts and a power per row; for gradients three bf16 parts."""
    part = 2 * round_up(hidden_size, SLAB_ROW_STEP)
    token, column, row = hidden_parts * part + 4, 2 * part + 4, 3 * part
    return Costs(chunk_columns, logit=6, stats_token=token, stats_column=column, slab_token=row, slab_column=row)


class HeadSize(NamedTuple):
    """Sizes of a head, the same on every rank of its group; the methods return bytes."""

    hidden: int  # H
    columns: int  # of the group's largest shard, padding included
    itemsize: int  # bytes of an element of the weight and of the gradient of a logit
    stats_rows: int  # statistics per token and chunk and, with telemetry, of their merge
    costs: Costs
    sums_weight: bool  # the weight gradient needs a separate fp32 sum over blocks of tokens
    even: bool = True  # no shard ends in a separate slab, see `cut_columns`

    @property
    def stats(self) -> BlockBytes:
        """Bytes of the statistics of a token, with intermediates."""
        chunks = ceil_div(self.columns, self.costs.chunk_columns)
        return BlockBytes(0, 4 * chunks * self.stats_rows + self.costs.stats_token, self.costs.stats_column)

    @property
    def slab(self) -> BlockBytes:
        """Bytes of a slab of logit gradients, with intermediates."""
        return BlockBytes(self.itemsize + self.costs.logit, self.costs.slab_token, self.costs.slab_column)

    @property
    def weight_sum_column(self) -> int:
        """Bytes per column of the fp32 sum of the weight gradient; 0: the gradient needs no separate sum."""
        return 4 * self.hidden if self.sums_weight else 0

    @property
    def weight_sum(self) -> int:
        """Bytes of this sum for the largest shard."""
        return self.columns * self.weight_sum_column

    @property
    def hidden_sum_token(self) -> int:
        """Bytes per token of the fp32 sum of the hidden gradient.

        0 if no sum is needed: the cache is one slab, or gradients are fp32.
        """
        return 0 if self.even or self.itemsize == 4 else 4 * self.hidden

    def kept_token(self, columns: int) -> int:
        """Bytes per token of a cache of this many columns."""
        return slab_row_stride(columns) * self.itemsize + 4 * ceil_div(columns, self.costs.chunk_columns)

    def cache_columns(self, num_tokens: int, num_columns: int, logits_cache_bytes: int) -> int:
        """Return the number of columns that fit in a cache: all, or a multiple of the columns of a tile."""
        if logits_cache_bytes == 0 or self.costs.tile_columns == 0 or num_tokens == 0:
            return 0
        if num_tokens * self.kept_token(num_columns) <= logits_cache_bytes:
            return num_columns
        tile_bytes = num_tokens * self.kept_token(self.costs.tile_columns)
        return logits_cache_bytes // tile_bytes * self.costs.tile_columns

    def smallest_workspace(self, *, needs_grad: bool, needs_weight: bool) -> int:
        """Return the bytes that every pass needs for its smallest block, one token of `COLUMN_STEP` columns."""
        of_stats = self.stats.of(1, COLUMN_STEP)
        sum_column = self.weight_sum_column if needs_weight else 0
        return max(of_stats, self.slab.of(1, COLUMN_STEP) + COLUMN_STEP * sum_column) if needs_grad else of_stats

    def check_workspace(self, workspace_bytes: int, *, needs_grad: bool, needs_weight: bool) -> None:
        """Raise ValueError if the workspace is smaller than that."""
        smallest = self.smallest_workspace(needs_grad=needs_grad, needs_weight=needs_weight)
        if workspace_bytes < smallest:
            raise ValueError(f"workspace_bytes must be at least {smallest} for this head, got {workspace_bytes}")


def size_of_two_heads(student: HeadSize, reading_bytes: int) -> HeadSize:
    """Return the student's sizes with the products of both heads as the only intermediates.

    `reading_bytes`: bytes per token that the backend allocates to read products with all columns.
    """
    logit = 2 * 4  # bytes of both products, in fp32
    row_bytes = reading_bytes + slab_row_stride(student.columns) * logit
    costs = Costs(student.costs.chunk_columns, logit=logit, stats_token=row_bytes, slab_token=reading_bytes)
    return student._replace(stats_rows=0, costs=costs)


def stats_tokens(size: HeadSize, num_tokens: int, workspace_bytes: int) -> int:
    """Return how many tokens' statistics are computed at once. A quarter of the workspace is for copied columns."""
    columns = max(COLUMN_STEP, workspace_bytes // 4 // max(size.stats.per_column, 1))
    most = size.stats.most_tokens(workspace_bytes, min(columns, PREFERRED_COLUMNS))
    return max(1, even(num_tokens, most, MIN_TOKENS))


def stats_columns(size: HeadSize, num_tokens: int, workspace_bytes: int) -> int:
    """Return how many copied columns fit in the workspace together with the statistics of `stats_tokens`."""
    most = size.stats.most_columns(workspace_bytes, num_tokens)
    return max(COLUMN_STEP, even(size.columns, max(COLUMN_STEP, most), COLUMN_STEP))


def backward_tokens(size: HeadSize, num_tokens: int, workspace_bytes: int) -> int:
    """Return the tokens of a block in the outer loop of backward; the inner loop goes over slabs of the vocabulary.

    One block with many slabs accumulates the hidden gradient, 4 N H bytes. Several blocks, each with all columns,
    accumulate the weight gradient, 4 V H bytes. The smaller sum also causes less traffic, if blocks have `WIDE_BLOCK`
    tokens. The sum of the weight gradient is part of the workspace only if blocks stay that wide.
    """
    slab, columns = size.slab, size.columns
    row_bytes = slab.per_token + round_up(columns, COLUMN_STEP) * slab.per_logit
    room = workspace_bytes - columns * slab.per_column
    block = max((room - size.weight_sum) // row_bytes, min(WIDE_BLOCK, room // row_bytes))
    if columns >= num_tokens or block < WIDE_BLOCK:
        return max(num_tokens, 1)
    return even(num_tokens, block, MIN_TOKENS)


def plan_known_loss(
    size: HeadSize, num_tokens: int, workspace_bytes: int, *, single_is_sum: bool = False
) -> tuple[int, int] | None:
    """Return the tokens of a block whose logits are cached until their gradients are computed; None if none fit.

    The second number is the workspace without these logits. `single_is_sum`: the weight gradient of a single block is
    an fp32 sum, too.
    """
    if size.costs.tile_columns == 0:
        return None
    # First the statistics. After they are freed, hidden times the slab's factor, and the fp32 hidden gradient.
    token_bytes = max(size.stats.per_token, size.hidden * size.itemsize + size.hidden_sum_token)
    kept = size.kept_token(size.columns)
    tokens = kept_tokens(num_tokens, workspace_bytes, kept + token_bytes, size.weight_sum, single_is_sum=single_is_sum)
    return None if tokens is None else (tokens, max(workspace_bytes - tokens * kept, tokens * token_bytes))


def kept_tokens(
    num_tokens: int, room: int, bytes_per_token: int, sum_bytes: int = 0, *, single_is_sum: bool = False
) -> int | None:
    """Return the tokens of a block whose logits are kept until their gradients are computed; None below `MIN_TOKENS`.

    A call may use `room` bytes, and `sum_bytes` for the fp32 sum of the weight gradient over blocks, if there is one.
    One block: the whole sum's memory is free. Several blocks, or one with `single_is_sum`: half, because the 16-bit
    gradient is allocated after the last block.
    """
    if num_tokens * bytes_per_token <= room + (sum_bytes // 2 if single_is_sum else sum_bytes):
        return max(1, num_tokens)
    most = (room + sum_bytes // 2) // bytes_per_token
    if most < MIN_TOKENS:
        return None
    return min(num_tokens, most // KNOWN_LOSS_STEP * KNOWN_LOSS_STEP or most // MIN_TOKENS * MIN_TOKENS)


def products_tokens(size: HeadSize, num_tokens: int, room: int) -> int:
    """Return how many tokens' products of two heads are in memory at once: at most as many as still make it faster."""
    most = min(room // size.stats.per_token, max(WIDE_PRODUCTS, WIDE_LOGITS // size.columns))
    return max(1, even(num_tokens, most, MIN_TOKENS))


def plan_known_weights(
    size: HeadSize, num_tokens: int, workspace_bytes: int, *, single_is_sum: bool = False
) -> tuple[int, int] | None:
    """Return the tokens whose gradients are collected, and of how many products are in memory; None if none fit.

    Products and gradients share the memory of `kept_tokens`. Products get up to `WIDE_PRODUCTS` tokens and gradients
    the rest, because each block of gradients updates the sum of the weight gradient. What is left goes to products.
    """
    products, gradient = size.stats.per_token, slab_row_stride(size.columns) * size.itemsize + size.hidden_sum_token
    most = kept_tokens(num_tokens, workspace_bytes, products + gradient, size.weight_sum, single_is_sum=single_is_sum)
    if most is None:
        return None
    if most >= num_tokens:
        return most, most
    room = workspace_bytes + size.weight_sum // 2
    at_once = min(most, even(num_tokens, min(workspace_bytes // products, WIDE_PRODUCTS), MIN_TOKENS))
    tokens = even(num_tokens, (room - at_once * products) // gradient, MIN_TOKENS)
    return tokens, products_tokens(size, tokens, room - tokens * gradient)


def plan_blocks(
    num_tokens: int,
    num_columns: int,
    workspace_bytes: int,
    block_bytes: BlockBytes,
    *,
    per_column_if_tokens_are_cut: int = 0,
) -> Blocks:
    """Return the tokens and columns of a slab: the widest within `workspace_bytes` that still saves time.

    It has all tokens if `PREFERRED_COLUMNS` then fit, and about `SLAB_LOGITS` logits. Otherwise slabs minimise the
    traffic of the fp32 sums of both gradients.

    Raises:
        ValueError: not even the smallest block fits.
    """

    def traffic(blocks: Blocks) -> float:
        """In units of N*V*H: each slab updates N*H sums; each block of only some tokens updates V*H."""
        return 1 / blocks.columns + (0 if blocks is uncut else 1 / blocks.tokens)

    preferred = min(PREFERRED_COLUMNS, round_up(num_columns, COLUMN_STEP))
    num_slabs = max(1, min(num_columns // preferred, round(num_columns * num_tokens / SLAB_LOGITS)))
    most = min(
        block_bytes.most_columns(workspace_bytes, num_tokens), round_up(ceil_div(num_columns, num_slabs), COLUMN_STEP)
    )
    uncut = Blocks(num_tokens, even(num_columns, most, COLUMN_STEP))
    if block_bytes.of(num_tokens, preferred) <= workspace_bytes:
        return uncut
    cut_bytes = block_bytes._replace(per_column=block_bytes.per_column + per_column_if_tokens_are_cut)
    halves = (preferred * quarters // 4 >> halvings for halvings in range(7) for quarters in (4, 3))
    widths = sorted({max(COLUMN_STEP, width // COLUMN_STEP * COLUMN_STEP) for width in halves})
    blocks = (Blocks(min(num_tokens, cut_bytes.most_tokens(workspace_bytes, width)), width) for width in widths)
    possible = [block for block in blocks if block.tokens >= 1]
    if not possible:
        least = cut_bytes.of(1, COLUMN_STEP)
        raise ValueError(f"workspace_bytes must be at least {least} for this head, got {workspace_bytes}")
    tokens, columns = min(possible, key=traffic)
    cut_tokens = Blocks(even(num_tokens, tokens, MIN_TOKENS), even(num_columns, columns, COLUMN_STEP))
    candidates = [uncut, cut_tokens] if uncut.columns >= COLUMN_STEP else [cut_tokens]
    return min(candidates, key=traffic)


def cut(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    """Yield `[start, stop)` in slices of `step`."""
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def cut_columns(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    """Yield as `cut` does; columns beyond a multiple of `ALIGNED_COLUMNS` become a separate last slice."""
    for columns in cut(stop, step, start):
        even = columns.stop - (columns.stop - columns.start) % ALIGNED_COLUMNS
        yield from (part for part in (slice(columns.start, even), slice(even, columns.stop)) if part.start < part.stop)


def slab_row_stride(columns: int) -> int:
    """Return the number of elements from row to row of a slab or cache."""
    return round_up(columns, SLAB_ROW_STEP)


def ceil_div(value: int, step: int) -> int:
    """Return value / step, rounded up; `triton.cdiv` takes 5 us on the host."""
    return -(-value // step)


def round_up(value: int, step: int) -> int:
    return ceil_div(value, step) * step


def even(length: int, most: int, step: int) -> int:
    """Return the block length up to `most` that cuts `length` most evenly, a multiple of `step` if possible."""
    if most >= length:
        return length
    if most < step:
        return most
    most = most // step * step
    return min(most, round_up(ceil_div(length, ceil_div(length, most)), step))
