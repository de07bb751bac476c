"""A pytest plugin: the code of compute capability 8.0 runs on a Hopper GPU.

    python -m pytest -p tests.as_sm80 tests

Triton's passes and the package's choices are those for 8.0 (mma.sync, cp.async, no tensor memory), and the assembler is
told what the GPU is. Ranks that a test starts run Hopper's own code.
"""

import torch
import triton
from triton.backends.nvidia import compiler


def imitate() -> None:
    """Has torch and Triton take the GPU, from now on, for one of compute capability 8.0."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise RuntimeError("sm80's code is run on a GPU of compute capability 9.0, and there is none")
    triton.knobs.propagate_env = False  # ranks inherit the environment, and not what follows
    triton.knobs.runtime.override_arch = "sm80"
    triton.knobs.propagate_env = True
    compiler.sm_arch_from_capability = lambda capability: "sm_90"
    torch.cuda.get_device_capability = lambda device=None: (8, 0)


imitate()
