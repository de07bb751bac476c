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

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call, check_backward
from megatron_lce.core.call_plan import Plan, plan_divergence
from megatron_lce.core.computed_rows import ComputedRows
from megatron_lce.core.head_gradients import HeadGradients, Slab, computed_slabs, kept_slabs
from megatron_lce.core.jsd_heads import (
    DIVERGENCE_ROWS,
    LABEL_ROWS,
    SOFTMAX_ROWS,
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
    total: Tensor | None  # [] fp32, of weighted losses
    gradients: HeadGradients | None  # of the total
    student_outputs: list[Tensor]  # logprobs, entropy and lse, [N] each; empty: not requested
    per_row: tuple[Tensor | None, ...]  # of the computed rows, for backward: index, both scales, to_nats, statistics


@torch.no_grad()
def find_divergences(
    call: Call,  # the student's
    heads: Heads,  # hidden [N, H], under sequence parallel [N / tp, H]
    teacher_temperature: Tensor | float | None,  # [N] if a tensor; None: the student's
    return_student: bool,
    token_weights: Tensor | None,  # [N]; rows of weight 0 are ignored; None: no total
    with_gradient: bool,  # of the total
) -> Divergences:
    """Run all of forward, block by block: statistics, losses and, with `token_weights`, the total and its gradients.

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
    gradients = unscaled_gradients(tokens, call) if with_gradient else None
    # Both gathers start first: ranks must run collectives in one order. A rank without columns skips products only, and
    # runs every collective.
    for block, of_teacher in zip(tokens.blocks(), teacher_tokens.blocks(), strict=True):
        rows, stats = all_rows.select(block.rows), all_stats[:, block.rows]
        both = Heads(
            heads.student.of_rows(block.hidden.wait(), rows.scale),
            heads.teacher.of_rows(of_teacher.hidden.wait(), teacher_scale[block.rows]),
            heads.beta,
            heads.kinds,
            rows.labels if return_student else None,
        )
        collected = None
        if plan.cached_columns:
            stride = slab_row_stride(call.shard.columns)
            collected = with_zeros_behind(call.hidden.new_empty(stats.shape[1], stride), call.shard.columns)
        upstream = None if weights is None else {kind: weights[block.rows]}
        _fill_stats(both, stats, call, plan.stats_tokens, collected, upstream, rows)
        if gradients is not None:
            assert upstream is not None
            terms = gradient_terms(upstream, stats, rows.to_nats, rows.scale, heads.student, heads.beta)
            recomputed = _recomputed_slabs(both._replace(terms=terms), stats, call, plan)
            slabs = recomputed if collected is None else kept_slabs(collected)
            del collected  # freed before the next block allocates
            gradients.add(block, slabs)
    by_kind, to_nats = divergences_in_nats(all_stats, all_rows, heads.kinds, heads.beta)
    losses, total = by_kind[kind], None
    if weights is not None:
        total = computed.nan_if_wrong(torch.where(all_rows.ignored, 0.0, weights * losses).sum())
    of_student = student_outputs(all_stats, all_rows) if return_student else ()
    losses, *outputs = computed.spread_outputs([losses, *of_student])
    per_row = computed.index, all_rows.scale, teacher_scale, to_nats, all_stats
    return Divergences(heads, losses, total, gradients, outputs, per_row)


def jsd_with_gradient(found: Divergences, call: Call) -> Tensor:
    """Return the total, or the loss of each token, with a gradient."""
    if found.total is not None:
        return with_gradients(found.total, found.gradients, call, "linear_jsd")
    return _LinearJsd.apply(call.hidden, call.weight, found, call)


class _LinearJsd(torch.autograd.Function):
    """Per-token divergence of two heads over a vocab-sharded weight each.

    Both heads are laid out as in `LinearCrossEntropyFunction`; the teacher gets no gradient. Saves a dozen floats per
    token; backward recomputes the logits of both heads slab by slab.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, found: Divergences, call: Call) -> Tensor:
        student, teacher = found.heads[:2]
        # Autograd cannot save inference tensors, which do not change outside inference mode.
        ctx.inference = [t if t.is_inference() else None for t in teacher[:2]]
        saved = (None if t.is_inference() else t for t in teacher[:2])
        ctx.save_for_backward(hidden, weight, *saved, *found.per_row)
        ctx.forms, ctx.call = (student[2:4], teacher[2:4]), call.without_tensors()
        ctx.beta, ctx.kinds = found.heads.beta, found.heads.kinds
        return found.losses.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("linear_jsd", grad_loss)
        hidden, weight, *saved, index, scale, teacher_scale, to_nats, stats = ctx.saved_tensors
        teacher_tensors = [one if other is None else other for one, other in zip(saved, ctx.inference, strict=True)]
        student, teacher = Head(hidden, weight, *ctx.forms[0]), Head(*teacher_tensors, *ctx.forms[1])
        call, computed = ctx.call.with_tensors(hidden, weight), ComputedRows(grad_loss.shape[0], index)
        with own_arithmetic(grad_loss.device, "linear_jsd backward"):
            upstream = computed.select(grad_loss.float())
            terms = gradient_terms({ctx.kinds[0]: upstream}, stats, to_nats, scale, student, ctx.beta)
            if call.options.skip_ignored is True:
                # The gradient of a broken row is NaN whatever the upstream gradient.
                has_gradient = (upstream != 0) | to_nats.isnan()
                with_gradient = ComputedRows.where(has_gradient, call.options.tp_group).index
                if with_gradient is not None:
                    stats, terms = stats[:, with_gradient], terms[:, with_gradient]
                    scale, teacher_scale = scale[with_gradient], teacher_scale[with_gradient]
                    computed = computed.subset(with_gradient)
            heads = Heads(student, teacher, ctx.beta, ctx.kinds)
            plan = _plan(heads, call, computed.count, ctx.needs_input_grad[1])
            tokens, teacher_tokens = (
                tokens_in_blocks(head.hidden, computed, plan.block_tokens, call.options) for head in (student, teacher)
            )
            gradients = HeadGradients(tokens, call, ctx.needs_input_grad[:2])
            # Both gathers come first, as in forward.
            for block, of_teacher in zip(tokens.blocks(), teacher_tokens.blocks(), strict=True):
                student_rows = student.of_rows(block.hidden.wait(), scale)
                teacher_rows = teacher.of_rows(of_teacher.hidden.wait(), teacher_scale)
                heads = Heads(student_rows, teacher_rows, ctx.beta, ctx.kinds, terms=terms)
                gradients.add(block, _recomputed_slabs(heads, stats, call, plan))
            return *gradients.results(), None, None


def _fill_stats(
    heads: Heads,
    stats: Tensor,
    call: Call,
    tokens_at_once: int,
    all_gradients: Tensor | None,
    upstream: dict[Kind, Tensor] | None,
    rows: Rows,
) -> None:
    """Fill `DivergenceStats`, [K, N], and gradients [N, C], if any, for some tokens at a time.

    For these tokens the ranks exchange both softmaxes, then the sums.
    """
    group, backend, all_columns = call.options.tp_group, call.backend, slice(0, call.shard.columns)
    memory = heads.student.hidden.new_empty(0, dtype=torch.float32)
    for tokens in cut(stats.shape[1], tokens_at_once):
        block, block_stats = heads.block(tokens, all_columns), stats[:, tokens]
        softmaxes, sums = block_stats[:SOFTMAX_ROWS], block_stats[SOFTMAX_ROWS:]
        products = _products(block, memory) if call.shard.columns > 0 else None
        if products is not None:
            backend.softmaxes_of_products(block, products, block_stats)
        else:
            block_stats.zero_()
            softmaxes[::2] = -torch.inf  # the largest of no logits
        if group is not None:
            softmaxes.copy_(merged_softmaxes(collectives.stack_over_group(softmaxes, group)))
        if products is not None:
            backend.divergence_of_products(block, products, block_stats)
        if group is not None:
            sums.copy_(collectives.stack_over_group(sums, group).sum(dim=0))
        if products is not None and all_gradients is not None and upstream is not None:
            some = {kind: gradient[tokens] for kind, gradient in upstream.items()}
            inputs = block_stats, rows.to_nats[tokens], rows.scale[tokens], heads.student, heads.beta
            block = block._replace(terms=gradient_terms(some, *inputs))
            backend.gradient_of_products(block, products, block_stats, all_gradients[tokens])


def _recomputed_slabs(heads: Heads, stats: Tensor, call: Call, plan: Plan) -> Iterator[Slab]:
    """Yield gradients of the student's products, slab by slab, from recomputed products of both heads."""
    memory = heads.student.hidden.new_empty(0, dtype=torch.float32)

    def compute(tokens: slice, columns: slice, grad: Tensor) -> None:
        block = heads.block(tokens, columns)
        call.backend.gradient_of_products(block, _products(block, memory), stats[:, tokens], grad)

    columns = slice(0, call.shard.columns)
    yield from computed_slabs(heads.student.hidden, stats.shape[1], columns, plan, compute)


def _products(heads: Heads, memory: Tensor) -> Tensor:
    """Return the products of both heads, [2, N, C], in this memory, which is empty the first time."""
    num_tokens, num_columns = heads.student.hidden.shape[0], heads.student.weight.shape[0]
    products = memory.resize_(2, num_tokens, slab_row_stride(num_columns))[:, :, :num_columns]
    step = COLUMN_STEP if any(copies_to_fp32(head.hidden) for head in heads[:2]) else num_columns
    for head, values in zip(heads[:2], products, strict=True):
        for columns in cut_columns(num_columns, step):
            product(head.hidden, head.weight[columns].T, values[:, columns], accumulate=False)
    return products


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
