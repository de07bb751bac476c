"""The order of passes and collectives of `megatron_lce.jsd`: per token, and of a weighted sum with known weights.

Per token, forward fills each row's `Found`, and backward recomputes both heads' products for the gradients. With known
weights a block of tokens gets its gradients in forward, while its products are in memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.call import Call
from megatron_lce.core.computed_rows import ComputedRows
from megatron_lce.core.head_gradients import HeadGradients
from megatron_lce.core.head_products import (
    check_workspace,
    collected_slabs,
    diverge,
    gradient_blocks,
    recomputed_slabs,
)
from megatron_lce.core.known_loss import unscaled_dtype, unscaled_gradients, with_gradients
from megatron_lce.core.products import own_arithmetic
from megatron_lce.core.tokens import tokens_in_blocks
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
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, found: "Divergences", call: Call) -> Tensor:
        student, teacher = found.heads[:2]
        # A tensor of inference mode cannot be saved for backward, and cannot change outside of that mode.
        ctx.inference = [t if t.is_inference() else None for t in teacher[:2]]
        saved = (None if t.is_inference() else t for t in teacher[:2])
        ctx.save_for_backward(hidden, weight, *saved, *found.per_row)
        ctx.forms, ctx.beta, ctx.call = (student[2:4], teacher[2:4]), found.heads.beta, call.without_tensors()
        return found.losses.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("linear_jsd")
        hidden, weight, *saved, index, scale, teacher_scale, to_nats, found = ctx.saved_tensors
        teacher_tensors = [one if other is None else other for one, other in zip(saved, ctx.inference, strict=True)]
        student, teacher = Head(hidden, weight, *ctx.forms[0]), Head(*teacher_tensors, *ctx.forms[1])
        call, computed = ctx.call.with_tensors(hidden, weight), ComputedRows(grad_loss.shape[0], index)
        with own_arithmetic(grad_loss.device, "linear_jsd backward"):
            upstream = computed.select(grad_loss.float())
            coefficient = gradient_coefficient(upstream, to_nats, scale, student, ctx.beta)
            if call.options.skip_ignored is True:
                # A broken row's gradient is NaN whatever its upstream.
                has_gradient = (upstream != 0) | to_nats.isnan()
                with_gradient = ComputedRows.where(has_gradient, call.options.tp_group).index
                if with_gradient is not None:
                    found, coefficient = found[:, with_gradient], coefficient[with_gradient]
                    scale, teacher_scale = scale[with_gradient], teacher_scale[with_gradient]
                    computed = computed.subset(with_gradient)

            needs_hidden, needs_weight = ctx.needs_input_grad[:2]
            tokens, teacher_tokens = (
                tokens_in_blocks(head.hidden, computed, computed.count, call.options) for head in (student, teacher)
            )
            gradients = HeadGradients(tokens, call, needs_hidden=needs_hidden, needs_weight=needs_weight)
            # Gathered first, as a rank without columns makes no slabs: ranks must agree on collectives' order.
            for block, of_teacher in zip(tokens.blocks(), teacher_tokens.blocks(), strict=True):
                student_rows = student.of_rows(block.hidden.wait(), scale)
                teacher_rows = teacher.of_rows(of_teacher.hidden.wait(), teacher_scale)
                heads = Heads(student_rows, teacher_rows, ctx.beta, None, coefficient)
                gradients.add(block, recomputed_slabs(heads, found, call, gradients.bytes_per_column))
            return *gradients.results(), None, None


class Divergences(NamedTuple):
    """What a pass over the tokens finds."""

    heads: Heads
    losses: Tensor  # [N] fp32 in nats; 0 in skipped rows
    total: Tensor | None  # [] fp32, of weighted losses
    gradients: HeadGradients | None  # of the total
    student_outputs: list[Tensor]  # logprobs, entropy and lse, [N] each; empty: not asked for
    per_row: tuple[Tensor | None, ...]  # of the computed rows, for backward: index, both scales, to_nats, `Found`


@torch.no_grad()
def find_divergences(
    call: Call,  # the student's
    heads: Heads,  # hidden [N, H], under sequence parallel [N / tp, H]
    teacher_temperature: Tensor | float | None,  # [N] if a tensor; None: the student's
    return_student: bool,
    token_weights: Tensor | None,  # [N]; a row of weight 0 is ignored; None: no total is made
    with_gradient: bool,  # of the total
) -> Divergences:
    """Fill each row's `Found`, block by block; with gradients a block is as many tokens as they have room for."""
    options, prepare, labels = call.options, call.backend.prepare_rows, call.labels
    if token_weights is not None:
        labels = labels.masked_fill(token_weights == 0, options.ignore_index)
    all_rows = prepare(labels, call.temperature, options, call.shard)
    teacher_scale = all_rows.scale
    if teacher_temperature is not None:
        teacher_scale = prepare(labels, teacher_temperature, options, call.shard).scale
    # A number from the caller counts labels; weights of 0 do not change it.
    computed = ComputedRows.of(labels if options.skip_ignored is True else call.labels, options)
    check_workspace(heads, call)
    # A block collects gradients of smaller blocks, whose products stay in memory for every reading.
    blocks = gradient_blocks(heads, computed.count, call) if with_gradient else None
    of_block = computed.count if blocks is None else blocks[1]
    tokens, teacher_tokens = (
        tokens_in_blocks(head.hidden, computed, of_block, options, unscaled_dtype(call)) for head in heads[:2]
    )
    computed = tokens.computed
    all_rows, teacher_scale = computed.select_rows(all_rows), computed.select(teacher_scale)
    weights = None if token_weights is None else computed.select(token_weights).float()
    coefficient = None
    if weights is not None:
        coefficient = gradient_coefficient(weights, all_rows.to_nats, all_rows.scale, heads.student, heads.beta)
    all_found = teacher_scale.new_empty(9 if return_student else 6, computed.count)  # see `Found`
    gradients = unscaled_gradients(tokens, call) if with_gradient else None
    # Gathered first, as a rank without columns leaves out what follows: ranks must agree on collectives' order.
    for block, of_teacher in zip(tokens.blocks(), teacher_tokens.blocks(), strict=True):
        rows, found = all_rows.select(block.rows), all_found[:, block.rows]
        both = Heads(
            heads.student.of_rows(block.hidden.wait(), rows.scale),
            heads.teacher.of_rows(of_teacher.hidden.wait(), teacher_scale[block.rows]),
            heads.beta,
            rows.labels if return_student else None,
            None if coefficient is None else coefficient[block.rows],
        )
        if gradients is not None and blocks is not None:
            gradients.add(block, collected_slabs(both, found, call, blocks[0]))
            continue
        diverge(both, found, call)
        if gradients is not None:
            gradients.add(block, recomputed_slabs(both, found, call, gradients.bytes_per_column))
    losses, to_nats = losses_in_nats(all_found, all_rows, heads.beta)
    total = None
    if weights is not None:
        total = computed.nan_if_wrong(torch.where(all_rows.ignored, 0.0, weights * losses).sum())
    of_student = student_outputs(all_found, all_rows) if return_student else ()
    losses, *outputs = computed.spread_outputs([losses, *of_student])
    per_row = computed.index, all_rows.scale, teacher_scale, to_nats, all_found
    return Divergences(heads, losses, total, gradients, outputs, per_row)


def jsd_with_gradient(found: Divergences, call: Call) -> Tensor:
    """The total, or the loss of each token, as autograd knows it."""
    if found.total is not None:
        return with_gradients(found.total, found.gradients, call, "linear_jsd")
    return _LinearJsd.apply(call.hidden, call.weight, found, call)
