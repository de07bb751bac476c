"""Chunks' extremes and sums are merged to the vocabulary's in one launch, see `megatron_lce.core.statistics`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.core.plan import ceil_div
from megatron_lce.core.statistics import UNIT, num_chunk_sums, num_extremes, num_sums

_BLOCK_S = 64
_UNITS = tl.constexpr(1 / UNIT)


def sum_chunks(
    parts: Tensor, all_extremes: Tensor, num_columns: int, entropy: bool, telemetry: bool
) -> tuple[Tensor, Tensor]:
    """Return the vocabulary's extremes [E, N], and the chunks' sums relative to them, int64 [`num_sums`, N] in `UNIT`s.

    One launch does both. On one rank `parts` are the `all_extremes`, too.
    """
    num_chunks, rows_of_part, num_tokens = parts.shape
    extremes = parts.new_empty(num_extremes(telemetry), num_tokens)
    sums = parts.new_empty(num_sums(entropy, telemetry), num_tokens, dtype=torch.int64)
    block_n = tiles.rows_of_program(8, num_tokens)  # of one warp: many small programs are fastest
    # the same bits with and without the optional rows
    tiles.launch(_sum_chunks_kernel, (ceil_div(num_tokens, block_n),), fused=False)(
        parts,
        all_extremes,
        extremes,
        sums,
        num_chunks,
        all_extremes.shape[0],
        num_tokens,
        rows_of_part * num_tokens,
        all_extremes.shape[1] * num_tokens,
        rows_of_part - num_chunk_sums(entropy, telemetry),
        num_columns,
        ENTROPY=entropy,
        TELEMETRY=telemetry,
        BLOCK_S=_BLOCK_S,
        BLOCK_N=block_n,
        num_warps=1,
    )
    return extremes, sums


@triton.jit
def _largest(running, values):
    """Return the largest value over the first dimension, NaN if any is, which tl.max would pass over."""
    largest = tl.maximum(running, tl.max(values, 0), propagate_nan=tl.PropagateNan.ALL)
    return tl.where(tl.max((values != values).to(tl.int32), 0) > 0, float("nan"), largest)


@triton.jit
def _merged_extremes(
    parts_ptr,  # [S, >= E, N]
    out_ptr,  # [E, N]
    tokens,
    S,
    N,
    part_stride,
    TELEMETRY: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store the extremes of the union of S sets of columns, and return the largest logit and the smallest, if asked."""
    token_mask = tokens < N
    max_logit = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    label_logit = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    min_logit = tl.full((BLOCK_N,), float("inf"), tl.float32)
    for start in range(0, S, BLOCK_S):
        splits = start + tl.arange(0, BLOCK_S)
        mask = (splits < S)[:, None] & token_mask[None, :]
        part = parts_ptr + splits.to(tl.int64)[:, None] * part_stride + tokens[None, :]  # [BLOCK_S, BLOCK_N]
        max_logit = _largest(max_logit, tl.load(part, mask, other=float("-inf")))
        label_logit = tl.maximum(label_logit, tl.max(tl.load(part + N, mask, other=float("-inf")), 0))
        if TELEMETRY:
            min_logit = tl.minimum(min_logit, tl.min(tl.load(part + 2 * N, mask, other=float("inf")), 0))
    out = out_ptr + tokens
    tl.store(out, max_logit, token_mask)
    tl.store(out + N, label_logit, token_mask)
    if TELEMETRY:
        argmax = tl.full((BLOCK_N,), float("inf"), tl.float32)
        for start in range(0, S, BLOCK_S):
            splits = start + tl.arange(0, BLOCK_S)
            mask = (splits < S)[:, None] & token_mask[None, :]
            part = parts_ptr + splits.to(tl.int64)[:, None] * part_stride + tokens[None, :]
            at_max = tl.load(part, mask, other=float("-inf")) == max_logit[None, :]
            part_argmax = tl.load(part + 3 * N, mask, other=float("inf"))
            argmax = tl.minimum(argmax, tl.min(tl.where(at_max, part_argmax, float("inf")), 0))
        tl.store(out + 2 * N, min_logit, token_mask)
        tl.store(out + 3 * N, argmax, token_mask)
    return max_logit, min_logit


@triton.jit
def largest_logit(max_logit, min_logit):
    """Return the largest absolute logit."""
    return tl.maximum(tl.abs(max_logit), tl.abs(min_logit))


@triton.jit(do_not_specialize=["S", "num_sets", "N", "part_stride", "set_stride", "first_sum", "num_columns"])
def _sum_chunks_kernel(
    parts_ptr,  # [S, K, N]
    all_extremes_ptr,  # [num_sets, >= E, N] of the whole vocabulary
    extremes_ptr,  # [E, N] out, its extremes
    out_ptr,  # [1 + ENTROPY + 4 * TELEMETRY, N] int64 out
    S,
    num_sets,
    N,
    part_stride,
    set_stride,
    first_sum,  # the row of a part where its sums start
    num_columns,
    ENTROPY: tl.constexpr,
    TELEMETRY: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Merge the vocabulary's extremes, and add up the chunks' sums relative to them, for BLOCK_N tokens."""
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_mask = tokens < N
    max_logit, min_logit = _merged_extremes(
        all_extremes_ptr, extremes_ptr, tokens, num_sets, N, set_stride, TELEMETRY, BLOCK_S, BLOCK_N
    )
    max_logit = tl.where(token_mask, max_logit, 0.0)
    sum_exp = tl.zeros((BLOCK_N,), tl.int64)
    sum_exp_logit = tl.zeros((BLOCK_N,), tl.int64)
    if TELEMETRY:
        largest = largest_logit(max_logit, tl.where(token_mask, min_logit, 0.0))
        largest = tl.where(largest > 0, largest, 1.0)[None, :]
        sum_exp_squared = tl.zeros((BLOCK_N,), tl.int64)
        sum_logit = tl.zeros((BLOCK_N,), tl.int64)
        sum_logit_squared = tl.zeros((BLOCK_N,), tl.int64)
    for start in range(0, S, BLOCK_S):
        splits = start + tl.arange(0, BLOCK_S)
        mask = (splits < S)[:, None] & token_mask[None, :]
        part = parts_ptr + splits.to(tl.int64)[:, None] * part_stride + tokens[None, :]
        shift = tl.load(part, mask, other=float("-inf")) - max_logit[None, :]
        scale = tl.exp2(shift)
        part_sum = tl.load(part + first_sum * N, mask, other=0.0)
        sum_exp += tl.sum((scale * part_sum * _UNITS).to(tl.int64), 0)
        if ENTROPY:
            part_sum_exp_logit = tl.load(part + (first_sum + 1) * N, mask, other=0.0)
            finite_shift = tl.where(scale > 0, shift, 0.0)
            terms = scale * (part_sum_exp_logit + part_sum * finite_shift)
            sum_exp_logit += tl.sum((terms * _UNITS).to(tl.int64), 0)
        if TELEMETRY:
            part += (first_sum + 1 + ENTROPY) * N
            terms = scale * scale * tl.load(part, mask, other=0.0)
            sum_exp_squared += tl.sum((terms * _UNITS).to(tl.int64), 0)
            terms = tl.load(part + N, mask, other=0.0) / largest
            sum_logit += tl.sum((terms * _UNITS).to(tl.int64), 0)
            terms = tl.load(part + 2 * N, mask, other=0.0) / largest / largest
            sum_logit_squared += tl.sum((terms * _UNITS).to(tl.int64), 0)
    out = out_ptr + tokens
    tl.store(out, sum_exp, token_mask)
    if ENTROPY:
        tl.store(out + N, sum_exp_logit, token_mask)
    if TELEMETRY:
        out += (1 + ENTROPY) * N
        tl.store(out, sum_exp_squared, token_mask)
        tl.store(out + N, sum_logit, token_mask)
        tl.store(out + 2 * N, sum_logit_squared, token_mask)
        tl.store(out + 3 * N, tl.zeros((BLOCK_N,), tl.int64) + num_columns, token_mask)
