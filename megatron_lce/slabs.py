"""How a [tokens, columns] tensor is cut into blocks that fit a budget."""

from collections.abc import Iterator
from typing import NamedTuple

MIN_TOKENS = 128  # a kernel's row block
COLUMN_STEP = 256  # slabs are whole kernel tiles wide, so that rows of a slab stay aligned


class Blocks(NamedTuple):
    """Blocks of at most `tokens` x `columns`."""

    tokens: int
    columns: int


def plan_blocks(
    num_tokens: int,
    num_columns: int,
    workspace_bytes: int,
    *,
    bytes_per_logit: int,
    bytes_per_token: int = 0,
    bytes_per_column: int = 0,
    bytes_per_column_if_tokens_are_cut: int = 0,
    preferred_columns: int = 16384,
) -> Blocks:
    """The widest blocks within `workspace_bytes`.

    All tokens at once if that leaves slabs of `preferred_columns`; else tokens are cut too, since a product wants both
    of its dimensions wide. Depends on nothing but its arguments.

    Raises:
        ValueError: not even the smallest block fits.
    """
    preferred = min(preferred_columns, round_up(num_columns, COLUMN_STEP))
    per_token = bytes_per_token + preferred * bytes_per_logit
    if num_tokens * per_token + preferred * bytes_per_column <= workspace_bytes:
        room = workspace_bytes - num_tokens * bytes_per_token
        widest = room // (num_tokens * bytes_per_logit + bytes_per_column) if bytes_per_logit else num_columns
        return Blocks(num_tokens, _even(num_columns, max(widest, preferred), COLUMN_STEP))

    bytes_per_column += bytes_per_column_if_tokens_are_cut
    columns = preferred
    while True:
        room = workspace_bytes - columns * bytes_per_column
        tokens = room // (bytes_per_token + columns * bytes_per_logit)
        if tokens >= min(num_tokens, columns // 2, 8192) or (columns <= COLUMN_STEP and tokens >= 1):
            break
        if columns <= COLUMN_STEP:
            smallest = COLUMN_STEP * (bytes_per_column + bytes_per_logit) + bytes_per_token
            raise ValueError(f"workspace_bytes must be at least {smallest} for this head, got {workspace_bytes}")
        columns = max(COLUMN_STEP, columns // 2 // COLUMN_STEP * COLUMN_STEP)
    return Blocks(_even(num_tokens, tokens, MIN_TOKENS), _even(num_columns, columns, COLUMN_STEP))


def cut(length: int, step: int) -> Iterator[slice]:
    """`[0, length)` in slices of `step`."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _even(length: int, most: int, step: int) -> int:
    """The block length, a multiple of `step` and at most `most` where that allows, that cuts `length` most evenly."""
    if most >= length:
        return length
    if most < step:
        return most
    most = most // step * step
    return min(most, round_up(-(-length // -(-length // most)), step))
