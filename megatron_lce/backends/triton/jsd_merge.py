"""Merging what disjoint sets of columns know of two heads: a rank's chunks, or the ranks of a group."""

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.core.blocks import ceil_div

_BLOCK_S = 1024  # the chunks of most vocabularies at once


def merge_stats(student: Tensor, teacher: Tensor, out: Tensor) -> None:
    """Largest logits and sums of either head, [S, 2, N] of S disjoint sets of columns -> of their union, [4, N]."""
    _launch(_merge_stats_kernel, out, student, teacher, programs=2)


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """[S, 2, N] -> [2, N], a token's sum in one order, whatever the other tokens."""
    _launch(_sum_parts_kernel, out, parts, programs=1)


def _launch(kernel: triton.JITFunction, out: Tensor, *parts: Tensor, programs: int) -> None:
    num_tokens = out.shape[1]
    block_n = tiles.merging_rows(out.device) // 2  # there are few tokens in a block
    kernel[(ceil_div(num_tokens, block_n), programs)](
        out,
        *parts,
        num_tokens,
        *(given.shape[0] for given in parts),
        *(given.stride(0) for given in parts),
        out.stride(0),
        BLOCK_S=_BLOCK_S,
        BLOCK_N=block_n,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["N", "S", "part_stride", "out_stride"])
def _sum_parts_kernel(
    out_ptr,  # [2, N], rows out_stride apart
    parts_ptr,  # [S, 2, N], parts part_stride apart
    N,
    S,
    part_stride,
    out_stride,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_mask = tokens < N
    for row in tl.static_range(2):
        total = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, S, BLOCK_S):
            part, mask = _parts_at(parts_ptr, start, S, part_stride, tokens, token_mask, BLOCK_S)
            total += tl.sum(tl.load(part + row * N, mask, other=0.0), 0)
        tl.store(out_ptr + row * out_stride + tokens, total, token_mask)


@triton.jit(do_not_specialize=["N", "S", "teacher_S", "part_stride", "teacher_stride", "out_stride"])
def _merge_stats_kernel(
    out_ptr,  # [4, N], rows out_stride apart
    parts_ptr,  # [S, 2, N], parts part_stride apart
    teacher_ptr,  # the teacher's [teacher_S, 2, N]
    N,
    S,
    teacher_S,
    part_stride,
    teacher_stride,
    out_stride,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The largest logit first, then the sum relative to it; of one head in a program."""
    if tl.program_id(1) == 1:
        parts_ptr, S, part_stride = teacher_ptr, teacher_S, teacher_stride
        out_ptr += 2 * out_stride
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_mask = tokens < N
    largest = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    for start in range(0, S, BLOCK_S):
        part, mask = _parts_at(parts_ptr, start, S, part_stride, tokens, token_mask, BLOCK_S)
        largest = tl.maximum(largest, tl.max(tl.load(part, mask, other=float("-inf")), 0))
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, S, BLOCK_S):
        part, mask = _parts_at(parts_ptr, start, S, part_stride, tokens, token_mask, BLOCK_S)
        max_logit = tl.load(part, mask, other=float("-inf"))
        # -inf: of no columns.
        shift = tl.where(max_logit == float("-inf"), float("-inf"), max_logit - largest[None, :])
        total += tl.sum(tl.exp2(shift) * tl.load(part + N, mask, other=0.0), 0)
    tl.store(out_ptr + tokens, largest, token_mask)
    tl.store(out_ptr + out_stride + tokens, total, token_mask)


@triton.jit
def _parts_at(parts_ptr, start, S, part_stride, tokens, token_mask, BLOCK_S: tl.constexpr):
    """The first row of `BLOCK_S` parts, [BLOCK_S, BLOCK_N], and which of them are there."""
    splits = start + tl.arange(0, BLOCK_S)
    places = parts_ptr + splits.to(tl.int64)[:, None] * part_stride + tokens[None, :]
    return places, (splits < S)[:, None] & token_mask[None, :]
