"""Merging softmax statistics of disjoint sets of columns: a rank's splits, or the ranks of a group."""

import triton
import triton.language as tl
from torch import Tensor


def merge_stats(
    packed: Tensor,  # [S, K, N] fp32
    entropy: bool,
    telemetry: bool,
    out: Tensor | None = None,  # [K, N] fp32
) -> Tensor:
    """[S, K, N] of S disjoint sets of columns -> [K, N] of their union, see `megatron_lce.core.softmax_stats`."""
    num_splits, num_rows, num_tokens = packed.shape
    if out is None:
        out = packed.new_empty(num_rows, num_tokens)
    block_n = 32
    _merge_stats_kernel[(triton.cdiv(num_tokens, block_n),)](
        packed,
        out,
        num_splits,
        num_tokens,
        num_rows * num_tokens,
        out.stride(0),
        ENTROPY=entropy,
        TELEMETRY=telemetry,
        BLOCK_S=64,
        BLOCK_N=block_n,
        enable_fp_fusion=False,  # the same bits with and without the optional rows
    )
    return out


# `split_stride` is an argument and not K * N, whose divisors would choose the layout, and with it the order of a sum.
@triton.jit(do_not_specialize=["S", "N", "split_stride", "out_stride"])
def _merge_stats_kernel(
    stats_ptr,  # [S, K, N]
    out_ptr,  # [K, N], rows out_stride apart
    S,
    N,
    split_stride,
    out_stride,
    ENTROPY: tl.constexpr,
    TELEMETRY: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The largest logit first, then the sums relative to it, so that no order of splits is preferred."""
    K: tl.constexpr = 3 + ENTROPY + 2 * TELEMETRY
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_mask = tokens < N
    max_logit = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    label_logit = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    min_logit = tl.full((BLOCK_N,), float("inf"), tl.float32)
    for start in range(0, S, BLOCK_S):
        splits = start + tl.arange(0, BLOCK_S)
        mask = (splits < S)[:, None] & token_mask[None, :]
        part = stats_ptr + splits.to(tl.int64)[:, None] * split_stride + tokens[None, :]  # [BLOCK_S, BLOCK_N]
        split_max = tl.load(part, mask, other=float("-inf"))
        max_logit = tl.maximum(max_logit, tl.max(split_max, 0))
        label_logit = tl.maximum(label_logit, tl.max(tl.load(part + 2 * N, mask, other=float("-inf")), 0))
        if TELEMETRY:
            min_logit = tl.minimum(min_logit, tl.min(tl.load(part + (K - 2) * N, mask, other=float("inf")), 0))

    sum_exp = tl.zeros((BLOCK_N,), tl.float32)
    sum_exp_logit = tl.zeros((BLOCK_N,), tl.float32)
    argmax = tl.full((BLOCK_N,), float("inf"), tl.float32)
    for start in range(0, S, BLOCK_S):
        splits = start + tl.arange(0, BLOCK_S)
        mask = (splits < S)[:, None] & token_mask[None, :]
        part = stats_ptr + splits.to(tl.int64)[:, None] * split_stride + tokens[None, :]
        split_max = tl.load(part, mask, other=float("-inf"))
        split_sum = tl.load(part + N, mask, other=0.0)
        shift = tl.where(split_max == float("-inf"), float("-inf"), split_max - max_logit[None, :])
        scale = tl.exp2(shift)
        sum_exp += tl.sum(scale * split_sum, 0)
        if ENTROPY:
            split_sum_exp_logit = tl.load(part + 3 * N, mask, other=0.0)
            finite_shift = tl.where(scale > 0, shift, 0.0)
            sum_exp_logit += tl.sum(scale * (split_sum_exp_logit + split_sum * finite_shift), 0)
        if TELEMETRY:
            split_argmax = tl.load(part + (K - 1) * N, mask, other=float("inf"))
            at_max = tl.where(split_max == max_logit[None, :], split_argmax, float("inf"))
            argmax = tl.minimum(argmax, tl.min(at_max, 0))

    out = out_ptr + tokens
    tl.store(out, max_logit, token_mask)
    tl.store(out + out_stride, sum_exp, token_mask)
    tl.store(out + 2 * out_stride, label_logit, token_mask)
    if ENTROPY:
        tl.store(out + 3 * out_stride, sum_exp_logit, token_mask)
    if TELEMETRY:
        tl.store(out + (K - 2) * out_stride, min_logit, token_mask)
        tl.store(out + (K - 1) * out_stride, argmax, token_mask)
