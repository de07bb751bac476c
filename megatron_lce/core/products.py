"""The two plain matrix products of backward, accumulated in fp32, and matrices laid out so that they are fast."""

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_lce.core.trace import trace_range


@contextlib.contextmanager
def full_fp32() -> Iterator[None]:
    """Products of fp32 matrices in full fp32 inside, whatever TF32 setting the user trains with.

    torch has that setting for the whole process. It is touched only where it is reduced, by the first thread that
    comes in, and put back by the last that leaves.
    """
    _full_fp32.enter()
    try:
        yield
    finally:
        _full_fp32.leave()


@contextlib.contextmanager
def own_arithmetic(device: torch.device, name: str) -> Iterator[None]:
    """Autocast off and products in full fp32 inside; a range of that name in a profiler's trace."""
    autocast = torch.is_autocast_enabled(device.type)
    without = torch.autocast(device.type, enabled=False) if autocast else contextlib.nullcontext()
    with without, full_fp32(), trace_range(name):
        yield


class _FullFp32:
    """What `full_fp32` found, and how many threads are inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._found: list[tuple[str, str]] = []

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._found = [(backend, found) for backend in ("cuda", "mkldnn") if (found := _reduced(backend))]
                for backend, _ in self._found:
                    torch._C._set_fp32_precision_setter(backend, "matmul", "ieee")
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for backend, found in self._found:
                    torch._C._set_fp32_precision_setter(backend, "matmul", found)


def _reduced(backend: str) -> str | None:
    """The setting of this backend's products if it is less than fp32: "none" where it is inherited from the backend's.

    A setting of its own that is the backend's too cannot be told from an inherited one.
    """
    own, inherited = (torch._C._get_fp32_precision_getter(backend, of) for of in ("matmul", "all"))
    if own in ("none", "ieee"):
        return None
    return "none" if own == inherited else own


_full_fp32 = _FullFp32()


def product(
    a: Tensor,  # [m, k]
    b: Tensor,  # [k, n], a's dtype
    out: Tensor,  # [m, n], a's dtype or fp32
    *,
    accumulate: bool,  # True: out += a @ b, False: out = a @ b
) -> None:
    """One matrix product into `out`, which keeps the fp32 accumulator of 16-bit inputs when it is fp32 itself."""
    assert out.shape == (a.shape[0], b.shape[1])  # torch would make `out` fit, as another tensor than the caller has
    if a.device.type == "cpu":
        # No mixed-dtype product there, and a 16-bit one reads what lies behind a row on CPUs with AMX.
        a, b = a.float(), b.float()
        if out.dtype != torch.float32:
            assert not accumulate
            out.copy_(a @ b)
            return
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def with_zeros_behind(rows: Tensor, num_columns: int) -> Tensor:
    """The first columns of each row; the others become zero.

    What lies behind a row must be numbers: some libraries' products read it, as far as they read whole vectors.
    """
    if num_columns < rows.shape[1]:
        rows[:, num_columns:].zero_()
    return rows[:, :num_columns]


def laid_out(matrix: Tensor) -> Tensor:
    """The matrix [rows, H], whose rows start at 16 bytes; else a copy, up to 7 columns of zeros wider.

    Both cuBLAS and tensor-memory descriptors want that: with an odd H cuBLAS takes five times as long.
    """
    step = 16 // matrix.element_size()
    if missing := -matrix.shape[1] % step:
        return torch.nn.functional.pad(matrix, (0, missing))
    if matrix.stride(1) == 1 and matrix.stride(0) % step == 0 and matrix.data_ptr() % 16 == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)
