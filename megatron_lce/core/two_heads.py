"""The passes of divergences of two heads.

Forward, for blocks of tokens with all columns:

1. Two products write the logits of both heads to memory.
2. The backend reads them for both softmaxes, which the ranks merge.
3. It reads them for the divergences, whose parts the ranks add up.
4. With a caller's loss, autograd gives the upstream gradients of its sum. The backend reads the logits for the
   student's gradient, and two products add it to the gradients of hidden and weight, which `known_loss` scales in
   backward. A block's hidden gradient is reduced over the group while the second one runs; forward waits for it. If no
   block's gradients fit in the workspace, all tokens are one block, whose products are recomputed for this step.

Backward of divergences per token recomputes the products for a range of columns, and continues with step 4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call, check_backward
from megatron_lce.core.call_plan import Plan, plan_divergence
from megatron_lce.core.divergence_types import (
    DIVERGENCE_ROWS,
    LABEL_ROWS,
    SOFTMAX_ROWS,
    GradTerms,
    Head,
    Heads,
    Kind,
    LinearDivergenceOutput,
    computed_kinds,
    divergences_in_nats,
    gradient_terms,
    merged_softmaxes,
    student_outputs,
)
from megatron_lce.core.head_gradients import HeadGradients
from megatron_lce.core.known_loss import keeps_fp32_weight_sum, unscaled_dtype, unscaled_gradients
from megatron_lce.core.matmul import copies_to_fp32, matmul, with_zeros_behind, without_autocast
from megatron_lce.core.plan import COLUMN_STEP, aligned_slices, size_of_two_heads, slab_row_stride, slices
from megatron_lce.core.row_index import RowIndex
from megatron_lce.core.rows import RowInputs
from megatron_lce.core.token_loss import Losses, TokenLossFunction, TokenLossResults
from megatron_lce.core.tokens import tokens_in_blocks


class TwoHeads(NamedTuple):
    """What a call compares, beside the student's tensors and options in `Call`."""

    student: Head  # hidden [N, H], under sequence parallel [N / tp, H]
    teacher: Head
    kinds: tuple[Kind, ...]
    beta: float
    teacher_temperature: Tensor | float | None  # [N] if a tensor; None: the student's
    return_student: bool


class Divergences(NamedTuple):
    """Results of forward."""

    outputs: LinearDivergenceOutput  # [N] each; 0 in skipped rows
    summed: TokenLossResults | None  # of a caller's loss
    per_row: tuple[Tensor | None, ...]  # of the computed rows, for backward: index, both scales, to_nats, statistics


@torch.no_grad()
def divergence_forward(
    call: Call,
    heads: TwoHeads,
    loss: TokenLossFunction | None = None,
    per_token: Sequence[Tensor] = (),  # [N, ...] each
    needs_grad: bool = False,  # of the sum of the losses
) -> Divergences:
    """Run all of forward, block by block: statistics and, with a caller's loss, its sum and the gradients.

    `_LinearDivergence.forward` only saves the results.
    """
    options, prepare = call.options, call.backend.prepare_rows
    all_rows = prepare(call.labels, call.temperature, options, call.shard)
    teacher_scale = all_rows.scale
    if heads.teacher_temperature is not None:
        teacher_scale = prepare(call.labels, heads.teacher_temperature, options, call.shard).scale
    row_index = RowIndex.from_labels(call.labels, options)
    plan = _plan(heads.student, heads.teacher, call, row_index.count, call.weight.requires_grad, known_loss=needs_grad)
    tokens, teacher_tokens = (
        tokens_in_blocks(head.hidden, row_index, plan.block_tokens, options, unscaled_dtype(call)) for head in heads[:2]
    )
    row_index = tokens.row_index  # now in the order of the blocks
    all_rows, teacher_scale = row_index.select_rows(all_rows), row_index.select(teacher_scale)
    all_stats = teacher_scale.new_zeros(DIVERGENCE_ROWS + LABEL_ROWS * heads.return_student, row_index.count)
    losses = None
    if loss is not None:
        selected, no_rows = [row_index.select(x) for x in per_token], slice(0, 0)
        losses = Losses(
            loss,
            selected,
            lambda: _outputs(heads, all_stats[:, no_rows], all_rows.select(no_rows))[0],
            all_stats.device,
            needs_grad,
            heads.kinds,
        )
    head_grads, grad_buffer = unscaled_gradients(tokens, call, plan) if needs_grad else None, None
    if plan.caches:
        num_columns = call.shard.num_columns
        shape = min(plan.block_tokens, row_index.count), slab_row_stride(num_columns)
        grad_buffer = with_zeros_behind(call.hidden.new_empty(shape), num_columns)
    # Both gathers start first: ranks must run collectives in one order. A rank without columns skips products only, and
    # runs every collective.
    for block, teacher_block in zip(tokens.blocks(), teacher_tokens.blocks(), strict=True):
        rows, stats, find_terms = all_rows.select(block.row_slice), all_stats[:, block.row_slice], None
        block_heads = Heads(
            heads.student.with_rows(block.hidden.wait(), rows.scale),
            heads.teacher.with_rows(teacher_block.hidden.wait(), teacher_scale[block.row_slice]),
            heads.beta,
            computed_kinds(heads.kinds, heads.beta),
            rows.labels if heads.return_student else None,
        )
        grad_logits = TwoHeadGradLogits(call, block_heads, stats)
        if grad_buffer is not None:
            grad_logits.cached = grad_buffer[: block.num_tokens]
        if losses is not None:
            find_terms = partial(_terms_of_losses, losses, heads, rows, block.row_slice.start)
        grad_logits.fill_stats(plan, find_terms)
        if head_grads is not None:
            head_grads.add_block(block, grad_logits)
    per_row = row_index.index, all_rows.scale, teacher_scale
    if losses is not None:
        outputs, metrics = losses.all_tokens(row_index)
        loss_sum = row_index.nan_if_wrong(losses.loss_sum)
        return Divergences(outputs, TokenLossResults(loss_sum, head_grads, outputs, metrics, losses.sample), per_row)
    outputs, to_nats = _outputs(heads, all_stats, all_rows)
    return Divergences(row_index.scatter_outputs(outputs), None, (*per_row, to_nats, all_stats))


def divergences_with_gradient(divergences: Divergences, call: Call, heads: TwoHeads) -> LinearDivergenceOutput:
    """Return the divergences of each token with a gradient."""
    by_kind = _LinearDivergence.apply(call.hidden, call.weight, divergences, call, heads)
    return divergences.outputs._replace(**dict(zip(heads.kinds, by_kind, strict=True)))


def _outputs(heads: TwoHeads, stats: Tensor, rows: RowInputs) -> tuple[LinearDivergenceOutput, Tensor]:
    """Return the outputs of some rows, and to_nats, NaN if one of the divergences is."""
    outputs, to_nats = divergences_in_nats(stats, rows, heads.kinds, heads.beta)
    return outputs._replace(student=student_outputs(stats, rows) if heads.return_student else None), to_nats


def _terms_of_losses(
    losses: Losses, heads: TwoHeads, block_rows: RowInputs, start: int, stats: Tensor, token_slice: slice
) -> Tensor:
    """Call the loss for some tokens of a block, which starts at this row; return their `GradTerms`."""
    rows = block_rows.select(token_slice)
    outputs, to_nats = _outputs(heads, stats, rows)
    row_slice = slice(start + token_slice.start, start + token_slice.stop)
    upstream = _without_none(losses.add(outputs, rows.ignored, row_slice))
    return gradient_terms(upstream, stats, to_nats, rows.scale, heads.student, heads.beta)


def _without_none(upstream: dict[Any, Tensor | None]) -> dict[Kind, Tensor]:
    return {kind: gradient for kind, gradient in upstream.items() if gradient is not None}


class _LinearDivergence(torch.autograd.Function):
    """Per-token divergences of two heads over a vocab-sharded weight each.

    Both heads are laid out as in `LinearCrossEntropyFunction`; the teacher gets no gradient. Saves two dozen floats per
    token; backward recomputes the logits of both heads slab by slab.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, divergences: Divergences, call: Call, heads: TwoHeads
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        teacher = heads.teacher[:2]
        # Autograd cannot save inference tensors, which do not change outside inference mode.
        ctx.inference = [t if t.is_inference() else None for t in teacher]
        saved = (None if t.is_inference() else t for t in teacher)
        ctx.save_for_backward(hidden, weight, *saved, *divergences.per_row)
        ctx.softcaps, ctx.call = (heads.student[2:4], heads.teacher[2:4]), call.without_tensors()
        ctx.kinds, ctx.beta = heads.kinds, heads.beta
        return tuple(getattr(divergences.outputs, kind).clone() for kind in heads.kinds)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        check_backward("linear_divergence", *grads)
        grad_outputs = _without_none(dict(zip(ctx.kinds, grads, strict=True)))
        hidden, weight, *saved, index, scale, teacher_scale, to_nats, stats = ctx.saved_tensors
        teacher_tensors = [
            t if inference is None else inference for t, inference in zip(saved, ctx.inference, strict=True)
        ]
        student, teacher = Head(hidden, weight, *ctx.softcaps[0]), Head(*teacher_tensors, *ctx.softcaps[1])
        call = ctx.call.with_tensors(hidden, weight)
        with without_autocast(call.hidden.device, "linear_divergence backward"):
            row_index = RowIndex(next(iter(grad_outputs.values())).shape[0], index)
            upstream = {kind: row_index.select(gradient.float()) for kind, gradient in grad_outputs.items()}
            terms = gradient_terms(upstream, stats, to_nats, scale, student, ctx.beta)
            if call.options.skip_ignored is True:
                # The gradient of a broken row is NaN whatever the upstream gradient.
                has_grad = to_nats.isnan()
                for gradient in upstream.values():
                    has_grad |= gradient != 0
                grad_index = RowIndex.from_mask(has_grad, call.options.tp_group).index
                if grad_index is not None:
                    stats, terms = stats[:, grad_index], terms[:, grad_index]
                    scale, teacher_scale = scale[grad_index], teacher_scale[grad_index]
                    row_index = row_index.subset(grad_index)
            plan = _plan(student, teacher, call, row_index.count, ctx.needs_input_grad[1])
            tokens, teacher_tokens = (
                tokens_in_blocks(head.hidden, row_index, plan.block_tokens, call.options) for head in (student, teacher)
            )
            head_grads = HeadGradients(tokens, call, plan, ctx.needs_input_grad[:2])
            # Both gathers come first, as in forward.
            for block, teacher_block in zip(tokens.blocks(), teacher_tokens.blocks(), strict=True):
                block_heads = Heads(
                    student.with_rows(block.hidden.wait(), scale),
                    teacher.with_rows(teacher_block.hidden.wait(), teacher_scale),
                    ctx.beta,
                    computed_kinds(upstream, ctx.beta),
                    terms=terms,
                )
                head_grads.add_block(block, TwoHeadGradLogits(call, block_heads, stats))
            return *head_grads.results(), None, None, None


@dataclass
class TwoHeadGradLogits:
    """The gradients of the student's logits of a block, and the statistics that they follow from."""

    call: Call
    heads: Heads  # of the block
    stats: Tensor  # [10 or 13, N], `DivergenceStats`
    cached: Tensor | None = None  # [N, C] gradients of all columns, filled with the statistics
    _logits_buffer: Tensor | None = None

    def fill_stats(self, plan: Plan, find_terms: Callable[[Tensor, slice], Tensor] | None) -> None:
        """Fill statistics and cached gradients, for some tokens at a time with all their columns.

        For these tokens the ranks exchange both softmaxes, then the sums. From their statistics and their places in the
        block `find_terms` returns their `GradTerms`; None: no gradient.
        """
        if find_terms is not None:
            self.heads = self.heads._replace(terms=self.stats.new_empty(len(GradTerms._fields), self.stats.shape[1]))
        call, backend, group = self.call, self.call.backend, self.call.options.tp_group
        all_columns, buffer = slice(0, call.shard.num_columns), self._new_buffer()
        for token_slice in slices(self.stats.shape[1], plan.stats_tokens):
            heads, stats = self.heads.block(token_slice, all_columns), self.stats[:, token_slice]
            softmaxes, sums = stats[:SOFTMAX_ROWS], stats[SOFTMAX_ROWS:]
            raw_logits = _raw_logits(heads, buffer) if call.shard.num_columns > 0 else None
            if raw_logits is not None:
                backend.divergence_softmaxes(heads, raw_logits, stats)
            else:
                stats.zero_()
                softmaxes[::2] = -torch.inf  # the largest of no logits
            if group is not None:
                softmaxes.copy_(merged_softmaxes(collectives.all_gather_stack(softmaxes, group)))
            if raw_logits is not None:
                backend.divergence_sums(heads, raw_logits, stats)
            if group is not None:
                sums.copy_(collectives.all_gather_stack(sums, group).sum(dim=0))
            if find_terms is not None and heads.terms is not None:
                heads.terms.copy_(find_terms(stats, token_slice))
            if raw_logits is not None and self.cached is not None:
                backend.divergence_grad_logits(heads, raw_logits, stats, self.cached[token_slice])

    def write(self, grad: Tensor, token_slice: slice, col_slice: slice) -> None:
        """Recompute both heads' logits, and write the student's gradient to a slab."""
        if self._logits_buffer is None:
            self._logits_buffer = self._new_buffer()
        heads = self.heads.block(token_slice, col_slice)
        raw_logits = _raw_logits(heads, self._logits_buffer)
        self.call.backend.divergence_grad_logits(heads, raw_logits, self.stats[:, token_slice], grad)

    def _new_buffer(self) -> Tensor:
        return self.call.hidden.new_empty(0, dtype=torch.float32)


def _raw_logits(heads: Heads, buffer: Tensor) -> Tensor:
    """Return the products of both heads, [2, N, C], in this buffer, which is empty the first time."""
    num_tokens, num_columns = heads.student.hidden.shape[0], heads.student.weight.shape[0]
    raw_logits = buffer.resize_(2, num_tokens, slab_row_stride(num_columns))[:, :, :num_columns]
    step = COLUMN_STEP if any(copies_to_fp32(head.hidden) for head in heads[:2]) else num_columns
    for head, logits in zip(heads[:2], raw_logits, strict=True):
        for columns in aligned_slices(num_columns, step):
            matmul(head.hidden, head.weight[columns].T, logits[:, columns], accumulate=False)
    return raw_logits


def _plan(
    student: Head, teacher: Head, call: Call, num_tokens: int, needs_weight: bool, *, known_loss: bool = False
) -> Plan:
    """Return the plan of these heads. fp32 copies of the weights, which products make on CPUs, have room beside it.

    Raises:
        ValueError: the workspace is too small for forward or backward.
    """
    copied_row = max(4 * head.hidden.shape[1] * copies_to_fp32(head.hidden) for head in (student, teacher))
    size = size_of_two_heads(call.size, call.backend.divergence_scratch_bytes(call.shard.max_columns) + copied_row)
    workspace_bytes, copied_bytes = call.options.workspace_bytes, COLUMN_STEP * copied_row
    min_bytes = copied_bytes + size.smallest_workspace(needs_grad=True, needs_weight=True)
    if workspace_bytes < min_bytes:
        raise ValueError(f"workspace_bytes must be at least {min_bytes} for these heads, got {workspace_bytes}")
    return plan_divergence(
        size,
        num_tokens,
        call.shard.num_columns,
        workspace_bytes - copied_bytes,
        known_loss=known_loss,
        needs_weight=needs_weight,
        keeps_fp32_sum=known_loss and keeps_fp32_weight_sum(call),
    )
