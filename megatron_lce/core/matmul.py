"""Matrix products with fp32 accumulation, and the layout that makes them fast."""

import contextlib
import threading
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# The setting for matrix products of each library that torch calls, and what the setting inherits.
_PRECISIONS = (
    (torch.backends.cuda.matmul, torch.backends.cudnn),
    (torch.backends.mkldnn.matmul, torch.backends.mkldnn),  # type: ignore[attr-defined]
)


class _FullFp32:
    """Context in which products of fp32 matrices use full fp32, whatever TF32 setting the user trains with.

    The setting is global to the process. The first thread that enters changes it, if it is reduced, and the last thread
    that leaves restores it, as inherited ("none") if it equals what it inherits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0  # number of threads
        self._to_restore: list[tuple[Any, str]] = []

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._to_restore = [
                    (setting, "none" if setting.fp32_precision == inherited.fp32_precision else setting.fp32_precision)
                    for setting, inherited in _PRECISIONS
                    if setting.fp32_precision not in ("none", "ieee")
                ]
                for setting, _ in self._to_restore:
                    setting.fp32_precision = "ieee"
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for setting, before in self._to_restore:
                    setting.fp32_precision = before


full_fp32 = _FullFp32()


def matmul(
    a: Tensor,  # [m, k]
    b: Tensor,  # [k, n], a's dtype unless one of them is fp32
    out: Tensor,  # [m, n], a's dtype or fp32
    *,
    accumulate: bool,  # True: out += a @ b, False: out = a @ b
) -> None:
    """Write one matrix product to `out`; an fp32 `out` keeps the fp32 accumulator of 16-bit inputs."""
    assert out.shape == (a.shape[0], b.shape[1])  # torch would resize `out`, and leave the caller's view unfilled
    # On CPUs with AMX, 16-bit products read past the end of a row.
    if a.device.type == "cpu" or a.dtype != b.dtype or (a.dtype != out.dtype and copies_to_fp32(a)):
        a, b = a.float(), b.float()
    with full_fp32 if a.dtype == torch.float32 else contextlib.nullcontext():
        if a.dtype == out.dtype:
            torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
        elif out.dtype != torch.float32:
            assert not accumulate
            out.copy_(a @ b)
        elif accumulate:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)


def copies_to_fp32(matrix: Tensor) -> bool:
    """Return whether a product of such matrices with an fp32 result makes fp32 copies of them."""
    return matrix.dtype != torch.float32 and not _has_fp32_result(matrix.device, matrix.dtype)


@lru_cache
def _has_fp32_result(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch has products of 16-bit matrices with an fp32 result, found out with a small one."""
    if device.type == "cpu":
        return False
    small = torch.zeros(8, 8, dtype=dtype, device=device)
    try:
        torch.addmm(small.float(), small, small, out_dtype=torch.float32)
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, RuntimeError):
        return False
    return True


def with_zeros_behind(rows: Tensor, num_columns: int) -> Tensor:
    """Return the first columns of each row, and set the others to zero.

    Some libraries read whole vectors past the end of a row, where values must be finite.
    """
    if num_columns < rows.shape[1]:
        rows[:, num_columns:].zero_()
    return rows[:, :num_columns]


def aligned_rows(matrix: Tensor, step: int) -> Tensor:
    """Return a matrix [rows, H] whose rows start at multiples of 16 bytes, or a copy with such rows.

    Tensor-memory descriptors need that, and cuBLAS takes five times as long without it. H is padded with zeros to a
    multiple of `step` elements, at least 16 bytes.
    """
    if missing := -matrix.shape[1] % step:
        return torch.nn.functional.pad(matrix, (0, missing))
    if matrix.stride(1) == 1 and matrix.stride(0) % step == 0 and matrix.data_ptr() % 16 == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def as_saved(tensor: Tensor | None) -> Any:
    """Return a tensor from `saved_tensors` in the layout that kernels read: hooks may give back another one."""
    if tensor is None:
        return None
    step = 16 // tensor.element_size()
    is_matrix = tensor.dim() == 2 and tensor.shape[1] % step == 0
    return aligned_rows(tensor, step) if is_matrix else tensor.contiguous()
