"""The kernels share the order of tiles, the products of a tile, and what makes logits of them."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_lce.backends.triton.parts import three_parts
from megatron_lce.core.plan import SLAB_ROW_STEP

FP32_SUM = tl.constexpr(256)
SPLIT_SUM = tl.constexpr(1024)
ROW_STEP = tl.constexpr(SLAB_ROW_STEP)
MASKED_LOGIT = tl.constexpr(-1e38)  # finite, so that 0 * (masked - max) is 0 instead of NaN
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def tile_position(tile, num_row_blocks, num_column_tiles, GROUP_N: tl.constexpr):
    """Return the row block and column tile of a tile's number: GROUP_N row blocks go through the columns together."""
    tiles_in_group = GROUP_N * num_column_tiles
    group = tile // tiles_in_group
    first_row_block = group * GROUP_N
    row_blocks = min(num_row_blocks - first_row_block, GROUP_N)
    within = tile - group * tiles_in_group
    return first_row_block + within % row_blocks, within // row_blocks


@triton.jit
def _weight_tile(weight, column, h, H, BLOCK_H: tl.constexpr):
    """Load weight [BLOCK_V, BLOCK_H] at a column and h, zero past the ends."""
    if weight.dtype.is_ptr():
        inner = h + tl.arange(0, BLOCK_H)
        tile = tl.load(weight + inner[None, :], mask=(inner < H)[None, :], other=0.0)
    else:
        tile = weight.load([column, h])
    return tile


@triton.jit
def _weight_part(weight, column, part, h, H, width, BLOCK_H: tl.constexpr):
    """Load part 0, 1 or 2, the largest, of weight [BLOCK_V, BLOCK_H]: of rows of `width` * 3, or made of fp32 rows."""
    if weight.dtype.is_ptr():
        low, middle, high = three_parts(_weight_tile(weight, column, h, H, BLOCK_H))
        tile = tl.where(part == 2, high, tl.where(part == 1, middle, low))
    else:
        tile = weight.load([column, part * width + h])
    return tile


@triton.jit
def _split_products(
    hidden_desc,
    weight,
    row,
    column,
    H,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return the products of bf16 hidden with the three bf16 parts of an fp32 weight, which are exact."""
    width = tl.cdiv(H, ROW_STEP) * ROW_STEP
    products = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    # Tensor cores truncate as they add, by what the sum amounts to. So sums over SPLIT_SUM of H are added up; those of
    # the two small parts, which come first, are one sum.
    for piece in range(0, 1 + tl.cdiv(width, SPLIT_SUM)):
        start = tl.where(piece == 0, 0, 2 * width + (piece - 1) * SPLIT_SUM)
        stop = tl.where(piece == 0, 2 * width, min(start + SPLIT_SUM, 3 * width))
        partial = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        for step in range(start, stop, BLOCK_H):
            h = step % width
            hidden = hidden_desc.load([row, h])
            part = _weight_part(weight, column, step // width, h, H, width, BLOCK_H)
            partial = _add_product(hidden, part, partial, UPCAST)
        products += partial
    return products


@triton.jit
def tile_products(
    hidden_desc,  # [N, H]
    weight,  # the descriptor of [V, H] or parts [V, 3 * width], or pointers [BLOCK_V, 1] to rows, without `column`
    row,
    column,
    H,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PRODUCTS: tl.constexpr,  # `tiles.products_of`
    UPCAST: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Return a tile of hidden[row:] @ weight[column:].T in fp32; rows and columns past the end are zero."""
    products = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    if PRODUCTS == "split":
        products = _split_products(hidden_desc, weight, row, column, H, BLOCK_N, BLOCK_V, BLOCK_H, UPCAST)
    elif PRODUCTS == "tf32x3":
        # Triton adds each step's sum to `products` in fp32: tensor cores never sum over more than BLOCK_H of H.
        for h in range(0, H, BLOCK_H):
            hidden = hidden_desc.load([row, h]).to(tl.float32)
            weight_tile = _weight_tile(weight, column, h, H, BLOCK_H)
            products = tl.dot(hidden, weight_tile.T, products, input_precision="tf32x3")
    elif PRODUCTS == "ieee":
        # Sums over FP32_SUM of H are added up, as one running sum over a long H loses digits.
        for start in range(0, H, FP32_SUM):
            partial = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
            for h in range(start, min(start + FP32_SUM, H), BLOCK_H):
                hidden = hidden_desc.load([row, h]).to(tl.float32)
                weight_tile = _weight_tile(weight, column, h, H, BLOCK_H)
                partial = tl.dot(hidden, weight_tile.T, partial, input_precision="ieee")
            products += partial
    else:
        for h in range(0, H, BLOCK_H):
            hidden = hidden_desc.load([row, h])  # [BLOCK_N, BLOCK_H]
            weight_tile = _weight_tile(weight, column, h, H, BLOCK_H)  # [BLOCK_V, BLOCK_H]
            products = _add_product(hidden, weight_tile, products, UPCAST)
    return rounded(products, ROUND)


@triton.jit
def _add_product(hidden, weight_tile, products, UPCAST: tl.constexpr):
    """Return products + hidden @ weight_tile.T of 16-bit tiles."""
    if UPCAST:
        hidden = hidden.to(tl.float32)
        weight_tile = weight_tile.to(tl.float32)
    return tl.dot(hidden, weight_tile.T, products)


@triton.jit
def rounded(x, ROUND: tl.constexpr):
    """Return fp32 numbers as they are, or rounded to bf16 (to nearest even) by a cast or, as "integers", by hand."""
    if ROUND == "cast":
        x = x.to(tl.bfloat16).to(tl.float32)
    elif ROUND == "integers":  # the interpreter's cast truncates
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def halves(tile):
    """Return a tile's left and right columns: two stores take less shared memory than one."""
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def tanh(x):
    """Return tanh to a relative error of 2e-7, and exact at infinity: a softcap multiplies it by a large number.

    Below 1/2 it is x times a polynomial in x^2 (minimax fit), from there on it is computed from the exponential.
    """
    square = x * x
    polynomial = 0.13324779 + square * (-0.05298606 + square * 0.017134985)
    polynomial = 1.0 + square * (-0.3333307 + square * polynomial)
    by_exponential = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
    return tl.where(square < 0.25, x * polynomial, by_exponential)


@triton.jit
def fast_log2(x, PTX: tl.constexpr):
    """Return log2 of a positive normal number, to a relative error of 2^-22 or, near 1, an absolute one.

    The general logarithm takes 24 instructions instead of 1, and more time than the load of the number.
    """
    if PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


def descriptor(matrix: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [block_rows, block_columns])


def upcasts(dtype: torch.dtype, interpreting: bool) -> bool:
    return interpreting and dtype != torch.float32


def rounding(logits_dtype: torch.dtype | None, interpreting: bool) -> str:
    """Return `ROUND` for logits of that dtype, "" if they are not rounded."""
    if logits_dtype is None:
        return ""
    return "integers" if interpreting else "cast"
