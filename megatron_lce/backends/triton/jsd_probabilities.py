"""What kernels make of both heads' logits: where they are in memory, their probabilities and those of the mixture."""

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.tile_products import MASKED_LOGIT
from megatron_lce.core.blocks import ceil_div

READ_COLUMNS = 512  # of a program that reads logits


def reading_grid(logits: Tensor) -> tuple[int]:
    rows = tiles.reading_rows(logits.device)
    return (ceil_div(logits.shape[0], rows) * ceil_div(logits.shape[1], READ_COLUMNS),)


def reading_constexprs(logits: Tensor) -> dict[str, int]:
    return {"BLOCK_N": tiles.reading_rows(logits.device), "BLOCK_V": READ_COLUMNS, "num_warps": 1}


@triton.jit
def place_of(N, V, logits_stride, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr):
    """This program's rows and columns, and where their logits are."""
    num_blocks = tl.cdiv(V, BLOCK_V)
    rows = tl.program_id(0) // num_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(0) % num_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    return rows, rows < N, columns, rows.to(tl.int64)[:, None] * logits_stride + columns[None, :]


@triton.jit
def read_logits(logits_ptr, row_mask, columns, V, logits_stride):
    """Logits of these columns; those past the end have no weight in any sum.

    Read to the end of a row's storage: a bound that Triton knows to be a multiple of 16.
    """
    logits = tl.load(logits_ptr, row_mask[:, None] & (columns < logits_stride)[None, :], other=0.0)
    return tl.where((columns < V)[None, :], logits, MASKED_LOGIT)


@triton.jit
def log_probability(logits, stats_ptr, stats_stride, row_mask):
    """log2 p of one head."""
    log_sum = tl.log2(tl.load(stats_ptr + stats_stride, row_mask, other=1.0))
    return _shifted(logits, stats_ptr, row_mask) - log_sum[:, None]


@triton.jit
def _shifted(logits, max_ptr, row_mask):
    """By the largest of the row."""
    return logits - tl.load(max_ptr, row_mask, other=0.0)[:, None]


@triton.jit
def log_ratio(student, teacher, found, found_stride, row_mask):
    """log2(p_t / p_s): where the heads are close this keeps more digits than log p_t - log p_s does."""
    ratio = _shifted(teacher, found + 2 * found_stride, row_mask) - _shifted(student, found, row_mask)
    student_sum = tl.load(found + found_stride, row_mask, other=1.0)
    teacher_sum = tl.load(found + 3 * found_stride, row_mask, other=1.0)
    return ratio + tl.log2(student_sum / teacher_sum)[:, None]


@triton.jit
def log_over_mixture(ratio, teacher_weight, student_weight, STUDENT_LEADS: tl.constexpr):
    """log2(p_s / m) and log2(p_t / m) from log2(p_t / p_s), for beta between its ends; NaN if that is not finite.

    Of the head that weighs more in m, which leads, it is -log2(1 + w (q / p - 1)), with the other's probability q and
    weight w, and as exact as it is small. Held where p is so much smaller than q that it has no weight.
    """
    to_other = tl.minimum(ratio if STUDENT_LEADS else -ratio, 126.0)
    others_weight = teacher_weight if STUDENT_LEADS else student_weight
    # The minimum hides what is not finite.
    leading = 0.0 * ratio - _log2_of_1_plus(others_weight * (tl.exp2(to_other) - 1.0))
    other = leading + to_other
    if STUDENT_LEADS:
        return leading, other
    return other, leading


@triton.jit
def _log2_of_1_plus(x):
    """log2(1 + x) from -1/2 to 2^126, to 2e-7 of the result.

    1 + x = 2^e (1 + f) with 1 + f between the square roots of 1/2 and 2, and log2(1 + f) = f times a polynomial
    (minimax fit). Where e is 0 f is x, without the sum's rounding.
    """
    bits = (1.0 + x).to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) & -0x800000
    f = tl.where(exponent == 0, x, (bits - exponent).to(tl.float32, bitcast=True) - 1.0)
    polynomial = tl.fma(f, 0.129264208, -0.208933778)
    polynomial = tl.fma(f, polynomial, 0.215212268)
    polynomial = tl.fma(f, polynomial, -0.238675687)
    polynomial = tl.fma(f, polynomial, 0.287939094)
    polynomial = tl.fma(f, polynomial, -0.360716264)
    polynomial = tl.fma(f, polynomial, 0.48091028)
    polynomial = tl.fma(f, polynomial, -0.721347199)
    polynomial = tl.fma(f, polynomial, 1.442695)
    return tl.fma(f, polynomial, exponent.to(tl.float32) * 1.1920928955078125e-07)
