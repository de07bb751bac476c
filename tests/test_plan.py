"""Planning: blocks cover everything once, stay in the budget, and are as wide as it allows."""

from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_lce.core.plan import (
    ALIGNED_COLUMNS,
    COLUMN_STEP,
    MIN_TOKENS,
    HeadSize,
    PieceBytes,
    ScratchBytes,
    aligned_slices,
    backward_tokens,
    cached_block_tokens,
    plan_known_divergence,
    plan_slabs,
    size_of_two_heads,
    slab_row_stride,
    two_heads_tokens,
)
from tests.problems import smallest_workspace

TOKENS = st.integers(1, 200_000)
COLUMNS = st.integers(1, 300_000)
BUDGET = st.integers(0, 2**33)
BLOCK_BYTES = st.builds(PieceBytes, st.integers(1, 16), st.integers(0, 40_000), st.integers(0, 40_000))


@given(BUDGET, st.integers(1, 40_000), BLOCK_BYTES)
def test_as_many_tokens_and_columns_as_fit(room, given, block_bytes):
    for most, of in (
        (block_bytes.max_tokens(room, given), lambda tokens: block_bytes.total(tokens, given)),
        (block_bytes.max_columns(room, given), lambda columns: block_bytes.total(given, columns)),
    ):
        assert of(most) <= room < of(most + 1)


@given(TOKENS, COLUMNS, BUDGET, BLOCK_BYTES, st.integers(0, 40_000))
@example(131_072, 151_936, 2**29, PieceBytes(2), 4 * 4096)
@example(1, 1, 2**12, PieceBytes(16, 1, 1), 0)
def test_a_plan_stays_within_its_budget_and_fits_the_problem(num_tokens, num_columns, budget, block_bytes, extra):
    budget = max(budget, block_bytes.total(1, COLUMN_STEP) + COLUMN_STEP * extra)  # what `check_workspace` asks for
    tokens, columns = plan_slabs(num_tokens, num_columns, budget, block_bytes, split_tokens_per_column=extra)
    assert 1 <= tokens <= num_tokens
    assert 1 <= columns <= num_columns
    cut_bytes = columns * extra if tokens < num_tokens else 0
    assert block_bytes.total(tokens, columns) + cut_bytes <= budget
    assert columns == num_columns or columns % COLUMN_STEP == 0
    assert tokens == num_tokens or tokens < MIN_TOKENS or tokens % MIN_TOKENS == 0


@given(TOKENS, COLUMNS, BLOCK_BYTES)
def test_with_room_for_everything_no_block_cuts_tokens(num_tokens, num_columns, block_bytes):
    room = 512 * block_bytes.total(num_tokens, num_columns)
    tokens, columns = plan_slabs(num_tokens, num_columns, room, block_bytes)
    assert tokens == num_tokens
    assert columns == num_columns or columns >= 16384 / 2


@pytest.mark.parametrize(
    ("num_tokens", "num_columns", "workspace_bytes", "expected"),
    [
        (8192, 151_936, 2**29, 16_896),  # 9 slabs and not the 5 that fit: the rest of the workspace is the model's
        (8192, 37_984, 2**29, 19_200),
        (8192, 18_992, 2**29, 18_992),  # one product, not two narrow ones
        (16_384, 18_992, 2**29, 9_728),  # more does not fit
        (1024, 75_968, 2**29, 75_968),
        (3277, 75_968, 2**29, 38_144),  # 40 % of 8,192 tokens: two slabs, where one would be larger than all tokens'
        (1024, 20_000, 1024 * 19_000 * 2, 10_240),  # two halves, not a wide slab and a rest
    ],
)
def test_slabs_are_wide_and_no_wider_than_gains_anything(num_tokens, num_columns, workspace_bytes, expected):
    assert plan_slabs(num_tokens, num_columns, workspace_bytes, PieceBytes(2)) == (num_tokens, expected)


@given(st.integers(0, 5000), st.integers(1, 5), st.integers(0, 64))
def test_slabs_cover_everything_once_and_an_odd_end_is_its_own(stop, tiles, start):
    pieces = list(aligned_slices(stop, tiles * COLUMN_STEP, start))
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(start, stop))
    assert all(0 < piece.stop - piece.start <= tiles * COLUMN_STEP for piece in pieces)
    odd = [piece for piece in pieces if (piece.stop - piece.start) % ALIGNED_COLUMNS]
    assert odd in ([], pieces[-1:])
    assert all(piece.stop - piece.start < ALIGNED_COLUMNS for piece in odd)


def test_long_context_cuts_tokens_and_keeps_both_sides_wide():
    """By what both gradients' sums read and write: 15.3e-5 of 8 N V H bytes at best, 18.7e-5 with 8,192 x 15,360."""
    tokens, columns = plan_slabs(131_072, 151_936, 2**29, PieceBytes(2), split_tokens_per_column=4 * 4096)
    assert 1 / tokens + 1 / columns < 16.2e-5


@pytest.mark.parametrize(
    ("num_tokens", "hidden_size", "columns", "expected"),
    [
        (131_072, 4096, 18_992, 5_760),  # the sum, 297 MiB, comes out of the workspace
        (131_072, 7168, 16_160, 4_096),  # the sum and 4,096 tokens' logits are more than it, and less than hidden's sum
        (131_072, 16_384, 16_032, 4_096),  # the sum alone is
        (131_072, 4096, 65_600, 131_072),  # the logits of 4,096 tokens are
        (16_000, 7168, 16_160, 16_000),  # hidden's sum is smaller
    ],
)
def test_long_context_sums_the_smaller_gradient(num_tokens, hidden_size, columns, expected):
    size = HeadSize(hidden_size, columns, 2, 4, ScratchBytes(128, 256), needs_weight_acc=True)
    assert backward_tokens(size, num_tokens, 2**29) == expected


@given(st.integers(1, 40_000), st.integers(0, 9000), st.integers(0, 9000), st.booleans())
def test_kept_tokens_fit_and_are_few_only_where_no_more_fit(num_tokens, room, sum_bytes, keeps_fp32_sum):
    """A token takes a byte. One block has the room of the sum over blocks, several that of what is made of the sum."""
    kept = cached_block_tokens(num_tokens, room, 1, sum_bytes, keeps_fp32_sum=keeps_fp32_sum)
    most = room + sum_bytes // 2
    if num_tokens <= (most if keeps_fp32_sum else room + sum_bytes):
        assert kept == num_tokens
    elif most < MIN_TOKENS:
        assert kept is None
    else:
        assert kept == num_tokens or kept % MIN_TOKENS == 0
        assert min(num_tokens, most // 2 - MIN_TOKENS) <= kept <= most


@pytest.mark.parametrize(("most", "expected"), [(1900, 1792), (2500, 2048), (3850, 2048), (5500, 4096), (6800, 6144)])
def test_kept_tokens_fill_a_gpu(most, expected):
    assert cached_block_tokens(16_384, most, 1) == expected


def two_heads(columns, hidden_size=2048, divergence_columns=0):
    scratch = ScratchBytes(128, 256, divergence_columns=divergence_columns)
    return size_of_two_heads(HeadSize(hidden_size, columns, 2, 4, scratch, needs_weight_acc=True))


@pytest.mark.parametrize(
    ("mib", "columns", "per_token", "known"),
    [(512, 151_936, 384, (2048, 384)), (1024, 151_936, 512, (2816, 512)), (512, 18_992, 2816, (8192, 1664))],
)
def test_blocks_of_products_are_as_long_as_gains(mib, columns, per_token, known):
    """512 tokens, or of a narrow shard more; known weights collect gradients in what is left."""
    assert two_heads_tokens(two_heads(columns), 8192, mib * 2**20) == per_token
    assert plan_known_divergence(two_heads(columns), 8192, mib * 2**20) == known


@given(TOKENS, st.integers(1, 200_000), st.integers(8, 8192), BUDGET, st.integers(0, 1250), st.booleans())
@example(16_385, 363, 2302, 0, 0, False)  # with less than a call accepts, one token's products would not fit
def test_collected_gradients_and_their_products_fit(num_tokens, columns, hidden_size, budget, reading, keeps_fp32_sum):
    """In the workspace and the room of what is made of the weight's sum: of a single block, the sum's own."""
    size = two_heads(columns, hidden_size, reading)
    budget = max(budget, smallest_workspace(partial(size.check_workspace, needs_grad=True, needs_weight=True)))
    plan = plan_known_divergence(size, num_tokens, budget, keeps_fp32_sum=keeps_fp32_sum)
    if plan is None:
        return
    tokens, of_products = plan
    taken = tokens * 2 * slab_row_stride(columns) + of_products * size.stats_bytes.per_token
    single = tokens == num_tokens and not keeps_fp32_sum
    assert taken <= budget + size.weight_acc_bytes // (1 if single else 2)
    assert 1 <= of_products <= tokens <= num_tokens
