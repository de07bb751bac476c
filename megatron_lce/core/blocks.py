"""How a [tokens, columns] tensor is cut into pieces that fit a budget.

A slab is a range of the vocabulary's columns, as wide as the workspace allows; a block is a range of tokens that is
worked on by itself; a tile is what one program of a kernel computes; a chunk is the columns that statistics are taken
of; a shard is a rank's part, of the vocabulary or of a sequence.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

MIN_TOKENS = 128  # a kernel's row block
COLUMN_STEP = 256  # slabs are whole kernel tiles wide, so that rows of a slab stay aligned
PREFERRED_COLUMNS = 16384  # of a slab
ENOUGH_LOGITS = 2**27  # of one block: larger ones gain nothing (8192 x 4096 x 151936 on an H200: 59.4 ms from here on)
WIDE_BLOCK = 4096  # tokens of a block from which on a product that sums over them runs at speed
LOGITS_TILE = (MIN_TOKENS, COLUMN_STEP)  # of the kernels that make 16-bit inputs' logits
GRADIENT_TILE = (256, 128)  # of cuBLAS' product for hidden's gradient
MULTIPROCESSORS = 132  # of a Hopper GPU: so many tiles, a wave, take as long as one
WAVE_HIDDEN = 6500  # an fp32 sum of [V, this many], at 4.2 TB/s, takes as long as one wave over V, at 700 TFLOP/s
CHOICES = 16  # sizes to choose from
BESIDE_LOGITS = 1.6  # waves, of either head: a block's small kernels, and reading both weights once more
ALIGNED_COLUMNS = 8  # cuBLAS takes five times as long for a slab whose width is no multiple of this


class Blocks(NamedTuple):
    """Blocks of at most `tokens` x `columns`."""

    tokens: int
    columns: int


class BlockBytes(NamedTuple):
    """What a block of `tokens` x `columns` takes."""

    per_logit: int
    per_token: int = 0
    per_column: int = 0


def plan_blocks(
    num_tokens: int,
    num_columns: int,
    workspace_bytes: int,
    block_bytes: BlockBytes,
    *,
    per_column_if_tokens_are_cut: int = 0,
    preferred_columns: int = PREFERRED_COLUMNS,
) -> Blocks:
    """The widest blocks within `workspace_bytes` that still gain from their width.

    All tokens at once if that leaves slabs of `preferred_columns`, and then as many slabs as are that wide; else what
    reads and writes the least of the gradients' fp32 sums. Those are of N H numbers for every slab of columns, and of
    V H for every block of tokens but a single one: together N V H (1 / columns + 1 / tokens). Depends on nothing but
    its arguments.

    Raises:
        ValueError: not even the smallest block fits.
    """
    preferred = min(preferred_columns, round_up(num_columns, COLUMN_STEP))
    taken = (
        num_tokens * (block_bytes.per_token + preferred * block_bytes.per_logit) + preferred * block_bytes.per_column
    )
    columns = _columns_of_all_tokens(num_tokens, num_columns, workspace_bytes, block_bytes, preferred)
    if taken <= workspace_bytes:
        return Blocks(num_tokens, columns)
    cut_bytes = block_bytes._replace(per_column=block_bytes.per_column + per_column_if_tokens_are_cut)
    of_some = _blocks_of_cut_tokens(num_tokens, num_columns, workspace_bytes, cut_bytes, preferred)
    all_tokens_cost_less = columns >= COLUMN_STEP and 1 / columns <= 1 / of_some.columns + 1 / of_some.tokens
    return Blocks(num_tokens, columns) if all_tokens_cost_less else of_some


def _columns_of_all_tokens(
    num_tokens: int, num_columns: int, workspace_bytes: int, block_bytes: BlockBytes, preferred: int
) -> int:
    """The width of slabs that hold every token: of about `ENOUGH_LOGITS`, as far as they are `preferred` wide."""
    per_logit, per_token, per_column = block_bytes
    columns = num_columns
    if column_bytes := num_tokens * per_logit + per_column:  # a pass may take nothing for a column
        columns = (workspace_bytes - num_tokens * per_token) // column_bytes
    if per_logit:
        num_slabs = max(1, min(num_columns // preferred, round(num_columns * num_tokens / ENOUGH_LOGITS)))
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
        smallest = smallest_workspace(block_bytes)
        raise ValueError(f"workspace_bytes must be at least {smallest} for this head, got {workspace_bytes}")
    columns = min(possible, key=lambda width: (1 / width + 1 / tokens_beside(width), width))
    return Blocks(_even(num_tokens, tokens_beside(columns), MIN_TOKENS), _even(num_columns, columns, COLUMN_STEP))


def tokens_per_block(
    num_tokens: int,
    largest_shard: int,
    workspace_bytes: int,
    block_bytes: BlockBytes,
    sum_bytes_per_column: int,
) -> int:
    """How many tokens backward's outer loop takes at once: all of them, with slabs of vocabulary inside, or fewer.

    Slabs inside accumulate hidden's gradient, 4 N H bytes; blocks of tokens outside, each with all columns, accumulate
    the weight's, 4 V H bytes. What is smaller is also read and written less, as long as the blocks stay wide. The
    weight's sum comes out of the workspace as far as they do; what they need beside it is on top, as hidden's is.
    """
    row_bytes = block_bytes.per_token + round_up(largest_shard, COLUMN_STEP) * block_bytes.per_logit
    room = workspace_bytes - largest_shard * block_bytes.per_column
    block = max((room - largest_shard * sum_bytes_per_column) // row_bytes, min(WIDE_BLOCK, room // row_bytes))
    if largest_shard >= num_tokens or block < WIDE_BLOCK:
        return max(num_tokens, 1)
    return _even(num_tokens, block, MIN_TOKENS)


def kept_tokens(
    num_tokens: int,
    room: int,
    bytes_per_token: int,
    sum_bytes: int = 0,
    hidden_size: int = 0,
    step: int = MIN_TOKENS,
) -> int | None:
    """How many tokens go all the way at once where their logits are kept; None: too few for it to be worth while.

    A call takes `room` beside its gradients and the fp32 sum of the weight's over blocks, `sum_bytes`; 0: no gradient
    is made of such a sum when the blocks are gone. One block needs no sum, and has its room. Of several the
    last is gone when the gradient itself is allocated, in 16 bits half as large as the sum: they have its room, too.
    """
    if num_tokens * bytes_per_token <= room + sum_bytes:
        return max(1, num_tokens)
    most = (room + sum_bytes // 2) // bytes_per_token
    return None if most < step else cheapest_size(num_tokens, most, step, partial(_gradients_cost, hidden_size))


def _gradients_cost(hidden_size: int, num_tokens: int) -> float:
    """Waves of hidden's gradient, [num_tokens, hidden_size], and the weight's sum.

    rl of 16384 x 2048 x 131072, on an H200: 2,048 tokens at a time take 43.9 ms and 2,432 take 46.3; in other runs
    6,144 take 42.6, 5,504 43.3 and 4,096 43.0; and 3,584 take 44.4, as 2,048 do with 414 MiB less.
    """
    rows, columns = GRADIENT_TILE
    return _waves(ceil_div(num_tokens, rows) * ceil_div(hidden_size, columns)) + hidden_size / WAVE_HIDDEN


def logits_cost(num_columns: int, num_tokens: int) -> float:
    """Waves of one head's logits, of which the other has as many, and what is beside both, in the same measure.

    Of 8192 x (2048, 4096) x 151936, on an H200, 256, 384 and 512 tokens at a time take 72.0, 71.3 and 70.0 ms.
    """
    rows, columns = LOGITS_TILE
    return _waves(ceil_div(num_tokens, rows) * ceil_div(num_columns, columns)) + BESIDE_LOGITS


def _waves(tiles: int) -> int:
    """How many times a Hopper GPU's multiprocessors take a tile each."""
    return ceil_div(tiles, MULTIPROCESSORS)


def cheapest_size(length: int, most: int, step: int, cost: Callable[[int], float]) -> int:
    """What `length` is cut into: all of it, or a multiple of `step` that is among the largest up to `most`.

    Of what costs least the fewest and the most even.
    """
    if most < step:
        return min(length, most)

    def whole_cost(size: int) -> tuple[float, int, int]:
        whole, rest = divmod(length, size)
        return whole * cost(size) + (cost(rest) if rest else 0), ceil_div(length, size), size

    largest = most // step
    sizes = [multiple * step for multiple in range(largest, max(0, largest - CHOICES), -1)]
    return min([length, *sizes] if length <= most else sizes, key=whole_cost)


def stats_tokens(num_tokens: int, workspace_bytes: int, block_bytes: BlockBytes) -> int:
    """How many tokens' statistics are taken at once; a quarter of the workspace is left to copies of columns."""
    columns = max(COLUMN_STEP, workspace_bytes // 4 // max(block_bytes.per_column, 1))
    room = workspace_bytes - min(columns, PREFERRED_COLUMNS) * block_bytes.per_column
    return max(1, _even(num_tokens, room // block_bytes.per_token, MIN_TOKENS))


def smallest_workspace(block_bytes: BlockBytes) -> int:
    """Bytes of the smallest block: one token of `COLUMN_STEP` columns."""
    return COLUMN_STEP * (block_bytes.per_column + block_bytes.per_logit) + block_bytes.per_token


def cut(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    """`[start, stop)` in slices of `step`."""
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def cut_columns(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    """As `cut`; where the last slice is no multiple of `ALIGNED_COLUMNS` wide, its odd end is a slice of its own."""
    for columns in cut(stop, step, start):
        even = columns.stop - (columns.stop - columns.start) % ALIGNED_COLUMNS
        yield from (part for part in (slice(columns.start, even), slice(even, columns.stop)) if part.start < part.stop)


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
