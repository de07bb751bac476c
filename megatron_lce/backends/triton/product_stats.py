"""`product_stats` takes the statistics that `softmax_stats` takes, of products that are in memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.core.plan import ceil_div
from megatron_lce.core.statistics import CHUNK_COLUMNS, LOWEST_LOGIT

_LOWEST_LOGIT = tl.constexpr(LOWEST_LOGIT)
_CHUNKS = 16  # of a program


def product_stats(products: Tensor, row_scale: Tensor) -> Tensor:
    """Return statistics [chunks, 3, N] of every `CHUNK_COLUMNS` of fp32 products [N, C] times their scale [N]."""
    num_tokens, num_columns = products.shape
    num_chunks = ceil_div(num_columns, CHUNK_COLUMNS)
    stats = products.new_empty(num_chunks, 3, num_tokens, dtype=torch.float32)
    rows = tiles.rows_of_program(4, num_tokens)
    tiles.launch(_product_stats_kernel, (ceil_div(num_tokens, rows), ceil_div(num_chunks, _CHUNKS)), fused=False)(
        products,
        row_scale,
        stats,
        num_tokens,
        num_columns,
        products.stride(0),
        BLOCK_N=rows,
        CHUNKS=_CHUNKS,
        CHUNK=CHUNK_COLUMNS,
    )
    return stats


@triton.jit(do_not_specialize=["N"])
def _product_stats_kernel(
    products_ptr,  # [N, C] fp32, rows products_stride apart
    row_scale_ptr,  # [N] fp32
    stats_ptr,  # [chunks, 3, N] fp32 out
    N,
    C,
    products_stride,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the largest logit, -inf for the label's, and the sum of exponentials of CHUNKS chunks of BLOCK_N rows."""
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    chunks = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    columns = tl.program_id(1) * (CHUNKS * CHUNK) + tl.arange(0, CHUNKS * CHUNK)
    mask = (rows < N)[:, None] & (columns < C)[None, :]
    scale = tl.load(row_scale_ptr + rows, mask=rows < N, other=0.0)
    products = tl.load(products_ptr + rows[:, None] * products_stride + columns[None, :], mask=mask, other=0.0)
    logits = tl.where(mask, products * scale[:, None], float("-inf"))
    logits = tl.reshape(logits, (BLOCK_N, CHUNKS, CHUNK))
    max_logit = tl.maximum(tl.max(logits, 2), _LOWEST_LOGIT)
    sum_exp = tl.sum(tl.exp2(logits - max_logit[:, :, None]), 2)
    max_logit = tl.where(sum_exp == sum_exp, max_logit, float("nan"))  # tl.max passes over a NaN
    out = stats_ptr + chunks.to(tl.int64)[None, :] * (3 * N) + rows[:, None]
    stored = (rows < N)[:, None] & (chunks * CHUNK < C)[None, :]
    tl.store(out, max_logit, stored)
    tl.store(out + N, tl.full((BLOCK_N, CHUNKS), float("-inf"), tl.float32), stored)
    tl.store(out + 2 * N, sum_exp, stored)
