"""Second primitive: the gradient of one slab of logits, in hidden's dtype; recomputed, or from kept exponentials.

Of the raw logits, the products hidden @ weight.T: scale, softcap and temperature are in the row terms and the kernels.
"""

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.softmax_stats import LogitsCache
from megatron_lce.backends.triton.tile_products import (
    descriptor,
    tanh,
    tile_position,
    tile_products,
    upcasts,
)
from megatron_lce.core.blocks import BlockBytes
from megatron_lce.core.products import aligned, copied_row_bytes


def grad_logits_bytes(hidden: Tensor, weight: Tensor) -> BlockBytes:
    """What `grad_logits` takes for its output and its copies of unaligned inputs."""
    return BlockBytes(hidden.element_size(), copied_row_bytes(hidden), copied_row_bytes(weight))


def grad_logits(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [C, H], the slab
    labels: Tensor,  # [N] int32 ids; the slab's rows are first_column and up
    row_scale: Tensor,  # [N] fp32
    row_terms: Tensor,  # [5, N] fp32, see `megatron_lce.core.rows.row_terms`
    out: Tensor,  # [N, C] of hidden's dtype
    *,
    first_column: int,
    softcap_scale: float | None,
    entropy: bool,
) -> None:
    """Gradient of one slab of the products `hidden @ weight.T`, recomputing them."""
    tile = tiles.choose_tiles(hidden.dtype, hidden.device)
    hidden, weight = aligned(hidden), aligned(weight)
    num_tokens, num_columns = out.shape
    num_tiles = triton.cdiv(num_tokens, tile.block_n) * triton.cdiv(num_columns, tile.block_v)
    _grad_logits_kernel[(min(num_tiles, tiles.num_programs(hidden.device)),)](
        descriptor(hidden, tile.block_n, tile.block_h),
        descriptor(weight, tile.block_v, tile.block_h),
        labels,
        row_scale,
        row_terms,
        descriptor(out, tile.block_n, tile.block_v),
        num_tokens,
        num_columns,
        hidden.shape[1],
        row_terms.stride(0),
        first_column,
        0.0 if softcap_scale is None else softcap_scale,
        ENTROPY=entropy,
        SOFTCAP=softcap_scale is not None,
        UPCAST=upcasts(hidden.dtype, tiles.interpreting()),
        BLOCK_N=tile.block_n,
        BLOCK_V=tile.block_v,
        BLOCK_H=tile.block_h,
        GROUP_N=tiles.GROUP_N,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=softcap_scale is None,  # with it the softcap's registers spill
    )


def grad_logits_from_cache(
    cache: LogitsCache,
    labels: Tensor,  # [N] int32
    row_scale: Tensor,  # [N] fp32
    row_terms: Tensor,  # [5, N] fp32
    *,
    softcap: bool,
    entropy: bool,
) -> None:
    """Turn the kept exponentials into the gradient of their products, in place."""
    num_tokens, num_columns = cache.exp.shape
    block_v = tiles.choose_tiles(cache.exp.dtype, cache.exp.device).block_v
    block_n = 4
    num_column_tiles = triton.cdiv(num_columns, block_v)
    _grad_from_exp_kernel[(num_column_tiles * triton.cdiv(num_tokens, block_n),)](
        cache.exp,
        cache.tile_max,
        labels,
        row_scale,
        row_terms,
        num_tokens,
        cache.exp.stride(0),
        num_column_tiles,
        ENTROPY=entropy,
        SOFTCAP=softcap,
        BLOCK_N=block_n,
        BLOCK_V=block_v,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["N", "C", "terms_stride", "first_column"])
def _grad_logits_kernel(
    hidden_desc,  # [N, H]
    weight_desc,  # [C, H]
    label_ptr,  # [N] int32; column + first_column is compared with it
    row_scale_ptr,  # [N] fp32
    terms_ptr,  # [5, N] fp32, rows terms_stride apart
    out_desc,  # [N, C]
    N,
    C,
    H,
    terms_stride,
    first_column,
    softcap_scale,
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """p (p_term - entropy_term log2 p) + 1[label] label_term, for each tile; times a softcap's slope 1 - tanh^2."""
    num_row_blocks = tl.cdiv(N, BLOCK_N)
    num_column_tiles = tl.cdiv(C, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_row_blocks * num_column_tiles, tl.num_programs(0), flatten=True):
        row_block, column_tile = tile_position(tile, num_row_blocks, num_column_tiles, GROUP_N)
        row = row_block * BLOCK_N
        column = column_tile * BLOCK_V
        rows = row + tl.arange(0, BLOCK_N)
        row_mask = rows < N
        label = tl.load(label_ptr + rows, mask=row_mask, other=-1) - first_column

        logits = tile_products(hidden_desc, weight_desc, row, column, H, BLOCK_N, BLOCK_V, BLOCK_H, UPCAST)
        # Loaded after the products: held across them, these spill the accumulator's registers.
        row_scale = tl.load(row_scale_ptr + rows, mask=row_mask, other=0.0)
        lse = tl.load(terms_ptr + rows, mask=row_mask, other=0.0)
        p_term = tl.load(terms_ptr + terms_stride + rows, mask=row_mask, other=0.0)
        label_term = tl.load(terms_ptr + 3 * terms_stride + rows, mask=row_mask, other=0.0)
        if SOFTCAP:
            logits = tanh(logits * softcap_scale)
            slope = 1.0 - logits * logits
        log_p = logits * row_scale[:, None] - lse[:, None]
        grad = tl.exp2(log_p)
        if ENTROPY:
            entropy_term = tl.load(terms_ptr + 2 * terms_stride + rows, mask=row_mask, other=0.0)
            grad = grad * (p_term[:, None] - entropy_term[:, None] * log_p)
        else:
            grad = grad * p_term[:, None]
        columns = column + tl.arange(0, BLOCK_V)
        grad = tl.where(columns[None, :] == label[:, None], grad + label_term[:, None], grad)
        if SOFTCAP:
            grad = grad * slope
        out_desc.store([row, column], grad.to(out_desc.dtype))


@triton.jit
def _log2_of_16_bit(x):
    """log2 of a positive number of 8 or 11 significant bits, to 1.2e-4, which is less than those bits hold; -127 at 0.

    The exponent and mantissa read as one integer give e + f for x = 2^e (1 + f); log2(1 + f) - f is f (1 - f) times a
    polynomial (minimax fit). A third of the instructions of the exact logarithm, which would outlast the memory access.
    """
    bits = x.to(tl.int32, bitcast=True)
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    correction = 0.43872568 + fraction * (-0.23905799 + fraction * 0.08213049)
    return (bits.to(tl.float32) * 1.1920928955078125e-07 - 127.0) + (fraction - fraction * fraction) * correction


@triton.jit(do_not_specialize=["N", "num_column_tiles"])
def _grad_from_exp_kernel(
    exp_ptr,  # [N, exp_stride] in: exp(z - tile_max), out: the gradient; its first columns count
    tile_max_ptr,  # [tiles, N] fp32
    label_ptr,  # [N] int32
    row_scale_ptr,  # [N] fp32
    terms_ptr,  # [5, N] fp32
    N,
    exp_stride,
    num_column_tiles,
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The same gradient from the kept exponentials; the label's own column from its exact logprob."""
    column_tile = tl.program_id(0) % num_column_tiles
    rows = tl.program_id(0) // num_column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = column_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    row_mask = rows < N
    # Up to the end of a row's storage, not to its last column: a bound that Triton knows to be a multiple of 16.
    mask = row_mask[:, None] & (columns < exp_stride)[None, :]
    label = tl.load(label_ptr + rows, mask=row_mask, other=-1)
    lse = tl.load(terms_ptr + rows, mask=row_mask, other=0.0)
    p_term = tl.load(terms_ptr + N + rows, mask=row_mask, other=0.0)
    entropy_term = tl.load(terms_ptr + 2 * N + rows, mask=row_mask, other=0.0)
    label_term = tl.load(terms_ptr + 3 * N + rows, mask=row_mask, other=0.0)
    label_log_p = tl.load(terms_ptr + 4 * N + rows, mask=row_mask, other=0.0)
    shift = tl.load(tile_max_ptr + column_tile.to(tl.int64) * N + rows, mask=row_mask, other=0.0) - lse
    label_grad = tl.exp2(label_log_p) * (p_term - entropy_term * label_log_p) + label_term

    exp_ptrs = exp_ptr + rows.to(tl.int64)[:, None] * exp_stride + columns[None, :]
    exp = tl.load(exp_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N, BLOCK_V]
    grad = exp * tl.exp2(shift)[:, None]
    if ENTROPY or SOFTCAP:
        log_p = _log2_of_16_bit(exp) + shift[:, None]
    grad = grad * (p_term[:, None] - entropy_term[:, None] * log_p) if ENTROPY else grad * p_term[:, None]
    is_label = columns[None, :] == label[:, None]
    grad = tl.where(is_label, label_grad[:, None], grad)
    if SOFTCAP:
        row_scale = tl.load(row_scale_ptr + rows, mask=row_mask, other=1.0)
        capped = (tl.where(is_label, label_log_p[:, None], log_p) + lse[:, None]) / row_scale[:, None]
        grad = grad * (1.0 - capped * capped)
    tl.store(exp_ptrs, grad.to(exp_ptr.dtype.element_ty), mask=mask)
