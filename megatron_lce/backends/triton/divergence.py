"""Kernels of divergences, limited by memory bandwidth. Each reads the products of both heads once.

_softmaxes_kernel      -> student_max, student_sum, teacher_max, teacher_sum, which the ranks merge
_divergence_kernel     -> the sums of `DivergenceStats` (, mean_shifted_logit, label_logit, has_label), merged, too
_gradient_kernel       -> gradient of the student's products
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.dot_tile import MASKED_LOGIT, fast_log2, tanh
from megatron_lce.core.divergence_types import KINDS, SIGN_OF_MOST, DivergenceStats, GradTerms, Heads
from megatron_lce.core.plan import ceil_div

_SIGN_OF_MOST = tl.constexpr(SIGN_OF_MOST)
_VEC = tl.constexpr(4)  # columns that share a running maximum, as many as a thread loads at once

# Rows of `DivergenceStats` and `GradTerms`.
_S_MAX, _S_SUM, _T_MAX, _T_SUM, *_SUMS = map(tl.constexpr, range(len(DivergenceStats._fields)))
_FORWARD_KL, _REVERSE_KL, _TV, _TV_SIGN, _JSD, _STUDENT_KL, _MEAN_SHIFTED_LOGIT, _LABEL_LOGIT, _HAS_LABEL = _SUMS
_FORWARD_TERM, _REVERSE_TERM, _TV_TERM, _JSD_TERM, _P_TERM = map(tl.constexpr, range(len(GradTerms._fields)))


class _Head(NamedTuple):
    """What the kernels read of a head."""

    raw_logits: Tensor  # [N, V] fp32, rows row_stride apart
    scale: Tensor  # [N] fp32
    softcap_scale: float | None


def divergence_softmaxes(heads: Heads, raw_logits: Tensor, stats: Tensor) -> None:
    _launch(_softmaxes_kernel, heads, raw_logits, stats)


def divergence_sums(heads: Heads, raw_logits: Tensor, stats: Tensor) -> None:
    _launch(_divergence_kernel, heads, raw_logits, stats, label_ptr=heads.labels, **_formulas(heads))


def divergence_grad_logits(heads: Heads, raw_logits: Tensor, stats: Tensor, gradient: Tensor) -> None:
    assert gradient.stride() == raw_logits.stride()[1:]
    assert heads.terms is not None
    per_row = {"terms_ptr": heads.terms, "terms_stride": heads.terms.stride(0), "out_ptr": gradient}
    _launch(_gradient_kernel, heads, raw_logits, stats, **per_row, **_formulas(heads))


def _formulas(heads: Heads) -> dict[str, Any]:
    """Return the weights of teacher and student in the mixture, and the constants that select formulas."""
    beta = float(heads.beta)
    weights = {"teacher_weight": beta, "student_weight": 1.0 - beta}  # 1 - beta would lose digits in fp32
    return weights | {kind.upper(): kind in heads.kinds for kind in KINDS} | {"STUDENT_IS_HEAVIER": beta <= 0.5}


def _launch(kernel: Any, heads: Heads, raw_logits: Tensor, stats: Tensor, **extra: Any) -> None:
    _, num_tokens, num_columns = raw_logits.shape
    # A narrow shard fills fewer warps. Measured on Hopper at 151,936 columns.
    block_v = min(4096, max(256, triton.next_power_of_2(num_columns)))
    block_n = tiles.block_rows(1, num_tokens)
    pairs = zip(raw_logits, heads.scales, heads[:2], strict=True)
    student, teacher = (_Head(logits, scale, head.softcap_scale) for logits, scale, head in pairs)
    tiles.launch(
        kernel,
        (ceil_div(num_tokens, block_n),),
        raw_logits,
        fp_fusion=False,  # a logit must have the same bits in every reading
        student_head=student,
        teacher_head=teacher,
        stats_ptr=stats,
        N=num_tokens,
        V=num_columns,
        row_stride=raw_logits.stride(1),
        stats_stride=stats.stride(0),
        BLOCK_N=block_n,
        BLOCK_V=block_v,
        num_warps=max(1, block_v // 256),
        **extra,
    )


@triton.jit(do_not_specialize=["N", "V", "stats_stride"])
def _softmaxes_kernel(
    student_head,  # `_Head`
    teacher_head,
    stats_ptr,  # [4 or more, N] fp32 out, rows stats_stride apart
    stats_stride,
    N,
    V,
    row_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Largest logit and sum of exponentials of both heads."""
    offs_n, row_mask, first = _rows_of_program(N, row_stride, BLOCK_N)
    stats = stats_ptr + offs_n
    student_scale, teacher_scale = tl.load(student_head.scale + offs_n), tl.load(teacher_head.scale + offs_n)
    zeros = tl.zeros((BLOCK_N, BLOCK_V // _VEC), tl.float32)
    student_max, student_sum = zeros + MASKED_LOGIT, zeros
    teacher_max, teacher_sum = zeros + MASKED_LOGIT, zeros
    for col_start in range(0, V, BLOCK_V):
        offs, load_mask, col_mask = _col_offsets(first, col_start, V, row_stride, BLOCK_V)
        student, _ = _logits(student_head, student_scale, offs, load_mask, col_mask)
        teacher, _ = _logits(teacher_head, teacher_scale, offs, load_mask, col_mask)
        student_max, student_sum = _online_softmax_update(student_max, student_sum, student)
        teacher_max, teacher_sum = _online_softmax_update(teacher_max, teacher_sum, teacher)
    student_max, student_sum = _online_softmax_reduce(student_max, student_sum)
    teacher_max, teacher_sum = _online_softmax_reduce(teacher_max, teacher_sum)
    tl.store(stats + _S_MAX * stats_stride, student_max, row_mask)
    tl.store(stats + _S_SUM * stats_stride, student_sum, row_mask)
    tl.store(stats + _T_MAX * stats_stride, teacher_max, row_mask)
    tl.store(stats + _T_SUM * stats_stride, teacher_sum, row_mask)


@triton.jit(do_not_specialize=["N", "V", "stats_stride"])
def _divergence_kernel(
    student_head,  # `_Head`
    teacher_head,
    stats_ptr,  # [10, N] fp32, or [13, N] with labels, rows stats_stride apart; out: the sums of these divergences
    stats_stride,
    N,
    V,
    row_stride,
    label_ptr,  # [N] int32, or None: no student's outputs
    teacher_weight,  # beta
    student_weight,  # 1 - beta
    FORWARD_KL: tl.constexpr,
    REVERSE_KL: tl.constexpr,
    TV: tl.constexpr,
    JSD: tl.constexpr,
    STUDENT_IS_HEAVIER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The part of these columns of the divergences, and of the student's outputs."""
    offs_n, row_mask, first = _rows_of_program(N, row_stride, BLOCK_N)
    stats = stats_ptr + offs_n
    student_scale, teacher_scale = tl.load(student_head.scale + offs_n), tl.load(teacher_head.scale + offs_n)
    student_max, teacher_max, student_inverse, teacher_inverse, log_sums, zero_or_nan = _softmaxes(stats, stats_stride)
    zeros = tl.zeros((BLOCK_N, BLOCK_V // _VEC), tl.float32)
    forward, reverse, apart, tv_sign = zeros, zeros, zeros, zeros
    over_student_sum, over_teacher_sum, mean_shifted_logit, label_logit = zeros, zeros, zeros, zeros
    if label_ptr is not None:
        label = tl.load(label_ptr + offs_n)
    for col_start in range(0, V, BLOCK_V):
        offs, load_mask, col_mask = _col_offsets(first, col_start, V, row_stride, BLOCK_V)
        student, _ = _logits(student_head, student_scale, offs, load_mask, col_mask)
        teacher, _ = _logits(teacher_head, teacher_scale, offs, load_mask, col_mask)
        student -= student_max
        teacher -= teacher_max
        ratio = teacher - student + log_sums
        student_exp, teacher_exp = tl.exp2(student), tl.exp2(teacher)
        if label_ptr is not None:
            mean_shifted_logit += _vec_sum(student_exp * student)
            is_label = col_mask & (col_start + tl.arange(0, BLOCK_V)[None, :] == label)
            label_logit += _vec_sum(tl.where(is_label, student, 0.0))
        if FORWARD_KL:
            forward += _vec_sum(teacher_exp * ratio)
        if REVERSE_KL:
            reverse += _vec_sum(student_exp * -ratio)
        if TV:
            p_s = student_exp * student_inverse
            sign = _sign(-ratio, 0.0)
            apart += _vec_sum(sign * (p_s - teacher_exp * teacher_inverse))
            tv_sign += _vec_sum(p_s * sign)
        if JSD:
            over_student, over_teacher = _mixture_over_both(ratio, teacher_weight, student_weight, STUDENT_IS_HEAVIER)
            over_student_sum += _vec_sum(student_exp * over_student)
            over_teacher_sum += _vec_sum(teacher_exp * over_teacher)
    if FORWARD_KL:
        forward = tl.sum(forward, 1, keep_dims=True) * teacher_inverse + zero_or_nan
        tl.store(stats + _FORWARD_KL * stats_stride, forward, row_mask)
    if REVERSE_KL:
        reverse = tl.sum(reverse, 1, keep_dims=True) * student_inverse + zero_or_nan
        tl.store(stats + _REVERSE_KL * stats_stride, reverse, row_mask)
    if TV:
        tl.store(stats + _TV * stats_stride, 0.5 * tl.sum(apart, 1, keep_dims=True) + zero_or_nan, row_mask)
        tl.store(stats + _TV_SIGN * stats_stride, tl.sum(tv_sign, 1, keep_dims=True) + zero_or_nan, row_mask)
    if JSD:
        student_kl = tl.sum(over_student_sum, 1, keep_dims=True) * -student_inverse + zero_or_nan
        teacher_kl = tl.sum(over_teacher_sum, 1, keep_dims=True) * -teacher_inverse + zero_or_nan
        jsd = student_kl * student_weight + teacher_kl * teacher_weight
        tl.store(stats + _JSD * stats_stride, jsd, row_mask)
        tl.store(stats + _STUDENT_KL * stats_stride, student_kl, row_mask)
    if label_ptr is not None:
        mean_row = stats + _MEAN_SHIFTED_LOGIT * stats_stride
        tl.store(mean_row, tl.sum(mean_shifted_logit, 1, keep_dims=True) * student_inverse, row_mask)
        tl.store(stats + _LABEL_LOGIT * stats_stride, tl.sum(label_logit, 1, keep_dims=True), row_mask)
        tl.store(stats + _HAS_LABEL * stats_stride, ((label >= 0) & (label < V)).to(tl.float32), row_mask)


@triton.jit(do_not_specialize=["N", "V", "stats_stride", "terms_stride"])
def _gradient_kernel(
    student_head,  # `_Head`
    teacher_head,
    stats_ptr,  # [10 or more, N] fp32, rows stats_stride apart
    stats_stride,
    N,
    V,
    row_stride,
    terms_ptr,  # [5, N] fp32, rows terms_stride apart
    terms_stride,
    out_ptr,  # [N, V] out, rows row_stride apart
    teacher_weight,  # beta
    student_weight,  # 1 - beta
    FORWARD_KL: tl.constexpr,
    REVERSE_KL: tl.constexpr,
    TV: tl.constexpr,
    JSD: tl.constexpr,
    STUDENT_IS_HEAVIER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradient of the student's products; 0 in rows whose terms are 0."""
    offs_n, row_mask, first = _rows_of_program(N, row_stride, BLOCK_N)
    stats = stats_ptr + offs_n
    student_scale, teacher_scale = tl.load(student_head.scale + offs_n), tl.load(teacher_head.scale + offs_n)
    student_max, teacher_max, student_inverse, teacher_inverse, log_sums, zero_or_nan = _softmaxes(stats, stats_stride)
    terms = terms_ptr + offs_n
    forward_term = tl.load(terms + _FORWARD_TERM * terms_stride)
    reverse_term = tl.load(terms + _REVERSE_TERM * terms_stride)
    tv_term, jsd_term = tl.load(terms + _TV_TERM * terms_stride), tl.load(terms + _JSD_TERM * terms_stride)
    has_gradient = (forward_term != 0) | (reverse_term != 0) | (tv_term != 0) | (jsd_term != 0)
    p_term = tl.load(terms + _P_TERM * terms_stride) + zero_or_nan
    sign_of_most = _sign(tl.load(stats + _TV_SIGN * stats_stride), _SIGN_OF_MOST / 2)
    for col_start in range(0, V, BLOCK_V):
        offs, load_mask, col_mask = _col_offsets(first, col_start, V, row_stride, BLOCK_V)
        student, capped = _logits(student_head, student_scale, offs, load_mask, col_mask)
        teacher, _ = _logits(teacher_head, teacher_scale, offs, load_mask, col_mask)
        student -= student_max
        teacher -= teacher_max
        ratio = teacher - student + log_sums
        p_s = tl.exp2(student) * student_inverse
        grad = tl.zeros_like(ratio)
        if REVERSE_KL or TV or JSD:
            per_p = grad + p_term
            if REVERSE_KL:
                per_p += ratio * reverse_term
            if TV:
                per_p += tl.where(p_s > _SIGN_OF_MOST, sign_of_most, _sign(-ratio, 0.0)) * tv_term
            if JSD:
                over_student, _ = _mixture_over_both(ratio, teacher_weight, student_weight, STUDENT_IS_HEAVIER)
                per_p += over_student * jsd_term
            grad = p_s * per_p
        if FORWARD_KL:
            grad += (p_s - tl.exp2(teacher) * teacher_inverse) * forward_term
        if student_head.softcap_scale is not None:
            grad *= 1.0 - capped * capped
        grad = tl.where(col_mask & has_gradient, grad, 0.0)
        tl.store(out_ptr + offs, grad.to(out_ptr.dtype.element_ty), load_mask & row_mask)


@triton.jit
def _rows_of_program(N, row_stride, BLOCK_N: tl.constexpr):
    """Return the program's rows [BLOCK_N, 1], which of them exist, and where their products start."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    row_mask = offs_n < N
    offs_n = tl.minimum(offs_n, N - 1)
    return offs_n, row_mask, offs_n.to(tl.int64) * row_stride


@triton.jit
def _softmaxes(stats, stats_stride):
    """Return both maxima, the inverses of both sums, log2 of the sums' ratio, and 0 or NaN."""
    student_sum, teacher_sum = tl.load(stats + _S_SUM * stats_stride), tl.load(stats + _T_SUM * stats_stride)
    log_sums, zero_or_nan = tl.log2(student_sum / teacher_sum), (student_sum + teacher_sum) * 0.0
    student_max, teacher_max = tl.load(stats + _S_MAX * stats_stride), tl.load(stats + _T_MAX * stats_stride)
    return student_max, teacher_max, 1.0 / student_sum, 1.0 / teacher_sum, log_sums, zero_or_nan


@triton.jit
def _sign(x, least):
    return tl.where(x > least, 1.0, tl.where(x < -least, -1.0, 0.0))


@triton.jit
def _col_offsets(first, col_start, V, row_stride, BLOCK_V: tl.constexpr):
    """Return offsets of the columns from this one on, which of them are stored, and which lie before V.

    A row is stored up to row_stride. Triton knows that it is a multiple of 16, and reads and writes whole vectors.
    """
    columns = col_start + tl.arange(0, BLOCK_V)[None, :]
    return first + columns, columns < row_stride, columns < V


@triton.jit
def _logits(head, scale, offs, load_mask, col_mask):
    """Return base-2 logits, masked past V, and the products or, under a softcap, their tanh."""
    raw_logits = tl.load(head.raw_logits + offs, load_mask, other=0.0)
    if head.softcap_scale is not None:
        raw_logits = tanh(raw_logits * head.softcap_scale)
    return tl.where(col_mask, raw_logits * scale, MASKED_LOGIT), raw_logits


@triton.jit
def _online_softmax_update(max_logit, total, logits):
    """Add logits to running maxima and sums of 2^(z - maximum); a sum is NaN once a logit is not finite."""
    logits = tl.reshape(logits, (logits.shape[0], logits.shape[1] // _VEC, _VEC))
    larger = tl.maximum(max_logit, tl.max(logits, 2))
    exps = tl.fma(logits, 0.0, tl.exp2(logits - larger[:, :, None]))
    return larger, total * tl.exp2(max_logit - larger) + tl.sum(exps, 2)


@triton.jit
def _online_softmax_reduce(max_logit, total):
    """Merge running maxima and sums to the row's, [BLOCK_N, 1] each."""
    largest = tl.max(max_logit, 1, keep_dims=True)
    return largest, tl.sum(total * tl.exp2(max_logit - largest), 1, keep_dims=True)


@triton.jit
def _vec_sum(values):
    """Add up neighbours, [BLOCK_N, BLOCK_V] to [BLOCK_N, BLOCK_V / _VEC]."""
    return tl.sum(tl.reshape(values, (values.shape[0], values.shape[1] // _VEC, _VEC)), 2)


@triton.jit
def _mixture_over_both(ratio, teacher_weight, student_weight, STUDENT_IS_HEAVIER: tl.constexpr):
    """Return log2(m / p_s) and log2(m / p_t) from log2(p_t / p_s), for 0 < beta < 1, finite even if that is not.

    For the head with the larger weight in m, which leads, it is log2(1 + w (q / p - 1)), where q and w are the
    probability and the weight of the other head; its error is relative. The ratio is clamped where p is negligible.
    """
    to_other = tl.minimum(ratio if STUDENT_IS_HEAVIER else -ratio, 126.0)
    others_weight = tl.zeros_like(ratio) + (teacher_weight if STUDENT_IS_HEAVIER else student_weight)
    over_leading = _log2_of_1_plus(tl.fma(others_weight, tl.exp2(to_other), -others_weight))
    over_other = over_leading - to_other
    if STUDENT_IS_HEAVIER:
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
