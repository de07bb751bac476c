"""Kernels of `megatron_lce.api.linear_jsd`. Each reads the products of both heads once.

    _softmaxes_kernel      -> student_max, student_sum, teacher_max, teacher_sum
    _divergence_kernel     -> divergence, student_kl (, expected, label_logit, label_owned)
    _gradient_kernel       -> gradient of the student's products

Between them the ranks merge the softmaxes, then the sums. All kernels are limited by memory bandwidth.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.tile_products import MASKED_LOGIT, fast_log2, tanh
from megatron_lce.core.jsd_heads import Heads
from megatron_lce.core.plan import ceil_div

# A program's constants, measured on Hopper at 151,936 columns.
COLUMNS = 4096  # columns that it reads at a time
WARPS = 16
_NEIGHBOURS = tl.constexpr(4)  # columns that share a running maximum, as many as a thread loads at once


class _Head(NamedTuple):
    """What the kernels read of a head."""

    products: Tensor  # [N, V] fp32, rows row_stride apart
    scale: Tensor | None  # [N] fp32
    softcap_scale: float | None


def intermediate_bytes(num_columns: int) -> int:
    return 0


def softmaxes_of_products(heads: Heads, products: Tensor, stats: Tensor) -> None:
    _launch(_softmaxes_kernel, heads, products, stats)


def divergence_of_products(heads: Heads, products: Tensor, stats: Tensor) -> None:
    _launch(_divergence_kernel, heads, products, stats, heads.labels, *_mixture(heads.beta))


def gradient_of_products(heads: Heads, products: Tensor, stats: Tensor, gradient: Tensor) -> None:
    assert gradient.stride() == products.stride()[1:]
    _launch(_gradient_kernel, heads, products, stats, heads.coefficient, gradient, *_mixture(heads.beta))


def _mixture(beta: float) -> tuple[float, float, bool, bool, bool]:
    """Return the weights of teacher and student, and the constants that select a formula."""
    return float(beta), 1.0 - beta, beta == 0, beta == 1, beta <= 0.5  # 1 - beta would lose digits in fp32


def _launch(kernel: Any, heads: Heads, products: Tensor, stats: Tensor, *own: Any) -> None:
    _, num_tokens, num_columns = products.shape
    block_n = tiles.rows_of_program(1, num_tokens)
    columns = min(COLUMNS, max(256, triton.next_power_of_2(num_columns)))  # a narrow shard fills fewer, and fewer warps
    both = (_Head(own, head.scale, head.softcap_scale) for own, head in zip(products, heads[:2], strict=True))
    sizes = num_tokens, num_columns, products.stride(1), stats.stride(0)
    constants = {"BLOCK_N": block_n, "BLOCK_V": columns, "num_warps": max(1, WARPS * columns // COLUMNS)}
    # Not fused: a logit must have the same bits in every reading.
    launch = tiles.launch(kernel, (ceil_div(num_tokens, block_n),), products, fused=False)
    launch(*both, stats, *sizes, *own, **constants)


@triton.jit(do_not_specialize=["N", "V", "stats_stride"])
def _softmaxes_kernel(
    student_head,  # `_Head`
    teacher_head,
    stats_ptr,  # [4 or more, N] fp32 out, rows stats_stride apart
    N,
    V,
    row_stride,
    stats_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Largest logit and sum of exponentials of both heads."""
    rows, row_mask, first = _rows_of_program(N, row_stride, BLOCK_N)
    student_scale, teacher_scale = tl.load(student_head.scale + rows), tl.load(teacher_head.scale + rows)
    nothing = tl.zeros((BLOCK_N, BLOCK_V // _NEIGHBOURS), tl.float32)
    student_max, student_sum = nothing + MASKED_LOGIT, nothing
    teacher_max, teacher_sum = nothing + MASKED_LOGIT, nothing
    for column in range(0, V, BLOCK_V):
        places, stored, wanted = _places(first, column, V, row_stride, BLOCK_V)
        student, _ = _logits(student_head, student_scale, places, stored, wanted)
        teacher, _ = _logits(teacher_head, teacher_scale, places, stored, wanted)
        student_max, student_sum = _with_more(student_max, student_sum, student)
        teacher_max, teacher_sum = _with_more(teacher_max, teacher_sum, teacher)
    student_max, student_sum = _joined(student_max, student_sum)
    teacher_max, teacher_sum = _joined(teacher_max, teacher_sum)
    stats = stats_ptr + rows
    tl.store(stats, student_max, row_mask)
    tl.store(stats + stats_stride, student_sum, row_mask)
    tl.store(stats + 2 * stats_stride, teacher_max, row_mask)
    tl.store(stats + 3 * stats_stride, teacher_sum, row_mask)


@triton.jit(do_not_specialize=["N", "V", "stats_stride"])
def _divergence_kernel(
    student_head,  # `_Head`
    teacher_head,
    stats_ptr,  # [6, N] fp32, or [9, N] with labels, rows stats_stride apart; out from the fifth row on
    N,
    V,
    row_stride,
    stats_stride,
    label_ptr,  # [N] int32, or None: no student's outputs
    teacher_weight,  # beta
    student_weight,  # 1 - beta
    FORWARD_KL: tl.constexpr,
    REVERSE_KL: tl.constexpr,
    STUDENT_LEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The part of these columns of the divergence, of KL(p_student || m), and of the student's outputs."""
    rows, row_mask, first = _rows_of_program(N, row_stride, BLOCK_N)
    student_scale, teacher_scale = tl.load(student_head.scale + rows), tl.load(teacher_head.scale + rows)
    stats = stats_ptr + rows
    student_max, student_sum, teacher_max, teacher_sum, log_sums, unless_nan = _softmaxes(stats, stats_stride)
    nothing = tl.zeros((BLOCK_N, BLOCK_V // _NEIGHBOURS), tl.float32)
    over_student_sum, over_teacher_sum, expected, label_logit = nothing, nothing, nothing, nothing
    if label_ptr is not None:
        label = tl.load(label_ptr + rows)
    for column in range(0, V, BLOCK_V):
        places, stored, wanted = _places(first, column, V, row_stride, BLOCK_V)
        student, _ = _logits(student_head, student_scale, places, stored, wanted)
        teacher, _ = _logits(teacher_head, teacher_scale, places, stored, wanted)
        student -= student_max
        teacher -= teacher_max
        ratio = teacher - student + log_sums
        if label_ptr is not None:
            expected += _neighbours_sum(tl.exp2(student) * student)
            of_label = wanted & (column + tl.arange(0, BLOCK_V)[None, :] == label)
            label_logit += _neighbours_sum(tl.where(of_label, student, 0.0))
        if FORWARD_KL:
            over_teacher_sum += _neighbours_sum(tl.exp2(teacher) * -ratio)
        elif REVERSE_KL:
            over_student_sum += _neighbours_sum(tl.exp2(student) * ratio)
        else:
            over_student, over_teacher = _mixture_over_both(ratio, teacher_weight, student_weight, STUDENT_LEADS)
            over_student_sum += _neighbours_sum(tl.exp2(student) * over_student)
            over_teacher_sum += _neighbours_sum(tl.exp2(teacher) * over_teacher)
    student_kl = tl.sum(over_student_sum, 1, keep_dims=True) * -(1.0 / student_sum) + unless_nan
    teacher_kl = tl.sum(over_teacher_sum, 1, keep_dims=True) * -(1.0 / teacher_sum) + unless_nan
    divergence = student_kl * student_weight + teacher_kl * teacher_weight
    if FORWARD_KL:
        divergence = teacher_kl
    elif REVERSE_KL:
        divergence = student_kl
    tl.store(stats + 4 * stats_stride, divergence, row_mask)
    tl.store(stats + 5 * stats_stride, student_kl, row_mask)
    if label_ptr is not None:
        tl.store(stats + 6 * stats_stride, tl.sum(expected, 1, keep_dims=True) * (1.0 / student_sum), row_mask)
        tl.store(stats + 7 * stats_stride, tl.sum(label_logit, 1, keep_dims=True), row_mask)
        tl.store(stats + 8 * stats_stride, ((label >= 0) & (label < V)).to(tl.float32), row_mask)


@triton.jit(do_not_specialize=["N", "V", "stats_stride"])
def _gradient_kernel(
    student_head,  # `_Head`
    teacher_head,
    stats_ptr,  # [6 or more, N] fp32, rows stats_stride apart
    N,
    V,
    row_stride,
    stats_stride,
    coefficient_ptr,  # [N] fp32
    out_ptr,  # [N, V] out, rows row_stride apart
    teacher_weight,  # beta
    student_weight,  # 1 - beta
    FORWARD_KL: tl.constexpr,
    REVERSE_KL: tl.constexpr,
    STUDENT_LEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradient of the student's products; 0 in rows whose coefficient is 0."""
    rows, row_mask, first = _rows_of_program(N, row_stride, BLOCK_N)
    student_scale, teacher_scale = tl.load(student_head.scale + rows), tl.load(teacher_head.scale + rows)
    stats = stats_ptr + rows
    student_max, student_sum, teacher_max, teacher_sum, log_sums, unless_nan = _softmaxes(stats, stats_stride)
    student_inverse, teacher_inverse = 1.0 / student_sum, 1.0 / teacher_sum
    student_kl = tl.load(stats + 5 * stats_stride)
    coefficient = tl.load(coefficient_ptr + rows)
    factor = (coefficient if FORWARD_KL else coefficient * -student_inverse) + unless_nan
    for column in range(0, V, BLOCK_V):
        places, stored, wanted = _places(first, column, V, row_stride, BLOCK_V)
        student, capped = _logits(student_head, student_scale, places, stored, wanted)
        teacher, _ = _logits(teacher_head, teacher_scale, places, stored, wanted)
        student -= student_max
        teacher -= teacher_max
        if FORWARD_KL:
            grad = tl.exp2(student) * student_inverse - tl.exp2(teacher) * teacher_inverse
        else:
            over_student = teacher - student + log_sums
            if not REVERSE_KL:
                over_student, _ = _mixture_over_both(over_student, teacher_weight, student_weight, STUDENT_LEADS)
            grad = tl.exp2(student) * (over_student + student_kl)
        grad *= factor
        if student_head.softcap_scale is not None:
            grad *= 1.0 - capped * capped
        grad = tl.where(wanted & (coefficient != 0), grad, 0.0)
        tl.store(out_ptr + places, grad.to(out_ptr.dtype.element_ty), stored & row_mask)


@triton.jit
def _rows_of_program(N, row_stride, BLOCK_N: tl.constexpr):
    """Return the program's rows [BLOCK_N, 1], which of them exist, and where their products start."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    row_mask = rows < N
    rows = tl.minimum(rows, N - 1)
    return rows, row_mask, rows.to(tl.int64) * row_stride


@triton.jit
def _softmaxes(stats, stats_stride):
    """Load student_max, student_sum, teacher_max, teacher_sum; also return log2 of the ratio of sums, and 0 or NaN."""
    student_max, student_sum = tl.load(stats), tl.load(stats + stats_stride)
    teacher_max, teacher_sum = tl.load(stats + 2 * stats_stride), tl.load(stats + 3 * stats_stride)
    log_sums, unless_nan = tl.log2(student_sum / teacher_sum), (student_sum + teacher_sum) * 0.0
    return student_max, student_sum, teacher_max, teacher_sum, log_sums, unless_nan


@triton.jit
def _places(first, column, V, row_stride, BLOCK_V: tl.constexpr):
    """Return the places of the columns from this one on, which of them are stored, and which lie before V.

    A row is stored up to row_stride. Triton knows that it is a multiple of 16, and reads and writes whole vectors.
    """
    columns = column + tl.arange(0, BLOCK_V)[None, :]
    return first + columns, columns < row_stride, columns < V


@triton.jit
def _logits(head, scale, places, stored, wanted):
    """Return base-2 logits, masked past V, and the products or, under a softcap, their tanh."""
    products = tl.load(head.products + places, stored, other=0.0)
    if head.softcap_scale is not None:
        products = tanh(products * head.softcap_scale)
    return tl.where(wanted, products * scale, MASKED_LOGIT), products


@triton.jit
def _with_more(max_logit, total, logits):
    """Add logits to running maxima and sums of 2^(z - maximum); a sum is NaN once a logit is not finite."""
    logits = tl.reshape(logits, (logits.shape[0], logits.shape[1] // _NEIGHBOURS, _NEIGHBOURS))
    larger = tl.maximum(max_logit, tl.max(logits, 2))
    exps = tl.fma(logits, 0.0, tl.exp2(logits - larger[:, :, None]))
    return larger, total * tl.exp2(max_logit - larger) + tl.sum(exps, 2)


@triton.jit
def _joined(max_logit, total):
    """Merge running maxima and sums to the row's, [BLOCK_N, 1] each."""
    largest = tl.max(max_logit, 1, keep_dims=True)
    return largest, tl.sum(total * tl.exp2(max_logit - largest), 1, keep_dims=True)


@triton.jit
def _neighbours_sum(values):
    """Add up neighbours, [BLOCK_N, BLOCK_V] to [BLOCK_N, BLOCK_V / _NEIGHBOURS]."""
    return tl.sum(tl.reshape(values, (values.shape[0], values.shape[1] // _NEIGHBOURS, _NEIGHBOURS)), 2)


@triton.jit
def _mixture_over_both(ratio, teacher_weight, student_weight, STUDENT_LEADS: tl.constexpr):
    """Return log2(m / p_s) and log2(m / p_t) from log2(p_t / p_s), for 0 < beta < 1, finite even if that is not.

    For the head with the larger weight in m, which leads, it is log2(1 + w (q / p - 1)), where q and w are the
    probability and the weight of the other head; its error is relative. The ratio is clamped where p is negligible.
    """
    to_other = tl.minimum(ratio if STUDENT_LEADS else -ratio, 126.0)
    others_weight = tl.zeros_like(ratio) + (teacher_weight if STUDENT_LEADS else student_weight)
    over_leading = _log2_of_1_plus(tl.fma(others_weight, tl.exp2(to_other), -others_weight))
    over_other = over_leading - to_other
    if STUDENT_LEADS:
        return over_leading, over_other
    return over_other, over_leading


@triton.jit
def _log2_of_1_plus(x):
    """Return log2(1 + x) for x from -1/2 to 2^126, to a relative error of 8e-7, of 3e-7 for small x.

    Up to 1/4 it is x times a polynomial (minimax fit), as rounding 1 + x loses digits of x.
    """
    polynomial = tl.fma(x, 0.22733094, -0.26152116)
    polynomial = tl.fma(x, polynomial, 0.28770784)
    polynomial = tl.fma(x, polynomial, -0.36000082)
    polynomial = tl.fma(x, polynomial, 0.4809085)
    polynomial = tl.fma(x, polynomial, -0.7213528)
    polynomial = tl.fma(x, polynomial, 1.442695)
    return tl.where(tl.abs(x) <= 0.25, x * polynomial, fast_log2(1.0 + x))
