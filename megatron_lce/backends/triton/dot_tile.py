"""What the kernels over tiles share: arguments, the order of tiles, the dot products of a tile, and tanh."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.fp32_split import LO_SCALE
from megatron_lce.core.lm_head import LMHead
from megatron_lce.core.plan import SLAB_ROW_STEP

# Triton's interpreter runs. It is fixed at kernel definition, so read once here.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
PTX = tl.constexpr(tiles.has_ptx())
HI_SUM_STEP = tl.constexpr(384)
ROW_STEP = tl.constexpr(SLAB_ROW_STEP)
MASKED_LOGIT = tl.constexpr(-1e38)  # finite, so that 0 * (masked - max) is 0 instead of NaN
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def tile_position(tile_id, num_row_blocks, num_column_tiles, GROUP_N: tl.constexpr):
    """Return the row block and column tile of a tile's number: GROUP_N row blocks go through the columns together."""
    tiles_in_group = GROUP_N * num_column_tiles
    group = tile_id // tiles_in_group
    first_row_block = group * GROUP_N
    row_blocks = min(num_row_blocks - first_row_block, GROUP_N)
    within = tile_id - group * tiles_in_group
    return first_row_block + within % row_blocks, within // row_blocks


@triton.jit
def device_descriptor(matrix, num_rows, num_columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Return the descriptor of a matrix [num_rows, num_columns], made here if `host_descriptor` made none.

    Rows start at multiples of 16 bytes and take a multiple of them. Triton moves 16 bytes at once only if it can tell.
    """
    result = matrix
    if not isinstance(matrix, tl.core.tensor_descriptor_base):
        step: tl.constexpr = 128 // matrix[0].dtype.element_ty.primitive_bitwidth
        stored, stride = (num_columns + step - 1) // step * step, matrix[1] // step * step
        result = tl.make_tensor_descriptor(matrix[0], [num_rows, stored], [stride, 1], [BLOCK_ROWS, BLOCK_COLUMNS])
    return result


@triton.jit
def padded_h(H, PARTS: tl.constexpr):
    """Return the width of a matrix of H columns as the kernels read it: with its parts, if it is split."""
    return PARTS * (tl.cdiv(H, ROW_STEP) * ROW_STEP) if PARTS else H


@triton.jit
def dot_tile(
    hidden_desc,  # [N, H]
    weight_desc,  # [V, H]
    row_start,
    col_start,
    H,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Return a tile of hidden[row:] @ weight[column:].T in fp32; here and below, what is past the end is zero."""
    acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for h in range(0, H, BLOCK_H):
        acc = _add_product(hidden_desc.load([row_start, h]), weight_desc.load([col_start, h]), acc)
    return acc


@triton.jit
def dot_rows(
    hidden_desc,  # [N, H]
    weight_rows,  # pointers [BLOCK_V, 1] to rows of the weight
    row_start,
    H,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Return hidden[row:] times rows of the weight, each anywhere in memory."""
    acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for h in range(0, H, BLOCK_H):
        offs_h = h + tl.arange(0, BLOCK_H)
        hidden = hidden_desc.load([row_start, h])
        acc = _add_product(hidden, tl.load(weight_rows + offs_h[None, :], mask=(offs_h < H)[None, :], other=0.0), acc)
    return acc


@triton.jit
def dot_parts(
    hidden_desc,  # parts [N, HIDDEN_PARTS * width]
    hidden_pow2,  # a pointer to [N]
    weight_desc,  # parts [V, 2 * width]
    weight_pow2,  # a pointer to [V]
    row_start,
    col_start,
    H,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HIDDEN_PARTS: tl.constexpr,  # of `tiles.Tiles`
):
    """Return what `dot_tile` does for matrices in parts."""
    acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    width = tl.cdiv(H, ROW_STEP) * ROW_STEP
    # Tensor cores truncate as they add, in proportion to the sum. So the larger parts are summed over HI_SUM_STEP of H
    # at a time, and the smaller parts separately.
    acc_lo = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for start in range(0, width, HI_SUM_STEP):
        acc_hi = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        for h in range(start, min(start + HI_SUM_STEP, width), BLOCK_H):
            low, high = weight_desc.load([col_start, h]), weight_desc.load([col_start, width + h])
            if HIDDEN_PARTS == 2:
                hidden_low, hidden = hidden_desc.load([row_start, h]), hidden_desc.load([row_start, width + h])
                acc_lo = _add_product(hidden_low, high, acc_lo)
            else:
                hidden = hidden_desc.load([row_start, h])
            acc_lo = _add_product(hidden, low, acc_lo)
            acc_hi = _add_product(hidden, high, acc_hi)
        acc += acc_hi
    # `acc_lo` is non-finite only where an input is. `acc` already shows it, so drop it here.
    acc += tl.where(tl.abs(acc_lo) < float("inf"), acc_lo * (1 / LO_SCALE), 0.0)
    column_power = tl.load(weight_pow2 + col_start + tl.arange(0, BLOCK_V))
    row_power = tl.load(hidden_pow2 + row_start + tl.arange(0, BLOCK_N))[:, None]
    # Apply the smaller factor first: the larger alone, or their product, can overflow or underflow.
    acc *= tl.minimum(row_power, column_power[None, :])
    acc *= tl.maximum(row_power, column_power[None, :])
    return acc


@triton.jit
def _add_product(hidden, weight_tile, acc):
    """Return products + hidden @ weight_tile.T of 16-bit tiles [BLOCK_N, BLOCK_H] and [BLOCK_V, BLOCK_H]."""
    if INTERPRETED:  # the interpreter computes bf16 products wrongly
        hidden = hidden.to(tl.float32)
        weight_tile = weight_tile.to(tl.float32)
    return tl.dot(hidden, weight_tile.T, acc)


@triton.jit
def rounded_to_bf16(x):
    """Return fp32 numbers rounded to bf16 (nearest even), kept in fp32.

    Backward is straight-through: `grad_logits.py` recomputes rounded products, and treats the rounding as the identity.
    """
    if PTX:  # two at once: Triton's casts of one take 3 % of a backward
        pair: tl.constexpr = "{.reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000;}"
        bits = tl.inline_asm_elementwise(pair, "=r,=r,f,f", [x], tl.int32, is_pure=True, pack=2)
        rounded = bits.to(tl.float32, bitcast=True)
    else:  # the interpreter's casts truncate
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        rounded = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return rounded


@triton.jit
def halves(tile):
    """Return a tile's left and right columns: two stores take less shared memory than one."""
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def tanh(x):
    """Return tanh to a relative error of 4e-7, and 1 from 8.75 on, as x times a quotient of polynomials in x^2.

    The fit is minimax. At 8.75 the denominator is a power of two, whose reciprocal is exact. A form with exponentials
    would use the special-function unit twice instead of once.
    """
    x = tl.clamp(x, -8.75, 8.75, propagate_nan=tl.PropagateNan.ALL)
    square = x * x
    numerator = tl.fma(square, 1.93590228e-08, 2.93485446e-05)
    numerator = tl.fma(square, numerator, 0.00492882403)
    numerator = tl.fma(square, numerator, 0.187865704)
    numerator = x * tl.fma(square, numerator, 1.40227246)
    denominator = tl.fma(square, 1.1161286e-06, 0.000465175021)
    denominator = tl.fma(square, denominator, 0.0363893323)
    denominator = tl.fma(square, denominator, 0.65528965)
    denominator = tl.fma(square, denominator, 1.40227246)
    if PTX:
        reciprocal: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
        return numerator * tl.inline_asm_elementwise(
            reciprocal, "=f,f", [denominator], tl.float32, is_pure=True, pack=1
        )
    return numerator / denominator


@triton.jit
def fast_log2(x):
    """Return log2 of a positive normal number, to a relative error of 2^-22 or, near 1, an absolute one.

    The general logarithm takes 24 instructions instead of 1, more time than loading the number.
    """
    if PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


def shared_arguments(tile: tiles.Tiles, head: LMHead) -> dict[str, Any]:
    """Return the keyword arguments of every kernel over tiles."""
    cap = head.softcap_scale
    return {
        "softcap_scale": 0.0 if cap is None else cap,
        "SOFTCAP": cap is not None,
        "HIDDEN_PARTS": tile.hidden_parts,
        "ROUND": head.logits_dtype is not None,
        "BLOCK_N": tile.block_n,
        "BLOCK_H": tile.block_h,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def host_descriptor(matrix: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor | tuple[Tensor, int]:
    """Return a descriptor. GPUs without tensor-memory hardware get a matrix and its row stride for `device_descriptor`.

    There Triton knows no alignment of descriptors from the host, and would load 2 bytes at a time.
    """
    if not tiles.has_tma(matrix.device):
        assert matrix.stride(1) == 1
        assert matrix.stride(0) * matrix.element_size() % 16 == 0
        return matrix, matrix.stride(0)
    return TensorDescriptor.from_tensor(matrix, [block_rows, block_columns])
