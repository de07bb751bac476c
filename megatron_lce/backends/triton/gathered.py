"""Products of hidden states with single rows of the weight, and their gradients; arguments: see `Backend`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.core.plan import ceil_div

_BLOCK_H = 512


def gathered_products(hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, workspace_bytes: int) -> Tensor:
    """Return hidden[rows] . weight[ids], [M] fp32, 0 without an id; the bits of one do not depend on the others."""
    products = hidden.new_empty(ids.shape[0], dtype=torch.float32)
    block = 128 if hidden.device.type == "cpu" else 8  # an interpreter pays by the program
    if ids.shape[0]:
        _gathered_products_kernel[(ceil_div(ids.shape[0], block),)](
            hidden,
            weight,
            rows,
            ids,
            products,
            ids.shape[0],
            hidden.shape[1],
            hidden.stride(0),
            weight.stride(0),
            BLOCK_M=block,
            BLOCK_H=_BLOCK_H,
        )
    return products


def gathered_sums(
    matrix: Tensor,
    places: Tensor,
    factors: Tensor,
    offsets: Tensor,
    out: Tensor,
    *,
    accumulate: bool,
    workspace_bytes: int,
) -> None:
    """Write the sums of factors * matrix[places] over each part to `out`, or add them, in the order of the parts."""
    if out.shape[0] == 0:
        return
    # Most ids of a vocabulary have no tokens: few programs, which each fill much of a row.
    block = min(1024, triton.next_power_of_2(out.shape[1]))
    _gathered_sums_kernel[(out.shape[0], ceil_div(out.shape[1], block))](
        matrix,
        places,
        factors,
        offsets,
        out,
        out.shape[1],
        matrix.stride(0),
        out.stride(0),
        ACCUMULATE=accumulate,
        STAGES=4,
        BLOCK_M=4,
        BLOCK_H=block,
    )


def write_columns(matrix: Tensor, columns: Tensor, values: Tensor) -> None:
    """Write values to some columns of each row."""
    block = 4096 if matrix.device.type == "cpu" else 512
    if columns.numel():
        _write_columns_kernel[(ceil_div(columns.numel(), block),)](
            matrix,
            columns.contiguous(),
            values.contiguous(),
            columns.numel(),
            columns.shape[1],
            matrix.shape[1],
            matrix.stride(0),
            BLOCK=block,
        )


# One code for all strides: with another one, sums would have another order.
@triton.jit(do_not_specialize=["M", "hidden_stride", "weight_stride"])
def _gathered_products_kernel(
    hidden_ptr,  # [N, H]
    weight_ptr,  # [V, H]
    rows_ptr,  # [M] int64
    ids_ptr,  # [M] int64
    out_ptr,  # [M] fp32 out
    M,
    H,
    hidden_stride,
    weight_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Compute BLOCK_M products; each column of a block of H has a sum of its own, so that few roundings add up."""
    entries = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    ids = tl.load(ids_ptr + entries, mask=entries < M, other=-1)
    rows = tl.load(rows_ptr + entries, mask=entries < M, other=0)
    sums = tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32)
    # Rows start at 16 bytes, which Triton must read in the code to load as many at once.
    hidden_step: tl.constexpr = 128 // hidden_ptr.dtype.element_ty.primitive_bitwidth
    weight_step: tl.constexpr = 128 // weight_ptr.dtype.element_ty.primitive_bitwidth
    if tl.max(ids, 0) >= 0:
        hidden_rows = hidden_ptr + rows[:, None] * (hidden_stride // hidden_step * hidden_step)
        weight_rows = weight_ptr + ids[:, None] * (weight_stride // weight_step * weight_step)
        for start in range(0, H, BLOCK_H):
            inner = (start + tl.arange(0, BLOCK_H))[None, :]
            mask = (ids >= 0)[:, None] & (inner < H)
            hidden = tl.load(hidden_rows + inner, mask=mask, other=0.0).to(tl.float32)
            sums += hidden * tl.load(weight_rows + inner, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + entries, tl.sum(sums, 1), mask=entries < M)


@triton.jit
def _gathered_sums_kernel(
    matrix_ptr,  # [R, H]
    places_ptr,  # [M] int64
    factors_ptr,  # [M] fp32
    offsets_ptr,  # [S + 1] int64
    out_ptr,  # [S, H] out
    H,
    matrix_stride,
    out_stride,
    ACCUMULATE: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum one part's rows of the matrix, times their factors, BLOCK_M at a time."""
    part = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets_ptr + part)
    last = tl.load(offsets_ptr + part + 1)
    inner = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32)
    out = out_ptr + part * out_stride + inner
    if first >= last:  # as most ids of a vocabulary
        if not ACCUMULATE:
            tl.store(out, tl.zeros((1, BLOCK_H), dtype=out_ptr.dtype.element_ty), mask=inner < H)
        return
    for start in tl.range(first, last, BLOCK_M, num_stages=STAGES):
        entries = start + tl.arange(0, BLOCK_M)
        places = tl.load(places_ptr + entries, mask=entries < last, other=-1)
        factors = tl.load(factors_ptr + entries, mask=entries < last, other=0.0)
        mask = (places >= 0)[:, None] & (inner < H)
        rows = tl.load(matrix_ptr + places[:, None] * matrix_stride + inner, mask=mask, other=0.0)
        sums += tl.where(mask, factors[:, None] * rows.to(tl.float32), 0.0)
    total = tl.sum(sums, 0)[None, :]
    if ACCUMULATE:
        total += tl.load(out, mask=inner < H, other=0.0).to(tl.float32)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inner < H)


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
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.load(columns_ptr + places, mask=places < M, other=-1)
    inside = (columns >= 0) & (columns < C)
    values = tl.load(values_ptr + places, mask=inside, other=0.0)
    tl.store(matrix_ptr + places // K * matrix_stride + columns, values.to(matrix_ptr.dtype.element_ty), mask=inside)
