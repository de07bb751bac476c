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
def store_parts(
    parts_ptr,  # [S, 2, N] out
    divergence,
    student_kl,
    rows,
    N,
    V,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sums over this program's chunks: the same bits wherever the columns are cut."""
    CHUNKS: tl.constexpr = BLOCK_V // CHUNK
    chunks = tl.program_id(0) % tl.cdiv(V, BLOCK_V) * CHUNKS + tl.arange(0, CHUNKS)
    parts = parts_ptr + chunks.to(tl.int64)[None, :] * (2 * N) + rows[:, None]
    mask = (rows < N)[:, None] & (chunks * CHUNK < V)[None, :]
    tl.store(parts, tl.sum(tl.reshape(divergence, (BLOCK_N, CHUNKS, CHUNK)), 2), mask)
    tl.store(parts + N, tl.sum(tl.reshape(student_kl, (BLOCK_N, CHUNKS, CHUNK)), 2), mask)


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
def forward_kl(student, teacher, found, found_stride, row_mask):
    """p_t log2(p_t / p_s)."""
    pt = tl.exp2(log_probability(teacher, found + 2 * found_stride, found_stride, row_mask))
    return pt * log_ratio(student, teacher, found, found_stride, row_mask)


@triton.jit
def log_over_mixture(ratio, teacher_weight, student_weight, STUDENT_LEADS: tl.constexpr, PTX: tl.constexpr):
    """log2(p_s / m) and log2(p_t / m) from log2(p_t / p_s), for beta between its ends; NaN if that is not finite.

    Of the head that weighs more in m, which leads, it is -log2(1 + w (q / p - 1)), with the other's probability q and
    weight w, and as exact as it is small. Held where p is so much smaller than q that it has no weight.
    """
    to_other = tl.minimum(ratio if STUDENT_LEADS else -ratio, 126.0)
    others_weight = tl.zeros_like(ratio) + (teacher_weight if STUDENT_LEADS else student_weight)
    # The minimum hides what is not finite.
    leading = tl.fma(ratio, 0.0, -_log2_of_1_plus(tl.fma(others_weight, tl.exp2(to_other), -others_weight), PTX))
    other = leading + to_other
    if STUDENT_LEADS:
        return leading, other
    return other, leading


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
