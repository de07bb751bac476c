"""What kernels make of both heads' logits: where they are in memory, their probabilities and those of the mixture."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.tile_products import MASKED_LOGIT, fast_log2
from megatron_lce.core.blocks import ceil_div

WARP_COLUMNS = 512  # that a warp which reads logits has at once


def reading_grid(logits: Tensor, warps: int = 1, programs_more: int = 0) -> tuple[int]:
    """Programs of so many warps, for all columns of some rows, and some more for each of these."""
    rows = tiles.reading_rows(logits.device)
    return (ceil_div(logits.shape[0], rows) * (ceil_div(logits.shape[1], warps * WARP_COLUMNS) + programs_more),)


def reading_constexprs(logits: Tensor, beta: float, warps: int = 1) -> dict[str, Any]:
    return {
        "teacher_weight": float(beta),
        "student_weight": 1.0 - beta,
        "FORWARD_KL": beta == 0,
        "REVERSE_KL": beta == 1,
        "STUDENT_LEADS": beta <= 0.5,
        "PTX": tiles.speaks_ptx(),
        "BLOCK_N": tiles.reading_rows(logits.device),
        "BLOCK_V": warps * WARP_COLUMNS,
        "num_warps": warps,
    }


@triton.jit
def place_of(N, programs_of_row, BLOCK_N: tl.constexpr):
    """This program's rows, which of them are there (the last one stands in for the others), and its number in a row."""
    rows = tl.program_id(0) // programs_of_row * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.minimum(rows, N - 1), rows < N, tl.program_id(0) % programs_of_row


@triton.jit
def read_logits(
    student_ptr,  # [N, V], rows logits_stride apart
    teacher_ptr,
    rows,
    column,
    V,
    logits_stride,
    BLOCK_V: tl.constexpr,
):
    """Both heads' logits of the columns from this one on; those past the end have no weight in any sum."""
    columns = column + tl.arange(0, BLOCK_V)
    places = rows.to(tl.int64)[:, None] * logits_stride + columns[None, :]
    if column + BLOCK_V <= V:
        student = tl.load(student_ptr + places)
        teacher = tl.load(teacher_ptr + places)
    else:
        # To the end of a row's storage: a bound that Triton knows to be a multiple of 16.
        stored, wanted = (columns < logits_stride)[None, :], (columns < V)[None, :]
        student = tl.where(wanted, tl.load(student_ptr + places, stored, other=0.0), MASKED_LOGIT)
        teacher = tl.where(wanted, tl.load(teacher_ptr + places, stored, other=0.0), MASKED_LOGIT)
    return student, teacher


@triton.jit
def row_terms(found, found_stride):
    """Student's and teacher's largest logit, 1 / sum of either, log2(student's sum / teacher's), [BLOCK_N, 1] each."""
    student_sum = tl.load(found + found_stride)[:, None]
    teacher_sum = tl.load(found + 3 * found_stride)[:, None]
    return (
        tl.load(found)[:, None],
        tl.load(found + 2 * found_stride)[:, None],
        1.0 / student_sum,
        1.0 / teacher_sum,
        tl.log2(student_sum / teacher_sum),
    )


@triton.jit
def compare(student, teacher, student_max, teacher_max, log_sums):
    """p_student and p_teacher times the sums of their rows, and log2(p_teacher / p_student).

    Where the heads are close the ratio keeps more digits so than by log p_teacher - log p_student.
    """
    student -= student_max
    teacher -= teacher_max
    return tl.exp2(student), tl.exp2(teacher), teacher - student + log_sums


@triton.jit
def divergences(
    student_exp,  # what `compare` gives
    teacher_exp,
    ratio,
    student_inverse,
    teacher_inverse,
    teacher_weight,  # beta
    student_weight,  # 1 - beta, of which fp32 would lose digits
    FORWARD_KL: tl.constexpr,
    REVERSE_KL: tl.constexpr,
    STUDENT_LEADS: tl.constexpr,
    PTX: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sums over each chunk: beta p_t log(p_t / m) + (1 - beta) p_s log(p_s / m), and p_s log(p_s / m).

    At the ends of beta both are p log(p / q). [BLOCK_N, BLOCK_V / CHUNK] each, NaN where a ratio is not finite.
    """
    if FORWARD_KL:
        divergence = _chunk_sums(teacher_exp * ratio, CHUNK) * teacher_inverse
        student_kl = divergence
    elif REVERSE_KL:
        divergence = _chunk_sums(student_exp * ratio, CHUNK) * -student_inverse
        student_kl = divergence
    else:
        teacher_exp = tl.fma(ratio, 0.0, teacher_exp)
        over_student, over_teacher = mixture_over_both(ratio, teacher_weight, student_weight, STUDENT_LEADS, PTX)
        student_kl = _chunk_sums(student_exp * over_student, CHUNK) * -student_inverse
        teacher_kl = _chunk_sums(teacher_exp * over_teacher, CHUNK) * -teacher_inverse
        divergence = tl.fma(student_kl, student_weight, teacher_kl * teacher_weight)
    return divergence, student_kl


@triton.jit
def _chunk_sums(values, CHUNK: tl.constexpr):
    """[BLOCK_N, BLOCK_V] -> [BLOCK_N, BLOCK_V / CHUNK]."""
    return tl.sum(tl.reshape(values, (values.shape[0], values.shape[1] // CHUNK, CHUNK)), 2)


@triton.jit
def mixture_over_both(ratio, teacher_weight, student_weight, STUDENT_LEADS: tl.constexpr, PTX: tl.constexpr):
    """log2(m / p_s) and log2(m / p_t) from log2(p_t / p_s), for beta between its ends; finite though that is not.

    Of the head that weighs more in m, which leads, it is log2(1 + w (q / p - 1)), with the other's probability q and
    weight w, and as exact as it is small. Held where p is so much smaller than q that it has no weight.
    """
    to_other = tl.minimum(ratio if STUDENT_LEADS else -ratio, 126.0)
    others_weight = tl.zeros_like(ratio) + (teacher_weight if STUDENT_LEADS else student_weight)
    over_leading = _log2_of_1_plus(tl.fma(others_weight, tl.exp2(to_other), -others_weight), PTX)
    over_other = over_leading - to_other
    if STUDENT_LEADS:
        return over_leading, over_other
    return over_other, over_leading


@triton.jit
def _log2_of_1_plus(x, PTX: tl.constexpr):
    """log2(1 + x) from -1/2 to 2^126, to 8e-7 of the result; to 3e-7 where x is small.

    Up to 1/4 x times a polynomial (minimax fit): the logarithm of the sum would lose what its rounding loses of x.
    """
    polynomial = tl.fma(x, 0.22733094, -0.26152116)
    polynomial = tl.fma(x, polynomial, 0.28770784)
    polynomial = tl.fma(x, polynomial, -0.36000082)
    polynomial = tl.fma(x, polynomial, 0.4809085)
    polynomial = tl.fma(x, polynomial, -0.7213528)
    polynomial = tl.fma(x, polynomial, 1.442695)
    return tl.where(tl.abs(x) <= 0.25, x * polynomial, fast_log2(1.0 + x, PTX))
