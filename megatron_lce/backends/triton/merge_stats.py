"""Statistics of raw logits that are in memory, and the merge of all chunks, see `megatron_lce.core.statistics`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.packed import extremes_at, sums_at
from megatron_lce.core.options import Telemetry
from megatron_lce.core.plan import ceil_div
from megatron_lce.core.statistics import (
    CHUNK_COLUMNS,
    FIXED_POINT_UNIT,
    LOWEST_LOGIT,
    NO_ID,
    row_counts,
)

_UNITS = tl.constexpr(1 / FIXED_POINT_UNIT)
_NO_ID = tl.constexpr(NO_ID)
_LOWEST_LOGIT = tl.constexpr(LOWEST_LOGIT)


def chunk_stats_of_logits(raw_logits: Tensor, row_scale: Tensor) -> Tensor:
    num_tokens, num_columns = raw_logits.shape
    num_chunks, chunks_per_program = ceil_div(num_columns, CHUNK_COLUMNS), 16  # chunks of a program
    stats = raw_logits.new_empty(num_chunks, 3, num_tokens, dtype=torch.float32)
    block_n = tiles.block_rows(4, num_tokens)
    tiles.launch(
        _chunk_stats_of_logits_kernel,
        (ceil_div(num_tokens, block_n), ceil_div(num_chunks, chunks_per_program)),
        raw_logits,
        fp_fusion=False,
        raw_logits_ptr=raw_logits,
        row_scale_ptr=row_scale,
        stats_ptr=stats,
        N=num_tokens,
        C=num_columns,
        raw_logits_stride=raw_logits.stride(0),
        BLOCK_N=block_n,
        CHUNKS=chunks_per_program,
        CHUNK=CHUNK_COLUMNS,
    )
    return stats


def merge_chunks(
    stats: Tensor, all_extremes: Tensor, num_columns: int, entropy: bool, telemetry: Telemetry
) -> tuple[Tensor, Tensor]:
    num_chunks, rows_of_chunk, num_tokens = stats.shape
    num_sets, rows_of_set, _ = all_extremes.shape
    num_extremes, num_sums, _ = row_counts(entropy, telemetry)
    extremes = stats.new_empty(num_extremes, num_tokens)
    sums = stats.new_empty(num_sums, num_tokens, dtype=torch.int64)
    rows, block_s, num_warps = 8, 64, 1  # many small programs are fastest, unless they are few
    if num_tokens <= 256:
        rows, block_s, num_warps = 4, 512, 8
    elif telemetry == "mean_logit" and num_tokens <= 4096:  # 44 us instead of 115 (2,048 rows, 1,187 chunks, an H100)
        block_s, num_warps = 512, 8
    block_n = tiles.block_rows(rows, num_tokens)
    tiles.launch(
        _merge_chunks_kernel,
        (ceil_div(num_tokens, block_n),),
        stats,
        fp_fusion=False,  # the same bits with and without the optional rows
        stats_ptr=stats,
        all_extremes_ptr=all_extremes,
        extremes_ptr=extremes,
        out_ptr=sums,
        S=num_chunks,
        num_sets=num_sets,
        N=num_tokens,
        stats_stride=rows_of_chunk * num_tokens,
        set_stride=rows_of_set * num_tokens,
        num_columns=num_columns,
        ENTROPY=entropy,
        MEAN=bool(telemetry),
        TELEMETRY=telemetry is True,
        BLOCK_S=block_s,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )
    return extremes, sums


@triton.jit(do_not_specialize=["N"])
def _chunk_stats_of_logits_kernel(
    raw_logits_ptr,  # [N, C] fp32, rows raw_logits_stride apart
    row_scale_ptr,  # [N] fp32
    stats_ptr,  # [chunks, 3, N] fp32 out
    N,
    C,
    raw_logits_stride,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the largest logit, -inf for the label's, and the sum of exponentials of CHUNKS chunks of BLOCK_N rows."""
    offs_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    chunks = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    offs_v = tl.program_id(1) * (CHUNKS * CHUNK) + tl.arange(0, CHUNKS * CHUNK)
    mask = (offs_n < N)[:, None] & (offs_v < C)[None, :]
    scale = tl.load(row_scale_ptr + offs_n, mask=offs_n < N, other=0.0)
    raw_logits = tl.load(raw_logits_ptr + offs_n[:, None] * raw_logits_stride + offs_v[None, :], mask=mask, other=0.0)
    logits = tl.where(mask, raw_logits * scale[:, None], float("-inf"))
    logits = tl.reshape(logits, (BLOCK_N, CHUNKS, CHUNK))
    max_logit = tl.maximum(tl.max(logits, 2), _LOWEST_LOGIT)
    sum_exp = tl.sum(tl.exp2(logits - max_logit[:, :, None]), 2)
    max_logit = tl.where(sum_exp == sum_exp, max_logit, float("nan"))  # tl.max passes over a NaN
    out = stats_ptr + chunks.to(tl.int64)[None, :] * (3 * N) + offs_n[:, None]
    out_mask = (offs_n < N)[:, None] & (chunks * CHUNK < C)[None, :]
    extremes, sums = extremes_at(out, N), sums_at(out, N, False, False, 2)
    tl.store(extremes.max_logit, max_logit, out_mask)
    tl.store(extremes.label_logit, tl.full((BLOCK_N, CHUNKS), float("-inf"), tl.float32), out_mask)
    tl.store(sums.sum_exp, sum_exp, out_mask)


@triton.jit(do_not_specialize=["S", "num_sets", "N", "stats_stride", "set_stride", "num_columns"])
def _merge_chunks_kernel(
    stats_ptr,  # [S, K, N]
    all_extremes_ptr,  # [num_sets, >= E, N] of the whole vocabulary
    extremes_ptr,  # [E, N] out, its extremes
    out_ptr,  # [sums, N] int64 out
    S,
    num_sets,
    N,
    stats_stride,
    set_stride,
    num_columns,
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,
    TELEMETRY: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Merge the extremes of the vocabulary, then add up the sums of the chunks relative to them, for BLOCK_N tokens."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = offs_n < N
    max_logit = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    label_logit = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    min_logit = tl.full((BLOCK_N,), float("inf"), tl.float32)
    for start in range(0, num_sets, BLOCK_S):
        sets = start + tl.arange(0, BLOCK_S)
        mask = (sets < num_sets)[:, None] & row_mask[None, :]
        first_row = all_extremes_ptr + sets.to(tl.int64)[:, None] * set_stride + offs_n[None, :]  # [BLOCK_S, BLOCK_N]
        extremes = extremes_at(first_row, N)
        logits = tl.load(extremes.max_logit, mask, other=float("-inf"))
        largest = tl.maximum(max_logit, tl.max(logits, 0), propagate_nan=tl.PropagateNan.ALL)
        any_nan = tl.max((logits != logits).to(tl.int32), 0) > 0  # tl.max ignores NaN
        max_logit = tl.where(any_nan, float("nan"), largest)
        label_logit = tl.maximum(label_logit, tl.max(tl.load(extremes.label_logit, mask, other=float("-inf")), 0))
        if MEAN:
            min_logit = tl.minimum(min_logit, tl.min(tl.load(extremes.min_logit, mask, other=float("inf")), 0))
    merged = extremes_at(extremes_ptr + offs_n, N)
    tl.store(merged.max_logit, max_logit, row_mask)
    tl.store(merged.label_logit, label_logit, row_mask)
    if MEAN:
        tl.store(merged.min_logit, min_logit, row_mask)
    if TELEMETRY:
        argmax = tl.full((BLOCK_N,), _NO_ID, tl.int32)
        for start in range(0, num_sets, BLOCK_S):
            sets = start + tl.arange(0, BLOCK_S)
            mask = (sets < num_sets)[:, None] & row_mask[None, :]
            first_row = all_extremes_ptr + sets.to(tl.int64)[:, None] * set_stride + offs_n[None, :]
            extremes = extremes_at(first_row, N)
            at_max = tl.load(extremes.max_logit, mask, other=float("-inf")) == max_logit[None, :]
            set_argmax = tl.load(extremes.argmax, mask, other=0.0).to(tl.int32, bitcast=True)
            argmax = tl.minimum(argmax, tl.min(tl.where(at_max & mask, set_argmax, _NO_ID), 0))
        tl.store(merged.argmax, argmax.to(tl.float32, bitcast=True), row_mask)

    max_logit = tl.where(row_mask, max_logit, 0.0)
    sum_exp = tl.zeros((BLOCK_N,), tl.int64)
    sum_exp_logit = tl.zeros((BLOCK_N,), tl.int64)
    if MEAN:
        min_logit = tl.where(row_mask, min_logit, 0.0)
        max_abs_logit = tl.maximum(tl.abs(max_logit), tl.abs(min_logit))
        max_abs_logit = tl.where(max_abs_logit > 0, max_abs_logit, 1.0)[None, :]
        sum_logit = tl.zeros((BLOCK_N,), tl.int64)
        sum_exp_squared = tl.zeros((BLOCK_N,), tl.int64)
        sum_logit_squared = tl.zeros((BLOCK_N,), tl.int64)
    for start in range(0, S, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        mask = (offs_s < S)[:, None] & row_mask[None, :]
        chunk = stats_ptr + offs_s.to(tl.int64)[:, None] * stats_stride + offs_n[None, :]
        sums = sums_at(chunk, N, ENTROPY, TELEMETRY, 2 + MEAN + TELEMETRY)
        shift = tl.load(extremes_at(chunk, N).max_logit, mask, other=float("-inf")) - max_logit[None, :]
        rescale = tl.exp2(shift)
        chunk_sum = tl.load(sums.sum_exp, mask, other=0.0)
        sum_exp += tl.sum((rescale * chunk_sum * _UNITS).to(tl.int64), 0)
        if ENTROPY:
            chunk_sum_exp_logit = tl.load(sums.sum_exp_logit, mask, other=0.0)
            finite_shift = tl.where(rescale > 0, shift, 0.0)
            terms = rescale * (chunk_sum_exp_logit + chunk_sum * finite_shift)
            sum_exp_logit += tl.sum((terms * _UNITS).to(tl.int64), 0)
        if MEAN:
            terms = tl.load(sums.sum_logit, mask, other=0.0) / max_abs_logit
            sum_logit += tl.sum((terms * _UNITS).to(tl.int64), 0)
        if TELEMETRY:
            terms = rescale * rescale * tl.load(sums.sum_exp_squared, mask, other=0.0)
            sum_exp_squared += tl.sum((terms * _UNITS).to(tl.int64), 0)
            terms = tl.load(sums.sum_logit_squared, mask, other=0.0) / max_abs_logit / max_abs_logit
            sum_logit_squared += tl.sum((terms * _UNITS).to(tl.int64), 0)
    total = sums_at(out_ptr + offs_n, N, ENTROPY, TELEMETRY, 0)
    tl.store(total.sum_exp, sum_exp, row_mask)
    if ENTROPY:
        tl.store(total.sum_exp_logit, sum_exp_logit, row_mask)
    if TELEMETRY:
        tl.store(total.sum_exp_squared, sum_exp_squared, row_mask)
        tl.store(total.sum_logit_squared, sum_logit_squared, row_mask)
    if MEAN:
        tl.store(total.sum_logit, sum_logit, row_mask)
        tl.store(total.num_columns, tl.zeros((BLOCK_N,), tl.int64) + num_columns, row_mask)
