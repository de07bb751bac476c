"""The tile table, each row with where it was measured; what a launch needs to know of a device."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from megatron_lce.core.plan import Costs
from megatron_lce.core.statistics import CHUNK_COLUMNS


class Tiles(NamedTuple):
    """One program's tile of logits, [block_n, block_v], summed over H in steps of block_h."""

    block_n: int
    block_v: int
    block_h: int
    num_warps: int
    num_stages: int


# H200, ms with 3 and 4 stages: gradients of 8192 columns 0.91 and 0.94, statistics of 26240 x 4096 x 151936 47.4, 50.0.
HOPPER_16_BIT = Tiles(128, 256, 64, num_warps=8, num_stages=3)
# Within the 99 KiB of shared memory of Ada.
GENERIC_16_BIT = Tiles(128, 128, 32, num_warps=8, num_stages=3)
# Full fp32 products run on CUDA cores, not on tensor cores.
FP32 = Tiles(64, 64, 32, num_warps=8, num_stages=2)

GROUP_N = 8  # row blocks that walk the vocabulary together, so that a weight tile is read from L2 by all of them


def choose_tiles(dtype: torch.dtype, device: torch.device) -> Tiles:
    """Depends on dtype and device alone: the reductions, and so the bits, of a token are the same in every call."""
    if dtype == torch.float32:
        return FP32
    if device.type == "cpu" or _capability(device) == (9, 0):
        return HOPPER_16_BIT
    return GENERIC_16_BIT


def merging_rows(device: torch.device) -> int:
    """Rows of a program, one warp, that merges statistics of chunks: many small programs read them fastest."""
    return 64 if device.type == "cpu" else 8


def chunk_columns(hidden: torch.Tensor) -> int:
    """Columns of a chunk of statistics: the same for every tile of a dtype, and a part of `CHUNK_COLUMNS`."""
    return min(CHUNK_COLUMNS, choose_tiles(hidden.dtype, hidden.device).block_v)


def costs(hidden: torch.Tensor, telemetry: bool) -> Costs:
    """Nothing is kept of fp32 inputs."""
    tile = choose_tiles(hidden.dtype, hidden.device)
    return Costs(chunk_columns(hidden), 0 if hidden.dtype == torch.float32 else tile.block_v)


def stats_group(hidden_size: int) -> int:
    """`GROUP_N` of the statistics kernel: the slab is the whole shard, which larger groups read less often from memory.

    H200, 8 row blocks against this many, ms: 16.1 and 15.5 at 8192 x 4096 x 151936, 14.7 and 13.9 at
    16384 x 2048 x 131072, 13.0 and 12.6 at 8192 x 8192 x 64000. The gradient kernel's narrow slabs gain nothing.
    """
    return 32 if hidden_size <= 2048 else 16


@lru_cache
def num_programs(device: torch.device) -> int:
    """Programs of a persistent grid: one a multiprocessor."""
    if device.type == "cpu":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def interpreting() -> bool:
    """Triton's interpreter computes bf16 products wrongly; kernels upcast for it."""
    return triton.knobs.runtime.interpret


def speaks_ptx() -> bool:
    """Whether kernels are compiled for an NVIDIA GPU, whose instructions they may name."""
    return not interpreting() and torch.version.hip is None


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)
