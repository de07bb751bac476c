"""What kernels make of both heads' logits: where they are in memory, their probabilities and those of the mixture."""

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.tile_products import MASKED_LOGIT, fast_log2
from megatron_lce.core.blocks import COLUMN_STEP, ceil_div

READ_COLUMNS = 512  # of a program that reads logits
_SUM_COLUMNS = COLUMN_STEP  # a cut of the columns falls between two of them


def reading_grid(logits: Tensor) -> tuple[int]:
    rows = tiles.reading_rows(logits.device)
    return (ceil_div(logits.shape[0], rows) * ceil_div(logits.shape[1], READ_COLUMNS),)


def reading_constexprs(logits: Tensor) -> dict[str, int]:
    return {
        "PTX": tiles.speaks_ptx(),
        "BLOCK_N": tiles.reading_rows(logits.device),
        "BLOCK_V": READ_COLUMNS,
        "CHUNK": _SUM_COLUMNS,
        "num_warps": 1,
    }


def new_parts(logits: Tensor) -> Tensor:
    """[S, 2, N] for the sums over each chunk: the divergence, and KL(p_student || m)."""
    return logits.new_empty(ceil_div(logits.shape[1], _SUM_COLUMNS), 2, logits.shape[0])


@triton.jit
def place_of(N, V, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr):
    """This program's rows, which of them are there (the last one stands in for the others), and its first column."""
    num_blocks = tl.cdiv(V, BLOCK_V)
    rows = tl.program_id(0) // num_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.minimum(rows, N - 1), rows < N, tl.program_id(0) % num_blocks * BLOCK_V


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
def chunk_sums(values, CHUNK: tl.constexpr):
    """[BLOCK_N, BLOCK_V] -> [BLOCK_N, BLOCK_V / CHUNK]."""
    return tl.sum(tl.reshape(values, (values.shape[0], values.shape[1] // CHUNK, CHUNK)), 2)


@triton.jit
def store_parts(
    parts_ptr,  # [S, 2, N] out
    divergence,  # [BLOCK_N, CHUNKS]
    student_kl,
    rows,
    row_mask,
    N,
    column,
    V,
    CHUNK: tl.constexpr,
):
    """Sums over the chunks from this column on: the same bits wherever the columns are cut."""
    chunks = column // CHUNK + tl.arange(0, divergence.shape[1])
    parts = parts_ptr + chunks.to(tl.int64)[None, :] * (2 * N) + rows[:, None]
    mask = row_mask[:, None] & (chunks * CHUNK < V)[None, :]
    tl.store(parts, divergence, mask)
    tl.store(parts + N, student_kl, mask)


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
