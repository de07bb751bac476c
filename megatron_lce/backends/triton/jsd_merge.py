"""Merging what disjoint sets of columns know of two heads' divergence: a rank's chunks, or the ranks of a group."""

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.core.blocks import ceil_div

_BLOCK_S = 128


def merge_kl_stats(parts: Tensor, *, forward_kl: bool) -> Tensor:
    """[S, 5, N] of S disjoint sets of columns -> [5, N] of their union, see `megatron_lce.core.jsd_stats`."""
    return _launch(_merge_kl_stats_kernel, parts, FORWARD_KL=forward_kl)


def sum_parts(parts: Tensor) -> Tensor:
    """[S, 2, N] -> [2, N], a token's sum in one order, whatever the other tokens."""
    return _launch(_sum_parts_kernel, parts)


def _launch(kernel: triton.JITFunction, parts: Tensor, **constexprs: bool) -> Tensor:
    num_parts, num_rows, num_tokens = parts.shape
    out = parts.new_empty(num_rows, num_tokens)
    block_n = tiles.merging_rows(parts.device) // 4  # there are few tokens in a block
    kernel[(ceil_div(num_tokens, block_n),)](
        parts, out, num_parts, num_tokens, **constexprs, BLOCK_S=_BLOCK_S, BLOCK_N=block_n, num_warps=1
    )
    return out


@triton.jit(do_not_specialize=["S", "N"])
def _sum_parts_kernel(
    parts_ptr,  # [S, 2, N]
    out_ptr,  # [2, N]
    S,
    N,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_mask = tokens < N
    for row in tl.static_range(2):
        total = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, S, BLOCK_S):
            splits = start + tl.arange(0, BLOCK_S)
            mask = (splits < S)[:, None] & token_mask[None, :]
            part = parts_ptr + splits.to(tl.int64)[:, None] * (2 * N) + tokens[None, :]  # [BLOCK_S, BLOCK_N]
            total += tl.sum(tl.load(part + row * N, mask, other=0.0), 0)
        tl.store(out_ptr + row * N + tokens, total, token_mask)


@triton.jit(do_not_specialize=["S", "N"])
def _merge_kl_stats_kernel(
    parts_ptr,  # [S, 5, N]
    out_ptr,  # [5, N]
    S,
    N,
    FORWARD_KL: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The largest logits first, then the sums relative to them; p is the teacher's for forward KL."""
    P: tl.constexpr = 2 if FORWARD_KL else 0  # its largest logit's row; its sum's follows
    Q: tl.constexpr = 2 - P
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_mask = tokens < N
    max_p = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    max_q = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    for start in range(0, S, BLOCK_S):
        splits = start + tl.arange(0, BLOCK_S)
        mask = (splits < S)[:, None] & token_mask[None, :]
        part = parts_ptr + splits.to(tl.int64)[:, None] * (5 * N) + tokens[None, :]  # [BLOCK_S, BLOCK_N]
        max_p = tl.maximum(max_p, tl.max(tl.load(part + P * N, mask, other=float("-inf")), 0))
        max_q = tl.maximum(max_q, tl.max(tl.load(part + Q * N, mask, other=float("-inf")), 0))

    sum_p = tl.zeros((BLOCK_N,), tl.float32)
    sum_q = tl.zeros((BLOCK_N,), tl.float32)
    gap = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, S, BLOCK_S):
        splits = start + tl.arange(0, BLOCK_S)
        mask = (splits < S)[:, None] & token_mask[None, :]
        part = parts_ptr + splits.to(tl.int64)[:, None] * (5 * N) + tokens[None, :]
        split_max_p = tl.load(part + P * N, mask, other=float("-inf"))
        split_max_q = tl.load(part + Q * N, mask, other=float("-inf"))
        split_sum_p = tl.load(part + (P + 1) * N, mask, other=0.0)
        empty = split_max_p == float("-inf")
        shift_p = tl.where(empty, float("-inf"), split_max_p - max_p[None, :])
        shift_q = tl.where(empty, float("-inf"), split_max_q - max_q[None, :])
        scale_p = tl.exp2(shift_p)
        finite_shift = tl.where(scale_p > 0, shift_p - shift_q, 0.0)
        sum_p += tl.sum(scale_p * split_sum_p, 0)
        sum_q += tl.sum(tl.exp2(shift_q) * tl.load(part + (Q + 1) * N, mask, other=0.0), 0)
        gap += tl.sum(scale_p * (tl.load(part + 4 * N, mask, other=0.0) + split_sum_p * finite_shift), 0)

    out = out_ptr + tokens
    tl.store(out + P * N, max_p, token_mask)
    tl.store(out + (P + 1) * N, sum_p, token_mask)
    tl.store(out + Q * N, max_q, token_mask)
    tl.store(out + (Q + 1) * N, sum_q, token_mask)
    tl.store(out + 4 * N, gap, token_mask)
