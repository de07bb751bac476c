"""How a call is cut into pieces that fit its budgets, and how many bytes they take, in plain integers.

A shard is a rank's part of the vocabulary or of a sequence. A slab is a range of a shard's columns, as wide as the
workspace allows. A block is a range of tokens that is computed by itself. A tile is what one program of a kernel
computes. A chunk is the columns that share a row of statistics. Every argument that decides between paths is the same
on all ranks of a group.
"""

from collections.abc import Iterator
from typing import NamedTuple

MIN_TOKENS = 128  # rows of a kernel's tile
COLUMN_STEP = 256  # slabs are a multiple of a kernel's tile wide, so that rows of a slab stay aligned
PREFERRED_COLUMNS = 16384  # width of a slab
SLAB_LOGITS = 2**27  # logits of a slab: larger ones gain nothing (8192 x 4096 x 151936 on an H200)
WIDE_BLOCK = 4096  # tokens of a block: with fewer, a product that sums over them is slower
KNOWN_LOSS_STEP = 2048  # tokens: multiples fill a Hopper GPU in the product for hidden's gradient
# Products of 8192 x (2048, 4096) x 151936 take 30.4, 23.4, 22.3 and 24.5 ms in blocks of 256, 384, 512, 640 tokens.
WIDE_PRODUCTS = 512  # tokens of a block of two heads' products: more gain nothing, unless the shard is narrow
WIDE_LOGITS = 2**26  # a head's logits of a narrow shard's block
ALIGNED_COLUMNS = 8  # cuBLAS takes five times as long for a slab whose width is no multiple of this
SLAB_ROW_STEP = 64  # elements: rows of slabs and caches start at cache lines, and whole vectors of a CPU fit in a row


class Blocks(NamedTuple):
    """Size of the largest block."""

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

    @property
    def smallest(self) -> int:
        """Bytes of one token of `COLUMN_STEP` columns."""
        return self.of(1, COLUMN_STEP)


class Costs(NamedTuple):
    """Bytes that a backend's primitives take for inputs of one dtype, beside inputs and results."""

    chunk_columns: int  # columns that share a row of statistics
    tile_columns: int = 0  # a partial cache keeps a multiple of this many columns; 0: there is no cache
    logit: int = 0  # bytes of intermediates for each logit of a slab
    stats_token: int = 0  # bytes of intermediates for each token's statistics
    stats_column: int = 0  # bytes of a copy of a column's row of the weight while statistics are taken
    slab_token: int = 0  # bytes of a copy of a token's row of hidden for a slab
    slab_column: int = 0  # bytes of a copy of a column's row of the weight for a slab


def costs_of_parts(hidden_size: int, hidden_parts: int, chunk_columns: int) -> Costs:
    """Return the costs beside an fp32 weight: fp16 parts and a factor of each row; for gradients three bf16 parts."""
    part = 2 * round_up(hidden_size, SLAB_ROW_STEP)
    token, column, row = hidden_parts * part + 4, 2 * part + 4, 3 * part
    return Costs(chunk_columns, logit=6, stats_token=token, stats_column=column, slab_token=row, slab_column=row)


class HeadSize(NamedTuple):
    """Sizes of a head, the same on every rank of its group; the methods return bytes."""

    hidden: int  # H
    columns: int  # of the group's largest shard, padding included
    itemsize: int  # bytes of an element of the weight and of the gradient of a logit
    stats_rows: int  # numbers of a token's statistics of one chunk, and, with telemetry, of their merge
    costs: Costs
    sums_weight: bool  # the weight's gradient needs an fp32 sum over blocks of tokens beside it
    even: bool = True  # no shard's last columns need a slab of their own, see `cut_columns`

    @property
    def stats(self) -> BlockBytes:
        """Bytes of a token's statistics and of the intermediates from which they are taken."""
        chunks = ceil_div(self.columns, self.costs.chunk_columns)
        return BlockBytes(0, 4 * chunks * self.stats_rows + self.costs.stats_token, self.costs.stats_column)

    @property
    def slab(self) -> BlockBytes:
        """Bytes of a slab of gradients of logits and of the intermediates from which it is made."""
        return BlockBytes(self.itemsize + self.costs.logit, self.costs.slab_token, self.costs.slab_column)

    @property
    def weight_sum_column(self) -> int:
        """Bytes per column of the fp32 sum of the weight's gradient, 0 when the gradient's own tensor is that sum."""
        return 4 * self.hidden if self.sums_weight else 0

    @property
    def weight_sum(self) -> int:
        """Bytes of the fp32 sum of the weight's gradient, of the largest shard; 0 as `weight_sum_column`."""
        return self.columns * self.weight_sum_column

    @property
    def hidden_sum_token(self) -> int:
        """Bytes per token of the fp32 sum of hidden's gradient, 0 when one product covers all kept columns."""
        return 0 if self.even or self.itemsize == 4 else 4 * self.hidden

    def kept_token(self, columns: int) -> int:
        """Bytes per token of that many columns' kept exponentials and their chunks' references."""
        return slab_row_stride(columns) * self.itemsize + 4 * ceil_div(columns, self.costs.chunk_columns)

    def cache_columns(self, num_tokens: int, num_columns: int, logits_cache_bytes: int) -> int:
        """Number of columns that a cache of that many bytes keeps: all, or a multiple of a tile's."""
        if logits_cache_bytes == 0 or self.costs.tile_columns == 0 or num_tokens == 0:
            return 0
        if num_tokens * self.kept_token(num_columns) <= logits_cache_bytes:
            return num_columns
        tile_bytes = num_tokens * self.kept_token(self.costs.tile_columns)
        return logits_cache_bytes // tile_bytes * self.costs.tile_columns


def size_of_two_heads(student: HeadSize, reading_bytes: int) -> HeadSize:
    """Return the student's sizes where both heads' products take the place of what a backend needs otherwise.

    `reading_bytes`: bytes per token of intermediates of products with all columns, and of their reading.
    """
    logit = 2 * 4  # bytes of both products, in fp32
    row_bytes = reading_bytes + slab_row_stride(student.columns) * logit
    costs = Costs(student.costs.chunk_columns, logit=logit, stats_token=row_bytes, slab_token=reading_bytes)
    return student._replace(stats_rows=0, costs=costs)


class KnownLossPlan(NamedTuple):
    """Blocks of `tokens` of a known loss, with `workspace_bytes` beside a block's kept logits."""

    tokens: int
    workspace_bytes: int


class KnownWeightsPlan(NamedTuple):
    """Blocks of `tokens` whose gradients are collected from two heads' products of `products_tokens` at a time."""

    tokens: int
    products_tokens: int


def smallest_workspace(size: HeadSize, needs_grad: bool, needs_weight: bool) -> int:
    """Bytes that every pass needs for its smallest block."""
    smallest = size.stats.smallest
    if needs_grad:
        column_sum = size.weight_sum_column if needs_weight else 0
        smallest = max(smallest, size.slab._replace(per_column=size.slab.per_column + column_sum).smallest)
    return smallest


def stats_tokens(size: HeadSize, num_tokens: int, workspace_bytes: int) -> int:
    """Number of tokens whose statistics are taken at once; copies of columns have a quarter of the workspace."""
    columns = max(COLUMN_STEP, workspace_bytes // 4 // max(size.stats.per_column, 1))
    most = size.stats.most_tokens(workspace_bytes, min(columns, PREFERRED_COLUMNS))
    return max(1, even(num_tokens, most, MIN_TOKENS))


def stats_columns(size: HeadSize, num_tokens: int, workspace_bytes: int) -> int:
    """Number of columns whose copies have room beside the statistics of `stats_tokens`."""
    most = size.stats.most_columns(workspace_bytes, num_tokens)
    return max(COLUMN_STEP, even(size.columns, max(COLUMN_STEP, most), COLUMN_STEP))


def backward_tokens(size: HeadSize, num_tokens: int, workspace_bytes: int) -> int:
    """Number of tokens of a block of backward's outer loop; the inner loop goes over slabs of vocabulary.

    One block with many slabs accumulates hidden's gradient, 4 N H bytes. Several blocks, each with all columns,
    accumulate the weight's, 4 V H bytes. The smaller sum is also read and written less, if blocks stay `WIDE_BLOCK`.
    The weight's sum comes out of the workspace as far as blocks stay so wide, and lies beside it otherwise.
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
) -> KnownLossPlan | None:
    """Return the blocks of tokens whose logits are kept until their gradients are made, or None without room.

    `single_is_sum`: the weight's gradient of a single block is an fp32 sum, too.
    """
    if size.costs.tile_columns == 0:
        return None
    beside = COLUMN_STEP * size.stats.per_column
    # First statistics; when they are free, hidden times the slab's factor, and the fp32 sum of hidden's gradient.
    token_bytes = max(size.stats.per_token, size.hidden * size.itemsize + size.hidden_sum_token)
    kept = size.kept_token(size.columns)
    tokens = kept_tokens(
        num_tokens, workspace_bytes - beside, kept + token_bytes, size.weight_sum, single_is_sum=single_is_sum
    )
    if tokens is None:
        return None
    return KnownLossPlan(tokens, max(workspace_bytes - tokens * kept, tokens * token_bytes + beside))


def kept_tokens(
    num_tokens: int, room: int, bytes_per_token: int, sum_bytes: int = 0, *, single_is_sum: bool = False
) -> int | None:
    """Tokens of a block whose logits are kept until their gradients are made; None if `MIN_TOKENS` have no room.

    A call takes `room` bytes beside its gradients, and `sum_bytes` for the fp32 sum of the weight's gradient over
    blocks; 0: there is no such sum. A single block needs no sum, and may take its room. With several blocks the
    gradient is allocated after the last is free, in 16 bits half as large as the sum: a block may take its room, too.
    """
    if num_tokens * bytes_per_token <= room + (sum_bytes // 2 if single_is_sum else sum_bytes):
        return max(1, num_tokens)
    most = (room + sum_bytes // 2) // bytes_per_token
    if most < MIN_TOKENS:
        return None
    return min(num_tokens, most // KNOWN_LOSS_STEP * KNOWN_LOSS_STEP or most // MIN_TOKENS * MIN_TOKENS)


def products_tokens(size: HeadSize, num_tokens: int, room: int) -> int:
    """Number of tokens whose products of two heads with all columns are read at once: no more than gain by it."""
    most = min(room // size.stats.per_token, max(WIDE_PRODUCTS, WIDE_LOGITS // size.columns))
    return max(1, even(num_tokens, most, MIN_TOKENS))


def plan_known_weights(
    size: HeadSize, num_tokens: int, workspace_bytes: int, *, single_is_sum: bool = False
) -> KnownWeightsPlan | None:
    """Return the blocks of tokens whose gradients are collected while their products are there, or None without room.

    They share the room of `kept_tokens`. Products take up to `WIDE_PRODUCTS` in the workspace, and gradients the rest,
    as each block of these reads and writes the weight's sum; what is left is the products'.
    """
    products, gradient = size.stats.per_token, slab_row_stride(size.columns) * size.itemsize + size.hidden_sum_token
    most = kept_tokens(num_tokens, workspace_bytes, products + gradient, size.weight_sum, single_is_sum=single_is_sum)
    if most is None:
        return None
    if most >= num_tokens:
        return KnownWeightsPlan(most, most)
    room = workspace_bytes + size.weight_sum // 2
    at_once = min(most, even(num_tokens, min(workspace_bytes // products, WIDE_PRODUCTS), MIN_TOKENS))
    tokens = even(num_tokens, (room - at_once * products) // gradient, MIN_TOKENS)
    return KnownWeightsPlan(tokens, products_tokens(size, tokens, room - tokens * gradient))


def plan_blocks(
    num_tokens: int,
    num_columns: int,
    workspace_bytes: int,
    block_bytes: BlockBytes,
    *,
    per_column_if_tokens_are_cut: int = 0,
) -> Blocks:
    """Return the widest blocks within `workspace_bytes` that still gain from their width.

    All tokens go at once if that leaves slabs of `PREFERRED_COLUMNS`, of about `SLAB_LOGITS` logits. Else the blocks
    are those that read and write the least of the gradients' fp32 sums.

    Raises:
        ValueError: not even the smallest block fits.
    """

    def read_and_written(blocks: Blocks) -> float:
        """In units of N V H: a slab of columns adds to N H numbers, and a block of tokens, unless it is all, to V H."""
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
        raise ValueError(f"workspace_bytes must be at least {cut_bytes.smallest} for this head, got {workspace_bytes}")
    tokens, columns = min(possible, key=read_and_written)
    cut_tokens = Blocks(even(num_tokens, tokens, MIN_TOKENS), even(num_columns, columns, COLUMN_STEP))
    candidates = [uncut, cut_tokens] if uncut.columns >= COLUMN_STEP else [cut_tokens]
    return min(candidates, key=read_and_written)


def cut(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    """Yield `[start, stop)` in slices of `step`."""
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def cut_columns(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    """Yield as `cut` does; what the last slice has beyond a multiple of `ALIGNED_COLUMNS` is a slice of its own."""
    for columns in cut(stop, step, start):
        even = columns.stop - (columns.stop - columns.start) % ALIGNED_COLUMNS
        yield from (part for part in (slice(columns.start, even), slice(even, columns.stop)) if part.start < part.stop)


def slab_row_stride(columns: int) -> int:
    """Number of elements from row to row of a slab or cache."""
    return round_up(columns, SLAB_ROW_STEP)


def ceil_div(value: int, step: int) -> int:
    """Return value / step, rounded up. `triton.cdiv` takes 5 us on the host."""
    return -(-value // step)


def round_up(value: int, step: int) -> int:
    return ceil_div(value, step) * step


def even(length: int, most: int, step: int) -> int:
    """Block length of at most `most` that cuts `length` most evenly; a multiple of `step` if `most` holds one."""
    if most >= length:
        return length
    if most < step:
        return most
    most = most // step * step
    return min(most, round_up(ceil_div(length, ceil_div(length, most)), step))
