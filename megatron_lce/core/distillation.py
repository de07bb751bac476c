"""The order of passes and collectives of `megatron_lce.jsd`: per token, and of a weighted sum with known weights.

Per token, forward fills each row's `Found`, and backward recomputes both heads' products for the gradients. With known
weights a block of tokens gets its gradients in forward, while its products are in memory.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call
from megatron_lce.core.head_gradients import Slab, head_gradients
from megatron_lce.core.head_products import (
    check_workspace,
    collected_slabs,
    diverge,
    gradient_blocks,
    recomputed_slabs,
)
from megatron_lce.core.known_loss import KnownLossPass, known_loss
from megatron_lce.core.products import own_arithmetic
from megatron_lce.core.tokens import Counted, TokenBlock, Tokens, counted_rows, in_order, rows_that_count
from megatron_lce.core.two_heads import Head, Heads, gradient_coefficient, losses_in_nats, student_outputs
from megatron_lce.core.validation import refuse_double_backward


class _LinearJsd(torch.autograd.Function):
    """Per-token divergence of two heads over a vocab-sharded weight each.

    student hidden  replicated, or sharded along the sequence  -> its gradient is summed over the group
    student weight  this rank's shard                          -> its gradient is complete on this rank
    teacher         as the student's                           -> no gradient
    Keeps a dozen floats a token alive; backward recomputes both heads' logits slab by slab.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, run: "JsdPass") -> tuple[Tensor, ...]:
        student, teacher = run.heads[:2]
        loss = known_loss(run, with_gradient=False)
        student_results = run.student_outputs() if run.return_student else []
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*student_results)
        # A tensor of inference mode cannot be saved for backward, and cannot change outside of that mode.
        ctx.inference = [t if t.is_inference() else None for t in teacher[:2]]
        saved = (None if t.is_inference() else t for t in teacher[:2])
        ctx.save_for_backward(hidden, weight, *saved, *run.saved())
        ctx.forms, ctx.beta, ctx.call = (student[2:4], teacher[2:4]), run.heads.beta, run.call.without_tensors()
        return loss, *student_results

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any):
        refuse_double_backward("linear_jsd")
        if grad_loss is None:
            return None, None, None
        hidden, weight, *saved, order, scale, teacher_scale, to_nats, found = ctx.saved_tensors
        teacher_tensors = [one if other is None else other for one, other in zip(saved, ctx.inference, strict=True)]
        student, teacher = Head(hidden, weight, *ctx.forms[0]), Head(*teacher_tensors, *ctx.forms[1])
        call, num_tokens = ctx.call.with_tensors(hidden, weight), grad_loss.shape[0]
        options = call.options
        with own_arithmetic(grad_loss.device, "linear_jsd backward"):
            upstream = in_order(grad_loss.float(), order)
            coefficient = gradient_coefficient(upstream, to_nats, scale, student, ctx.beta)
            if options.skip_ignored is True:
                # Rows whose gradient is not zero. A broken row's is NaN whatever its upstream.
                rows = rows_that_count((upstream != 0) | to_nats.isnan(), options).rows
                if rows is not None:
                    found, coefficient = found[:, rows], coefficient[rows]
                    scale, teacher_scale = scale[rows], teacher_scale[rows]
                    order = rows if order is None else order[rows]
            if scale.shape[0] > 0:
                # Gathered here, as a rank without columns makes no slabs: ranks must agree on the order of collectives.
                if options.sequence_parallel:
                    assert options.tp_group is not None
                    teacher = teacher._replace(hidden=collectives.gather_rows(teacher.hidden, options.tp_group))
                teacher = teacher._replace(hidden=in_order(teacher.hidden, order))

            def slabs(block: TokenBlock, bytes_per_column: int) -> Iterator[Slab]:
                both = student.of_rows(block.hidden.wait(), scale), teacher.of_rows(teacher.hidden, teacher_scale)
                return recomputed_slabs(Heads(*both, ctx.beta, None, coefficient), found, call, bytes_per_column)

            gradients = head_gradients(
                Tokens(hidden, num_tokens, Counted(order), max(num_tokens, 1), options),
                call,
                slabs,
                needs_hidden=ctx.needs_input_grad[0],
                needs_weight=ctx.needs_input_grad[1],
            )
        return *gradients, None


def linear_jsd_autograd(run: "JsdPass") -> tuple[Tensor, list[Tensor]]:
    """Return the loss [N], and if they were asked for, the student's logprobs, entropy and lse."""
    loss, *student_results = _LinearJsd.apply(run.call.hidden, run.call.weight, run)
    return loss, student_results


class JsdPass(KnownLossPass):
    """It is one pass over the tokens for their divergences, or for their weighted sum and its gradients."""

    name = "linear_jsd"

    def __init__(
        self,
        call: Call,  # the student's
        heads: Heads,  # hidden [N, H], under sequence parallel [N / tp, H]
        teacher_temperature: Tensor | float | None,  # [N] if a tensor; None: the student's
        return_student: bool,
        token_weights: Tensor | None,  # [N]; a row of weight 0 is ignored; None: no sum is made
        with_gradient: bool,
    ) -> None:
        self.heads, self.return_student, self._with_gradient = heads, return_student, with_gradient
        options, prepare, labels = call.options, call.backend.prepare_rows, call.labels
        if token_weights is not None:
            labels = labels.masked_fill(token_weights == 0, options.ignore_index)
        rows = prepare(labels, call.temperature, options, call.shard)
        teacher_scale = rows.scale
        if teacher_temperature is not None:
            teacher_scale = prepare(labels, teacher_temperature, options, call.shard).scale
        # A number from the caller counts labels; weights of 0 do not change it.
        counted = counted_rows(labels if options.skip_ignored is True else call.labels, options)
        computed = counted.of(labels.shape[0])
        check_workspace(heads, call)
        # A block collects gradients of smaller blocks, whose products stay in memory for every reading.
        self._blocks = blocks = gradient_blocks(heads, computed, call) if with_gradient else None
        super().__init__(call, rows, counted, max(computed, 1) if blocks is None else blocks[1])
        self._teacher_blocks = self.new_tokens(heads.teacher.hidden).blocks()
        rows, self._teacher_scale = self.rows, in_order(teacher_scale, self.order)
        self._token_weights = weights = None if token_weights is None else in_order(token_weights, self.order).float()
        if weights is not None:
            coefficient = gradient_coefficient(weights, rows.to_nats, rows.scale, heads.student, heads.beta)
            self.heads = heads._replace(coefficient=coefficient)
        self._found = teacher_scale.new_empty(9 if return_student else 6, computed)  # see `Found`

    def slabs(self, block: TokenBlock, bytes_per_column: int) -> Iterator[Slab]:
        """Fill a block's divergences, then yield the gradients of the student's products."""
        student, teacher, beta, _, coefficient = self.heads
        rows, found = self.rows.select(block.rows), self._found[:, block.rows]
        # Gathered first, as a rank without columns leaves out what follows: ranks must agree on collectives' order.
        student = student.of_rows(block.hidden.wait(), rows.scale)
        teacher = teacher.of_rows(next(self._teacher_blocks).hidden.wait(), self._teacher_scale[block.rows])
        labels = rows.labels if self.return_student else None
        heads = Heads(student, teacher, beta, labels, None if coefficient is None else coefficient[block.rows])
        if self._blocks is not None:
            yield from collected_slabs(heads, found, self.call, self._blocks[0])
            return
        diverge(heads, found, self.call)
        if self._with_gradient:
            yield from recomputed_slabs(heads, found, self.call, bytes_per_column)

    def result(self) -> Tensor:
        """Return each token's divergence in nats, or their weighted sum, after all blocks."""
        losses, self._to_nats = losses_in_nats(self._found, self.rows, self.heads.beta)
        if self._token_weights is None:
            return self.to_every_row(losses)
        return self.unless_nan(torch.where(self.rows.ignored, 0.0, self._token_weights * losses).sum())

    def saved(self) -> tuple[Tensor | None, ...]:
        """Return what backward needs of a pass without weights: see `_LinearJsd`."""
        return self.order, self.rows.scale, self._teacher_scale, self._to_nats, self._found

    def student_outputs(self) -> list[Tensor]:
        """Return the student's logprobs, entropy and lse, [N] each, after all blocks."""
        return [self.to_every_row(output) for output in student_outputs(self._found, self.rows)]
