"""The primitives of `megatron_lce.jsd`: both heads' logits of a tile, the first head's waiting in scratch memory.

Two fp32 accumulators as large as the tile that feeds the tensor cores well do not fit in a program's registers. So the
first head's tile goes to a buffer of the program's own, small enough to stay in L2, and comes back in pieces once the
second head's is done. A tile is computed in two halves: ptxas then keeps both loops' accumulators in registers.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.jsd_merge import merge_kl_stats, sum_parts
from megatron_lce.backends.triton.jsd_tiles import (
    capped,
    keep,
    kept_piece,
    load_row,
    log_mixture,
    log_probability,
    masked,
    shift_logits,
    tile_logits,
    two_half_products,
)
from megatron_lce.backends.triton.merge_stats import merge_extremes, sum_chunks
from megatron_lce.backends.triton.rows import prepare_rows
from megatron_lce.backends.triton.softmax_stats import softmax_stats, softmax_stats_bytes
from megatron_lce.backends.triton.tile_products import descriptor, tile_position
from megatron_lce.core.blocks import BlockBytes, cut, plan_blocks
from megatron_lce.core.jsd_stats import KL_ROWS, Head, both_copies
from megatron_lce.core.products import Copies, aligned

__all__ = [
    "divergence",
    "divergence_bytes",
    "grad_logits",
    "grad_logits_bytes",
    "kl_stats",
    "merge_extremes",
    "merge_kl_stats",
    "new_scratch",
    "prepare_rows",
    "scratch_bytes",
    "softmax_stats",
    "softmax_stats_bytes",
    "stats_bytes",
    "sum_chunks",
    "sum_parts",
]


def scratch_bytes(student: Head, teacher: Head) -> int:
    """What one program needs for the first head's tile."""
    tile = _choose_tiles(student, teacher)
    return 4 * tile.block_n * tile.block_v


def new_scratch(student: Head, teacher: Head, most_bytes: int) -> Tensor:
    """[programs, BLOCK_N * BLOCK_V] fp32 in at most that many bytes: one row for each program of a persistent grid."""
    device = student.hidden.device
    programs = min(tiles.num_programs(device), most_bytes // scratch_bytes(student, teacher))
    tile = _choose_tiles(student, teacher)
    return torch.empty(programs, tile.block_n * tile.block_v, device=device)


def stats_bytes(student: Head, teacher: Head, num_columns: int, copies: Copies) -> BlockBytes:
    """What `kl_stats` takes for each tile's statistics and its copies of unaligned inputs."""
    return _tile_rows_bytes(KL_ROWS, student, teacher, num_columns, copies)


def divergence_bytes(student: Head, teacher: Head, num_columns: int, copies: Copies) -> BlockBytes:
    return _tile_rows_bytes(2, student, teacher, num_columns, copies)


def grad_logits_bytes(student: Head, teacher: Head, copies: Copies) -> BlockBytes:
    """What `grad_logits` takes for its output and its copies of unaligned inputs."""
    return BlockBytes(student.hidden.element_size(), *copies)


def kl_stats(p: Head, q: Head, row_scales: Tensor, *, scratch: Tensor, workspace_bytes: int) -> Tensor:
    """Packed statistics [5, N] of V columns, see `megatron_lce.core.jsd_stats`; row_scales [2, N], p's first."""
    return _reduce_tiles(
        q,
        p,
        row_scales,
        kernel=_kl_stats_kernel,
        merge=merge_kl_stats,
        num_rows=KL_ROWS,
        scratch=scratch,
        workspace_bytes=workspace_bytes,
    )


def divergence(
    student: Head, teacher: Head, terms: Tensor, *, beta: float, scratch: Tensor, workspace_bytes: int
) -> Tensor:
    """[2, N] base-2 sums over V columns: the divergence for 0 < beta < 1, and KL(p_student || m).

    terms: the first six rows of `RowTerms`.
    """
    return _reduce_tiles(
        student,
        teacher,
        terms,
        beta,
        kernel=_divergence_kernel,
        merge=sum_parts,
        num_rows=2,
        scratch=scratch,
        workspace_bytes=workspace_bytes,
    )


def grad_logits(
    student: Head,  # of one slab
    teacher: Head,
    terms: Tensor,  # [8, N] fp32, `RowTerms`
    out: Tensor,  # [N, C] of the student's dtype
    *,
    beta: float,
    scratch: Tensor,
) -> None:
    """Gradient of one slab of the student's products."""
    tile = _choose_tiles(student, teacher)
    out_desc = descriptor(out, tile.block_n, tile.block_v // 4)
    constexprs = {"FORWARD_KL": beta == 0, "REVERSE_KL": beta == 1, "GROUP_N": tiles.GROUP_N}
    _launch(_grad_logits_kernel, student, teacher, terms, scratch, out_desc, beta, **constexprs)


def _reduce_tiles(
    first: Head,
    second: Head,
    terms: Tensor,  # [..., N]
    *further: float,
    kernel: triton.JITFunction,
    merge: Callable[..., Tensor],
    num_rows: int,
    scratch: Tensor,
    workspace_bytes: int,
) -> Tensor:
    """[num_rows, N]: what the kernel writes for each tile of columns, merged."""
    num_tokens, num_columns = terms.shape[1], first.weight.shape[0]
    block_v = _choose_tiles(first, second).block_v
    num_tiles = triton.cdiv(num_columns, block_v)
    block_bytes = _tile_rows_bytes(num_rows, first, second, num_columns, both_copies(first, second))
    blocks = plan_blocks(num_tokens, num_columns, workspace_bytes, block_bytes)
    group = tiles.stats_group(first.hidden.shape[1] + second.hidden.shape[1])
    reduced = terms.new_empty(num_rows, num_tokens)
    buffer = terms.new_empty(num_tiles * num_rows * blocks.tokens)
    for tokens in cut(num_tokens, blocks.tokens):
        length = tokens.stop - tokens.start
        parts = buffer[: num_tiles * num_rows * length].view(num_tiles, num_rows, length)
        for columns in cut(num_columns, blocks.columns):
            out = parts[columns.start // block_v :]
            blocks_of = (first.block(tokens, columns), second.block(tokens, columns))
            _launch(kernel, *blocks_of, terms[:, tokens], scratch, out, *further, GROUP_N=group)
        merge(parts, out=reduced[:, tokens])
    return reduced


def _launch(
    kernel: triton.JITFunction,
    first: Head,
    second: Head,
    terms: Tensor,
    scratch: Tensor,
    out: Any,
    *further: float,
    **constexprs: int,
) -> None:
    tile = _choose_tiles(first, second)
    num_tokens, num_columns = first.hidden.shape[0], first.weight.shape[0]
    num_tiles = triton.cdiv(num_tokens, tile.block_n) * triton.cdiv(num_columns, tile.block_v)
    descriptors = []
    for head in (first, second):
        descriptors.append(descriptor(aligned(head.hidden), tile.block_n, tile.block_h))
        descriptors.append(descriptor(aligned(head.weight), tile.block_v // 2, tile.block_h))
    kernel[(min(num_tiles, scratch.shape[0]),)](
        *descriptors,
        terms,
        scratch,
        out,
        num_tokens,
        num_columns,
        first.hidden.shape[1],
        second.hidden.shape[1],
        terms.stride(0),
        *(head.softcap_scale or 0.0 for head in (first, second)),
        *further,
        **constexprs,
        FIRST_SOFTCAP=first.softcap is not None,
        SECOND_SOFTCAP=second.softcap is not None,
        UPCAST=tiles.interpreting(),
        BLOCK_N=tile.block_n,
        BLOCK_V=tile.block_v,
        BLOCK_H=tile.block_h,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,  # z - max must be 0 at the largest logit, however large it is
    )


def _choose_tiles(first: Head, second: Head) -> tiles.Tiles:
    """One tile for both heads: that of fp32 if either is."""
    dtypes = (first.hidden.dtype, second.hidden.dtype)
    dtype = torch.float32 if torch.float32 in dtypes else first.hidden.dtype
    return tiles.choose_tiles(dtype, first.hidden.device)


def _tile_rows_bytes(num_rows: int, first: Head, second: Head, num_columns: int, copies: Copies) -> BlockBytes:
    num_tiles = triton.cdiv(num_columns, _choose_tiles(first, second).block_v)
    return BlockBytes(0, num_tiles * num_rows * 4 + copies.token, copies.column)


@triton.jit(do_not_specialize=["N", "V", "terms_stride"])
def _kl_stats_kernel(
    q_hidden_desc,  # [N, H_Q]
    q_weight_desc,  # [V, H_Q]
    p_hidden_desc,  # [N, H_P]
    p_weight_desc,  # [V, H_P]
    scale_ptr,  # [2, N] fp32, p's first, rows terms_stride apart
    scratch_ptr,  # [programs, BLOCK_N * BLOCK_V] fp32
    stats_ptr,  # [S, 5, N] fp32 out, one split a tile of columns
    N,
    V,
    H_Q,
    H_P,
    terms_stride,
    q_softcap_scale,
    p_softcap_scale,
    FIRST_SOFTCAP: tl.constexpr,
    SECOND_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """Statistics of each tile, of p and q; the formulas of `megatron_lce.core.jsd_stats`."""
    num_row_blocks = tl.cdiv(N, BLOCK_N)
    num_column_tiles = tl.cdiv(V, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_row_blocks * num_column_tiles, tl.num_programs(0)):
        row_block, column_tile = tile_position(tile, num_row_blocks, num_column_tiles, GROUP_N)
        row = row_block * BLOCK_N
        column = column_tile * BLOCK_V
        rows = row + tl.arange(0, BLOCK_N)
        row_mask = rows < N

        pieces = two_half_products(q_hidden_desc, q_weight_desc, row, column, H_Q, UPCAST, BLOCK_N, BLOCK_V, BLOCK_H)
        scale = load_row(scale_ptr, terms_stride, 1, rows, row_mask)
        max_q, shifted_q, sum_q = shift_logits(tile_logits(pieces, scale, q_softcap_scale, column, V, FIRST_SOFTCAP))
        keep(scratch_ptr, shifted_q, BLOCK_N, BLOCK_V)
        pieces = two_half_products(p_hidden_desc, p_weight_desc, row, column, H_P, UPCAST, BLOCK_N, BLOCK_V, BLOCK_H)
        scale = load_row(scale_ptr, terms_stride, 0, rows, row_mask)
        max_p, shifted_p, sum_p = shift_logits(tile_logits(pieces, scale, p_softcap_scale, column, V, SECOND_SOFTCAP))
        gap = tl.zeros((BLOCK_N,), tl.float32)
        for i in tl.static_range(4):
            gap += tl.sum(tl.exp2(shifted_p[i]) * (shifted_p[i] - kept_piece(scratch_ptr, i, BLOCK_N, BLOCK_V)), 1)

        stats = stats_ptr + column_tile.to(tl.int64) * (5 * N) + rows
        tl.store(stats, max_p, row_mask)
        tl.store(stats + N, sum_p, row_mask)
        tl.store(stats + 2 * N, max_q, row_mask)
        tl.store(stats + 3 * N, sum_q, row_mask)
        tl.store(stats + 4 * N, gap, row_mask)


@triton.jit(do_not_specialize=["N", "V", "terms_stride"])
def _divergence_kernel(
    student_hidden_desc,  # [N, H_S]
    student_weight_desc,  # [V, H_S]
    teacher_hidden_desc,  # [N, H_T]
    teacher_weight_desc,  # [V, H_T]
    terms_ptr,  # [6, N] fp32, rows terms_stride apart
    scratch_ptr,  # [programs, BLOCK_N * BLOCK_V] fp32
    sums_ptr,  # [S, 2, N] fp32 out, one split a tile of columns
    N,
    V,
    H_S,
    H_T,
    terms_stride,
    student_softcap_scale,
    teacher_softcap_scale,
    beta,
    FIRST_SOFTCAP: tl.constexpr,
    SECOND_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """Sums over each tile's columns: beta p_t log(p_t / m) + (1 - beta) p_s log(p_s / m), and p_s log(p_s / m)."""
    QUARTER: tl.constexpr = BLOCK_V // 4
    num_row_blocks = tl.cdiv(N, BLOCK_N)
    num_column_tiles = tl.cdiv(V, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_row_blocks * num_column_tiles, tl.num_programs(0)):
        row_block, column_tile = tile_position(tile, num_row_blocks, num_column_tiles, GROUP_N)
        row = row_block * BLOCK_N
        column = column_tile * BLOCK_V
        pieces = two_half_products(
            student_hidden_desc, student_weight_desc, row, column, H_S, UPCAST, BLOCK_N, BLOCK_V, BLOCK_H
        )
        keep(scratch_ptr, pieces, BLOCK_N, BLOCK_V)
        pieces = two_half_products(
            teacher_hidden_desc, teacher_weight_desc, row, column, H_T, UPCAST, BLOCK_N, BLOCK_V, BLOCK_H
        )
        rows = row + tl.arange(0, BLOCK_N)
        row_mask = rows < N
        loss = tl.zeros((BLOCK_N,), tl.float32)
        student_kl = tl.zeros((BLOCK_N,), tl.float32)
        for i in tl.static_range(4):
            first_column = column + i * QUARTER
            kept = capped(kept_piece(scratch_ptr, i, BLOCK_N, BLOCK_V), student_softcap_scale, FIRST_SOFTCAP)
            piece = capped(pieces[i], teacher_softcap_scale, SECOND_SOFTCAP)
            log_ps = masked(log_probability(kept, terms_ptr, terms_stride, 0, rows, row_mask), first_column, V)
            log_pt = masked(log_probability(piece, terms_ptr, terms_stride, 3, rows, row_mask), first_column, V)
            ps = tl.exp2(log_ps)
            pt = tl.exp2(log_pt)
            log_m = log_mixture(ps, pt, beta)
            kl_s = ps * (log_ps - log_m)
            kl_t = pt * (log_pt - log_m)
            student_kl += tl.sum(kl_s, 1)
            loss += tl.sum(tl.fma(beta, kl_t, (1 - beta) * kl_s), 1)
        sums = sums_ptr + column_tile.to(tl.int64) * (2 * N) + rows
        tl.store(sums, loss, row_mask)
        tl.store(sums + N, student_kl, row_mask)


@triton.jit(do_not_specialize=["N", "C", "terms_stride"])
def _grad_logits_kernel(
    student_hidden_desc,  # [N, H_S]
    student_weight_desc,  # [C, H_S]
    teacher_hidden_desc,  # [N, H_T]
    teacher_weight_desc,  # [C, H_T]
    terms_ptr,  # [8, N] fp32, rows terms_stride apart
    scratch_ptr,  # [programs, BLOCK_N * BLOCK_V] fp32
    out_desc,  # [N, C]
    N,
    C,
    H_S,
    H_T,
    terms_stride,
    student_softcap_scale,
    teacher_softcap_scale,
    beta,
    FORWARD_KL: tl.constexpr,
    REVERSE_KL: tl.constexpr,
    FIRST_SOFTCAP: tl.constexpr,
    SECOND_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """coefficient p_s (log(p_s / m) - KL(p_s || m)) of each tile, and its forms at the ends; see `megatron_lce.jsd`.

    Under a softcap of the student times its slope 1 - tanh^2.
    """
    QUARTER: tl.constexpr = BLOCK_V // 4
    num_row_blocks = tl.cdiv(N, BLOCK_N)
    num_column_tiles = tl.cdiv(C, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_row_blocks * num_column_tiles, tl.num_programs(0)):
        row_block, column_tile = tile_position(tile, num_row_blocks, num_column_tiles, GROUP_N)
        row = row_block * BLOCK_N
        column = column_tile * BLOCK_V
        pieces = two_half_products(
            student_hidden_desc, student_weight_desc, row, column, H_S, UPCAST, BLOCK_N, BLOCK_V, BLOCK_H
        )
        keep(scratch_ptr, pieces, BLOCK_N, BLOCK_V)
        pieces = two_half_products(
            teacher_hidden_desc, teacher_weight_desc, row, column, H_T, UPCAST, BLOCK_N, BLOCK_V, BLOCK_H
        )
        rows = row + tl.arange(0, BLOCK_N)
        row_mask = rows < N
        student_kl = load_row(terms_ptr, terms_stride, 6, rows, row_mask)
        coefficient = load_row(terms_ptr, terms_stride, 7, rows, row_mask)
        for i in tl.static_range(4):
            kept = capped(kept_piece(scratch_ptr, i, BLOCK_N, BLOCK_V), student_softcap_scale, FIRST_SOFTCAP)
            piece = capped(pieces[i], teacher_softcap_scale, SECOND_SOFTCAP)
            log_ps = log_probability(kept, terms_ptr, terms_stride, 0, rows, row_mask)
            log_pt = log_probability(piece, terms_ptr, terms_stride, 3, rows, row_mask)
            ps = tl.exp2(log_ps)
            if FORWARD_KL:
                grad = ps - tl.exp2(log_pt)
            elif REVERSE_KL:
                grad = ps * (log_ps - log_pt - student_kl)
            else:
                grad = ps * (log_ps - log_mixture(ps, tl.exp2(log_pt), beta) - student_kl)
            grad = grad * coefficient
            if FIRST_SOFTCAP:
                grad = grad * (1.0 - kept * kept)
            out_desc.store([row, column + i * QUARTER], grad.to(out_desc.dtype))
