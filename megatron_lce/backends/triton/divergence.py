"""`read_products` of `megatron_lce.jsd`: a program reads a row of both heads' products up to three times.

A row's gradient needs its divergence, which needs both softmaxes. The results of a reading stay in registers for the
next, or come from memory if other columns contribute. Only reading takes time: a GPU's caches cannot hold the products.
"""

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.tile_products import MASKED_LOGIT, fast_log2, tanh
from megatron_lce.core.plan import ceil_div
from megatron_lce.core.two_heads import Heads

# A program's constants, measured on Hopper at 151,936 columns.
COLUMNS = 4096  # columns that it reads at a time
WARPS = 16
_NEIGHBOURS = tl.constexpr(4)  # columns that share a running maximum, as many as a thread loads at once


def intermediate_bytes(num_columns: int) -> int:
    """Bytes per token beside the arguments, 0 as nothing is allocated."""
    return 0


def read_products(
    heads: Heads,
    products: Tensor,  # [2, N, C]
    stats: Tensor,  # [6 or 9, N]
    gradient: Tensor | None = None,
    *,
    softmaxes: bool = False,
    divergence: bool = False,
) -> None:
    """Read the products for softmax statistics, sums and gradient in one launch: see `Backend`."""
    student, teacher, beta, labels, coefficient = heads
    _, num_tokens, num_columns = products.shape
    assert gradient is None or (coefficient is not None and gradient.stride() == products.stride()[1:])
    block_n = tiles.rows_of_program(1, num_tokens)
    columns = min(COLUMNS, max(256, triton.next_power_of_2(num_columns)))  # a narrow shard fills fewer, and fewer warps
    _read_products_kernel[(ceil_div(num_tokens, block_n),)](
        products[0],
        products[1],
        student.scale,
        teacher.scale,
        labels,
        stats,
        None if gradient is None else coefficient,
        gradient,
        num_tokens,
        num_columns,
        products.stride(1),
        stats.stride(0),
        student.softcap_scale,
        teacher.softcap_scale,
        float(beta),
        1.0 - beta,
        SOFTMAXES=softmaxes,
        DIVERGENCE=divergence,
        FORWARD_KL=beta == 0,
        REVERSE_KL=beta == 1,
        STUDENT_LEADS=beta <= 0.5,
        BLOCK_N=block_n,
        BLOCK_V=columns,
        num_warps=max(1, WARPS * columns // COLUMNS),
        enable_fp_fusion=False,  # a logit must have the same bits in every reading
    )


@triton.jit(do_not_specialize=["N", "V", "stats_stride"])
def _read_products_kernel(
    student_ptr,  # [N, V] fp32 products, rows row_stride apart
    teacher_ptr,  # as the student's
    student_scale_ptr,  # [N] fp32
    teacher_scale_ptr,
    label_ptr,  # [N] int32, or None: no student's outputs
    stats_ptr,  # [6, N] fp32, or [9, N] with labels, rows stats_stride apart
    coefficient_ptr,  # [N] fp32, or None
    out_ptr,  # [N, V] out, rows row_stride apart, or None: no gradient
    N,
    V,
    row_stride,
    stats_stride,
    student_softcap_scale,  # or None
    teacher_softcap_scale,
    teacher_weight,  # beta
    student_weight,  # 1 - beta, computed in fp64: fp32 would lose digits
    SOFTMAXES: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    FORWARD_KL: tl.constexpr,
    REVERSE_KL: tl.constexpr,
    STUDENT_LEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Read rows of both heads' products: for their softmaxes, for their sums, and for the student's gradient."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    row_mask = rows < N
    rows = tl.minimum(rows, N - 1)
    first = rows.to(tl.int64) * row_stride
    stats = stats_ptr + rows
    student_scale = tl.load(student_scale_ptr + rows)
    teacher_scale = tl.load(teacher_scale_ptr + rows)
    nothing = tl.zeros((BLOCK_N, BLOCK_V // _NEIGHBOURS), tl.float32)

    if SOFTMAXES:
        student_max, student_sum = nothing + MASKED_LOGIT, nothing
        teacher_max, teacher_sum = nothing + MASKED_LOGIT, nothing
        for column in range(0, V, BLOCK_V):
            places, stored, wanted = _places(first, column, V, row_stride, BLOCK_V)
            student, _ = _logits(student_ptr + places, stored, wanted, student_scale, student_softcap_scale)
            teacher, _ = _logits(teacher_ptr + places, stored, wanted, teacher_scale, teacher_softcap_scale)
            student_max, student_sum = _with_more(student_max, student_sum, student)
            teacher_max, teacher_sum = _with_more(teacher_max, teacher_sum, teacher)
        student_max, student_sum = _joined(student_max, student_sum)
        teacher_max, teacher_sum = _joined(teacher_max, teacher_sum)
        tl.store(stats, student_max, row_mask)
        tl.store(stats + stats_stride, student_sum, row_mask)
        tl.store(stats + 2 * stats_stride, teacher_max, row_mask)
        tl.store(stats + 3 * stats_stride, teacher_sum, row_mask)
    else:
        student_max = tl.load(stats)
        student_sum = tl.load(stats + stats_stride)
        teacher_max = tl.load(stats + 2 * stats_stride)
        teacher_sum = tl.load(stats + 3 * stats_stride)
    student_inverse, teacher_inverse = 1.0 / student_sum, 1.0 / teacher_sum
    log_sums = tl.log2(student_sum / teacher_sum)
    unless_nan = (student_sum + teacher_sum) * 0.0

    # The gradient of forward KL needs no sums: one reading makes both.
    AT_ONCE: tl.constexpr = FORWARD_KL and out_ptr is not None and label_ptr is None
    over_student_sum, over_teacher_sum, expected, label_logit = nothing, nothing, nothing, nothing
    if label_ptr is not None:
        label = tl.load(label_ptr + rows)
    if DIVERGENCE and not AT_ONCE:
        for back in range(0, V, BLOCK_V):  # the last columns of a reading may still be in the GPU's cache
            column = (V - 1) // BLOCK_V * BLOCK_V - back
            places, stored, wanted = _places(first, column, V, row_stride, BLOCK_V)
            student, _ = _logits(student_ptr + places, stored, wanted, student_scale, student_softcap_scale)
            teacher, _ = _logits(teacher_ptr + places, stored, wanted, teacher_scale, teacher_softcap_scale)
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
    student_kl = tl.sum(over_student_sum, 1, keep_dims=True) * -student_inverse + unless_nan
    if not DIVERGENCE:
        student_kl = tl.load(stats + 5 * stats_stride)

    if out_ptr is not None:
        coefficient = tl.load(coefficient_ptr + rows)
        factor = (coefficient if FORWARD_KL else coefficient * -student_inverse) + unless_nan
        for column in range(0, V, BLOCK_V):
            places, stored, wanted = _places(first, column, V, row_stride, BLOCK_V)
            student, capped = _logits(student_ptr + places, stored, wanted, student_scale, student_softcap_scale)
            teacher, _ = _logits(teacher_ptr + places, stored, wanted, teacher_scale, teacher_softcap_scale)
            student -= student_max
            teacher -= teacher_max
            ratio = teacher - student + log_sums
            if FORWARD_KL:
                teacher_exp = tl.exp2(teacher)
                if DIVERGENCE and AT_ONCE:
                    over_teacher_sum += _neighbours_sum(teacher_exp * -ratio)
                grad = tl.exp2(student) * student_inverse - teacher_exp * teacher_inverse
            else:
                over_student = ratio
                if not REVERSE_KL:
                    over_student, _ = _mixture_over_both(ratio, teacher_weight, student_weight, STUDENT_LEADS)
                grad = tl.exp2(student) * (over_student + student_kl)
            grad *= factor
            if student_softcap_scale is not None:
                grad *= 1.0 - capped * capped
            grad = tl.where(wanted & (coefficient != 0), grad, 0.0)
            tl.store(out_ptr + places, grad.to(out_ptr.dtype.element_ty), stored & row_mask)

    if DIVERGENCE:
        teacher_kl = tl.sum(over_teacher_sum, 1, keep_dims=True) * -teacher_inverse + unless_nan
        divergence = student_kl * student_weight + teacher_kl * teacher_weight
        if FORWARD_KL:
            divergence = teacher_kl
        elif REVERSE_KL:
            divergence = student_kl
        tl.store(stats + 4 * stats_stride, divergence, row_mask)
        tl.store(stats + 5 * stats_stride, student_kl, row_mask)
        if label_ptr is not None:
            tl.store(stats + 6 * stats_stride, tl.sum(expected, 1, keep_dims=True) * student_inverse, row_mask)
            tl.store(stats + 7 * stats_stride, tl.sum(label_logit, 1, keep_dims=True), row_mask)
            tl.store(stats + 8 * stats_stride, ((label >= 0) & (label < V)).to(tl.float32), row_mask)


@triton.jit
def _places(first, column, V, row_stride, BLOCK_V: tl.constexpr):
    """Return the places of the columns from this one on, which of them are stored, and which lie before V.

    A row is stored up to row_stride, which Triton knows to be a multiple of 16: so whole vectors are read and written.
    """
    columns = column + tl.arange(0, BLOCK_V)[None, :]
    return first + columns, columns < row_stride, columns < V


@triton.jit
def _logits(places, stored, wanted, scale, softcap_scale):
    """Return base-2 logits, masked past V, and the products, or their tanh, that they are multiples of."""
    products = tl.load(places, stored, other=0.0)
    if softcap_scale is not None:
        products = tanh(products * softcap_scale)
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

    For the head with the larger weight in m, which leads, it is log2(1 + w (q / p - 1)), with the other's probability
    q and weight w, and its error is relative. The ratio is clamped where p is too small beside q to have a weight.
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
