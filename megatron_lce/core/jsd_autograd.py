"""The autograd function of `megatron_lce.jsd`: the order of its passes and collectives, and what is saved of them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.divergence import diverge, gradient_factor, losses_in_nats
from megatron_lce.core.head_gradients import Slab, head_gradients
from megatron_lce.core.jsd_logits import Heads, check_workspace, recomputed_slabs
from megatron_lce.core.jsd_stats import FOUND_ROWS, Head
from megatron_lce.core.options import Options
from megatron_lce.core.products import own_arithmetic
from megatron_lce.core.protocols import JsdBackend
from megatron_lce.core.tokens import (
    Counted,
    TokenBlock,
    Tokens,
    counted_rows,
    rows_that_count,
    rows_to_compute,
    to_every_row,
)
from megatron_lce.core.validation import refuse_double_backward


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
        backend: JsdBackend,
    ) -> Tensor:
        student = Head(student_hidden, student_weight, student_logits_scale, student_softcap)
        teacher = Head(teacher_hidden, teacher_weight, teacher_logits_scale, teacher_softcap)
        with own_arithmetic(student_hidden.device, "linear_jsd forward"):
            rows = backend.prepare_rows(labels, temperature, options)
            counted = counted_rows(labels, rows, options, backend).wait()
            rows = rows_to_compute(rows, counted.rows, counted)
            check_workspace(Heads(student, teacher, rows.scale, beta, backend), options)
            found = torch.empty(FOUND_ROWS, rows.scale.shape[0], device=rows.scale.device)
            if rows.scale.shape[0] > 0:
                here, there = (_computed(head, counted.rows, options) for head in (student, teacher))
                diverge(Heads(here, there, rows.scale, beta, backend), options, found)
            loss, to_nats = losses_in_nats(found, rows, beta)
            loss = to_every_row(loss, counted, labels.shape[0])
        ctx.set_materialize_grads(False)
        # A tensor of inference mode cannot be saved for backward; nor can it change outside of that mode.
        ctx.of_inference = [t if t.is_inference() else None for t in teacher[:2]]
        of_teacher = (None if t.is_inference() else t for t in teacher[:2])
        ctx.save_for_backward(*student[:2], *of_teacher, counted.rows, rows.scale, to_nats, found)
        ctx.forms = student[2:], teacher[2:]
        ctx.beta, ctx.options, ctx.backend = beta, options, backend
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None):
        refuse_double_backward("linear_jsd")
        no_gradient = (None,) * 11
        if grad_loss is None:
            return None, None, *no_gradient
        hidden, weight, *of_teacher, order, scale, to_nats, found = ctx.saved_tensors
        of_teacher = [saved if kept is None else kept for saved, kept in zip(of_teacher, ctx.of_inference, strict=True)]
        student, teacher = Head(hidden, weight, *ctx.forms[0]), Head(*of_teacher, *ctx.forms[1])
        options, num_tokens = ctx.options, grad_loss.shape[0]
        with own_arithmetic(grad_loss.device, "linear_jsd backward"):
            upstream = grad_loss.float() if order is None else grad_loss.float()[order]
            factor = gradient_factor(upstream, to_nats, scale, student, ctx.beta)
            if options.skip_ignored is True:
                # Rows whose gradient is not zero. A broken row is NaN whatever comes.
                counts = (upstream != 0) | to_nats.isnan()
                kept = rows_that_count(counts, (found, factor, scale), options, ctx.backend).wait()
                if kept.rows is not None and kept.per_row is not None:
                    found, factor, scale = kept.per_row
                    order = kept.rows if order is None else order[kept.rows]
            if scale.shape[0] > 0:
                # Before anything that a rank without columns leaves out: ranks must agree on the order of collectives.
                teacher = _computed(teacher, order, options)
            heads = Heads(student, teacher, scale, ctx.beta, ctx.backend)

            def slabs(block: TokenBlock, bytes_per_column: int) -> Iterator[Slab]:
                whole = heads._replace(student=student._replace(hidden=block.hidden.wait()))
                return recomputed_slabs(whole, found, factor, options, bytes_per_column)

            gradients = head_gradients(
                Tokens(student.hidden, num_tokens, Counted(order), max(num_tokens, 1), options),
                student.weight,
                options,
                ctx.backend,
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
    backend: JsdBackend,
) -> Tensor:
    """The loss [N] of flattened inputs."""
    return _LinearJsd.apply(*student, *teacher, labels, temperature, beta, options, backend)


def _computed(head: Head, rows: Tensor | None, options: Options) -> Head:
    """The head with the hidden of every token that is computed; `rows` None: all."""
    if options.sequence_parallel:
        assert options.tp_group is not None
        head = head._replace(hidden=collectives.gather_rows(head.hidden, options.tp_group))
    return head if rows is None else head._replace(hidden=head.hidden.index_select(0, rows))
