"""How a call is cut into pieces that fit its budgets, and how many bytes everything takes: plain integers.

A slab is a range of the vocabulary's columns, as wide as the workspace allows; a block is a range of tokens that is
worked on by itself; a tile is what one program of a kernel computes; a chunk is the columns that statistics are taken
of; a shard is a rank's part, of the vocabulary or of a sequence. Whatever decides between paths here is shared by the
ranks of a group.
"""

from collections.abc import Iterator
from typing import NamedTuple

MIN_TOKENS = 128  # a kernel's row block
COLUMN_STEP = 256  # slabs are whole kernel tiles wide, so that rows of a slab stay aligned
PREFERRED_COLUMNS = 16384  # of a slab
SLAB_LOGITS = 2**27  # of one slab: larger ones gain nothing (8192 x 4096 x 151936 on an H200)
WIDE_BLOCK = 4096  # tokens of a block from which on a product that sums over them runs at speed
KNOWN_LOSS_STEP = 2048  # tokens: blocks of so many fill a Hopper GPU in the product for hidden's gradient
ALIGNED_COLUMNS = 8  # cuBLAS takes five times as long for a slab whose width is no multiple of this
SLAB_ROW_STEP = 64  # elements: rows of slabs and caches start at cache lines, and whole vectors of a CPU fit in a row


class Blocks(NamedTuple):
    """Blocks of at most `tokens` x `columns`."""

    tokens: int
    columns: int


class BlockBytes(NamedTuple):
    """Bytes of a block of `tokens` x `columns`."""

    per_logit: int
    per_token: int = 0
    per_column: int = 0

    @property
    def smallest(self) -> int:
        """Bytes of one token of `COLUMN_STEP` columns."""
        return COLUMN_STEP * (self.per_column + self.per_logit) + self.per_token


class Costs(NamedTuple):
    """What a backend's primitives take for inputs of one dtype, beside inputs and results."""

    chunk_columns: int  # columns that share a row of statistics
    tile_columns: int = 0  # columns of which a cache keeps a whole number; 0: it keeps nothing
    logit: int = 0  # bytes of intermediates for each logit of a slab
    stats_token: int = 0  # bytes of intermediates for each token's statistics
    upcast_row: int = 0  # bytes of an fp32 copy of a row of hidden or weight


class HeadSize(NamedTuple):
    """A head as every rank of its group plans it; the methods tell bytes."""

    hidden: int  # H
    columns: int  # of the group's largest shard, padding included
    itemsize: int  # bytes of an element of hidden and weight
    stats_rows: int  # K, numbers of a token's statistics of one chunk
    costs: Costs
    sums_weight: bool  # the weight's gradient over parts of the tokens needs an fp32 sum beside it
    even: bool = True  # no shard's columns end in a slab of their own

    @property
    def stats(self) -> BlockBytes:
        """Bytes of a token's statistics and of what is there while they are taken."""
        chunks = ceil_div(self.columns, self.costs.chunk_columns)
        per_token = 4 * chunks * self.stats_rows + self.costs.stats_token + self.costs.upcast_row
        return BlockBytes(0, per_token, self.costs.upcast_row)

    @property
    def slab(self) -> BlockBytes:
        """Bytes of a slab of gradients of logits, and of what is there while it is made."""
        return BlockBytes(self.itemsize + self.costs.logit, self.costs.upcast_row, self.costs.upcast_row)

    @property
    def weight_sum_column(self) -> int:
        """Bytes of a column in the fp32 sum of the weight's gradient; 0: its own tensor is that sum."""
        return 4 * self.hidden if self.sums_weight else 0

    @property
    def weight_sum(self) -> int:
        """Bytes of that sum over the largest shard."""
        return self.columns * self.weight_sum_column

    @property
    def hidden_sum_token(self) -> int:
        """Bytes of a token in the fp32 sum of hidden's gradient of kept logits; 0: one product covers all of them."""
        return 0 if self.even or self.itemsize == 4 else 4 * self.hidden

    def kept_token(self, columns: int) -> int:
        """Bytes of one token's kept exponentials of that many columns, and of each chunk's reference."""
        return slab_row_stride(columns) * self.itemsize + 4 * ceil_div(columns, self.costs.chunk_columns)

    def cache_columns(self, num_tokens: int, num_columns: int, logits_cache_bytes: int) -> int:
        """How many columns a cache of that many bytes keeps: all, or a whole number of tiles."""
        if self.costs.tile_columns == 0 or num_tokens == 0:
            return 0
        if num_tokens * self.kept_token(num_columns) <= logits_cache_bytes:
            return num_columns
        tile_bytes = num_tokens * self.kept_token(self.costs.tile_columns)
        return logits_cache_bytes // tile_bytes * self.costs.tile_columns


class KnownLossPlan(NamedTuple):
    """How tokens go all the way to their gradients at once."""

    tokens: int  # of a block
    workspace_bytes: int  # left beside a block's kept logits


def smallest_workspace(size: HeadSize, needs_grad: bool, needs_weight: bool) -> int:
    """Bytes in which every pass finds room for its smallest block."""
    smallest = size.stats.smallest
    if needs_grad:
        column_sum = size.weight_sum_column if needs_weight else 0
        smallest = max(smallest, size.slab._replace(per_column=size.slab.per_column + column_sum).smallest)
    return smallest


def stats_tokens(size: HeadSize, num_tokens: int, workspace_bytes: int) -> int:
    """How many tokens' statistics are taken at once; a quarter of the workspace is left to copies of columns."""
    columns = max(COLUMN_STEP, workspace_bytes // 4 // max(size.stats.per_column, 1))
    room = workspace_bytes - min(columns, PREFERRED_COLUMNS) * size.stats.per_column
    return max(1, _even(num_tokens, room // size.stats.per_token, MIN_TOKENS))


def backward_tokens(size: HeadSize, num_tokens: int, workspace_bytes: int) -> int:
    """How many tokens backward's outer loop takes at once: all of them, with slabs of vocabulary inside, or fewer.

    Slabs inside accumulate hidden's gradient, 4 N H bytes; blocks of tokens outside, each with all columns, accumulate
    the weight's, 4 V H bytes. What is smaller is also read and written less, as long as the blocks stay wide. The
    weight's sum comes out of the workspace as far as they do; what they need beside it is on top, as hidden's is.
    """
    slab, columns = size.slab, size.columns
    row_bytes = slab.per_token + round_up(columns, COLUMN_STEP) * slab.per_logit
    room = workspace_bytes - columns * slab.per_column
    block = max((room - size.weight_sum) // row_bytes, min(WIDE_BLOCK, room // row_bytes))
    if columns >= num_tokens or block < WIDE_BLOCK:
        return max(num_tokens, 1)
    return _even(num_tokens, block, MIN_TOKENS)


def plan_slabs(
    size: HeadSize, num_tokens: int, num_columns: int, workspace_bytes: int, *, per_column_if_tokens_are_cut: int = 0
) -> Blocks:
    """Blocks of a buffer for the gradients of so many columns' logits."""
    return plan_blocks(
        num_tokens,
        slab_row_stride(num_columns),
        workspace_bytes,
        size.slab,
        per_column_if_tokens_are_cut=per_column_if_tokens_are_cut,
    )


def plan_known_loss(
    size: HeadSize, num_tokens: int, workspace_bytes: int, *, single_is_sum: bool = False
) -> KnownLossPlan | None:
    """Blocks of tokens whose logits are kept until their gradients are made; None: too few have room.

    `single_is_sum`: the weight's gradient of a single block is an fp32 sum, too.
    """
    if size.costs.tile_columns == 0:
        return None
    beside = COLUMN_STEP * size.stats.per_column
    # Statistics, then hidden states times what gradients of a row have in common, and the sum of their gradient.
    token_bytes = max(size.stats.per_token, size.hidden * size.itemsize + size.hidden_sum_token)
    kept = size.kept_token(size.columns)
    tokens = kept_tokens(
        num_tokens, workspace_bytes - beside, kept + token_bytes, size.weight_sum, single_is_sum=single_is_sum
    )
    if tokens is None:
        return None
    return KnownLossPlan(tokens, max(workspace_bytes - tokens * kept, tokens * token_bytes + beside))


def kept_tokens(
    num_tokens: int,
    room: int,
    bytes_per_token: int,
    sum_bytes: int = 0,
    step: int = MIN_TOKENS,
    *,
    single_is_sum: bool = False,
) -> int | None:
    """How many tokens go all the way at once where their logits are kept; None: fewer than `step` have room.

    A call takes `room` beside its gradients and the fp32 sum of the weight's over blocks, `sum_bytes`; 0: no gradient
    is made of such a sum when the blocks are gone. One block needs no sum, and has its room. Of several the last is
    gone when the gradient itself is allocated, in 16 bits half as large as the sum: they have its room, too.
    """
    if num_tokens * bytes_per_token <= room + (sum_bytes // 2 if single_is_sum else sum_bytes):
        return max(1, num_tokens)
    most = (room + sum_bytes // 2) // bytes_per_token
    if most < step:
        return None
    wide = round_up(KNOWN_LOSS_STEP, step)
    return min(max(1, num_tokens), most // wide * wide or most // step * step)


def plan_blocks(
    num_tokens: int,
    num_columns: int,
    workspace_bytes: int,
    block_bytes: BlockBytes,
    *,
    per_column_if_tokens_are_cut: int = 0,
) -> Blocks:
    """The widest blocks within `workspace_bytes` that still gain from their width.

    All tokens at once if that leaves slabs of `PREFERRED_COLUMNS`, and then as many slabs as are that wide; else what
    reads and writes the least of the gradients' fp32 sums. Those are of N H numbers for every slab of columns, and of
    V H for every block of tokens but a single one: together N V H (1 / columns + 1 / tokens). Depends on nothing but
    its arguments.

    Raises:
        ValueError: not even the smallest block fits.
    """
    preferred = min(PREFERRED_COLUMNS, round_up(num_columns, COLUMN_STEP))
    taken = (
        num_tokens * (block_bytes.per_token + preferred * block_bytes.per_logit) + preferred * block_bytes.per_column
    )
    columns = _columns_of_all_tokens(num_tokens, num_columns, workspace_bytes, block_bytes, preferred)
    if taken <= workspace_bytes:
        return Blocks(num_tokens, columns)
    cut_bytes = block_bytes._replace(per_column=block_bytes.per_column + per_column_if_tokens_are_cut)
    blocks = _blocks_of_cut_tokens(num_tokens, num_columns, workspace_bytes, cut_bytes, preferred)
    all_tokens_cost_less = columns >= COLUMN_STEP and 1 / columns <= 1 / blocks.columns + 1 / blocks.tokens
    return Blocks(num_tokens, columns) if all_tokens_cost_less else blocks


def _columns_of_all_tokens(
    num_tokens: int, num_columns: int, workspace_bytes: int, block_bytes: BlockBytes, preferred: int
) -> int:
    """The width of slabs that hold every token: of about `SLAB_LOGITS`, as far as they are `preferred` wide."""
    per_logit, per_token, per_column = block_bytes
    columns = (workspace_bytes - num_tokens * per_token) // (num_tokens * per_logit + per_column)
    num_slabs = max(1, min(num_columns // preferred, round(num_columns * num_tokens / SLAB_LOGITS)))
    columns = min(columns, round_up(ceil_div(num_columns, num_slabs), COLUMN_STEP))
    return _even(num_columns, columns, COLUMN_STEP)


def _blocks_of_cut_tokens(
    num_tokens: int, num_columns: int, workspace_bytes: int, block_bytes: BlockBytes, preferred: int
) -> Blocks:
    """Blocks of some tokens: about as many as columns."""
    per_logit, per_token, per_column = block_bytes

    def tokens_beside(columns: int) -> int:
        return min(num_tokens, (workspace_bytes - columns * per_column) // (per_token + columns * per_logit))

    halves = (preferred * quarters // 4 >> halvings for halvings in range(7) for quarters in (4, 3))
    widths = {max(COLUMN_STEP, width // COLUMN_STEP * COLUMN_STEP) for width in halves}
    possible = [width for width in widths if tokens_beside(width) >= 1]
    if not possible:
        smallest = block_bytes.smallest
        raise ValueError(f"workspace_bytes must be at least {smallest} for this head, got {workspace_bytes}")
    columns = min(possible, key=lambda width: (1 / width + 1 / tokens_beside(width), width))
    return Blocks(_even(num_tokens, tokens_beside(columns), MIN_TOKENS), _even(num_columns, columns, COLUMN_STEP))


def cut(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    """`[start, stop)` in slices of `step`."""
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def cut_columns(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    """As `cut`; where the last slice is no multiple of `ALIGNED_COLUMNS` wide, its odd end is a slice of its own."""
    for columns in cut(stop, step, start):
        even = columns.stop - (columns.stop - columns.start) % ALIGNED_COLUMNS
        yield from (part for part in (slice(columns.start, even), slice(even, columns.stop)) if part.start < part.stop)


def slab_row_stride(columns: int) -> int:
    """Elements from row to row of a slab or cache."""
    return round_up(columns, SLAB_ROW_STEP)


def ceil_div(value: int, step: int) -> int:
    """value / step, rounded up. (Not `triton.cdiv`, which takes 5 us on the host.)"""
    return -(-value // step)


def round_up(value: int, step: int) -> int:
    return ceil_div(value, step) * step


def _even(length: int, most: int, step: int) -> int:
    """The block length, a multiple of `step` and at most `most` where that allows, that cuts `length` most evenly."""
    if most >= length:
        return length
    if most < step:
        return most
    most = most // step * step
    return min(most, round_up(ceil_div(length, ceil_div(length, most)), step))
