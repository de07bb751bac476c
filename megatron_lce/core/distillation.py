"""The order of passes and collectives of `megatron_lce.jsd`: per token, and of a weighted sum with known weights.

Per token, forward finds each row's `Found` and backward makes the gradients of both heads' products once more. With
known weights a block of tokens goes all the way to its gradients while its products are there.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call
from megatron_lce.core.divergence import (
    GradientBlocks,
    Heads,
    ProductsRoom,
    check_workspace,
    diverge,
    diverge_block,
    gradient_blocks,
    recomputed_slabs,
)
from megatron_lce.core.head_gradients import Slab, head_gradients, kept_slabs
from megatron_lce.core.known_loss import unscaled_dtype
from megatron_lce.core.options import Options
from megatron_lce.core.plan import cut, slab_row_stride
from megatron_lce.core.products import own_arithmetic, with_zeros_behind
from megatron_lce.core.protocols import Backend
from megatron_lce.core.tokens import (
    Counted,
    TokenBlock,
    Tokens,
    counted_rows,
    rows_that_count,
    rows_to_compute,
    to_every_row,
)
from megatron_lce.core.two_heads import FOUND_ROWS, Gradient, Head, gradient_coefficient, losses_in_nats
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
        hidden: Tensor,  # the student's, as below; here for autograd
        weight: Tensor,
        call: Call,
        student: Head,
        teacher: Head,
        beta: float,
    ) -> Tensor:
        options, backend = call.options, call.backend
        with own_arithmetic(hidden.device, "linear_jsd forward"):
            rows = backend.prepare_rows(call.labels, call.temperature, options, call.shard)
            counted = counted_rows(call.labels, options)
            rows = rows_to_compute(rows, counted.rows, counted)
            check_workspace(_heads(student, teacher, rows.scale, beta, backend), call)
            found = torch.empty(FOUND_ROWS, rows.scale.shape[0], dtype=torch.float32, device=hidden.device)
            if rows.scale.shape[0] > 0:
                here, there = (_computed(head, counted.rows, options) for head in (student, teacher))
                diverge(_heads(here, there, rows.scale, beta, backend), call, found)
            loss, to_nats = losses_in_nats(found, rows, beta)
            loss = to_every_row(loss, counted, call.labels.shape[0])
        ctx.set_materialize_grads(False)
        # A tensor of inference mode cannot be saved for backward; nor can it change outside of that mode.
        ctx.inference = [t if t.is_inference() else None for t in teacher[:2]]
        saved = (None if t.is_inference() else t for t in teacher[:2])
        ctx.save_for_backward(hidden, weight, *saved, counted.rows, rows.scale, to_nats, found)
        ctx.forms = student[2:], teacher[2:]
        ctx.beta, ctx.call = beta, call.without_tensors()
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None):
        refuse_double_backward("linear_jsd")
        if grad_loss is None:
            return (None,) * 6
        hidden, weight, *saved, order, scale, to_nats, found = ctx.saved_tensors
        teacher_tensors = [one if other is None else other for one, other in zip(saved, ctx.inference, strict=True)]
        student, teacher = Head(hidden, weight, *ctx.forms[0]), Head(*teacher_tensors, *ctx.forms[1])
        call, num_tokens = ctx.call.with_tensors(hidden, weight), grad_loss.shape[0]
        options = call.options
        with own_arithmetic(grad_loss.device, "linear_jsd backward"):
            upstream = grad_loss.float() if order is None else grad_loss.float()[order]
            coefficient = gradient_coefficient(upstream, to_nats, scale, student, ctx.beta)
            if options.skip_ignored is True:
                # Rows whose gradient is not zero. A broken row is NaN whatever comes.
                rows = rows_that_count((upstream != 0) | to_nats.isnan(), options).rows
                if rows is not None:
                    found, coefficient, scale = found[:, rows], coefficient[rows], scale[rows]
                    order = rows if order is None else order[rows]
            if scale.shape[0] > 0:
                # Before anything that a rank without columns leaves out: ranks must agree on the order of collectives.
                teacher = _computed(teacher, order, options)

            def slabs(block: TokenBlock, bytes_per_column: int) -> Iterator[Slab]:
                whole = student._replace(hidden=block.hidden.wait())
                heads = _heads(whole, teacher, scale, ctx.beta, call.backend)
                return recomputed_slabs(heads, found, coefficient, call, bytes_per_column)

            gradients = head_gradients(
                Tokens(hidden, num_tokens, Counted(order), max(num_tokens, 1), options),
                call,
                slabs,
                needs_hidden=ctx.needs_input_grad[0],
                needs_weight=ctx.needs_input_grad[1],
            )
        return *gradients, None, None, None, None


def linear_jsd_autograd(call: Call, student: Head, teacher: Head, beta: float) -> Tensor:
    """The loss [N] of flattened inputs; the call is the student's."""
    return _LinearJsd.apply(call.hidden, call.weight, call, student, teacher, beta)


class JsdPass:
    """One pass over the tokens: the weighted sum of their divergences, and what its gradients are made of."""

    name = "linear_jsd"

    def __init__(
        self,
        call: Call,  # the student's
        student: Head,
        teacher: Head,
        beta: float,
        token_weights: Tensor,  # [N]; 0: an ignored row
        with_gradient: bool,
    ) -> None:
        self.call, self._with_gradient = call, with_gradient
        options, backend, num_tokens = call.options, call.backend, call.labels.shape[0]
        weighted = call.labels.masked_fill(token_weights == 0, options.ignore_index)
        rows = backend.prepare_rows(weighted, call.temperature, options, call.shard)
        # A number from the caller is of the labels.
        self._counted = counted_rows(weighted if options.skip_ignored is True else call.labels, options)
        computed = num_tokens if self._counted.rows is None else self._counted.rows.shape[0]
        self._heads = _heads(student, teacher, rows.scale, beta, backend)
        check_workspace(self._heads, call)
        blocks = gradient_blocks(self._heads, computed, call) if with_gradient else None
        block_tokens = max(computed, 1) if blocks is None else blocks.gradients
        self.tokens, teacher_tokens = (
            Tokens(head.hidden, num_tokens, self._counted, block_tokens, options, unscaled_dtype(call))
            for head in (student, teacher)
        )
        self._teacher_blocks = teacher_tokens.blocks()
        order = self.tokens.order()
        self._rows = rows_to_compute(rows, order, self._counted)
        self._token_weights = (token_weights if order is None else token_weights[order]).float()
        self._coefficient = gradient_coefficient(
            self._token_weights, self._rows.to_nats, self._rows.scale, student, beta
        )
        self._found = torch.empty(FOUND_ROWS, computed, dtype=torch.float32, device=call.hidden.device)
        self._kept = None if blocks is None else _KeptGradients(self._heads, blocks, call)

    def slabs(self, block: TokenBlock, bytes_per_column: int) -> Iterator[Slab]:
        """Find a block's divergences, then yield the gradients of the student's products."""
        # Before anything that a rank without columns leaves out: ranks must agree on the order of collectives.
        student, teacher = block.hidden.wait(), next(self._teacher_blocks).hidden.wait()
        whole = self._heads
        heads = _heads(
            whole.student._replace(hidden=student),
            whole.teacher._replace(hidden=teacher),
            self._rows.scale[block.rows],
            whole.beta,
            whole.backend,
        )
        found, coefficient = self._found[:, block.rows], self._coefficient[block.rows]
        if self._kept is not None:
            yield from self._kept.slabs(heads, found, coefficient)
            return
        diverge(heads, self.call, found)
        if self._with_gradient:
            yield from recomputed_slabs(heads, found, coefficient, self.call, bytes_per_column)

    def total(self) -> Tensor:
        """The weighted sum of the divergences."""
        losses, _ = losses_in_nats(self._found, self._rows, self._heads.beta)
        total = torch.where(self._rows.ignored, 0.0, self._token_weights * losses).sum()
        unless_nan = self._counted.unless_nan
        return total if unless_nan is None else total * unless_nan


class _KeptGradients:
    """Gradients of a block's products, collected from smaller blocks whose products are there for every reading."""

    def __init__(self, heads: Heads, blocks: GradientBlocks, call: Call) -> None:
        self._call, num_columns = call, call.shard.columns
        self._room = ProductsRoom(heads, blocks.products, num_columns)
        self._gradients = heads.student.hidden.new_empty(blocks.gradients, slab_row_stride(num_columns))

    def slabs(self, heads: Heads, found: Tensor, coefficient: Tensor) -> Iterator[Slab]:
        """Fill `Found`, [6, n], then yield the gradients of the n tokens with all columns."""
        num_tokens, num_columns = found.shape[1], self._call.shard.columns
        columns = slice(0, num_columns)
        out = with_zeros_behind(self._gradients[:num_tokens], num_columns)
        for tokens in cut(num_tokens, self._room.tokens):
            gradient = Gradient(coefficient[tokens], out[tokens])
            diverge_block(heads.block(tokens, columns), self._room, self._call, found[:, tokens], gradient)
        yield from kept_slabs(out, num_columns)


def _heads(student: Head, teacher: Head, scale: Tensor, beta: float, backend: Backend) -> Heads:
    """Both heads, where `scale`, [N], makes base-2 logits of products at a logits_scale of 1."""
    return Heads(student, teacher, (student.row_scale(scale), teacher.row_scale(scale)), beta, backend)


def _computed(head: Head, rows: Tensor | None, options: Options) -> Head:
    """The head with the hidden of every token that is computed; `rows` None: all."""
    if options.sequence_parallel:
        assert options.tp_group is not None
        head = head._replace(hidden=collectives.gather_rows(head.hidden, options.tp_group))
    return head if rows is None else head._replace(hidden=head.hidden.index_select(0, rows))
