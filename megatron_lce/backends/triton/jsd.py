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
    compare,
    divergences,
    place_of,
    read_logits,
    reading_constexprs,
    reading_grid,
    row_terms,
)
from megatron_lce.backends.triton.jsd_row_sums import can_share
from megatron_lce.backends.triton.rows import prepare_rows
from megatron_lce.backends.triton.scale import scale
from megatron_lce.core.blocks import COLUMN_STEP, ceil_div
from megatron_lce.core.jsd_stats import STATS_ROWS

__all__ = [
    "compact_rows",
    "divergence_and_grad",
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

_SUM_COLUMNS = COLUMN_STEP  # of a chunk: a cut of the columns falls between two, so that its sums have the same bits


def divergence_parts(
    student: Tensor,  # [N, C] base-2 logits
    teacher: Tensor,
    found: Tensor,  # [6, N]; the first four of `Found`
    *,
    beta: float,
) -> Tensor:
    """[S, 2, N] base-2 sums over each chunk: the divergence, and KL(p_student || m)."""
    num_tokens, num_columns = student.shape
    parts = student.new_empty(ceil_div(num_columns, _SUM_COLUMNS), 2, num_tokens)
    _divergence_kernel[reading_grid(student)](
        student,
        teacher,
        found,
        parts,
        num_tokens,
        num_columns,
        student.stride(0),
        found.stride(0),
        CHUNK=_SUM_COLUMNS,
        **reading_constexprs(student, beta),
    )
    return parts


def divergence_and_grad(
    student: Tensor,  # [N, C] base-2 logits
    teacher: Tensor,
    found: Tensor,  # [6, N]; the last two are filled
    coefficient: Tensor,  # [N]
    tanh_scale: Tensor | None,  # [N]
    out: Tensor,  # [N, C]
    *,
    beta: float,
) -> None:
    """What `divergence_parts` adds up to, and what `grad_logits_from_kept` makes of it."""
    if can_share(student, beta):
        grad_logits_from_kept(student, teacher, found, coefficient, tanh_scale, out, beta=beta, finds=True)
    else:
        sum_parts(divergence_parts(student, teacher, found, beta=beta), found[2 * STATS_ROWS :])
        grad_logits_from_kept(student, teacher, found, coefficient, tanh_scale, out, beta=beta)


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
    teacher_weight,
    student_weight,
    FORWARD_KL: tl.constexpr,
    REVERSE_KL: tl.constexpr,
    STUDENT_LEADS: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    rows, row_mask, block = place_of(N, tl.cdiv(V, BLOCK_V), BLOCK_N)
    column = block * BLOCK_V
    student_max, teacher_max, student_inverse, teacher_inverse, log_sums = row_terms(found_ptr + rows, found_stride)
    student, teacher = read_logits(student_ptr, teacher_ptr, rows, column, V, logits_stride, BLOCK_V)
    student_exp, teacher_exp, ratio = compare(student, teacher, student_max, teacher_max, log_sums)
    divergence, student_kl = divergences(
        student_exp,
        teacher_exp,
        ratio,
        student_inverse,
        teacher_inverse,
        teacher_weight,
        student_weight,
        FORWARD_KL,
        REVERSE_KL,
        STUDENT_LEADS,
        PTX,
        CHUNK,
    )
    chunks = column // CHUNK + tl.arange(0, BLOCK_V // CHUNK)
    parts = parts_ptr + chunks.to(tl.int64)[None, :] * (2 * N) + rows[:, None]
    mask = row_mask[:, None] & (chunks * CHUNK < V)[None, :]
    tl.store(parts, divergence, mask)
    tl.store(parts + N, student_kl, mask)
