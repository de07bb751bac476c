"""The primitives of `megatron_lce.jsd`, and those that read both heads' logits in memory.

A divergence wants both heads' logits at once, and two fp32 accumulators of a tile that feeds the tensor cores well do
not fit in a program's registers. So one kernel makes logits, at the speed of a product, and the others read them at the
speed of the memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.compaction import compact_rows, gather_rows
from megatron_lce.backends.triton.jsd_logits import logits, logits_bytes
from megatron_lce.backends.triton.jsd_merge import merge_stats, sum_parts
from megatron_lce.backends.triton.rows import prepare_rows
from megatron_lce.backends.triton.scale import scale
from megatron_lce.backends.triton.tile_products import MASKED_LOGIT, SMALLEST_NORMAL
from megatron_lce.core.blocks import COLUMN_STEP, ceil_div

__all__ = [
    "compact_rows",
    "divergence_parts",
    "gather_rows",
    "grad_logits",
    "logits",
    "logits_bytes",
    "merge_stats",
    "prepare_rows",
    "scale",
    "sum_parts",
]

_COLUMNS = COLUMN_STEP  # of a program that reads logits; wherever they are cut, it holds the same columns


def divergence_parts(
    student: Tensor,  # [N, C] base-2 logits
    teacher: Tensor,
    found: Tensor,  # [6, N]; the first four of `Found`
    *,
    beta: float,
) -> Tensor:
    """[S, 2, N] base-2 sums over each chunk: the divergence, and KL(p_student || m)."""
    parts = student.new_empty(ceil_div(student.shape[1], _COLUMNS), 2, student.shape[0])
    _divergence_kernel[_grid(student)](
        student,
        teacher,
        found,
        parts,
        *student.shape,
        student.stride(0),
        found.stride(0),
        float(beta),
        FORWARD_KL=beta == 0,
        REVERSE_KL=beta == 1,
        **_constexprs(student),
    )
    return parts


def grad_logits(
    student: Tensor,  # [N, C] base-2 logits
    teacher: Tensor,
    found: Tensor,  # [6, N]
    coefficient: Tensor,  # [N]; 0: no gradient
    tanh_scale: Tensor | None,  # [N] factor from the student's tanh to its logits; None without a softcap
    out: Tensor,  # [N, C] of the student's dtype
    *,
    beta: float,
) -> None:
    """Gradient of the student's products."""
    _grad_logits_kernel[_grid(student)](
        student,
        teacher,
        found,
        coefficient,
        tanh_scale,
        out,
        *student.shape,
        student.stride(0),
        found.stride(0),
        out.stride(0),
        float(beta),
        FORWARD_KL=beta == 0,
        REVERSE_KL=beta == 1,
        **_constexprs(student),
    )


def _grid(logits: Tensor) -> tuple[int]:
    rows = tiles.reading_rows(logits.device)
    return (ceil_div(logits.shape[0], rows) * ceil_div(logits.shape[1], _COLUMNS),)


def _constexprs(logits: Tensor) -> dict[str, int]:
    return {"BLOCK_N": tiles.reading_rows(logits.device), "BLOCK_V": _COLUMNS, "num_warps": 1}


@triton.jit(do_not_specialize=["N", "V", "found_stride"])
def _divergence_kernel(
    student_ptr,  # [N, V] fp32, rows logits_stride apart
    teacher_ptr,  # as the student's
    found_ptr,  # [6, N] fp32, rows found_stride apart
    parts_ptr,  # [S, 2, N] fp32 out, one of a chunk of BLOCK_V columns
    N,
    V,
    logits_stride,
    found_stride,
    beta,
    FORWARD_KL: tl.constexpr,
    REVERSE_KL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Sums over each chunk: beta p_t log(p_t / m) + (1 - beta) p_s log(p_s / m), and p_s log(p_s / m).

    At the ends of beta both are p log(p / q).
    """
    chunk, rows, row_mask, columns, places = _chunk_of(N, V, logits_stride, BLOCK_N, BLOCK_V)
    student = _load(student_ptr + places, row_mask, columns, V, logits_stride)
    teacher = _load(teacher_ptr + places, row_mask, columns, V, logits_stride)
    student_stats = found_ptr + rows
    teacher_stats = found_ptr + 2 * found_stride + rows
    log_ps = _log_probability(student, student_stats, found_stride, row_mask)
    log_pt = _log_probability(teacher, teacher_stats, found_stride, row_mask)
    if FORWARD_KL or REVERSE_KL:
        # Where the heads are close this keeps more digits than log p_s - log p_t does.
        gap = _shifted(student, student_stats, row_mask) - _shifted(teacher, teacher_stats, row_mask)
        student_sum = tl.load(student_stats + found_stride, row_mask, other=1.0)
        gap += tl.log2(tl.load(teacher_stats + found_stride, row_mask, other=1.0) / student_sum)[:, None]
        divergence = tl.sum(tl.exp2(log_ps) * gap if REVERSE_KL else tl.exp2(log_pt) * -gap, 1)
        student_kl = divergence
    else:
        ps = tl.exp2(log_ps)
        pt = tl.exp2(log_pt)
        log_m = _log_mixture(ps, pt, beta)
        kl_s = ps * (log_ps - log_m)
        kl_t = pt * (log_pt - log_m)
        divergence = tl.sum(tl.fma(beta, kl_t, (1 - beta) * kl_s), 1)
        student_kl = tl.sum(kl_s, 1)
    parts = parts_ptr + chunk.to(tl.int64) * (2 * N) + rows
    tl.store(parts, divergence, row_mask)
    tl.store(parts + N, student_kl, row_mask)


@triton.jit(do_not_specialize=["N", "V", "found_stride"])
def _grad_logits_kernel(
    student_ptr,  # [N, V] fp32, rows logits_stride apart
    teacher_ptr,  # as the student's
    found_ptr,  # [6, N] fp32, rows found_stride apart
    coefficient_ptr,  # [N] fp32
    tanh_scale_ptr,  # [N] fp32, or None
    out_ptr,  # [N, V], rows out_stride apart, as far as the logits' go
    N,
    V,
    logits_stride,
    found_stride,
    out_stride,
    beta,
    FORWARD_KL: tl.constexpr,
    REVERSE_KL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """coefficient p_s (log(p_s / m) - KL(p_s || m)), and its forms at the ends; see `megatron_lce.jsd`.

    Under a softcap of the student times its slope 1 - tanh^2.
    """
    _, rows, row_mask, columns, places = _chunk_of(N, V, logits_stride, BLOCK_N, BLOCK_V)
    student = _load(student_ptr + places, row_mask, columns, V, logits_stride)
    teacher = _load(teacher_ptr + places, row_mask, columns, V, logits_stride)
    log_ps = _log_probability(student, found_ptr + rows, found_stride, row_mask)
    log_pt = _log_probability(teacher, found_ptr + 2 * found_stride + rows, found_stride, row_mask)
    divergence = tl.load(found_ptr + 4 * found_stride + rows, row_mask, other=0.0)
    student_kl = tl.load(found_ptr + 5 * found_stride + rows, row_mask, other=0.0)[:, None]
    coefficient = tl.load(coefficient_ptr + rows, row_mask, other=0.0)[:, None]
    ps = tl.exp2(log_ps)
    if FORWARD_KL:
        grad = ps - tl.exp2(log_pt)
    elif REVERSE_KL:
        grad = ps * (log_ps - log_pt - student_kl)
    else:
        grad = ps * (log_ps - _log_mixture(ps, tl.exp2(log_pt), beta) - student_kl)
    if tanh_scale_ptr is not None:
        capped = student / tl.load(tanh_scale_ptr + rows, row_mask, other=1.0)[:, None]
        grad = grad * (1.0 - capped * capped)
    # What is not finite anywhere in the row makes all of it NaN.
    grad = grad * coefficient + (divergence - divergence)[:, None]
    grad = tl.where((coefficient != 0) & (columns < V)[None, :], grad, 0.0)
    out = out_ptr + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(out, grad.to(out_ptr.dtype.element_ty), row_mask[:, None] & (columns < logits_stride)[None, :])


@triton.jit
def _chunk_of(N, V, logits_stride, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr):
    """This program's chunk of columns and its rows, and where their logits are."""
    num_chunks = tl.cdiv(V, BLOCK_V)
    chunk = tl.program_id(0) % num_chunks
    rows = tl.program_id(0) // num_chunks * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    return chunk, rows, rows < N, columns, rows.to(tl.int64)[:, None] * logits_stride + columns[None, :]


@triton.jit
def _load(logits_ptr, row_mask, columns, V, logits_stride):
    """Logits of a chunk; columns past the end have no weight in any sum.

    Read to the end of a row's storage: a bound that Triton knows to be a multiple of 16.
    """
    logits = tl.load(logits_ptr, row_mask[:, None] & (columns < logits_stride)[None, :], other=0.0)
    return tl.where((columns < V)[None, :], logits, MASKED_LOGIT)


@triton.jit
def _log_probability(logits, stats_ptr, stats_stride, row_mask):
    """log2 p of one head."""
    log_sum = tl.log2(tl.load(stats_ptr + stats_stride, row_mask, other=1.0))
    return _shifted(logits, stats_ptr, row_mask) - log_sum[:, None]


@triton.jit
def _shifted(logits, max_ptr, row_mask):
    """By the largest of the row."""
    return logits - tl.load(max_ptr, row_mask, other=0.0)[:, None]


@triton.jit
def _log_mixture(ps, pt, beta):
    """log2 m, held where 0 * log(p / m) is 0 if p_s and p_t underflow; finite for NaN too, which p_s or p_t brings."""
    return _log2_of_normal(tl.maximum(tl.fma(beta, pt, (1 - beta) * ps), SMALLEST_NORMAL))


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
