"""Kernels with a fault each, for `tests.sanitizer`: they run on a GPU only."""

import torch
import triton
import triton.language as tl


@triton.jit
def _read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Read BLOCK numbers, however many there are."""
    places = tl.arange(0, BLOCK)
    tl.store(out_ptr + places, tl.load(x_ptr + places) + 1.0)


@triton.jit
def _race_kernel(out_ptr, BLOCK: tl.constexpr):
    """Write every thread's number to one word of shared memory, and read it without a barrier between."""
    places = tl.arange(0, BLOCK)
    share: tl.constexpr = """{
        .shared .align 4 .b32 word;
        st.volatile.shared.b32 [word], $1;
        ld.volatile.shared.b32 $0, [word];
    }"""
    found = tl.inline_asm_elementwise(share, "=r,r", [places], tl.int32, is_pure=False, pack=1)
    tl.store(out_ptr + places, found)


def run(fault: str) -> None:
    """Launch the kernel with that fault."""
    block = 128
    if fault == "race":
        _race_kernel[(1,)](torch.empty(block, dtype=torch.int32, device="cuda"), BLOCK=block, num_warps=4)
    else:
        numbers = block // 3 if fault == "oob" else block
        x = torch.empty(numbers, dtype=torch.float32, device="cuda")
        if fault == "oob":
            x.zero_()
        _read_kernel[(1,)](x, torch.empty(block, dtype=torch.float32, device="cuda"), BLOCK=block, num_warps=4)
    torch.cuda.synchronize()
