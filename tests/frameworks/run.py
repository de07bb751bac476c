"""Runs a program of this folder, run_NAME.py, on the CPU. It exits non-zero where a comparison failed.

    torchrun --nproc-per-node 2 tests/frameworks/run.py NAME FOLDERS

All ranks are of one tensor-parallel group, under `--context` each of its own.
"""

import gc
import importlib
import os
import sys
from pathlib import Path

import comparing
import torch

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    tensor_parallel = 1 if "--context" in arguments else int(os.environ["WORLD_SIZE"])
    comparing.megatron_runtime.initialize(tensor_parallel, device="cpu")
    folders = [Path(argument) for argument in arguments if not argument.startswith("--")]
    importlib.import_module(f"run_{name}").program(*folders)
    gc.collect()
    comparing.megatron_runtime.teardown()
    sys.exit(bool(comparing.failures))
