"""The order of passes and collectives of `megatron_lce.jsd`: per token, and of a weighted sum with known weights.

Per token, forward fills each row's `Found`, and backward recomputes both heads' products for the gradients. With known
weights a block of tokens gets its gradients in forward, while its products are in memory.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call
from megatron_lce.core.head_gradients import Slab, head_gradients
from megatron_lce.core.head_products import (
    Heads,
    check_workspace,
    collected_slabs,
    diverge,
    gradient_blocks,
    recomputed_slabs,
)
from megatron_lce.core.known_loss import known_loss, unscaled_dtype
from megatron_lce.core.products import own_arithmetic
from megatron_lce.core.rows import Rows
from megatron_lce.core.tokens import (
    Counted,
    TokenBlock,
    Tokens,
    counted_rows,
    rows_that_count,
    rows_to_compute,
    to_every_row,
)
from megatron_lce.core.two_heads import Head, gradient_coefficient, losses_in_nats, student_outputs
from megatron_lce.core.validation import refuse_double_backward


class JsdCall(NamedTuple):
    """It is one call of `linear_jsd`: the student's `Call`, both heads, and their keywords."""

    call: Call
    student: Head  # its hidden [N, H_s], under sequence parallel [N / tp, H_s]
    teacher: Head
    teacher_temperature: Tensor | float | None  # [N] if a tensor; None: the student's
    beta: float
    return_student: bool

    def rows(self, labels: Tensor) -> tuple[Rows, Tensor]:
        """Return each token's `Rows`, and the teacher's scale, [N]."""
        call, prepare = self.call, self.call.backend.prepare_rows
        rows = prepare(labels, call.temperature, call.options, call.shard)
        if self.teacher_temperature is None:
            return rows, rows.scale
        return rows, prepare(labels, self.teacher_temperature, call.options, call.shard).scale

    def heads(self, student: Head, teacher: Head, rows: Rows, teacher_scale: Tensor) -> Heads:
        """Return both heads with these rows' scales."""
        labels = rows.labels if self.return_student else None
        student, teacher = student.with_scale(rows.scale), teacher.with_scale(teacher_scale)
        return Heads(student, teacher, labels, self.beta, self.call.backend)


class _LinearJsd(torch.autograd.Function):
    """Per-token divergence of two heads over a vocab-sharded weight each.

    student hidden  replicated, or sharded along the sequence  -> its gradient is summed over the group
    student weight  this rank's shard                          -> its gradient is complete on this rank
    teacher         as the student's                           -> no gradient
    Keeps a dozen floats a token alive; backward recomputes both heads' logits slab by slab.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, jsd: JsdCall) -> tuple[Tensor, ...]:
        run, teacher = JsdPass(jsd), jsd.teacher
        loss = known_loss(run, with_gradient=False)
        student_results = run.student_outputs() if jsd.return_student else []
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*student_results)
        # A tensor of inference mode cannot be saved for backward, and cannot change outside of that mode.
        ctx.inference = [t if t.is_inference() else None for t in teacher[:2]]
        saved = (None if t.is_inference() else t for t in teacher[:2])
        ctx.save_for_backward(hidden, weight, *saved, *run.saved())
        ctx.forms = jsd.student[2:4], teacher[2:4]
        ctx.beta, ctx.call = jsd.beta, jsd.call.without_tensors()
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
            upstream = _some(grad_loss.float(), order)
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
                teacher = teacher._replace(hidden=_some(teacher.hidden, order))

            def slabs(block: TokenBlock, bytes_per_column: int) -> Iterator[Slab]:
                head = student._replace(hidden=block.hidden.wait())
                heads = Heads(head.with_scale(scale), teacher.with_scale(teacher_scale), None, ctx.beta, call.backend)
                return recomputed_slabs(heads, found, coefficient, call, bytes_per_column)

            gradients = head_gradients(
                Tokens(hidden, num_tokens, Counted(order), max(num_tokens, 1), options),
                call,
                slabs,
                needs_hidden=ctx.needs_input_grad[0],
                needs_weight=ctx.needs_input_grad[1],
            )
        return *gradients, None


def linear_jsd_autograd(jsd: JsdCall) -> tuple[Tensor, list[Tensor] | None]:
    """Return the loss [N], and if they were asked for, the student's logprobs, entropy and lse."""
    loss, *student_results = _LinearJsd.apply(jsd.call.hidden, jsd.call.weight, jsd)
    return loss, student_results or None


class JsdPass:
    """It is one pass over the tokens for their divergences, or for their weighted sum and its gradients."""

    name = "linear_jsd"

    def __init__(self, jsd: JsdCall, token_weights: Tensor | None = None, with_gradient: bool = False) -> None:
        """Cut the tokens into blocks. `token_weights` [N]; a row of weight 0 is ignored; without, no sum is made."""
        self._jsd, self.call, self._with_gradient = jsd, jsd.call, with_gradient
        call, options, num_tokens = jsd.call, jsd.call.options, jsd.call.labels.shape[0]
        labels = call.labels
        if token_weights is not None:
            labels = labels.masked_fill(token_weights == 0, options.ignore_index)
        rows, teacher_scale = jsd.rows(labels)
        # A number from the caller counts labels; weights of 0 do not change it.
        self._counted = counted_rows(labels if options.skip_ignored is True else call.labels, options)
        computed = num_tokens if self._counted.rows is None else self._counted.rows.shape[0]
        heads = jsd.heads(jsd.student, jsd.teacher, rows, teacher_scale)
        check_workspace(heads, call)
        # A block collects gradients of smaller blocks, whose products stay in memory for every reading.
        self._blocks = blocks = gradient_blocks(heads, computed, call) if with_gradient else None
        block_tokens = max(computed, 1) if blocks is None else blocks[1]
        self.tokens, teacher_tokens = (
            Tokens(head.hidden, num_tokens, self._counted, block_tokens, options, unscaled_dtype(call))
            for head in (jsd.student, jsd.teacher)
        )
        self._teacher_blocks = teacher_tokens.blocks()
        self._order = self.tokens.order()
        self._rows = rows = rows_to_compute(rows, self._order, self._counted)
        self._teacher_scale = _some(teacher_scale, self._order)
        self._token_weights = weights = None if token_weights is None else _some(token_weights, self._order).float()
        if weights is not None:
            self._coefficient = gradient_coefficient(weights, rows.to_nats, rows.scale, jsd.student, jsd.beta)
        self._found = teacher_scale.new_empty(9 if jsd.return_student else 6, computed)  # see `Found`

    def slabs(self, block: TokenBlock, bytes_per_column: int) -> Iterator[Slab]:
        """Fill a block's divergences, then yield the gradients of the student's products."""
        jsd = self._jsd
        # Gathered first, as a rank without columns leaves out what follows: ranks must agree on collectives' order.
        student = jsd.student._replace(hidden=block.hidden.wait())
        teacher = jsd.teacher._replace(hidden=next(self._teacher_blocks).hidden.wait())
        heads = jsd.heads(student, teacher, self._rows.select(block.rows), self._teacher_scale[block.rows])
        found = self._found[:, block.rows]
        if self._blocks is None:
            diverge(heads, found, self.call)
        if self._with_gradient:
            arguments = heads, found, self._coefficient[block.rows], self.call
            if self._blocks is None:
                yield from recomputed_slabs(*arguments, bytes_per_column)
            else:
                yield from collected_slabs(*arguments, self._blocks[0])

    factor = staticmethod(Tensor.float)  # the factor of a sum's gradients is its upstream gradient

    def result(self) -> Tensor:
        """Return each token's divergence in nats, or their weighted sum, after all blocks."""
        losses, self._to_nats = losses_in_nats(self._found, self._rows, self._jsd.beta)
        if self._token_weights is None:
            return to_every_row(losses, self._counted, self.call.labels.shape[0])
        total = torch.where(self._rows.ignored, 0.0, self._token_weights * losses).sum()
        unless_nan = self._counted.unless_nan
        return total if unless_nan is None else total * unless_nan

    def saved(self) -> tuple[Tensor | None, ...]:
        """Return what backward needs of a pass without weights: see `_LinearJsd`."""
        return self._order, self._rows.scale, self._teacher_scale, self._to_nats, self._found

    def student_outputs(self) -> list[Tensor]:
        """Return the student's logprobs, entropy and lse, [N] each, after all blocks."""
        rows = self._counted if self._order is None else self._counted._replace(rows=self._order)
        outputs = student_outputs(self._found, self._rows)
        return [to_every_row(output, rows, self.call.labels.shape[0]) for output in outputs]


def _some(per_row: Tensor, order: Tensor | None) -> Tensor:
    """Return the numbers of the computed rows in their order, or all of them if `order` is None."""
    return per_row if order is None else per_row.index_select(0, order)
