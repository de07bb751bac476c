"""fp32 numbers as sums of 16-bit parts, which tensor cores multiply exactly.

`matmul` multiplies three bf16 parts. The kernels read one or two fp16 parts of a row divided by a power of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.core.matmul import matmul as core_matmul
from megatron_lce.core.plan import COLUMN_STEP, SLAB_ROW_STEP, ceil_div, round_up, slices

# Tensor cores truncate as they add, so sums over this many rows are added up in fp32. Only the product of the largest
# parts needs it. With 512 it takes 16 % more time; with 2048 the error doubles and exceeds the fp32 error of cuBLAS.
K_STEP = 1024
LO_SCALE = tl.constexpr(2.0**11)  # scales the smaller fp16 part, so that it is a normal number


def matmul(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """Compute `megatron_lce.core.matmul.matmul`; an fp32 input is multiplied in parts on NVIDIA's tensor cores.

    The three smallest of the nine products of parts are left out: each is below 2^-24 of the whole.
    """
    if torch.float32 not in (a.dtype, b.dtype) or not tiles.has_ptx():
        core_matmul(a, b, out, accumulate=accumulate)
        return
    a_parts, b_parts, length = _bf16_parts(a), _bf16_parts(b), a.shape[1]
    pairs = [(i, j) for i in range(len(a_parts)) for j in range(len(b_parts)) if i + j < 3]
    for i, j in sorted(pairs, key=sum, reverse=True):  # small ones first
        for piece in slices(length, length if i + j else K_STEP):
            core_matmul(a_parts[i][:, piece], b_parts[j][piece], out, accumulate=accumulate)
            accumulate = True


def _bf16_parts(matrix: Tensor) -> list[Tensor]:
    """Return bf16 matrices whose sum is the matrix, the largest first."""
    if matrix.dtype == torch.bfloat16:
        return [matrix]
    if matrix.stride(1) != 1:
        return [part.T for part in _bf16_parts(matrix.T)]
    parts, _ = split_fp32(matrix, 3, torch.bfloat16)
    return [part[:, : matrix.shape[1]] for part in reversed(parts.chunk(3, 1))]


def split_fp32(matrix: Tensor, number: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor | None]:
    """Return a matrix [M, K] in parts, [M, number * width], the smallest first, and the power of two of each row.

    The width is a multiple of `SLAB_ROW_STEP`, padded with zeros.

    3 bf16 parts  their sum is the fp32 number; no powers
    2 fp16 parts  their sum times the power is x to 2^-23 |x|, or to 2^-50 of the largest in the row; the smaller part
                  is stored `LO_SCALE` times as large
    1 fp16 part   all of a 16-bit x, or what is above 2^-39 of the largest in the row

    The powers, [M] fp32, go on to the end of a tile.
    """
    (num_rows, num_columns), width = matrix.shape, round_up(matrix.shape[1], SLAB_ROW_STEP)
    parts, powers, written = matrix.new_empty(num_rows, number * width, dtype=dtype), None, num_rows
    if dtype == torch.float16:
        written = round_up(num_rows, COLUMN_STEP)
        powers = matrix.new_empty(written, dtype=torch.float32)
    block_m = tiles.block_rows(1, written)
    tiles.launch(
        _split_kernel,
        (ceil_div(written, block_m),),
        matrix,
        fp_fusion=True,
        matrix_ptr=matrix,
        parts_ptr=parts,
        powers_ptr=powers,
        M=num_rows,
        K=num_columns,
        width=width,
        row_stride=matrix.stride(0),
        PARTS=number,
        BLOCK_M=block_m,
        BLOCK_K=min(1024, triton.next_power_of_2(width)),
    )
    return parts, powers


@triton.jit(do_not_specialize=["M"])
def _split_kernel(
    matrix_ptr,  # [M, K]
    parts_ptr,  # [M, PARTS * width] out, the smallest part first
    powers_ptr,  # [M] fp32 out, and more up to the end of a tile; None: rows are not scaled
    M,
    K,
    width,
    row_stride,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the parts of BLOCK_M rows; scaled rows are first read for their largest number."""
    offs_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    inner, row_mask = tl.arange(0, BLOCK_K)[None, :], offs_m < M
    matrix_rows = matrix_ptr + offs_m * row_stride
    if powers_ptr is not None:
        max_abs_bits = tl.zeros((BLOCK_M,), dtype=tl.int32)
        for start in range(0, K, BLOCK_K):
            offs_k = start + inner
            x = tl.load(matrix_rows + offs_k, row_mask & (offs_k < K), other=0.0).to(tl.float32)
            # The bits of |x| are ordered as the numbers are. Triton 3.6 would compare numbers that were bf16 in bf16,
            # which 8.0 cannot.
            bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            max_abs_bits = tl.maximum(max_abs_bits, tl.max(tl.where(bits < 0x7F800000, bits, 0), 1))
        # Divided by this power, the largest finite number of the row is 2^14 to 2^15; fp16 reaches 2^16.
        power_bits = ((tl.maximum(max_abs_bits >> 23, 15) - 14) << 23)[:, None]
        tl.store(powers_ptr + offs_m, power_bits.to(tl.float32, bitcast=True))
        inverse = ((254 << 23) - power_bits).to(tl.float32, bitcast=True)
    for start in range(0, width, BLOCK_K):
        offs_k = start + inner
        rest = tl.load(matrix_rows + offs_k, row_mask & (offs_k < K), other=0.0).to(tl.float32)
        if powers_ptr is not None:
            rest *= inverse
        parts, mask = parts_ptr + offs_m * (PARTS * width) + offs_k, row_mask & (offs_k < width)
        for place in tl.static_range(PARTS - 1, -1, -1):
            part = rest.to(parts_ptr.dtype.element_ty)
            tl.store(parts + place * width, part, mask)
            rest = tl.where(part.to(tl.float32) == rest, 0.0, rest - part.to(tl.float32))  # an infinity leaves no rest
            if powers_ptr is not None:
                rest *= LO_SCALE
