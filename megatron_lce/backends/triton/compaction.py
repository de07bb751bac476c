"""The rows that count, brought together in front; how many they are only the device knows when this is launched."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.core.blocks import ceil_div
from megatron_lce.core.rows import Compacted

_BLOCK_H = 1024


def compact_rows(
    counts: Tensor,  # [N] bool
    per_row: Sequence[Tensor],  # [..., N] each
    *,
    to_host: bool,
) -> Compacted:
    """One launch: a dozen small ones would cost more than their work. So each program counts what came before it.

    The number goes to pinned memory of the host, too: a copy of it would take the device 12 us.
    """
    num_rows = counts.shape[0]
    rows = torch.empty_like(counts, dtype=torch.int64)
    number = torch.empty((), dtype=torch.int32, device=counts.device)
    on_host = torch.empty((), dtype=torch.int32, device="cpu", pin_memory=counts.is_cuda) if to_host else None
    given = tuple(tensor.contiguous() for tensor in per_row)
    brought = tuple(torch.empty_like(tensor) for tensor in given)
    block = 16384 if counts.device.type == "cpu" else 512  # an interpreter pays by the program
    _compact_rows_kernel[(max(1, ceil_div(num_rows, block)),)](
        counts,
        rows,
        number,
        on_host,
        given,
        brought,
        num_rows,
        HEIGHTS=tuple(tensor.numel() // max(num_rows, 1) for tensor in given),
        BLOCK=block,
        BLOCK_COUNTED=16384,
        num_warps=8,
    )
    return Compacted(rows, brought, number, on_host)


def gather_rows(
    matrix: Tensor,  # [N, H]
    rows: Tensor,  # [M] int64
    number: Tensor,  # [] int32
    unless_all: bool,
) -> Tensor:
    """[M, H]: the first `number` of the rows. `unless_all`: nothing is copied where that is every one of them."""
    num_rows, hidden_size = rows.shape[0], matrix.shape[1]
    gathered = matrix.new_empty(num_rows, hidden_size)
    on_cpu = matrix.device.type == "cpu"  # an interpreter pays by the program
    block_n = 64 if on_cpu else 4
    programs = tiles.num_programs(matrix.device) * (1 if on_cpu else 8)
    _gather_rows_kernel[(min(programs, ceil_div(num_rows, block_n)),)](
        matrix,
        rows,
        number,
        gathered,
        num_rows,
        hidden_size,
        *matrix.stride(),
        UNLESS_ALL=unless_all,
        BLOCK_N=block_n,
        BLOCK_H=_BLOCK_H,
    )
    return gathered


@triton.jit(do_not_specialize=["N"])
def _compact_rows_kernel(
    counts_ptr,  # [N] bool
    rows_ptr,  # [N] int64 out: which rows count, ascending; behind them 0
    number_ptr,  # [] int32 out
    on_host_ptr,  # [] int32 out, or None
    given_ptrs,  # [HEIGHTS[i], N] each
    brought_ptrs,  # of the same shapes, out: what the rows that count bring; behind it 0
    N,
    HEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_COUNTED: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK
    before, number = 0, 0
    for start in range(0, N, BLOCK_COUNTED):
        rows = start + tl.arange(0, BLOCK_COUNTED)
        counts = tl.load(counts_ptr + rows, rows < N, other=0).to(tl.int32)
        before += tl.sum(tl.where(rows < first, counts, 0))
        number += tl.sum(counts)
    if first == 0:
        tl.store(number_ptr, number)
        if on_host_ptr is not None:
            tl.store(on_host_ptr, number)
    rows = first + tl.arange(0, BLOCK)
    counts = tl.load(counts_ptr + rows, rows < N, other=0).to(tl.int32)
    counted, behind = counts > 0, (rows >= number) & (rows < N)
    places = before + tl.cumsum(counts, 0) - 1
    tl.store(rows_ptr + places, rows.to(tl.int64), counted)
    tl.store(rows_ptr + rows, tl.zeros((BLOCK,), tl.int64), behind)
    for i in tl.static_range(len(HEIGHTS)):
        for height in range(HEIGHTS[i]):
            brought = brought_ptrs[i] + height * N
            given = tl.load(given_ptrs[i] + height * N + rows, counted)
            tl.store(brought + places, given, counted)
            tl.store(brought + rows, tl.zeros((BLOCK,), given.dtype), behind)


@triton.jit(do_not_specialize=["M"])
def _gather_rows_kernel(
    matrix_ptr,  # [N, H]
    rows_ptr,  # [M] int64
    number_ptr,  # [] int32
    out_ptr,  # [M, H] contiguous
    M,
    H,
    row_stride,
    column_stride,
    UNLESS_ALL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    number = tl.load(number_ptr)
    if UNLESS_ALL and number == M:
        return
    for start in range(tl.program_id(0) * BLOCK_N, number, tl.num_programs(0) * BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        wanted = places < number
        from_row = matrix_ptr + tl.load(rows_ptr + places, wanted, other=0)[:, None] * row_stride
        to_row = out_ptr + places.to(tl.int64)[:, None] * H
        for first in range(0, H, BLOCK_H):
            columns = (first + tl.arange(0, BLOCK_H))[None, :]
            mask = wanted[:, None] & (columns < H)
            tl.store(to_row + columns, tl.load(from_row + columns.to(tl.int64) * column_stride, mask), mask)
