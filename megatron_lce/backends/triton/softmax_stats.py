"""First primitive: softmax statistics of hidden @ weight.T, with the logits in registers only."""

from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.merge_stats import merge_stats
from megatron_lce.backends.triton.tile_products import (
    MASKED_LOGIT,
    descriptor,
    tanh,
    tile_position,
    tile_products,
    upcasts,
)
from megatron_lce.core.blocks import BlockBytes, cut, plan_blocks, round_up
from megatron_lce.core.products import aligned, copied_row_bytes
from megatron_lce.core.softmax_stats import packed_rows

CACHE_ROW_STEP = 64  # elements: rows start at cache lines, and where Triton knows that 16-byte accesses are aligned


class LogitsCache:
    """exp(z - m) of the first columns in the inputs' dtype, and m, the largest logit of each row of each tile.

    Both together stay within the bytes they were asked to. `exp` turns into the gradient in place.
    """

    def __init__(self, exp: Tensor, tile_max: Tensor) -> None:
        self.exp = exp  # [N, C]
        self.tile_max = tile_max  # [tiles, N] fp32, base 2

    @classmethod
    def allocate(cls, num_tokens: int, num_columns: int, hidden: Tensor) -> Self:
        stride = round_up(num_columns, CACHE_ROW_STEP)
        block_v = tiles.choose_tiles(hidden.dtype, hidden.device).block_v
        exp = hidden.new_empty(num_tokens, stride)[:, :num_columns]
        return cls(exp, hidden.new_empty(triton.cdiv(num_columns, block_v), num_tokens, dtype=torch.float32))

    def free(self) -> None:
        del self.exp, self.tile_max


def cache_columns(num_tokens: int, num_columns: int, hidden: Tensor, logits_cache_bytes: int) -> int:
    """How many columns a cache of that many bytes keeps: all, or a whole number of tiles; none of fp32 inputs."""
    if hidden.dtype == torch.float32 or num_tokens == 0:
        return 0
    block_v = tiles.choose_tiles(hidden.dtype, hidden.device).block_v
    row_bytes = round_up(num_columns, CACHE_ROW_STEP) * hidden.element_size() + 4 * triton.cdiv(num_columns, block_v)
    if num_tokens * row_bytes <= logits_cache_bytes:
        return num_columns
    return logits_cache_bytes // (num_tokens * (block_v * hidden.element_size() + 4)) * block_v


def softmax_stats_bytes(hidden: Tensor, weight: Tensor, entropy: bool, telemetry: bool) -> BlockBytes:
    """What `softmax_stats` takes for the statistics of every split and its copies of unaligned inputs."""
    num_splits = triton.cdiv(weight.shape[0], tiles.choose_tiles(hidden.dtype, hidden.device).block_v)
    split_bytes = num_splits * packed_rows(entropy, telemetry) * 4
    return BlockBytes(0, split_bytes + copied_row_bytes(hidden), copied_row_bytes(weight))


def softmax_stats(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    labels: Tensor,  # [N] int32 ids into weight's rows; -1: owned by nobody here
    row_scale: Tensor,  # [N] fp32 factor from products (or their tanh) to base-2 logits
    *,
    softcap_scale: float | None,
    entropy: bool,
    telemetry: bool,
    vocab_start: int,
    workspace_bytes: int,
    cache: LogitsCache | None = None,
) -> Tensor:
    """Packed softmax statistics [K, N] of V columns, see `megatron_lce.core.softmax_stats`. Fills the cache, if any."""
    num_tokens, num_columns = hidden.shape[0], weight.shape[0]
    tile = tiles.choose_tiles(hidden.dtype, hidden.device)
    rows = packed_rows(entropy, telemetry)
    num_splits = triton.cdiv(num_columns, tile.block_v)
    blocks = plan_blocks(
        num_tokens,
        num_columns,
        workspace_bytes,
        softmax_stats_bytes(hidden, weight, entropy, telemetry),
    )
    kept = 0 if cache is None else cache.exp.shape[1]
    ranges = [(columns, True) for columns in cut(kept, blocks.columns)]
    ranges += [
        (slice(kept + columns.start, kept + columns.stop), False) for columns in cut(num_columns - kept, blocks.columns)
    ]
    packed = hidden.new_empty(rows, num_tokens, dtype=torch.float32)
    buffer = hidden.new_empty(num_splits * rows * blocks.tokens, dtype=torch.float32)
    for tokens in cut(num_tokens, blocks.tokens):
        block = slab = None  # a copy's memory goes before the next one is made
        block = aligned(hidden[tokens])
        splits = buffer[: num_splits * rows * block.shape[0]].view(num_splits, rows, block.shape[0])
        for columns, keep in ranges:
            slab = None
            slab = aligned(weight[columns])
            exp = cache.exp[tokens, columns] if keep and cache is not None else None
            num_tiles = triton.cdiv(block.shape[0], tile.block_n) * triton.cdiv(slab.shape[0], tile.block_v)
            _softmax_stats_kernel[(min(num_tiles, tiles.num_programs(hidden.device)),)](
                descriptor(block, tile.block_n, tile.block_h),
                descriptor(slab, tile.block_v, tile.block_h),
                labels[tokens],
                row_scale[tokens],
                splits[columns.start // tile.block_v :],
                None if exp is None else descriptor(exp, tile.block_n, tile.block_v),
                block.shape[0],
                slab.shape[0],
                hidden.shape[1],
                columns.start,
                vocab_start,
                0.0 if softcap_scale is None else softcap_scale,
                ENTROPY=entropy,
                TELEMETRY=telemetry,
                KEEP_EXP=keep,
                SOFTCAP=softcap_scale is not None,
                UPCAST=upcasts(hidden.dtype, tiles.interpreting()),
                BLOCK_N=tile.block_n,
                BLOCK_V=tile.block_v,
                BLOCK_H=tile.block_h,
                GROUP_N=tiles.stats_group(hidden.shape[1]),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                enable_fp_fusion=False,
            )
            if keep and cache is not None:
                first = columns.start // tile.block_v
                last = triton.cdiv(columns.stop, tile.block_v)
                cache.tile_max[first:last, tokens] = splits[first:last, 0]
        merge_stats(splits, entropy, telemetry, out=packed[:, tokens])
    return packed


# fp fusion is off in the launch: logprobs must keep their bits whichever of the constexprs below are set.
@triton.jit(do_not_specialize=["N", "V", "first_column", "vocab_start"])
def _softmax_stats_kernel(
    hidden_desc,  # [N, H]
    weight_desc,  # [V, H]
    label_ptr,  # [N] int32; column + first_column is compared with it
    row_scale_ptr,  # [N] fp32
    stats_ptr,  # [S, K, N] fp32 out, one split a tile of columns
    exp_desc,  # [N, V] out, if KEEP_EXP
    N,
    V,
    H,
    first_column,
    vocab_start,
    softcap_scale,
    ENTROPY: tl.constexpr,
    TELEMETRY: tl.constexpr,
    KEEP_EXP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """Statistics of each tile of logits, [BLOCK_N, BLOCK_V], which never leaves the registers (but for its exp)."""
    K: tl.constexpr = 3 + ENTROPY + 2 * TELEMETRY
    num_row_blocks = tl.cdiv(N, BLOCK_N)
    num_column_tiles = tl.cdiv(V, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_row_blocks * num_column_tiles, tl.num_programs(0), flatten=True):
        row_block, column_tile = tile_position(tile, num_row_blocks, num_column_tiles, GROUP_N)
        row = row_block * BLOCK_N
        column = column_tile * BLOCK_V
        rows = row + tl.arange(0, BLOCK_N)
        row_mask = rows < N
        label = tl.load(label_ptr + rows, mask=row_mask, other=-1)
        row_scale = tl.load(row_scale_ptr + rows, mask=row_mask, other=0.0)

        logits = tile_products(hidden_desc, weight_desc, row, column, H, BLOCK_N, BLOCK_V, BLOCK_H, UPCAST)
        if SOFTCAP:
            logits = tanh(logits * softcap_scale)
        logits = logits * row_scale[:, None]  # [BLOCK_N, BLOCK_V]

        columns = column + tl.arange(0, BLOCK_V)
        stats = stats_ptr + column_tile.to(tl.int64) * (K * N) + rows
        if TELEMETRY:
            tl.store(stats + (K - 2) * N, tl.min(tl.where((columns < V)[None, :], logits, float("inf")), 1), row_mask)
        if column + BLOCK_V > V:
            logits = tl.where((columns < V)[None, :], logits, MASKED_LOGIT)
        max_logit = tl.max(logits, 1)  # [BLOCK_N]
        is_label = columns[None, :] == (label - first_column)[:, None]
        label_logit = tl.max(tl.where(is_label, logits, float("-inf")), 1)
        if TELEMETRY:
            argmax = tl.argmax(logits, 1) + (column + first_column + vocab_start)
            tl.store(stats + (K - 1) * N, argmax.to(tl.float32), row_mask)

        shifted = logits - max_logit[:, None]
        exp = tl.exp2(shifted)
        tl.store(stats, max_logit, row_mask)
        tl.store(stats + N, tl.sum(exp, 1), row_mask)
        tl.store(stats + 2 * N, label_logit, row_mask)
        if ENTROPY:
            tl.store(stats + 3 * N, tl.sum(exp * shifted, 1), row_mask)
        if KEEP_EXP:
            exp_desc.store([row, column], exp.to(exp_desc.dtype))
