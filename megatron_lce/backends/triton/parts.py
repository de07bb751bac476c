"""Numbers as sums of three bf16 parts, which tensor cores multiply exactly; `product` makes fp32 products of them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.core import products
from megatron_lce.core.plan import ALIGNED_COLUMNS, ceil_div, cut, round_up

# Tensor cores truncate as they add: their sums over this many rows are added up in fp32. Only the product of both
# largest parts needs it. Half as many read and write the sum twice as often.
PIECE = 512


def product(
    a: Tensor,  # [m, k]
    b: Tensor,  # [k, n]
    out: Tensor,  # [m, n], the dtype of both or fp32
    *,
    accumulate: bool,  # True: out += a @ b, False: out = a @ b
) -> None:
    """Write a product as `megatron_lce.core.products` does; if one is fp32, from parts, on NVIDIA's tensor cores.

    Of nine products of parts the three smallest are left out: each is below 2^-24 of the whole.
    """
    if torch.float32 not in (a.dtype, b.dtype) or not tiles.speaks_ptx():
        products.product(a, b, out, accumulate=accumulate)
        return
    rows, columns, length = _parts(a), _parts(b), a.shape[1]
    pairs = [(i, j) for i in range(len(rows)) for j in range(len(columns)) if i + j < 3]
    for i, j in sorted(pairs, key=sum, reverse=True):  # small ones first
        for piece in cut(length, length if i + j else PIECE):
            products.product(rows[i][:, piece], columns[j][piece], out, accumulate=accumulate)
            accumulate = True


def _parts(matrix: Tensor) -> list[Tensor]:
    """Return bf16 matrices whose sum is the matrix, the largest first."""
    if matrix.dtype == torch.bfloat16:
        return [matrix]
    if matrix.stride(1) != 1:
        return [part.T for part in _parts(matrix.T)]
    return [part[:, : matrix.shape[1]] for part in reversed(split(matrix, ALIGNED_COLUMNS).unbind(1))]


def split(matrix: Tensor, step: int) -> Tensor:
    """Return the three bf16 parts of each row of an fp32 or fp16 matrix [M, K]: [M, 3, width], smallest first.

    The width is a multiple of `step`; behind a part are zeros.
    """
    num_rows, num_columns = matrix.shape
    width = round_up(num_columns, step)
    parts = matrix.new_empty(num_rows, 3, width, dtype=torch.bfloat16)
    rows = 64 if matrix.device.type == "cpu" else 1  # an interpreter pays by the program
    _split_kernel[(ceil_div(num_rows, rows),)](
        matrix, parts, num_rows, num_columns, width, matrix.stride(0), BLOCK_M=rows, BLOCK_K=1024
    )
    return parts


@triton.jit
def three_parts(x):
    """Return the bf16 parts of fp32 numbers, the smallest first; the sum is exact where numbers are normal."""
    high = x.to(tl.bfloat16)
    # 0 for an infinity, too, whose parts would be NaN.
    rest = tl.where(high.to(tl.float32) == x, 0.0, x - high.to(tl.float32))
    middle = rest.to(tl.bfloat16)
    return (rest - middle.to(tl.float32)).to(tl.bfloat16), middle, high


@triton.jit(do_not_specialize=["M"])
def _split_kernel(
    matrix_ptr,  # [M, K] fp32 or fp16
    parts_ptr,  # [M, 3, width] bf16 out
    M,
    K,
    width,
    row_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Split BLOCK_M rows."""
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    for start in range(0, width, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(matrix_ptr + rows * row_stride + columns, (rows < M) & (columns < K), other=0.0).to(tl.float32)
        low, middle, high = three_parts(x)
        parts = parts_ptr + rows * (3 * width) + columns
        mask = (rows < M) & (columns < width)
        tl.store(parts, low, mask)
        tl.store(parts + width, middle, mask)
        tl.store(parts + 2 * width, high, mask)
