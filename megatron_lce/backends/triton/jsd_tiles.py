"""What the kernels of two heads share: a tile's products in four pieces, and where the first head's wait."""

import triton
import triton.language as tl

from megatron_lce.backends.triton.tile_products import FP32_SUM, MASKED_LOGIT, tanh

_SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)  # under this a probability counts as zero


@triton.jit
def two_half_products(
    hidden_desc,  # [N, H]
    weight_desc,  # [V, H]
    row,
    column,
    H,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """hidden[row:] @ weight[column:].T in fp32, in four pieces [BLOCK_N, BLOCK_V / 4]; zero past the end."""
    HALF: tl.constexpr = BLOCK_V // 2
    left = tl.zeros((BLOCK_N, HALF), dtype=tl.float32)
    right = tl.zeros((BLOCK_N, HALF), dtype=tl.float32)
    if hidden_desc.dtype == tl.float32:
        # Sums of sums, as in `tile_products`.
        for start in range(0, H, FP32_SUM):
            left_part = tl.zeros((BLOCK_N, HALF), dtype=tl.float32)
            right_part = tl.zeros((BLOCK_N, HALF), dtype=tl.float32)
            for h in range(start, min(start + FP32_SUM, H), BLOCK_H):
                hidden = hidden_desc.load([row, h])
                left_part = tl.dot(hidden, weight_desc.load([column, h]).T, left_part, input_precision="ieee")
                right_part = tl.dot(hidden, weight_desc.load([column + HALF, h]).T, right_part, input_precision="ieee")
            left += left_part
            right += right_part
        return _halves(left) + _halves(right)
    for h in range(0, H, BLOCK_H):
        hidden = hidden_desc.load([row, h])  # [BLOCK_N, BLOCK_H]
        left_weight = weight_desc.load([column, h])  # [HALF, BLOCK_H]
        right_weight = weight_desc.load([column + HALF, h])
        if UPCAST:
            hidden = hidden.to(tl.float32)
            left_weight = left_weight.to(tl.float32)
            right_weight = right_weight.to(tl.float32)
        left = tl.dot(hidden, left_weight.T, left)
        right = tl.dot(hidden, right_weight.T, right)
    return _halves(left) + _halves(right)


@triton.jit
def _halves(x):
    """The left and the right half of the columns."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _scratch_piece(scratch_ptr, piece: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr):
    """Where this program keeps a piece [BLOCK_N, BLOCK_V / 4] of the first head's tile."""
    QUARTER: tl.constexpr = BLOCK_V // 4
    first = scratch_ptr + tl.program_id(0) * (BLOCK_N * BLOCK_V) + piece * (BLOCK_N * QUARTER)
    return first + tl.arange(0, BLOCK_N)[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]


@triton.jit
def keep(scratch_ptr, pieces, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr):
    """Put a tile where `kept_piece` finds it; the barriers keep its writes and reads apart from the next tile's."""
    tl.debug_barrier()
    for i in tl.static_range(4):
        tl.store(_scratch_piece(scratch_ptr, i, BLOCK_N, BLOCK_V), pieces[i])
    tl.debug_barrier()


@triton.jit
def kept_piece(scratch_ptr, piece: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr):
    return tl.load(_scratch_piece(scratch_ptr, piece, BLOCK_N, BLOCK_V))


@triton.jit
def masked(logits, column, V):
    """Logits of columns past the end have no weight in any sum."""
    if column + logits.shape[1] > V:
        columns = column + tl.arange(0, logits.shape[1])
        logits = tl.where((columns < V)[None, :], logits, MASKED_LOGIT)
    return logits


@triton.jit
def capped(products, softcap_scale, SOFTCAP: tl.constexpr):
    """The products, or their tanh under a softcap."""
    if SOFTCAP:
        products = tanh(products * softcap_scale)
    return products


@triton.jit
def load_row(terms_ptr, terms_stride, term: tl.constexpr, rows, row_mask):
    """A row of the packed terms, as a column to broadcast over a tile."""
    return tl.load(terms_ptr + term * terms_stride + rows, mask=row_mask, other=0.0)[:, None]


@triton.jit
def tile_logits(pieces, scale, softcap_scale, column, V, SOFTCAP: tl.constexpr):
    """Base-2 logits of the products, in the same four pieces."""
    QUARTER: tl.constexpr = pieces[0].shape[1]
    return (
        masked(capped(pieces[0], softcap_scale, SOFTCAP) * scale, column, V),
        masked(capped(pieces[1], softcap_scale, SOFTCAP) * scale, column + QUARTER, V),
        masked(capped(pieces[2], softcap_scale, SOFTCAP) * scale, column + 2 * QUARTER, V),
        masked(capped(pieces[3], softcap_scale, SOFTCAP) * scale, column + 3 * QUARTER, V),
    )


@triton.jit
def shift_logits(logits):
    """Each row's largest logit, the logits relative to it, and the sum of their exponentials."""
    left = tl.maximum(tl.max(logits[0], 1), tl.max(logits[1], 1))
    right = tl.maximum(tl.max(logits[2], 1), tl.max(logits[3], 1))
    largest = tl.maximum(left, right)
    at = largest[:, None]
    shifted = (logits[0] - at, logits[1] - at, logits[2] - at, logits[3] - at)
    total = tl.zeros_like(largest)
    for i in tl.static_range(4):
        total += tl.sum(tl.exp2(shifted[i]), 1)
    return largest, shifted, total


@triton.jit
def log_probability(products, terms_ptr, terms_stride, term: tl.constexpr, rows, row_mask):
    """log2 p of one head, whose scale, largest logit and log of the sum are the terms from `term`."""
    scale = load_row(terms_ptr, terms_stride, term, rows, row_mask)
    max_logit = load_row(terms_ptr, terms_stride, term + 1, rows, row_mask)
    log_sum = load_row(terms_ptr, terms_stride, term + 2, rows, row_mask)
    return products * scale - max_logit - log_sum


@triton.jit
def log_mixture(ps, pt, beta):
    """log2 m, held where 0 * log(p / m) is 0 if p_s and p_t underflow; finite for NaN too, which p_s or p_t brings."""
    return _log2_of_normal(tl.maximum(tl.fma(beta, pt, (1 - beta) * ps), _SMALLEST_NORMAL))


@triton.jit
def _log2_of_normal(x):
    """log2 of a positive normal number, to 1.4e-7 of the result, and 0 at 1.

    x = 2^e (1 + f) with 1 + f between the square roots of 1/2 and 2, and log2(1 + f) = f times a polynomial (minimax
    fit). Half the instructions of the general logarithm, which minds zero, infinity and subnormal numbers.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) & -0x800000
    f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    polynomial = tl.fma(f, 0.129264208, -0.208933778)
    polynomial = tl.fma(f, polynomial, 0.215212268)
    polynomial = tl.fma(f, polynomial, -0.238675687)
    polynomial = tl.fma(f, polynomial, 0.287939094)
    polynomial = tl.fma(f, polynomial, -0.360716264)
    polynomial = tl.fma(f, polynomial, 0.48091028)
    polynomial = tl.fma(f, polynomial, -0.721347199)
    polynomial = tl.fma(f, polynomial, 1.442695)
    return tl.fma(f, polynomial, exponent.to(tl.float32) * 1.1920928955078125e-07)
