"""Gradients of the products hidden @ weight.T, from recomputed logits or from cached exponentials."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.dot_tile import (
    SMALLEST_NORMAL,
    device_descriptor,
    dot_parts,
    dot_tile,
    fast_log2,
    halves,
    host_descriptor,
    padded_h,
    rounded_to_bf16,
    shared_arguments,
    tanh,
    tile_position,
)
from megatron_lce.backends.triton.fp32_split import split_fp32
from megatron_lce.backends.triton.packed import row_terms_at
from megatron_lce.core.lm_head import LOWEST_LOG_P, NUM_TERMS, LMHead, RowInputs
from megatron_lce.core.plan import ceil_div, slab_row_stride

_LOWEST_LOG_P = tl.constexpr(LOWEST_LOG_P)


def grad_logits(
    head: LMHead, rows: RowInputs, terms: Tensor, out: Tensor, *, slab_start: int, entropy: bool, shift: Tensor | None
) -> None:
    if shift is not None:
        _grad_from_exp(out, shift, rows, terms, entropy, softcap=head.softcap is not None)
        return
    hidden, weight = head.hidden, head.weight
    tile = tiles.choose_tiles(hidden.dtype, weight.dtype, hidden.device)
    (num_tokens, num_columns), width = out.shape, hidden.shape[1]
    hidden_pow2 = weight_pow2 = None
    if tile.weight_parts:
        hidden, hidden_pow2 = split_fp32(hidden, tile.hidden_parts)
        weight, weight_pow2 = split_fp32(weight, tile.weight_parts)
    tiles.launch(
        _grad_logits_kernel,
        tiles.tile_grid(num_tokens, num_columns, tile, out.device),
        out,
        fp_fusion=out.dtype != torch.float32,  # in fp32 z - max must be 0 at the largest z
        **shared_arguments(tile, head),
        hidden_desc=host_descriptor(hidden, tile.block_n, tile.block_h),
        hidden_pow2=hidden_pow2,
        weight_desc=host_descriptor(weight, tile.block_v, tile.block_h),
        weight_pow2=weight_pow2,
        label_ptr=rows.labels,
        row_scale_ptr=rows.scale,
        terms_ptr=terms,
        out_desc=host_descriptor(out, tile.block_n, tile.block_v // 2),
        N=num_tokens,
        C=num_columns,
        H=width,
        terms_stride=terms.stride(0),
        slab_start=slab_start,
        ENTROPY=entropy,
        MEAN=terms.shape[0] > NUM_TERMS,
        PERSISTENT=tiles.has_tma(out.device),
        BLOCK_V=tile.block_v,
        GROUP_N=tiles.GROUP_N,
    )


def _grad_from_exp(exp: Tensor, shift: Tensor, rows: RowInputs, terms: Tensor, entropy: bool, *, softcap: bool) -> None:
    """Turn exponentials into the gradient, in place; padding past each row is written with finite numbers."""
    mean = terms.shape[0] > NUM_TERMS
    assert not (softcap and mean)  # an exponential that underflowed to 0 no longer gives the tanh slope
    chunk = tiles.choose_tiles(exp.dtype, exp.dtype, exp.device).chunk
    num_tokens, num_columns = exp.shape
    num_chunks = ceil_div(num_columns, chunk)
    # 4 chunks a program: 4 % slower than a copy (H200).
    programs_per_row, block_n = ceil_div(num_chunks, 4), tiles.block_rows(4, num_tokens)
    tiles.launch(
        _grad_from_exp_kernel,
        (programs_per_row * ceil_div(num_tokens, block_n),),
        exp,
        fp_fusion=True,
        exp_ptr=exp,
        shift_ptr=shift,
        label_ptr=rows.labels,
        row_scale_ptr=rows.scale,
        terms_ptr=terms,
        N=num_tokens,
        row_end=slab_row_stride(num_columns),  # the end of the stored row: Triton knows it to be a multiple of 16
        exp_stride=exp.stride(0),
        shift_stride=shift.stride(0),
        terms_stride=terms.stride(0),
        num_chunks=num_chunks,
        programs_per_row=programs_per_row,
        ENTROPY=entropy,
        MEAN=mean,
        SOFTCAP=softcap,
        BLOCK_N=block_n,
        CHUNK=chunk,
        num_warps=2,
    )


@triton.jit(do_not_specialize=["N", "C", "terms_stride", "slab_start"])
def _grad_logits_kernel(
    hidden_desc,  # [N, H]
    hidden_pow2,  # [N] fp32; None without parts, as weight_pow2
    weight_desc,  # [C, H]
    weight_pow2,  # [C] fp32
    label_ptr,  # [N] int32; column + slab_start is compared with it
    row_scale_ptr,  # [N] fp32
    terms_ptr,  # [6 + MEAN, N] fp32, rows terms_stride apart
    out_desc,  # [N, C]
    N,
    C,
    H,
    terms_stride,
    slab_start,
    softcap_scale,
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PERSISTENT: tl.constexpr,  # programs take one tile after the other
    HIDDEN_PARTS: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """Write p (p_term - entropy_term log2 p) + 1[label] label_term + mean_term, times a softcap's slope.

    The terms hold the constant factors of the slope.
    """
    hidden_desc = device_descriptor(hidden_desc, N, padded_h(H, HIDDEN_PARTS), BLOCK_N, BLOCK_H)
    weight_desc = device_descriptor(weight_desc, C, padded_h(H, 2 if HIDDEN_PARTS else 0), BLOCK_V, BLOCK_H)
    out_desc = device_descriptor(out_desc, N, C, BLOCK_N, BLOCK_V // 2)
    num_row_blocks = tl.cdiv(N, BLOCK_N)
    num_column_tiles = tl.cdiv(C, BLOCK_V)
    for tile_id in tl.range(
        tl.program_id(0), num_row_blocks * num_column_tiles, tl.num_programs(0), flatten=PERSISTENT
    ):
        row_block, column_tile = tile_position(tile_id, num_row_blocks, num_column_tiles, GROUP_N)
        row_start = row_block * BLOCK_N
        col_start = column_tile * BLOCK_V
        offs_n = row_start + tl.arange(0, BLOCK_N)
        if HIDDEN_PARTS:
            raw_logits = dot_parts(
                hidden_desc, hidden_pow2, weight_desc, weight_pow2, row_start, col_start, H,
                BLOCK_N, BLOCK_V, BLOCK_H, HIDDEN_PARTS,
            )  # fmt: skip
        else:
            raw_logits = dot_tile(hidden_desc, weight_desc, row_start, col_start, H, BLOCK_N, BLOCK_V, BLOCK_H)
        if ROUND:
            raw_logits = rounded_to_bf16(raw_logits)
        # One half at a time, and row values loaded for each: more values at once spill registers.
        left, right = halves(raw_logits)
        for half in tl.static_range(2):
            acc_half, first = left if half == 0 else right, col_start + half * (BLOCK_V // 2)
            first_id, mask = slab_start + first, offs_n < N
            terms = row_terms_at(terms_ptr + offs_n, terms_stride)
            label = tl.load(label_ptr + offs_n, mask=mask, other=-1) - first_id
            row_scale = tl.load(row_scale_ptr + offs_n, mask=mask, other=0.0)
            max_logit = tl.load(terms.max_logit, mask=mask, other=0.0)
            log_sum = tl.load(terms.log_sum, mask=mask, other=0.0)
            p_term = tl.load(terms.p_term, mask=mask, other=0.0)
            label_term = tl.load(terms.label_term, mask=mask, other=0.0)
            capped = tanh(acc_half * softcap_scale) if SOFTCAP else acc_half
            log_p = (capped * row_scale[:, None] - max_logit[:, None]) - log_sum[:, None]
            grad = tl.exp2(log_p)
            if ENTROPY:
                entropy_term = tl.load(terms.entropy_term, mask=mask, other=0.0)
                grad = grad * (p_term[:, None] - entropy_term[:, None] * tl.maximum(log_p, _LOWEST_LOG_P))
            else:
                grad = grad * p_term[:, None]
            is_label = tl.arange(0, BLOCK_V // 2)[None, :] == label[:, None]
            grad = tl.where(is_label, grad + label_term[:, None], grad)
            if MEAN:
                grad += tl.load(terms.mean_term, mask=mask, other=0.0)[:, None]
            if SOFTCAP:
                grad *= 1.0 - capped * capped  # last: before the others it spills registers
            out_desc.store([row_start, first], grad.to(out_desc.dtype))


@triton.jit(do_not_specialize=["N", "shift_stride", "terms_stride", "num_chunks", "programs_per_row"])
def _grad_from_exp_kernel(
    exp_ptr,  # [N, row_end] 2^(z - shift), rows exp_stride apart; out: the gradient
    shift_ptr,  # [chunks, N] fp32, rows shift_stride apart
    label_ptr,  # [N] int32
    row_scale_ptr,  # [N] fp32
    terms_ptr,  # [6 + MEAN, N] fp32, rows terms_stride apart
    N,
    row_end,
    exp_stride,
    shift_stride,
    terms_stride,
    num_chunks,
    programs_per_row,
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the same gradient from cached exponentials, and the column of the label from its exact logprob."""
    split_id = tl.program_id(0) % programs_per_row
    offs_n = tl.program_id(0) // programs_per_row * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = offs_n < N
    terms = row_terms_at(terms_ptr + offs_n, terms_stride)
    label = tl.load(label_ptr + offs_n, mask=row_mask, other=-1)
    max_logit = tl.load(terms.max_logit, mask=row_mask, other=0.0)
    log_sum = tl.load(terms.log_sum, mask=row_mask, other=0.0)
    p_term = tl.load(terms.p_term, mask=row_mask, other=0.0)
    entropy_term = tl.load(terms.entropy_term, mask=row_mask, other=0.0)
    label_term = tl.load(terms.label_term, mask=row_mask, other=0.0)
    label_log_p = tl.load(terms.label_logprob, mask=row_mask, other=0.0)
    label_grad = tl.exp2(label_log_p) * (p_term - entropy_term * label_log_p) + label_term
    row_ptrs = exp_ptr + offs_n.to(tl.int64) * exp_stride

    for chunk in range(split_id, num_chunks, programs_per_row):
        offs_v = chunk * CHUNK + tl.arange(0, CHUNK)
        mask = row_mask[:, None] & (offs_v < row_end)[None, :]
        shift = tl.load(shift_ptr + tl.cast(chunk, tl.int64) * shift_stride + offs_n, mask=row_mask, other=0.0)
        log_scale = (shift - max_logit) - log_sum
        exp_ptrs = row_ptrs[:, None] + offs_v[None, :]
        exp = tl.load(exp_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N, CHUNK]
        grad = exp * tl.exp2(log_scale)[:, None]
        if ENTROPY or SOFTCAP:
            log_p = fast_log2(tl.maximum(exp, SMALLEST_NORMAL)) + log_scale[:, None]  # -126 where nothing was kept
        grad = grad * (p_term[:, None] - entropy_term[:, None] * log_p) if ENTROPY else grad * p_term[:, None]
        is_label = offs_v[None, :] == label[:, None]
        grad = tl.where(is_label, label_grad[:, None], grad)
        if MEAN:
            grad += tl.load(terms.mean_term, mask=row_mask, other=0.0)[:, None]
        if SOFTCAP:
            row_scale = tl.load(row_scale_ptr + offs_n, mask=row_mask, other=1.0)
            logits = (tl.where(is_label, label_log_p[:, None], log_p) + log_sum[:, None]) + max_logit[:, None]
            capped = logits / row_scale[:, None]
            grad = grad * (1.0 - capped * capped)
        tl.store(exp_ptrs, grad.to(exp_ptr.dtype.element_ty), mask=mask)
