"""The primitives of `megatron_lce.jsd`, and the one that looks at both heads' logits in memory.

A divergence wants the statistics of both heads' whole rows before it can look at a logit. So one kernel makes logits,
at the speed of a product, and others read them at the speed of the memory; a gradient whose row's statistics are there
is made of both heads' products in one.
"""

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton.compaction import compact_rows, gather_rows
from megatron_lce.backends.triton.jsd_gradient import grad_logits, grad_logits_bytes, grad_logits_from_kept
from megatron_lce.backends.triton.jsd_logits import logits, logits_bytes
from megatron_lce.backends.triton.jsd_merge import merge_stats, sum_parts
from megatron_lce.backends.triton.jsd_probabilities import (
    chunk_sums,
    compare,
    mixture_over_both,
    new_parts,
    place_of,
    read_logits,
    reading_constexprs,
    reading_grid,
    row_terms,
    store_parts,
)
from megatron_lce.backends.triton.rows import prepare_rows
from megatron_lce.backends.triton.scale import scale

__all__ = [
    "compact_rows",
    "divergence_parts",
    "gather_rows",
    "grad_logits",
    "grad_logits_bytes",
    "grad_logits_from_kept",
    "logits",
    "logits_bytes",
    "merge_stats",
    "prepare_rows",
    "scale",
    "sum_parts",
]


def divergence_parts(
    student: Tensor,  # [N, C] base-2 logits
    teacher: Tensor,
    found: Tensor,  # [6, N]; the first four of `Found`
    *,
    beta: float,
) -> Tensor:
    """[S, 2, N] base-2 sums over each chunk: the divergence, and KL(p_student || m)."""
    parts = new_parts(student)
    _divergence_kernel[reading_grid(student)](
        student,
        teacher,
        found,
        parts,
        *student.shape,
        student.stride(0),
        found.stride(0),
        float(beta),
        1.0 - beta,
        FORWARD_KL=beta == 0,
        REVERSE_KL=beta == 1,
        STUDENT_LEADS=beta <= 0.5,
        **reading_constexprs(student),
    )
    return parts


@triton.jit(do_not_specialize=["N", "V", "found_stride"])
def _divergence_kernel(
    student_ptr,  # [N, V] fp32, rows logits_stride apart
    teacher_ptr,  # as the student's
    found_ptr,  # [6, N] fp32, rows found_stride apart
    parts_ptr,  # [S, 2, N] fp32 out, one of a chunk of CHUNK columns
    N,
    V,
    logits_stride,
    found_stride,
    teacher_weight,  # beta
    student_weight,  # 1 - beta, of which fp32 would lose digits
    FORWARD_KL: tl.constexpr,
    REVERSE_KL: tl.constexpr,
    STUDENT_LEADS: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sums over each chunk: beta p_t log(p_t / m) + (1 - beta) p_s log(p_s / m), and p_s log(p_s / m).

    At the ends of beta both are p log(p / q).
    """
    rows, row_mask, column = place_of(N, V, BLOCK_N, BLOCK_V)
    student_max, teacher_max, student_inverse, teacher_inverse, log_sums = row_terms(found_ptr + rows, found_stride)
    student, teacher = read_logits(student_ptr, teacher_ptr, rows, column, V, logits_stride, BLOCK_V)
    student_exp, teacher_exp, ratio = compare(student, teacher, student_max, teacher_max, log_sums)
    if FORWARD_KL:
        divergence = chunk_sums(teacher_exp * ratio, CHUNK) * teacher_inverse
        student_kl = divergence
    elif REVERSE_KL:
        divergence = chunk_sums(student_exp * ratio, CHUNK) * -student_inverse
        student_kl = divergence
    else:
        over_student, over_teacher = mixture_over_both(ratio, teacher_weight, student_weight, STUDENT_LEADS, PTX)
        # NaN where the ratio is not finite.
        student_kl = chunk_sums(student_exp * tl.fma(ratio, 0.0, over_student), CHUNK) * -student_inverse
        teacher_kl = chunk_sums(teacher_exp * over_teacher, CHUNK) * -teacher_inverse
        divergence = tl.fma(student_kl, student_weight, teacher_kl * teacher_weight)
    store_parts(parts_ptr, divergence, student_kl, rows, row_mask, N, column, V, CHUNK)
