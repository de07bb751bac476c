"""The table of tiles, with the GPU on which each was chosen, and how kernels are launched."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from megatron_lce.core.options import Telemetry
from megatron_lce.core.plan import ScratchBytes, ceil_div, fp32_scratch_bytes
from megatron_lce.core.statistics import CHUNK_COLUMNS


class Tiles(NamedTuple):
    """Shape of the tile of logits that a program computes, [block_n, block_v], and the step of its sum over H."""

    block_n: int
    block_v: int
    block_h: int
    num_warps: int
    num_stages: int
    weight_parts: int = 0  # fp16 parts of an fp32 weight; 0: 16-bit inputs are not split
    hidden_parts: int = 0  # fp16 parts of hidden, with an fp32 weight

    @property
    def chunk(self) -> int:
        """Number of columns of a chunk: as many as a tile has, at most `CHUNK_COLUMNS`."""
        return min(CHUNK_COLUMNS, self.block_v)


# 3 stages are 3 to 6 % faster than 4 on an H200.
HOPPER_16_BIT = Tiles(128, 256, 64, num_warps=8, num_stages=3)
# Statistics of few rows: 300 us where the tile above takes 400 (16 x 4096 x 151936, an H200); cuBLAS's product, 300.
HOPPER_FEW_ROWS = Tiles(64, 256, 64, num_warps=8, num_stages=5)
HOPPER_LABELS = Tiles(64, 64, 64, num_warps=4, num_stages=6)  # half the time of 128 x 128: all of it is latency
# Compiled, not run. 128 x 256 spills registers there. 12.0 has less shared memory than 10.0.
BLACKWELL_16_BIT = Tiles(128, 128, 64, num_warps=8, num_stages=4)
SMALL_BLACKWELL_16_BIT = Tiles(128, 128, 64, num_warps=8, num_stages=3)
# 64 KiB: two programs fit an A100's multiprocessor, one Ada's or AMD's. Run as 8.0's code on a Hopper GPU.
AMPERE_16_BIT = Tiles(128, 128, 64, num_warps=4, num_stages=3)
# For numbers in parts: a step loads two tiles of the weight and one or two of hidden, and a program keeps three sums.
HOPPER_FP32 = Tiles(128, 128, 64, num_warps=8, num_stages=3, weight_parts=2)
GENERIC_FP32 = Tiles(128, 64, 32, num_warps=8, num_stages=3, weight_parts=2)

GROUP_N = 8  # row blocks that walk the vocabulary together, so that a weight tile is read from L2 by all of them
ROW_BLOCK = 128  # rows of a program of the kernels over per-row values


@lru_cache
def choose_tiles(hidden: torch.dtype, weight: torch.dtype, device: torch.device) -> Tiles:
    """Choose tiles by dtypes and device alone, so that the reductions of a token have the same bits in every call."""
    if weight == torch.float32:
        tile = HOPPER_FP32 if device.type == "cpu" or _capability(device) == (9, 0) else GENERIC_FP32
        return tile._replace(hidden_parts=2 if hidden == torch.float32 else 1)
    if device.type == "cpu":
        return HOPPER_16_BIT
    by_family = {9: HOPPER_16_BIT, 10: BLACKWELL_16_BIT, 12: SMALL_BLACKWELL_16_BIT}
    return by_family.get(_capability(device)[0], AMPERE_16_BIT)


def block_rows(on_gpu: int, num_rows: int) -> int:
    """Return the rows of a program: up to 128 in the interpreter, which runs Python code for each program."""
    return min(128, triton.next_power_of_2(max(num_rows, 1))) if triton.knobs.runtime.interpret else on_gpu


def scratch_bytes(hidden: torch.Tensor, weight: torch.Tensor, telemetry: Telemetry) -> ScratchBytes:
    tile = choose_tiles(hidden.dtype, weight.dtype, hidden.device)
    if tile.weight_parts:  # without a cache
        return fp32_scratch_bytes(weight.shape[1], tile.hidden_parts, tile.chunk)
    return ScratchBytes(tile.chunk, caches=True)


def tile_grid(num_tokens: int, num_columns: int, tile: Tiles, device: torch.device) -> tuple[int]:
    """Return a grid over tiles: one program per tile or, if persistent, 8 warps of programs per multiprocessor."""
    num_tiles = ceil_div(num_tokens, tile.block_n) * ceil_div(num_columns, tile.block_v)
    if not has_tma(device):  # nothing would load the next tile meanwhile
        return (num_tiles,)
    return (min(num_tiles, 2 if device.type == "cpu" else _multiprocessors(device) * (8 // tile.num_warps)),)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch(kernel: Any, grid: tuple[int, ...], like: torch.Tensor, *, fp_fusion: bool, **arguments: Any) -> None:
    """Launch a kernel on the device of `like`; for an empty grid do nothing.

    `fp_fusion` lets the compiler round a * b + c once. The default differs between versions of Triton.
    """
    if all(grid):
        with torch.cuda.device_of(like):  # Triton launches on the current device
            kernel[grid](enable_fp_fusion=fp_fusion, **arguments)


def has_ptx() -> bool:
    """Return whether kernels are compiled for an NVIDIA GPU and may use PTX instructions."""
    return not triton.knobs.runtime.interpret and torch.version.hip is None


@lru_cache
def has_tma(device: torch.device) -> bool:
    """Return whether the GPU, or the interpreter, has tensor-memory descriptors."""
    return device.type == "cpu" or _capability(device) >= (9, 0)


def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, (0, 0) of an AMD GPU."""
    return torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)
