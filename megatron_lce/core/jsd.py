"""The passes of `linear_jsd`.

Forward, for blocks of tokens with all columns:

1. Two products write the logits of both heads to memory.
2. The backend reads them for both softmaxes, which the ranks merge.
3. It reads them for the divergence, whose parts the ranks add up.
4. With token weights the upstream gradient is known. The backend reads the logits for the student's gradient, and two
   products add it to the gradients of hidden and weight, which `known_loss` scales in backward. A block's hidden
   gradient is reduced over the group while the second one runs; forward waits for it. If no block's gradients fit in
   the workspace, all tokens are one block, whose products are recomputed for this step.

Backward of a per-token loss recomputes the products for a range of columns, and continues with step 4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call, check_backward
from megatron_lce.core.call_plan import Plan, plan_divergence
from megatron_lce.core.computed_rows import ComputedRows
from megatron_lce.core.head_gradients import CachedGradLogits, HeadGradients
from megatron_lce.core.jsd_heads import (
    DIVERGENCE_ROWS,
    LABEL_ROWS,
    SOFTMAX_ROWS,
    GradTerms,
    Head,
    Heads,
    Kind,
    divergences_in_nats,
    gradient_terms,
    merged_softmaxes,
    student_outputs,
)
from megatron_lce.core.known_loss import scales_a_sum, unscaled_dtype, unscaled_gradients, with_gradients
from megatron_lce.core.plan import COLUMN_STEP, cut, cut_columns, size_of_two_heads, slab_row_stride
from megatron_lce.core.products import copies_to_fp32, own_arithmetic, product, with_zeros_behind
from megatron_lce.core.rows import Rows
from megatron_lce.core.tokens import tokens_in_blocks


class Divergences(NamedTuple):
    """Results of forward."""

    heads: Heads
    losses: Tensor  # [N] fp32 in nats; 0 in skipped rows
    loss_sum: Tensor | None  # [] fp32, of weighted losses
    head_grads: HeadGradients | None  # of this sum
    student_outputs: list[Tensor]  # logprobs, entropy and lse, [N] each; empty: not requested
    per_row: tuple[Tensor | None, ...]  # of the computed rows, for backward: index, both scales, to_nats, statistics


@torch.no_grad()
def jsd_forward(
    call: Call,  # the student's
    heads: Heads,  # hidden [N, H], under sequence parallel [N / tp, H]
    teacher_temperature: Tensor | float | None,  # [N] if a tensor; None: the student's
    return_student: bool,
    token_weights: Tensor | None,  # [N]; rows of weight 0 are ignored; None: no sum
    with_gradient: bool,  # of the sum
) -> Divergences:
    """Run all of forward, block by block: statistics, losses and, with `token_weights`, their sum and its gradients.

    `_LinearJsd.forward` only saves the results.
    """
    options, prepare, labels, (kind,) = call.options, call.backend.prepare_rows, call.labels, heads.kinds
    if token_weights is not None:
        labels = labels.masked_fill(token_weights == 0, options.ignore_index)
    all_rows = prepare(labels, call.temperature, options, call.shard)
    teacher_scale = all_rows.scale
    if teacher_temperature is not None:
        teacher_scale = prepare(labels, teacher_temperature, options, call.shard).scale
    # A number given as `skip_ignored` is the number of labels, whatever the weights.
    computed = ComputedRows.of(labels if options.skip_ignored is True else call.labels, options)
    plan = _plan(heads, call, computed.count, call.weight.requires_grad, known=with_gradient)
    tokens, teacher_tokens = (
        tokens_in_blocks(head.hidden, computed, plan.block_tokens, options, unscaled_dtype(call)) for head in heads[:2]
    )
    computed = tokens.computed  # now in the order of the blocks
    all_rows, teacher_scale = computed.select_rows(all_rows), computed.select(teacher_scale)
    weights = None if token_weights is None else computed.select(token_weights).float()
    all_stats = teacher_scale.new_zeros(DIVERGENCE_ROWS + LABEL_ROWS * return_student, computed.count)
    head_grads, grad_buffer = unscaled_gradients(tokens, call, plan) if with_gradient else None, None
    if plan.cached_columns > 0:
        shape = min(plan.block_tokens, computed.count), slab_row_stride(plan.cached_columns)
        grad_buffer = with_zeros_behind(call.hidden.new_empty(shape), plan.cached_columns)
    # Both gathers start first: ranks must run collectives in one order. A rank without columns skips products only, and
    # runs every collective.
    for block, teacher_block in zip(tokens.blocks(), teacher_tokens.blocks(), strict=True):
        rows, stats, find_terms = all_rows.select(block.rows), all_stats[:, block.rows], None
        block_heads = Heads(
            heads.student.of_rows(block.hidden.wait(), rows.scale),
            heads.teacher.of_rows(teacher_block.hidden.wait(), teacher_scale[block.rows]),
            heads.beta,
            heads.kinds,
            rows.labels if return_student else None,
        )
        grad_logits = TwoHeadGradLogits(call, block_heads, stats)
        if grad_buffer is not None:
            grad_logits.cached = CachedGradLogits(grad_buffer[: block.num_tokens])
        if weights is not None and head_grads is not None:
            find_terms = partial(_terms, {kind: weights[block.rows]}, rows, heads)
        grad_logits.fill_stats(plan, find_terms)
        if head_grads is not None:
            head_grads.add_block(block, grad_logits)
    by_kind, to_nats = divergences_in_nats(all_stats, all_rows, heads.kinds, heads.beta)
    losses, loss_sum = by_kind[kind], None
    if weights is not None:
        loss_sum = computed.nan_if_wrong(torch.where(all_rows.ignored, 0.0, weights * losses).sum())
    student = student_outputs(all_stats, all_rows) if return_student else ()
    losses, *outputs = computed.spread_outputs([losses, *student])
    per_row = computed.index, all_rows.scale, teacher_scale, to_nats, all_stats
    return Divergences(heads, losses, loss_sum, head_grads, outputs, per_row)


def jsd_with_gradient(divergences: Divergences, call: Call) -> Tensor:
    """Return the sum, or the loss of each token, with a gradient."""
    if divergences.loss_sum is not None:
        return with_gradients(divergences.loss_sum, divergences.head_grads, call, "linear_jsd")
    return _LinearJsd.apply(call.hidden, call.weight, divergences, call)


class _LinearJsd(torch.autograd.Function):
    """Per-token divergence of two heads over a vocab-sharded weight each.

    Both heads are laid out as in `LinearCrossEntropyFunction`; the teacher gets no gradient. Saves a dozen floats per
    token; backward recomputes the logits of both heads slab by slab.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, divergences: Divergences, call: Call) -> Tensor:
        student, teacher = divergences.heads[:2]
        # Autograd cannot save inference tensors, which do not change outside inference mode.
        ctx.inference = [t if t.is_inference() else None for t in teacher[:2]]
        saved = (None if t.is_inference() else t for t in teacher[:2])
        ctx.save_for_backward(hidden, weight, *saved, *divergences.per_row)
        ctx.softcaps, ctx.call = (student[2:4], teacher[2:4]), call.without_tensors()
        ctx.beta, ctx.kinds = divergences.heads.beta, divergences.heads.kinds
        return divergences.losses.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("linear_jsd", grad_loss)
        hidden, weight, *saved, index, scale, teacher_scale, to_nats, stats = ctx.saved_tensors
        teacher_tensors = [one if other is None else other for one, other in zip(saved, ctx.inference, strict=True)]
        student, teacher = Head(hidden, weight, *ctx.softcaps[0]), Head(*teacher_tensors, *ctx.softcaps[1])
        call, computed = ctx.call.with_tensors(hidden, weight), ComputedRows(grad_loss.shape[0], index)
        with own_arithmetic(grad_loss.device, "linear_jsd backward"):
            upstream = computed.select(grad_loss.float())
            terms = gradient_terms({ctx.kinds[0]: upstream}, stats, to_nats, scale, student, ctx.beta)
            if call.options.skip_ignored is True:
                # The gradient of a broken row is NaN whatever the upstream gradient.
                has_grad = (upstream != 0) | to_nats.isnan()
                grad_index = ComputedRows.where(has_grad, call.options.tp_group).index
                if grad_index is not None:
                    stats, terms = stats[:, grad_index], terms[:, grad_index]
                    scale, teacher_scale = scale[grad_index], teacher_scale[grad_index]
                    computed = computed.subset(grad_index)
            plan = _plan(Heads(student, teacher, ctx.beta, ctx.kinds), call, computed.count, ctx.needs_input_grad[1])
            tokens, teacher_tokens = (
                tokens_in_blocks(head.hidden, computed, plan.block_tokens, call.options) for head in (student, teacher)
            )
            head_grads = HeadGradients(tokens, call, plan, ctx.needs_input_grad[:2])
            # Both gathers come first, as in forward.
            for block, teacher_block in zip(tokens.blocks(), teacher_tokens.blocks(), strict=True):
                block_heads = Heads(
                    student.of_rows(block.hidden.wait(), scale),
                    teacher.of_rows(teacher_block.hidden.wait(), teacher_scale),
                    ctx.beta,
                    ctx.kinds,
                    terms=terms,
                )
                head_grads.add_block(block, TwoHeadGradLogits(call, block_heads, stats))
            return *head_grads.results(), None, None


@dataclass
class TwoHeadGradLogits:
    """The gradients of the student's logits of a block, and the statistics that they follow from."""

    call: Call
    heads: Heads  # of the block
    stats: Tensor  # [10 or 13, N], `DivergenceStats`
    cached: CachedGradLogits | None = None  # of all columns, filled with the statistics
    _logits_buffer: Tensor | None = None

    def fill_stats(self, plan: Plan, find_terms: Callable[[Tensor, slice], Tensor] | None) -> None:
        """Fill statistics and cached gradients, for some tokens at a time with all their columns.

        For these tokens the ranks exchange both softmaxes, then the sums. From their statistics and their places in the
        block `find_terms` returns their `GradTerms`; None: no gradient.
        """
        if find_terms is not None:
            self.heads = self.heads._replace(terms=self.stats.new_empty(len(GradTerms._fields), self.stats.shape[1]))
        call, backend, group = self.call, self.call.backend, self.call.options.tp_group
        all_columns, buffer = slice(0, call.shard.columns), self._new_buffer()
        for token_slice in cut(self.stats.shape[1], plan.stats_tokens):
            heads, stats = self.heads.block(token_slice, all_columns), self.stats[:, token_slice]
            softmaxes, sums = stats[:SOFTMAX_ROWS], stats[SOFTMAX_ROWS:]
            raw_logits = _raw_logits(heads, buffer) if call.shard.columns > 0 else None
            if raw_logits is not None:
                backend.softmaxes_of_products(heads, raw_logits, stats)
            else:
                stats.zero_()
                softmaxes[::2] = -torch.inf  # the largest of no logits
            if group is not None:
                softmaxes.copy_(merged_softmaxes(collectives.stack_over_group(softmaxes, group)))
            if raw_logits is not None:
                backend.divergence_of_products(heads, raw_logits, stats)
            if group is not None:
                sums.copy_(collectives.stack_over_group(sums, group).sum(dim=0))
            if find_terms is not None and heads.terms is not None:
                heads.terms.copy_(find_terms(stats, token_slice))
            if raw_logits is not None and self.cached is not None:
                backend.gradient_of_products(heads, raw_logits, stats, self.cached.grad[token_slice])

    def write(self, grad: Tensor, token_slice: slice, col_slice: slice) -> None:
        """Recompute both heads' logits, and write the student's gradient to a slab."""
        if self._logits_buffer is None:
            self._logits_buffer = self._new_buffer()
        heads = self.heads.block(token_slice, col_slice)
        raw_logits = _raw_logits(heads, self._logits_buffer)
        self.call.backend.gradient_of_products(heads, raw_logits, self.stats[:, token_slice], grad)

    def _new_buffer(self) -> Tensor:
        return self.call.hidden.new_empty(0, dtype=torch.float32)


def _terms(upstream: dict[Kind, Tensor], rows: Rows, heads: Heads, stats: Tensor, token_slice: slice) -> Tensor:
    """Return the `GradTerms` of some tokens from the upstream gradients of their block and their statistics."""
    part, some = rows.select(token_slice), {kind: gradient[token_slice] for kind, gradient in upstream.items()}
    return gradient_terms(some, stats, part.to_nats, part.scale, heads.student, heads.beta)


def _raw_logits(heads: Heads, buffer: Tensor) -> Tensor:
    """Return the products of both heads, [2, N, C], in this buffer, which is empty the first time."""
    num_tokens, num_columns = heads.student.hidden.shape[0], heads.student.weight.shape[0]
    raw_logits = buffer.resize_(2, num_tokens, slab_row_stride(num_columns))[:, :, :num_columns]
    step = COLUMN_STEP if any(copies_to_fp32(head.hidden) for head in heads[:2]) else num_columns
    for head, logits in zip(heads[:2], raw_logits, strict=True):
        for columns in cut_columns(num_columns, step):
            product(head.hidden, head.weight[columns].T, logits[:, columns], accumulate=False)
    return raw_logits


def _plan(heads: Heads, call: Call, num_tokens: int, needs_weight: bool, *, known: bool = False) -> Plan:
    """Return the plan of these heads. fp32 copies of the weights, which products make on CPUs, have room beside it.

    Raises:
        ValueError: the workspace is too small for forward or backward.
    """
    copied_row = max(4 * head.hidden.shape[1] * copies_to_fp32(head.hidden) for head in heads[:2])
    size = size_of_two_heads(call.size, call.backend.intermediate_bytes(call.shard.largest) + copied_row)
    given, copied = call.options.workspace_bytes, COLUMN_STEP * copied_row
    smallest = copied + size.smallest_workspace(needs_grad=True, needs_weight=True)
    if given < smallest:
        raise ValueError(f"workspace_bytes must be at least {smallest} for these heads, got {given}")
    return plan_divergence(
        size,
        num_tokens,
        call.shard.columns,
        given - copied,
        known=known,
        needs_weight=needs_weight,
        keeps_fp32_sum=known and scales_a_sum(call),
    )
