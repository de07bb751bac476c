"""The autograd function of `megatron_lce.jsd`: the order of its passes and collectives, and what is saved of them."""

import math
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.blocks import plan_blocks, smallest_workspace
from megatron_lce.core.group_stats import stats_of_tokens
from megatron_lce.core.head_gradients import Slab, accumulator_bytes_per_column, computed_slabs, head_gradients
from megatron_lce.core.jsd_stats import Head, RowTerms, both_copies, empty_kl_stats, unpack_kl
from megatron_lce.core.options import Options
from megatron_lce.core.products import Copies, own_arithmetic, slab_row_stride
from megatron_lce.core.rows import LOG_SUM_OF_IGNORED_ROW, Rows
from megatron_lce.core.softmax_stats import LN_2, UNIT
from megatron_lce.core.tokens import (
    TokenBlock,
    Tokens,
    counted_rows,
    rows_that_count,
    rows_to_compute,
    to_every_row,
)


class _LinearJsd(torch.autograd.Function):
    """Per-token divergence of two heads over a vocab-sharded weight each.

    student hidden  replicated, or sharded along the sequence  -> its gradient is summed over the group
    student weight  this rank's shard                          -> its gradient is complete on this rank
    teacher         as the student's                           -> no gradient
    Keeps at most 12 floats a token alive; backward recomputes both heads' logits slab by slab.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student_hidden: Tensor,  # [N, H_s], under sequence parallel [N / tp, H_s]
        student_weight: Tensor,  # [V_local, H_s]
        student_logits_scale: float,
        student_softcap: float | None,
        teacher_hidden: Tensor,  # [N, H_t], under sequence parallel [N / tp, H_t]
        teacher_weight: Tensor,  # [V_local, H_t]
        teacher_logits_scale: float,
        teacher_softcap: float | None,
        labels: Tensor,  # [N] int64
        temperature: Tensor | float,  # [N] if a tensor
        beta: float,
        options: Options,
        backend: ModuleType,
    ) -> Tensor:
        student = Head(student_hidden, student_weight, student_logits_scale, student_softcap)
        teacher = Head(teacher_hidden, teacher_weight, teacher_logits_scale, teacher_softcap)
        with own_arithmetic(student_hidden.device, "linear_jsd forward"):
            _check_workspace(student, teacher, options, backend)
            rows = backend.prepare_rows(labels, temperature, options)
            counted = counted_rows(labels, options)
            rows = rows_to_compute(rows, counted.rows, counted)
            divergence, found = _diverge(
                _computed(student, counted.rows, options),
                _computed(teacher, counted.rows, options),
                rows,
                beta,
                options,
                backend,
            )
            ignored = rows.to_nats == 0
            # What is not finite in either head ends here: backward, which may not meet it, takes the row's NaN from
            # to_nats. Every rank has the same divergence, so no rank goes on with a finite gradient.
            to_nats = torch.where(divergence.isfinite() | ignored, rows.to_nats, torch.nan)
            # Rounding may carry a divergence past its bounds; a clamp passes NaN.
            loss = torch.where(ignored, 0.0, divergence.clamp(0.0, _largest_divergence(beta)) * to_nats)
            loss = to_every_row(loss, counted, labels.shape[0])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*student[:2], *teacher[:2], counted.rows, rows.scale, to_nats, *found)
        ctx.forms = student[2:], teacher[2:]
        ctx.beta, ctx.options, ctx.backend = beta, options, backend
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None):
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph must be False: linear_jsd has no double backward")
        no_gradient = (None,) * 11
        if grad_loss is None:
            return None, None, *no_gradient
        tensors = ctx.saved_tensors
        student, teacher = (
            Head(*its_tensors, *form) for its_tensors, form in zip((tensors[:2], tensors[2:4]), ctx.forms, strict=True)
        )
        order, row_scale, to_nats, *found = tensors[4:]
        beta, options, backend = ctx.beta, ctx.options, ctx.backend
        num_tokens = grad_loss.shape[0]
        with own_arithmetic(grad_loss.device, "linear_jsd backward"):
            upstream = grad_loss.float() if order is None else grad_loss.float()[order]
            terms = _row_terms(student, teacher, row_scale, to_nats, _Found(*found), upstream, beta)
            kept = _rows_with_gradient(upstream, to_nats, options)
            if kept is not None:
                terms, order = terms.index_select(1, kept), kept if order is None else order[kept]
            if terms.shape[1] > 0:
                # Before anything that a rank without columns leaves out: ranks must agree on the order of collectives.
                teacher = _computed(teacher, order, options)

            def slabs(block: TokenBlock, bytes_per_column: int) -> Iterator[Slab]:
                whole = student._replace(hidden=block.hidden.wait())
                return _grad_logits_slabs(whole, teacher, terms, beta, options, backend, bytes_per_column)

            gradients = head_gradients(
                Tokens(student.hidden, num_tokens, order, max(num_tokens, 1), options),
                student.weight,
                options,
                slabs,
                needs_hidden=ctx.needs_input_grad[0],
                needs_weight=ctx.needs_input_grad[1],
            )
        return *gradients, *no_gradient


def linear_jsd_autograd(
    student: Head,
    teacher: Head,
    labels: Tensor,  # [N]
    temperature: Tensor | float,
    beta: float,
    options: Options,
    backend: ModuleType,
) -> Tensor:
    """The loss [N] of flattened inputs."""
    return _LinearJsd.apply(*student, *teacher, labels, temperature, beta, options, backend)


class _Found(NamedTuple):
    """What forward finds out about each token for its backward, [N] fp32, base 2, the same bits on every rank."""

    student_max: Tensor
    student_log_sum: Tensor
    teacher_max: Tensor
    teacher_log_sum: Tensor
    student_kl: Tensor  # KL(p_student || m); at beta = 1, KL(p_student || p_teacher); at beta = 0 of no use


def _diverge(
    student: Head, teacher: Head, rows: Rows, beta: float, options: Options, backend: ModuleType
) -> tuple[Tensor, _Found]:
    """The divergence of each token, [N] in base 2, and what backward needs beside it."""
    if rows.scale.shape[0] == 0:
        empty = rows.scale
        return empty, _Found(*(empty,) * 5)
    student, teacher = (head._replace(weight=head.weight[: options.num_columns]) for head in (student, teacher))
    if beta in (0, 1):
        return _diverge_at_end(student, teacher, rows, beta, options, backend)
    log_sum_exps = _log_sum_exps(student, teacher, rows, options, backend)
    of_student, of_teacher = log_sum_exps[:2], log_sum_exps[2:]
    terms = torch.stack([student.row_scale(rows.scale), *of_student, teacher.row_scale(rows.scale), *of_teacher])
    if options.num_columns == 0:
        sums = terms.new_zeros(2, terms.shape[1])
    else:
        scratch, room = _scratch_and_room(student, teacher, options, backend)
        sums = backend.divergence(student, teacher, terms, beta=beta, scratch=scratch, workspace_bytes=room)
    if options.tp_group is not None:
        sums = backend.sum_parts(collectives.stack_over_group(sums, options.tp_group))
    return sums[0], _Found(*log_sum_exps, sums[1])


def _diverge_at_end(
    student: Head, teacher: Head, rows: Rows, beta: float, options: Options, backend: ModuleType
) -> tuple[Tensor, _Found]:
    """KL(p || q), p being the teacher's for beta = 0 and the student's for beta = 1."""
    p, q = (teacher, student) if beta == 0 else (student, teacher)
    if options.num_columns == 0:
        packed = empty_kl_stats(rows.scale.shape[0], rows.scale.device)
    else:
        scratch, room = _scratch_and_room(student, teacher, options, backend)
        scales = torch.stack([p.row_scale(rows.scale), q.row_scale(rows.scale)])
        packed = backend.kl_stats(p, q, scales, scratch=scratch, workspace_bytes=room)
    if options.tp_group is not None:
        packed = backend.merge_kl_stats(collectives.stack_over_group(packed, options.tp_group))
    stats = unpack_kl(packed)
    p_terms, q_terms = (stats.max_p, stats.sum_p.log2()), (stats.max_q, stats.sum_q.log2())
    log_sum_exps = (*q_terms, *p_terms) if beta == 0 else (*p_terms, *q_terms)
    divergence = stats.kl()
    return divergence, _Found(*log_sum_exps, divergence)


def _log_sum_exps(
    student: Head, teacher: Head, rows: Rows, options: Options, backend: ModuleType
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Largest logit and log of the sum over the group's whole vocabulary, of student and teacher."""
    found: list[Tensor] = []
    for head in (student, teacher):
        its_rows = rows._replace(scale=head.row_scale(rows.scale))
        its_options = replace(options, logits_scale=head.logits_scale, softcap=head.softcap)
        extremes, sums = stats_of_tokens(head.hidden, head.weight, its_rows, its_options, backend)
        found += [extremes[0], (sums[0].float() * UNIT).log2()]
    return found[0], found[1], found[2], found[3]


def _grad_logits_slabs(
    student: Head,
    teacher: Head,
    terms: Tensor,  # [8, N]
    beta: float,
    options: Options,
    backend: ModuleType,
    bytes_per_column: int,
) -> Iterator[Slab]:
    """Gradients of the student's logits, slab by slab; both hiddens are gathered."""
    if options.num_columns == 0:
        return
    scratch, room = _scratch_and_room(student, teacher, options, backend)
    blocks = plan_blocks(
        terms.shape[1],
        slab_row_stride(options.num_columns),
        room,
        backend.grad_logits_bytes(student, teacher, both_copies(student, teacher)),
        per_column_if_tokens_are_cut=bytes_per_column,
    )

    def compute(tokens: slice, columns: slice, grad: Tensor) -> None:
        parts = (head.block(tokens, columns) for head in (student, teacher))
        backend.grad_logits(*parts, terms[:, tokens], grad, beta=beta, scratch=scratch)

    num_columns = options.num_columns
    yield from computed_slabs(student.hidden, terms.shape[1], slice(0, num_columns), num_columns, blocks, compute)


def _computed(head: Head, rows: Tensor | None, options: Options) -> Head:
    """The head with the hidden of every token that is computed; `rows` None: all."""
    if options.sequence_parallel:
        assert options.tp_group is not None
        head = head._replace(hidden=collectives.gather_rows(head.hidden, options.tp_group))
    return head if rows is None else head._replace(hidden=head.hidden.index_select(0, rows))


def _rows_with_gradient(upstream: Tensor, to_nats: Tensor, options: Options) -> Tensor | None:
    """Under `skip_ignored=True` the rows whose gradient is not zero; None: all. A broken row is NaN whatever comes."""
    if options.skip_ignored is not True or upstream.shape[0] == 0:
        return None
    return rows_that_count((upstream != 0) | to_nats.isnan(), options)


def _largest_divergence(beta: float) -> float:
    """In base 2: that of two distributions with nothing in common."""
    return math.inf if beta in (0, 1) else -beta * math.log2(beta) - (1 - beta) * math.log2(1 - beta)


def _row_terms(
    student: Head, teacher: Head, row_scale: Tensor, to_nats: Tensor, found: _Found, grad_loss: Tensor, beta: float
) -> Tensor:
    """`RowTerms`, packed. The coefficient carries upstream, scale / temperature and the way from base 2 to nats."""
    ignored = to_nats == 0
    # Upstream times scale / temperature: row_scale is log2 e / temperature.
    coefficient = grad_loss * to_nats * row_scale * student.logits_scale
    if beta > 0:  # the gradient has a logarithm, in base 2
        coefficient = coefficient * LN_2
    if beta < 1:
        coefficient = coefficient * (1 - beta)
    return torch.stack(
        RowTerms(
            student_scale=student.row_scale(row_scale),
            student_max=found.student_max,
            student_log_sum=torch.where(ignored, LOG_SUM_OF_IGNORED_ROW, found.student_log_sum),
            teacher_scale=teacher.row_scale(row_scale),
            teacher_max=found.teacher_max,
            teacher_log_sum=torch.where(ignored, LOG_SUM_OF_IGNORED_ROW, found.teacher_log_sum),
            student_kl=torch.where(ignored, 0.0, found.student_kl),
            coefficient=torch.where(ignored, 0.0, coefficient),
        )
    )


def _check_workspace(student: Head, teacher: Head, options: Options, backend: ModuleType) -> None:
    """Every pass, backward's too, must find room for its smallest block before the first one runs.

    Asked of the largest shard of the group, so that ranks agree.
    """
    copies = both_copies(student, teacher)
    blocks = _smallest_blocks(student, teacher, options.largest_shard, copies, options, backend)
    stats = max(smallest_workspace(backend.softmax_stats_bytes(head.hidden, options)) for head in (student, teacher))
    smallest = max(stats, backend.scratch_bytes(student, teacher) + blocks)
    if options.workspace_bytes < smallest:
        raise ValueError(f"workspace_bytes must be at least {smallest} for these heads, got {options.workspace_bytes}")


def _scratch_and_room(student: Head, teacher: Head, options: Options, backend: ModuleType) -> tuple[Tensor, int]:
    """The kernels' scratch, at most a quarter of the workspace where that is enough, and the bytes left for blocks."""
    copies, num_columns = both_copies(student, teacher), student.weight.shape[0]
    spare = options.workspace_bytes - _smallest_blocks(student, teacher, num_columns, copies, options, backend)
    most = max(backend.scratch_bytes(student, teacher), min(spare, options.workspace_bytes // 4))
    scratch = backend.new_scratch(student, teacher, most)
    return scratch, options.workspace_bytes - scratch.nbytes


def _smallest_blocks(
    student: Head, teacher: Head, num_columns: int, copies: Copies, options: Options, backend: ModuleType
) -> int:
    """Bytes of the largest of the passes' smallest blocks."""
    accumulator = accumulator_bytes_per_column(student.weight, options)
    backward = backend.grad_logits_bytes(student, teacher, copies)
    passes = (
        backend.stats_bytes(student, teacher, num_columns, copies),
        backend.divergence_bytes(student, teacher, num_columns, copies),
        backward._replace(per_column=backward.per_column + accumulator),
    )
    return max(smallest_workspace(block_bytes) for block_bytes in passes)
