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
# Bytes of a column's cached logits per element of H, by default: more than both gradients and a sum of one take (6 H),
# less than a rival keeps (16 H in fp32 and 16 bits).
CACHED_BYTES_PER_H = 8
ALIGNED_COLUMNS = 8  # cuBLAS takes five times as long for a slab whose width is not a multiple of this
SLAB_ROW_STEP = 64  # elements: rows of slabs and caches start at cache lines and hold whole vectors of a CPU


class PieceBytes(NamedTuple):
    """Bytes of a block per logit, per token and per column."""

    per_logit: int
    per_token: int = 0
    per_column: int = 0

    def total(self, num_tokens: int, num_columns: int) -> int:
        """Return the bytes of a block."""
        return num_tokens * (self.per_token + num_columns * self.per_logit) + num_columns * self.per_column

    def max_tokens(self, budget_bytes: int, num_columns: int) -> int:
        """Return the most tokens of a block of so many columns."""
        return (budget_bytes - num_columns * self.per_column) // (self.per_token + num_columns * self.per_logit)

    def max_columns(self, budget_bytes: int, num_tokens: int) -> int:
        """Return the most columns of a block of so many tokens."""
        return (budget_bytes - num_tokens * self.per_token) // max(1, self.per_column + num_tokens * self.per_logit)


class ScratchBytes(NamedTuple):
    """Bytes of intermediates of a backend's primitives, for inputs of one dtype."""

    chunk_columns: int  # number of columns that share one set of statistics
    caches: bool = False  # logits can be kept until their gradient is computed
    slab_per_logit: int = 0  # bytes per logit of a slab
    stats_per_token: int = 0  # bytes per token of statistics
    stats_per_column: int = 0  # bytes of a copied row of the weight for statistics
    slab_per_token: int = 0  # bytes of a copied row of hidden for a slab
    slab_per_column: int = 0  # bytes of a copied row of the weight for a slab
    divergence_columns: int = 0  # whose divergences are computed at once, in six fp32 numbers for each token


def fp32_scratch_bytes(hidden_size: int, hidden_parts: int, chunk_columns: int) -> ScratchBytes:
    """Return them with an fp32 weight: fp16 parts and a power per row; for gradients three bf16 parts."""
    part_bytes = 2 * round_up(hidden_size, SLAB_ROW_STEP)
    token, column, row = hidden_parts * part_bytes + 4, 2 * part_bytes + 4, 3 * part_bytes
    return ScratchBytes(
        chunk_columns,
        slab_per_logit=6,
        stats_per_token=token,
        stats_per_column=column,
        slab_per_token=row,
        slab_per_column=row,
    )


class HeadSize(NamedTuple):
    """Sizes of a head, the same on every rank of its group; the methods return bytes."""

    hidden_size: int  # H
    max_columns: int  # of the group's largest shard, padding included
    itemsize: int  # bytes of an element of the weight and of the gradient of a logit
    stats_rows: int  # statistics per token and chunk and, with telemetry, of their merge
    scratch: ScratchBytes
    needs_weight_acc: bool  # the weight gradient needs a separate fp32 sum over blocks of tokens
    shards_aligned: bool = True  # no shard ends in a separate slab, see `aligned_slices`
    num_heads: int = 1
    copied_bytes: int = 0  # of copies that products make, beside the workspace of a plan

    @property
    def stats_bytes(self) -> PieceBytes:
        """Bytes of the statistics of a token, with intermediates."""
        chunks = ceil_div(self.max_columns, self.scratch.chunk_columns)
        return PieceBytes(0, 4 * chunks * self.stats_rows + self.scratch.stats_per_token, self.scratch.stats_per_column)

    @property
    def slab_bytes(self) -> PieceBytes:
        """Bytes of a slab of logit gradients, with intermediates."""
        scratch = self.scratch
        return PieceBytes(self.itemsize + scratch.slab_per_logit, scratch.slab_per_token, scratch.slab_per_column)

    @property
    def weight_acc_per_column(self) -> int:
        """Bytes per column of the fp32 sum of the weight gradient; 0: the gradient needs no separate sum."""
        return 4 * self.hidden_size if self.needs_weight_acc else 0

    @property
    def weight_acc_bytes(self) -> int:
        """Bytes of this sum for the largest shard."""
        return self.max_columns * self.weight_acc_per_column

    @property
    def hidden_acc_per_token(self) -> int:
        """Bytes per token of the fp32 sum of the hidden gradient.

        0 if no sum is needed: the cache is one slab, or gradients are fp32.
        """
        return 0 if self.shards_aligned or self.itemsize == 4 else 4 * self.hidden_size

    def cache_bytes_per_token(self, num_columns: int) -> int:
        """Bytes per token of a cache of this many columns."""
        return slab_row_stride(num_columns) * self.itemsize + 4 * ceil_div(num_columns, self.scratch.chunk_columns)

    def fits_cache(self, num_tokens: int, logits_cache_bytes: int | None) -> bool:
        """Return whether all logits of the largest shard are kept: where they fit; None: of up to 4 H tokens."""
        if logits_cache_bytes is None:
            return self.scratch.caches and num_tokens * self.itemsize <= CACHED_BYTES_PER_H * self.hidden_size
        return self.scratch.caches and num_tokens * self.cache_bytes_per_token(self.max_columns) <= logits_cache_bytes

    def check_workspace(self, workspace_bytes: int, *, needs_grad: bool, needs_weight: bool) -> None:
        """Raise ValueError if a pass does not fit in it with its smallest block, one token of `COLUMN_STEP` columns."""
        stats = self.stats_bytes.total(1, COLUMN_STEP)
        per_column = self.weight_acc_per_column if needs_weight else 0
        slab = self.slab_bytes.total(1, COLUMN_STEP) + COLUMN_STEP * per_column if needs_grad else 0
        min_bytes = self.copied_bytes + max(stats, slab)
        if workspace_bytes < min_bytes:
            heads = "this head" if self.num_heads == 1 else "these heads"
            raise ValueError(f"workspace_bytes must be at least {min_bytes} for {heads}, got {workspace_bytes}")


def size_of_two_heads(student: HeadSize, copied_row: int = 0) -> HeadSize:
    """Return the student's sizes with the products of both heads as the only intermediates.

    `copied_row`: bytes of a row of the fp32 copies that products make of a head, on CPUs.
    """
    reading_bytes = copied_row + 6 * 4 * min(student.max_columns, student.scratch.divergence_columns)
    per_logit = 2 * 4  # bytes of both products, in fp32
    row_bytes = reading_bytes + slab_row_stride(student.max_columns) * per_logit
    scratch = ScratchBytes(
        student.scratch.chunk_columns, slab_per_logit=per_logit, stats_per_token=row_bytes, slab_per_token=reading_bytes
    )
    return student._replace(stats_rows=0, scratch=scratch, num_heads=2, copied_bytes=COLUMN_STEP * copied_row)


def stats_tokens(size: HeadSize, num_tokens: int, workspace_bytes: int) -> int:
    """Return how many tokens' statistics are computed at once. A quarter of the workspace is for copied columns."""
    num_columns = max(COLUMN_STEP, workspace_bytes // 4 // max(size.stats_bytes.per_column, 1))
    max_tokens = size.stats_bytes.max_tokens(workspace_bytes, min(num_columns, PREFERRED_COLUMNS))
    return max(1, balanced_step(num_tokens, max_tokens, MIN_TOKENS))


def stats_columns(size: HeadSize, num_tokens: int, workspace_bytes: int) -> int:
    """Return how many copied columns fit in the workspace together with the statistics of `stats_tokens`."""
    max_columns = size.stats_bytes.max_columns(workspace_bytes, num_tokens)
    return max(COLUMN_STEP, balanced_step(size.max_columns, max(COLUMN_STEP, max_columns), COLUMN_STEP))


def backward_tokens(size: HeadSize, num_tokens: int, workspace_bytes: int) -> int:
    """Return the tokens of a block in the outer loop of backward; the inner loop goes over slabs of the vocabulary.

    One block with many slabs accumulates the hidden gradient, 4 N H bytes. Several blocks, each with all columns,
    accumulate the weight gradient, 4 V H bytes. The smaller sum also causes less traffic, if blocks have `WIDE_BLOCK`
    tokens. The sum of the weight gradient is part of the workspace only if blocks stay that wide. Otherwise, and if the
    shard has as many columns as there are tokens, all tokens are one block.
    """
    slab_bytes, num_columns = size.slab_bytes, size.max_columns
    row_bytes = slab_bytes.per_token + round_up(num_columns, COLUMN_STEP) * slab_bytes.per_logit
    budget_bytes = workspace_bytes - num_columns * slab_bytes.per_column
    block_tokens = max((budget_bytes - size.weight_acc_bytes) // row_bytes, min(WIDE_BLOCK, budget_bytes // row_bytes))
    if num_columns >= num_tokens or block_tokens < WIDE_BLOCK:
        return max(num_tokens, 1)
    return balanced_step(num_tokens, block_tokens, MIN_TOKENS)


def plan_known_loss(
    size: HeadSize, num_tokens: int, workspace_bytes: int, *, keeps_fp32_sum: bool = False
) -> tuple[int, int] | None:
    """Return the tokens of a block whose logits are cached until their gradients are computed; None if none fit.

    The second number is the workspace without these logits. `keeps_fp32_sum`: the weight gradient of a single block is
    an fp32 sum, too.
    """
    if not size.scratch.caches:
        return None
    # First the statistics. After they are freed, the block's hidden gradient and its fp32 sum.
    token_bytes = max(size.stats_bytes.per_token, size.hidden_size * size.itemsize + size.hidden_acc_per_token)
    cache_bytes = size.cache_bytes_per_token(size.max_columns)
    tokens = cached_block_tokens(
        num_tokens, workspace_bytes, cache_bytes + token_bytes, size.weight_acc_bytes, keeps_fp32_sum=keeps_fp32_sum
    )
    return None if tokens is None else (tokens, max(workspace_bytes - tokens * cache_bytes, tokens * token_bytes))


def cached_block_tokens(
    num_tokens: int, budget_bytes: int, bytes_per_token: int, acc_bytes: int = 0, *, keeps_fp32_sum: bool = False
) -> int | None:
    """Return the tokens of a block whose logits are kept until their gradients are computed; None below `MIN_TOKENS`.

    A call may use `budget_bytes`, and `acc_bytes` for the fp32 sum of the weight gradient over blocks, if there is one.
    One block: the whole sum's memory is free. Several blocks, or one with `keeps_fp32_sum`: half, because the 16-bit
    gradient is allocated after the last block.
    """
    if num_tokens * bytes_per_token <= budget_bytes + (acc_bytes // 2 if keeps_fp32_sum else acc_bytes):
        return max(1, num_tokens)
    max_tokens = (budget_bytes + acc_bytes // 2) // bytes_per_token
    if max_tokens < MIN_TOKENS:
        return None
    return min(num_tokens, max_tokens // KNOWN_LOSS_STEP * KNOWN_LOSS_STEP or max_tokens // MIN_TOKENS * MIN_TOKENS)


def two_heads_tokens(size: HeadSize, num_tokens: int, budget_bytes: int) -> int:
    """Return how many tokens' products of two heads are in memory at once: at most as many as still make it faster."""
    max_tokens = min(budget_bytes // size.stats_bytes.per_token, max(WIDE_PRODUCTS, WIDE_LOGITS // size.max_columns))
    return max(1, balanced_step(num_tokens, max_tokens, MIN_TOKENS))


def plan_known_divergence(
    size: HeadSize, num_tokens: int, workspace_bytes: int, *, keeps_fp32_sum: bool = False
) -> tuple[int, int] | None:
    """Return the tokens whose gradients are collected, and of how many products are in memory; None if none fit.

    Products and gradients share the memory of `cached_block_tokens`. Products get up to `WIDE_PRODUCTS` tokens and
    gradients the rest, because each block of gradients updates the sum of the weight gradient. What is left goes to
    products.
    """
    logits_bytes = size.stats_bytes.per_token
    grad_bytes = slab_row_stride(size.max_columns) * size.itemsize + size.hidden_acc_per_token
    max_tokens = cached_block_tokens(
        num_tokens, workspace_bytes, logits_bytes + grad_bytes, size.weight_acc_bytes, keeps_fp32_sum=keeps_fp32_sum
    )
    if max_tokens is None:
        return None
    if max_tokens >= num_tokens:
        return max_tokens, max_tokens
    budget_bytes = workspace_bytes + size.weight_acc_bytes // 2
    logits_tokens = min(
        max_tokens, balanced_step(num_tokens, min(workspace_bytes // logits_bytes, WIDE_PRODUCTS), MIN_TOKENS)
    )
    block_tokens = balanced_step(num_tokens, (budget_bytes - logits_tokens * logits_bytes) // grad_bytes, MIN_TOKENS)
    return block_tokens, two_heads_tokens(size, block_tokens, budget_bytes - block_tokens * grad_bytes)


def plan_slabs(
    num_tokens: int,
    num_columns: int,
    workspace_bytes: int,
    block_bytes: PieceBytes,
    *,
    split_tokens_per_column: int = 0,
) -> tuple[int, int]:
    """Return the tokens and columns of a slab: the widest within `workspace_bytes` that still saves time.

    It has all tokens if `PREFERRED_COLUMNS` then fit, and about `SLAB_LOGITS` logits. Otherwise slabs minimise the
    traffic of the fp32 sums of both gradients.
    The workspace holds one token of `COLUMN_STEP` columns, as `HeadSize.check_workspace` ensures.
    """

    def traffic(shape: tuple[int, int]) -> float:
        """In units of N*V*H: each slab updates N*H sums; each block of only some tokens updates V*H."""
        return 1 / shape[1] + (0 if shape is all_tokens else 1 / shape[0])

    preferred = min(PREFERRED_COLUMNS, round_up(num_columns, COLUMN_STEP))
    num_slabs = max(1, min(num_columns // preferred, round(num_columns * num_tokens / SLAB_LOGITS)))
    max_columns = min(
        block_bytes.max_columns(workspace_bytes, num_tokens), round_up(ceil_div(num_columns, num_slabs), COLUMN_STEP)
    )
    all_tokens = num_tokens, balanced_step(num_columns, max_columns, COLUMN_STEP)
    if block_bytes.total(num_tokens, preferred) <= workspace_bytes:
        return all_tokens
    split_bytes = block_bytes._replace(per_column=block_bytes.per_column + split_tokens_per_column)
    halves = (preferred * quarters // 4 >> halvings for halvings in range(7) for quarters in (4, 3))
    widths = sorted({max(COLUMN_STEP, width // COLUMN_STEP * COLUMN_STEP) for width in halves})
    shapes = ((min(num_tokens, split_bytes.max_tokens(workspace_bytes, width)), width) for width in widths)
    tokens, columns = min((shape for shape in shapes if shape[0] >= 1), key=traffic)
    split_tokens = balanced_step(num_tokens, tokens, MIN_TOKENS), balanced_step(num_columns, columns, COLUMN_STEP)
    choices = [all_tokens, split_tokens] if all_tokens[1] >= COLUMN_STEP else [split_tokens]
    return min(choices, key=traffic)


def slices(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    """Yield `[start, stop)` in slices of `step`."""
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def aligned_slices(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    """Yield as `slices` does; columns beyond a multiple of `ALIGNED_COLUMNS` become a separate last slice."""
    for columns in slices(stop, step, start):
        aligned_stop = columns.stop - (columns.stop - columns.start) % ALIGNED_COLUMNS
        for part in (slice(columns.start, aligned_stop), slice(aligned_stop, columns.stop)):
            if part.start < part.stop:
                yield part


def slab_row_stride(num_columns: int) -> int:
    """Return the number of elements from row to row of a slab or cache."""
    return ceil_div(num_columns, SLAB_ROW_STEP) * SLAB_ROW_STEP


def ceil_div(value: int, step: int) -> int:
    """Return value / step, rounded up; `triton.cdiv` takes 5 us on the host."""
    return -(-value // step)


def round_up(value: int, step: int) -> int:
    return ceil_div(value, step) * step


def balanced_step(length: int, max_length: int, step: int) -> int:
    """Return the block length up to `max_length` that cuts `length` most evenly, if possible a multiple of `step`."""
    if max_length >= length:
        return length
    if max_length < step:
        return max_length
    max_length = max_length // step * step
    return min(max_length, round_up(ceil_div(length, ceil_div(length, max_length)), step))
