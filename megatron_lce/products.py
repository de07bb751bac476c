"""The two plain matrix products of backward, accumulated in fp32."""

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
