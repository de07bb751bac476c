"""Gradients of `megatron_lce.jsd`: from both heads' logits in memory, or from their products once more."""

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.jsd_probabilities import (
    compare,
    divergences,
    mixture_over_both,
    place_of,
    read_logits,
    reading_constexprs,
    reading_grid,
    row_terms,
)
from megatron_lce.backends.triton.jsd_row_sums import (
    REGISTERS,
    WARPS,
    room_to_share,
    share_part,
    share_sums,
    shared_sums,
)
from megatron_lce.backends.triton.tile_products import descriptor, halves, tanh, tile_position, tile_products, upcasts
from megatron_lce.core.blocks import BlockBytes, ceil_div
from megatron_lce.core.jsd_stats import Head
from megatron_lce.core.products import aligned, copies_of


def grad_logits_bytes(student: Head, teacher: Head) -> BlockBytes | None:
    """What `grad_logits` takes for its output and its copies of unaligned inputs; None: its loop is of one dtype."""
    if student.hidden.dtype != teacher.hidden.dtype:
        return None
    copies = [copies_of(head.hidden) for head in (student, teacher)]
    return BlockBytes(student.hidden.element_size(), sum(c.token for c in copies), sum(c.column for c in copies))


def grad_logits(
    student: Head,  # [N, H_s], [C, H_s]
    teacher: Head,  # [N, H_t], [C, H_t]
    scale: Tensor,  # [N] fp32 factor from products to base-2 logits at a logits_scale of 1
    found: Tensor,  # [6, N]
    coefficient: Tensor,  # [N]; 0: no gradient
    out: Tensor,  # [N, C] of the student's dtype
    *,
    beta: float,
) -> None:
    """Gradient of one slab of the student's products, of both heads' logits made once more."""
    tile = tiles.choose_pair_tiles(out.dtype, out.device)
    inputs, sizes = [], []
    for head in (student, teacher):
        hidden, weight = aligned(head.hidden), aligned(head.weight)
        inputs += [
            descriptor(hidden, tile.block_n, tile.block_h),
            descriptor(weight, tile.block_v, tile.block_h),
            head.row_scale(scale),
        ]
        sizes.append(hidden.shape[1])
    num_tokens, num_columns = out.shape
    num_tiles = ceil_div(num_tokens, tile.block_n) * ceil_div(num_columns, tile.block_v)
    _grad_logits_kernel[(min(num_tiles, tiles.num_programs(out.device)),)](
        *inputs,
        found,
        coefficient,
        descriptor(out, tile.block_n, tile.block_v // 2),
        num_tokens,
        num_columns,
        *sizes,
        found.stride(0),
        student.softcap_scale or 0.0,
        teacher.softcap_scale or 0.0,
        float(beta),
        1.0 - beta,
        FORWARD_KL=beta == 0,
        REVERSE_KL=beta == 1,
        STUDENT_LEADS=beta <= 0.5,
        STUDENT_SOFTCAP=student.softcap is not None,
        TEACHER_SOFTCAP=teacher.softcap is not None,
        UPCAST=upcasts(out.dtype, tiles.interpreting()),
        PTX=tiles.speaks_ptx(),
        BLOCK_N=tile.block_n,
        BLOCK_V=tile.block_v,
        BLOCK_H=tile.block_h,
        GROUP_N=tiles.GROUP_N,
        num_warps=tile.num_warps,
        num_stages=tile.more_stages,
        enable_fp_fusion=False,  # logits as forward had them, or z - max is off by what its rounding was
    )


def grad_logits_from_kept(
    student: Tensor,  # [N, C] base-2 logits
    teacher: Tensor,
    found: Tensor,  # [6, N]
    coefficient: Tensor,  # [N]; 0: no gradient
    tanh_scale: Tensor | None,  # [N] factor from the student's tanh to its logits; None without a softcap
    out: Tensor,  # [N, C] of the student's dtype
    *,
    beta: float,
    finds: bool = False,
) -> None:
    """The same from logits in memory; `finds`: and the last two rows of `found`, where `can_share` allows."""
    warps = WARPS if finds else 1
    _grad_from_kept_kernel[reading_grid(student, warps, programs_more=int(finds))](
        student,
        teacher,
        found,
        coefficient,
        tanh_scale,
        out,
        room_to_share(student) if finds else None,
        *student.shape,
        student.stride(0),
        found.stride(0),
        out.stride(0),
        **({"maxnreg": REGISTERS} if finds and 0 < beta < 1 else {}),
        **reading_constexprs(student, beta, warps),
    )


@triton.jit(do_not_specialize=["N", "V", "found_stride"])
def _grad_logits_kernel(
    student_hidden_desc,  # [N, H_s]
    student_weight_desc,  # [V, H_s]
    student_scale_ptr,  # [N] fp32
    teacher_hidden_desc,
    teacher_weight_desc,
    teacher_scale_ptr,
    found_ptr,  # [6, N] fp32, rows found_stride apart
    coefficient_ptr,  # [N] fp32
    out_desc,  # [N, V] out
    N,
    V,
    STUDENT_H,
    TEACHER_H,
    found_stride,
    student_softcap_scale,
    teacher_softcap_scale,
    teacher_weight,
    student_weight,
    FORWARD_KL: tl.constexpr,
    REVERSE_KL: tl.constexpr,
    STUDENT_LEADS: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """A tile's logits of the teacher, then those of the student, and what becomes of both.

    As turns of one loop, so that the next product's inputs are on their way under the end of this one.
    """
    num_row_blocks = tl.cdiv(N, BLOCK_N)
    num_column_tiles = tl.cdiv(V, BLOCK_V)
    num_tiles = tl.cdiv(num_row_blocks * num_column_tiles - tl.program_id(0), tl.num_programs(0))
    last_products = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for turn in tl.range(0, 2 * num_tiles, flatten=True):
        tile = tl.program_id(0) + turn // 2 * tl.num_programs(0)
        row_block, column_tile = tile_position(tile, num_row_blocks, num_column_tiles, GROUP_N)
        row = row_block * BLOCK_N
        column = column_tile * BLOCK_V
        hidden_desc = teacher_hidden_desc
        weight_desc = teacher_weight_desc
        H = TEACHER_H
        students_turn = turn % 2 == 1
        if students_turn:
            hidden_desc = student_hidden_desc
            weight_desc = student_weight_desc
            H = STUDENT_H
        products = tile_products(hidden_desc, weight_desc, row, column, H, BLOCK_N, BLOCK_V, BLOCK_H, UPCAST)
        if students_turn:
            rows = tl.minimum(row + tl.arange(0, BLOCK_N), N - 1)
            student_scale = tl.load(student_scale_ptr + rows)[:, None]
            teacher_scale = tl.load(teacher_scale_ptr + rows)[:, None]
            found = found_ptr + rows
            student_max, teacher_max, student_inverse, teacher_inverse, log_sums = row_terms(found, found_stride)
            # In halves: beside both whole tiles there are no registers for what becomes of one under a softcap.
            students, teachers = halves(products), halves(last_products)
            for half in tl.static_range(2):
                student, teacher, slope = students[half], teachers[half], None
                if STUDENT_SOFTCAP:
                    student = tanh(student * student_softcap_scale)
                    slope = 1.0 - student * student
                if TEACHER_SOFTCAP:
                    teacher = tanh(teacher * teacher_softcap_scale)
                student = student * student_scale
                teacher = teacher * teacher_scale
                student_exp, teacher_exp, ratio = compare(student, teacher, student_max, teacher_max, log_sums)
                grad = _gradient(
                    student_exp,
                    teacher_exp,
                    ratio,
                    slope,
                    student_inverse,
                    teacher_inverse,
                    tl.load(found + 4 * found_stride)[:, None],
                    tl.load(found + 5 * found_stride)[:, None],
                    tl.load(coefficient_ptr + rows)[:, None],
                    teacher_weight,
                    student_weight,
                    FORWARD_KL,
                    REVERSE_KL,
                    STUDENT_LEADS,
                    PTX,
                )
                out_desc.store([row, column + half * (BLOCK_V // 2)], grad.to(out_desc.dtype))
        last_products = products


@triton.jit(do_not_specialize=["N", "V", "found_stride"])
def _grad_from_kept_kernel(
    student_ptr,  # [N, V] fp32, rows logits_stride apart
    teacher_ptr,  # as the student's
    found_ptr,  # [6, N] fp32, rows found_stride apart
    coefficient_ptr,  # [N] fp32
    tanh_scale_ptr,  # [N] fp32, or None
    out_ptr,  # [N, V], rows out_stride apart, as far as the logits' go
    shared_ptr,  # `room_to_share`; None: there is all of found
    N,
    V,
    logits_stride,
    found_stride,
    out_stride,
    teacher_weight,
    student_weight,
    FORWARD_KL: tl.constexpr,
    REVERSE_KL: tl.constexpr,
    STUDENT_LEADS: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    num_blocks = tl.cdiv(V, BLOCK_V)
    if shared_ptr is None:
        rows, row_mask, block = place_of(N, num_blocks, BLOCK_N)
        adds_up: tl.constexpr = False
    else:
        rows, row_mask, block = place_of(N, num_blocks + 1, BLOCK_N)
        shared = shared_ptr + rows.to(tl.int64) * (num_blocks + 1)
        adds_up = block == num_blocks
    found = found_ptr + rows
    if adds_up:
        divergence, student_kl = share_sums(shared, num_blocks, row_mask, BLOCK_N)
        tl.store(found[:, None] + 4 * found_stride, divergence, row_mask[:, None])
        tl.store(found[:, None] + 5 * found_stride, student_kl, row_mask[:, None])
    else:
        column = block * BLOCK_V
        student_max, teacher_max, student_inverse, teacher_inverse, log_sums = row_terms(found, found_stride)
        coefficient = tl.load(coefficient_ptr + rows)[:, None]
        student, teacher = read_logits(student_ptr, teacher_ptr, rows, column, V, logits_stride, BLOCK_V)
        student_exp, teacher_exp, ratio = compare(student, teacher, student_max, teacher_max, log_sums)
        slope = None
        if tanh_scale_ptr is not None:
            capped = student / tl.load(tanh_scale_ptr + rows)[:, None]
            slope = 1.0 - capped * capped
        if shared_ptr is None:
            finite = tl.load(found + 4 * found_stride)[:, None]
            student_kl = tl.load(found + 5 * found_stride)[:, None]
        else:
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
                BLOCK_V,
            )
            share_part(shared, block, divergence, student_kl, row_mask)
            if FORWARD_KL:  # wants nothing of other programs
                finite = ratio
            else:
                finite, student_kl = shared_sums(shared, num_blocks, row_mask)
        grad = _gradient(
            student_exp,
            teacher_exp,
            ratio,
            slope,
            student_inverse,
            teacher_inverse,
            finite,
            student_kl,
            coefficient,
            teacher_weight,
            student_weight,
            FORWARD_KL,
            REVERSE_KL,
            STUDENT_LEADS,
            PTX,
        )
        columns = column + tl.arange(0, BLOCK_V)
        out = out_ptr + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        tl.store(out, grad.to(out_ptr.dtype.element_ty), row_mask[:, None] & (columns < logits_stride)[None, :])


@triton.jit
def _gradient(
    student_exp,  # probabilities times their rows' sums
    teacher_exp,
    ratio,  # log2(p_t / p_s)
    slope,  # of the student's softcap; None without one
    student_inverse,  # 1 / the rows' sums
    teacher_inverse,
    finite,  # the row's divergence, or the ratio: no product, of which x - x may be what its rounding was
    student_kl,
    coefficient,
    teacher_weight,
    student_weight,
    FORWARD_KL: tl.constexpr,
    REVERSE_KL: tl.constexpr,
    STUDENT_LEADS: tl.constexpr,
    PTX: tl.constexpr,
):
    """p_s (log(p_s / m) - KL(p_s || m)), and its forms at the ends; see `megatron_lce.jsd`.

    Under a softcap of the student times its slope, 1 - tanh^2. Times the rows' coefficient, zero where that is; what is
    not finite anywhere in a row makes all of it NaN.
    """
    zero = tl.zeros_like(ratio) + (finite - finite)  # or NaN
    if FORWARD_KL:
        # Rounded products, of which equal ones leave nothing.
        grad = tl.fma(student_exp, student_inverse, 0.0) - tl.fma(teacher_exp, teacher_inverse, 0.0)
        factor = coefficient
    else:
        if REVERSE_KL:
            over_student = ratio
        else:
            over_student, _ = mixture_over_both(ratio, teacher_weight, student_weight, STUDENT_LEADS, PTX)
        grad = student_exp * (over_student + student_kl)
        factor = coefficient * -student_inverse
    factor = tl.zeros_like(ratio) + factor
    if slope is not None:
        factor = factor * slope
    return tl.where(coefficient != 0, tl.fma(grad, factor, zero), 0.0)
