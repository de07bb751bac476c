"""Multiplication of a matrix by one number on the device, in fp32."""

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.core.plan import ceil_div


def scale_rows(matrix: Tensor, factor: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """One launch: torch would round the factor to 16 bits first, and reads at a fifth of the memory bandwidth."""
    in_place = out.data_ptr() == matrix.data_ptr() and not accumulate
    block_m = tiles.block_rows(1, matrix.shape[0])
    tiles.launch(
        _scale_kernel,
        (ceil_div(matrix.shape[0], block_m),),
        matrix,
        fp_fusion=True,
        matrix_ptr=matrix,
        factor_ptr=factor,
        out_ptr=out,
        M=matrix.shape[0],
        K=matrix.shape[1],
        row_stride=matrix.stride(0),
        column_stride=matrix.stride(1),
        out_row_stride=out.stride(0),
        out_column_stride=out.stride(1),
        UNLESS_ONE=in_place,
        ACCUMULATE=accumulate,
        BLOCK_M=block_m,
        BLOCK_K=1024,
    )


@triton.jit(do_not_specialize=["M"])
def _scale_kernel(
    matrix_ptr,  # [M, K]
    factor_ptr,  # [] fp32
    out_ptr,  # [M, K]
    M,
    K,
    row_stride,
    column_stride,
    out_row_stride,
    out_column_stride,
    UNLESS_ONE: tl.constexpr,  # nothing is done for a factor of 1, which the gradient of a loss often is
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write factor * matrix to `out`, or add it, for BLOCK_M rows."""
    offs_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    factor = tl.load(factor_ptr)
    if UNLESS_ONE:  # noqa: SIM102 - the compiler decides this, the device the next
        if factor == 1.0:
            return
    for start in range(0, K, BLOCK_K):
        offs_k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)[None, :]
        mask = (offs_m < M) & (offs_k < K)
        scaled = tl.load(matrix_ptr + offs_m * row_stride + offs_k * column_stride, mask).to(tl.float32) * factor
        out = out_ptr + offs_m * out_row_stride + offs_k * out_column_stride
        if ACCUMULATE:
            scaled += tl.load(out, mask).to(tl.float32)
        tl.store(out, scaled.to(out_ptr.dtype.element_ty), mask)
