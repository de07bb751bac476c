"""Products of hidden states with single rows of the weight, and their gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.dot_tile import rounded_to_bf16, tanh
from megatron_lce.core.lm_head import LMHead, RowInputs
from megatron_lce.core.options import Shard
from megatron_lce.core.plan import ceil_div


def indexed_logits(
    head: LMHead, token_index: Tensor, ids: Tensor, rows: RowInputs, shard: Shard, workspace_bytes: int
) -> Tensor:
    hidden, weight, num_ids, cap = head.hidden, head.weight, ids.shape[0], head.softcap_scale
    logits_and_owners = hidden.new_empty(2, num_ids, dtype=torch.float32)
    block = tiles.block_rows(8, num_ids)
    tiles.launch(
        _indexed_logits_kernel,
        (ceil_div(num_ids, block),),
        hidden,
        fp_fusion=True,
        hidden_ptr=hidden,
        weight_ptr=weight,
        token_index_ptr=token_index,
        ids_ptr=ids,
        row_scale_ptr=rows.scale,
        out_ptr=logits_and_owners,
        M=num_ids,
        H=hidden.shape[1],
        hidden_stride=hidden.stride(0),
        weight_stride=weight.stride(0),
        first_id=shard.start,
        num_columns=shard.num_columns,
        softcap_scale=cap or 0.0,
        SOFTCAP=cap is not None,
        ROUND=head.logits_dtype is not None,
        BLOCK_M=block,
        BLOCK_H=512,
    )
    return logits_and_owners


def bag_sums(
    matrix: Tensor,
    indices: Tensor,
    factors: Tensor,
    offsets: Tensor,
    out: Tensor,
    shard: Shard | None = None,
    *,
    accumulate: bool,
    workspace_bytes: int,
) -> None:
    num_sums, num_columns = out.shape
    block = min(1024, triton.next_power_of_2(num_columns))
    first, num_rows = (0, matrix.shape[0]) if shard is None else (shard.start, shard.num_columns)
    tiles.launch(
        _bag_sums_kernel,
        (num_sums, ceil_div(num_columns, block)),
        matrix,
        fp_fusion=True,
        matrix_ptr=matrix,
        indices_ptr=indices,
        factors_ptr=factors,
        offsets_ptr=offsets,
        out_ptr=out,
        H=num_columns,
        matrix_stride=matrix.stride(0),
        out_stride=out.stride(0),
        first_index=first,
        num_rows=num_rows,
        ACCUMULATE=accumulate,
        BLOCK_M=4,
        BLOCK_H=block,
    )


def write_columns(matrix: Tensor, columns: Tensor, values: Tensor) -> None:
    block = 4096 if matrix.device.type == "cpu" else 512
    tiles.launch(
        _write_columns_kernel,
        (ceil_div(columns.numel(), block),),
        matrix,
        fp_fusion=True,
        matrix_ptr=matrix,
        columns_ptr=columns.contiguous(),
        values_ptr=values.contiguous(),
        M=columns.numel(),
        K=columns.shape[1],
        C=matrix.shape[1],
        matrix_stride=matrix.stride(0),
        BLOCK=block,
    )


# Compiled once for all strides: other code would add in another order.
@triton.jit(do_not_specialize=["M", "hidden_stride", "weight_stride", "first_id", "num_columns"])
def _indexed_logits_kernel(
    hidden_ptr,  # [N, H]
    weight_ptr,  # [V, H]
    token_index_ptr,  # [M] int64
    ids_ptr,  # [M] int64
    row_scale_ptr,  # [N] fp32
    out_ptr,  # [2, M] fp32 out
    M,
    H,
    hidden_stride,
    weight_stride,
    first_id,
    num_columns,
    softcap_scale,
    SOFTCAP: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Compute BLOCK_M logits. Each column of a block of H is summed separately, so that few roundings add up."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    entry_mask = offs_m < M
    ids = tl.load(ids_ptr + offs_m, mask=entry_mask, other=-1)
    token_index = tl.load(token_index_ptr + offs_m, mask=entry_mask, other=0)
    columns = ids - first_id
    in_shard = entry_mask & (columns >= 0) & (columns < num_columns)
    sums = tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32)
    # Rows start at 16 bytes, which Triton must read in the code to load as many at once.
    hidden_step: tl.constexpr = 128 // hidden_ptr.dtype.element_ty.primitive_bitwidth
    weight_step: tl.constexpr = 128 // weight_ptr.dtype.element_ty.primitive_bitwidth
    if tl.max(in_shard.to(tl.int32), 0) > 0:
        hidden_rows = hidden_ptr + token_index[:, None] * (hidden_stride // hidden_step * hidden_step)
        weight_rows = weight_ptr + columns[:, None] * (weight_stride // weight_step * weight_step)
        for start in range(0, H, BLOCK_H):
            offs_h = (start + tl.arange(0, BLOCK_H))[None, :]
            mask = in_shard[:, None] & (offs_h < H)
            hidden = tl.load(hidden_rows + offs_h, mask=mask, other=0.0).to(tl.float32)
            sums += hidden * tl.load(weight_rows + offs_h, mask=mask, other=0.0).to(tl.float32)
    logits = tl.sum(sums, 1)
    if ROUND:
        logits = rounded_to_bf16(logits)
    if SOFTCAP:
        logits = tanh(logits * softcap_scale)
    logits *= tl.load(row_scale_ptr + token_index, mask=in_shard, other=0.0)
    tl.store(out_ptr + offs_m, tl.where(in_shard & (logits != 0.0), logits, 0.0), mask=entry_mask)  # -0.0 is 0.0
    tl.store(out_ptr + M + offs_m, (in_shard | (ids < 0)).to(tl.float32), mask=entry_mask)


@triton.jit
def _bag_sums_kernel(
    matrix_ptr,  # [R, H]
    indices_ptr,  # [M] int64
    factors_ptr,  # [M] fp32
    offsets_ptr,  # [S + 1] int64
    out_ptr,  # [S, H] out
    H,
    matrix_stride,
    out_stride,
    first_index,  # of the matrix's first row
    num_rows,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum one part's rows of the matrix, times their factors, BLOCK_M at a time."""
    sum_id = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets_ptr + sum_id)
    last = tl.load(offsets_ptr + sum_id + 1)
    offs_h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32)
    out = out_ptr + sum_id * out_stride + offs_h
    if first >= last:  # so for most ids of a vocabulary
        if not ACCUMULATE:
            tl.store(out, tl.zeros((1, BLOCK_H), dtype=out_ptr.dtype.element_ty), mask=offs_h < H)
        return
    for start in range(first, last, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        indices = tl.load(indices_ptr + offs_m, mask=offs_m < last, other=-1) - first_index
        factors = tl.load(factors_ptr + offs_m, mask=offs_m < last, other=0.0)
        mask = ((indices >= 0) & (indices < num_rows) & (factors != 0.0))[:, None] & (offs_h < H)
        rows = tl.load(matrix_ptr + indices[:, None] * matrix_stride + offs_h, mask=mask, other=0.0)
        sums += tl.where(mask, factors[:, None] * rows.to(tl.float32), 0.0)
    total = tl.sum(sums, 0)[None, :]
    if ACCUMULATE:
        total += tl.load(out, mask=offs_h < H, other=0.0).to(tl.float32)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=offs_h < H)


@triton.jit(do_not_specialize=["M", "K", "C"])
def _write_columns_kernel(
    matrix_ptr,  # [N, C] out
    columns_ptr,  # [N, K] int64
    values_ptr,  # [N, K] fp32
    M,
    K,
    C,
    matrix_stride,
    BLOCK: tl.constexpr,
):
    """Write BLOCK values."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.load(columns_ptr + offs, mask=offs < M, other=-1)
    col_mask = (columns >= 0) & (columns < C)
    values = tl.load(values_ptr + offs, mask=col_mask, other=0.0)
    tl.store(matrix_ptr + offs // K * matrix_stride + columns, values.to(matrix_ptr.dtype.element_ty), mask=col_mask)
