"""The two plain matrix products of backward, accumulated in fp32, and matrices laid out so that they are fast.

Both cuBLAS and tensor-memory descriptors want rows that start at 16 bytes.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def full_fp32() -> Iterator[None]:
    """Products of fp32 matrices in full fp32 inside, whatever TF32 setting the user trains with."""
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


def product(
    a: Tensor,  # [m, k]
    b: Tensor,  # [k, n], a's dtype
    out: Tensor,  # [m, n], a's dtype or fp32
    *,
    accumulate: bool,  # True: out += a @ b, False: out = a @ b
) -> None:
    """One matrix product into `out`, which keeps the fp32 accumulator of 16-bit inputs when it is fp32 itself."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    elif a.device.type == "cpu":  # no mixed-dtype product there
        torch.addmm(out, a.float(), b.float(), out=out) if accumulate else torch.mm(a.float(), b.float(), out=out)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def row_stride(columns: int, itemsize: int) -> int:
    """Elements from row to row, so that each starts at 16 bytes."""
    step = 16 // itemsize
    return -(-columns // step) * step


def is_aligned(matrix: Tensor) -> bool:
    stride, item = matrix.stride(0), matrix.element_size()
    return matrix.stride(1) == 1 and stride == row_stride(stride, item) and matrix.data_ptr() % 16 == 0


def aligned(matrix: Tensor) -> Tensor:
    """The matrix [m, k]; if its rows do not start at 16 bytes, a copy whose rows do, up to 7 columns of zeros wider."""
    if is_aligned(matrix):
        return matrix
    columns = matrix.shape[1]
    copy = matrix.new_empty(matrix.shape[0], row_stride(columns, matrix.element_size()))
    copy[:, :columns].copy_(matrix)
    copy[:, columns:].zero_()
    return copy


def copied_row_bytes(matrix: Tensor) -> int:
    """Bytes a row of `aligned(matrix)` takes: 0 where nothing is copied."""
    return 0 if is_aligned(matrix) else row_stride(matrix.shape[1], matrix.element_size()) * matrix.element_size()
