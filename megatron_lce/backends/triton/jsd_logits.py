"""The first primitive of `megatron_lce.jsd`: one head's logits into memory, with the statistics of their softmax."""

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.tile_products import (
    MASKED_LOGIT,
    descriptor,
    halves,
    tanh,
    tile_position,
    tile_products,
    upcasts,
)
from megatron_lce.core.blocks import BlockBytes, ceil_div
from megatron_lce.core.jsd_stats import STATS_ROWS, Head
from megatron_lce.core.products import aligned, copies_of


def logits_bytes(student: Head, teacher: Head, num_columns: int) -> BlockBytes:
    """Both heads' logits, and statistics of both heads' tiles: once beside a head's copies, twice while joined."""
    heads = (student, teacher)
    parts = 4 * 4 * STATS_ROWS * ceil_div(num_columns, min(_tile(head).block_v for head in heads))
    copies = max(copies_of(head.hidden) for head in heads)
    return BlockBytes(2 * 4, max(parts, parts // 2 + copies.token), copies.column)


def logits(
    head: Head,  # [N, H], [C, H]
    row_scale: Tensor,  # [N] fp32
    out: Tensor,  # [N, C] fp32, rows at 16 bytes
    *,
    stats: bool,
) -> Tensor | None:
    """Base-2 logits, `row_scale * hidden @ weight.T`, or `row_scale * tanh(softcap_scale * hidden @ weight.T)`.

    `stats`: also returns each tile's largest logit of a row and the sum of 2^(z - largest), [tiles, 2, N].
    """
    hidden, weight = aligned(head.hidden), aligned(head.weight)
    tile = _tile(head)
    num_tokens, num_columns = out.shape
    column_tiles = ceil_div(num_columns, tile.block_v)
    parts = out.new_empty(column_tiles, STATS_ROWS, num_tokens) if stats else None
    num_tiles = ceil_div(num_tokens, tile.block_n) * column_tiles
    _logits_kernel[(min(num_tiles, tiles.num_programs(hidden.device)),)](
        descriptor(hidden, tile.block_n, tile.block_h),
        descriptor(weight, tile.block_v, tile.block_h),
        row_scale,
        descriptor(out, tile.block_n, tile.block_v // 4),
        parts,
        num_tokens,
        num_columns,
        hidden.shape[1],
        head.softcap_scale or 0.0,
        SOFTCAP=head.softcap is not None,
        UPCAST=upcasts(hidden.dtype, tiles.interpreting()),
        BLOCK_N=tile.block_n,
        BLOCK_V=tile.block_v,
        BLOCK_H=tile.block_h,
        GROUP_N=tiles.stats_group(hidden.shape[1]),
        num_warps=tile.num_warps,
        num_stages=tile.more_stages,
        # A product in z - max would not be rounded, where it is in max: it must be 0 at the largest z.
        enable_fp_fusion=False,
    )
    return parts


def _tile(head: Head) -> tiles.Tiles:
    return tiles.choose_tiles(head.hidden.dtype, head.hidden.device)


@triton.jit(do_not_specialize=["N", "V"])
def _logits_kernel(
    hidden_desc,  # [N, H]
    weight_desc,  # [V, H]
    row_scale_ptr,  # [N] fp32
    logits_desc,  # [N, V] fp32 out
    stats_ptr,  # [tiles, 2, N] fp32 out; None: not wanted
    N,
    V,
    H,
    softcap_scale,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """Each tile in four pieces: a whole one finds no room in shared memory beside the inputs on their way."""
    QUARTER: tl.constexpr = BLOCK_V // 4
    num_row_blocks = tl.cdiv(N, BLOCK_N)
    num_column_tiles = tl.cdiv(V, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_row_blocks * num_column_tiles, tl.num_programs(0), flatten=True):
        row_block, column_tile = tile_position(tile, num_row_blocks, num_column_tiles, GROUP_N)
        row = row_block * BLOCK_N
        column = column_tile * BLOCK_V
        rows = row + tl.arange(0, BLOCK_N)
        logits = tile_products(hidden_desc, weight_desc, row, column, H, BLOCK_N, BLOCK_V, BLOCK_H, UPCAST)
        if SOFTCAP:
            logits = tanh(logits * softcap_scale)
        logits = logits * tl.load(row_scale_ptr + rows, mask=rows < N, other=0.0)[:, None]
        if stats_ptr is not None and column + BLOCK_V > V:
            logits = tl.where((column + tl.arange(0, BLOCK_V) < V)[None, :], logits, MASKED_LOGIT)
        left, right = halves(logits)
        first, second = halves(left)
        third, fourth = halves(right)
        logits_desc.store([row, column], first)
        if stats_ptr is not None:
            # Between the stores, each of which waits for the one before it.
            max_logit = tl.max(logits, 1)
            total = _exp_sum(first, max_logit)
        logits_desc.store([row, column + QUARTER], second)
        if stats_ptr is not None:
            total += _exp_sum(second, max_logit)
        logits_desc.store([row, column + 2 * QUARTER], third)
        if stats_ptr is not None:
            total += _exp_sum(third, max_logit)
        logits_desc.store([row, column + 3 * QUARTER], fourth)
        if stats_ptr is not None:
            total += _exp_sum(fourth, max_logit)
            stats = stats_ptr + column_tile.to(tl.int64) * (2 * N) + rows
            tl.store(stats, max_logit, mask=rows < N)
            tl.store(stats + N, total, mask=rows < N)


@triton.jit
def _exp_sum(logits, max_logit):
    return tl.sum(tl.exp2(logits - max_logit[:, None]), 1)
