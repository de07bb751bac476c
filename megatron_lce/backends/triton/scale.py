"""A matrix times one number on the device, in fp32."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def scale(
    matrix: Tensor,  # [M, K]
    factor: Tensor,  # [] fp32
    out: Tensor,  # [M, K]; may be the matrix
    *,
    accumulate: bool,  # True: out += factor * matrix, False: out = factor * matrix
) -> None:
    """torch rounds the factor to a 16-bit matrix's dtype first, and reads at a third of the memory's speed."""
    num_rows, num_columns = matrix.shape
    _scale_kernel[(num_rows,)](
        matrix,
        factor,
        out,
        num_columns,
        *matrix.stride(),
        *out.stride(),
        ACCUMULATE=accumulate,
        BLOCK=_BLOCK,
    )


@triton.jit
def _scale_kernel(
    matrix_ptr,  # [M, K]
    factor_ptr,  # [] fp32
    out_ptr,  # [M, K]
    K,
    row_stride,
    column_stride,
    out_row_stride,
    out_column_stride,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr)
    for start in range(0, K, BLOCK):
        columns = (start + tl.arange(0, BLOCK)).to(tl.int64)
        mask = columns < K
        scaled = tl.load(matrix_ptr + row * row_stride + columns * column_stride, mask).to(tl.float32) * factor
        out = out_ptr + row * out_row_stride + columns * out_column_stride
        if ACCUMULATE:
            scaled += tl.load(out, mask).to(tl.float32)
        tl.store(out, scaled.to(out_ptr.dtype.element_ty), mask)
