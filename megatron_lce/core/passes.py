"""The order of events of every operation over the whole vocabulary: one forward, one backward, one autograd function.

Forward takes statistics block by block, and at the end writes all outputs. Where the caller's loss is known, each block
goes from statistics to gradients at once: autograd, or Megatron's formula, gives the upstream gradients of the loss of
its rows, and two matrix products add the block to the gradients of hidden and weight, which `known_loss` scales in
backward. Otherwise backward starts from the upstream gradients of all rows.

A block's hidden gradient is reduced over the group while its last product for the weight runs; the pass returns when
all are reduced. If rows are skipped, sequence shards are gathered and scattered whole; `skip_ignored=True` also takes a
collective and a host wait in each pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from megatron_lce.core.call import Call, check_backward
from megatron_lce.core.call_plan import Plan, plan_call
from megatron_lce.core.eager import without_autocast
from megatron_lce.core.head_gradients import GradLogits, HeadGradients
from megatron_lce.core.lm_head import LMHead, RowInputs
from megatron_lce.core.losses import KnownLosses, Losses
from megatron_lce.core.matmul import as_saved, copies_to_fp32
from megatron_lce.core.plan import size_of_two_heads
from megatron_lce.core.tokens import RowIndex, TokenBlock, Tokens, tokens_in_blocks


class Source(GradLogits, Protocol):
    """What one head and two heads differ in, for some rows: all computed ones, or a block's. A dataclass."""

    name: ClassVar[str]
    output_type: ClassVar[type[Any]]  # a named tuple
    differentiable: ClassVar[tuple[str, ...]]  # its fields with a gradient
    kept: ClassVar[tuple[str, ...]]  # fields from forward to backward, with tensors that autograd saves
    call: Call
    rows: RowInputs | Any  # None until `take_rows`

    @property
    def teacher(self) -> LMHead | Any: ...

    @property
    def has_grad(self) -> Tensor | Any:
        """A mask [N] of rows with a nonzero gradient, known with the terms."""

    def take_rows(self, rows: RowInputs, row_index: RowIndex, plan: Plan) -> None:
        """Take the computed rows, and make room for what is kept of them. Once, at the start of a forward pass."""

    def subset(self, index: slice | Tensor) -> Self:
        """Return some of the rows."""

    def of_block(self, *blocks: TokenBlock) -> Self:
        """Return the rows of a block, with their hidden states. The last one takes the cache along."""

    def parts_with_stats(self, plan: Plan) -> Iterator[Self]:
        """Fill the block's rows of the whole's statistics, by launches and exchanges, and yield rows that are complete.

        One head yields the block once, two heads each part of it while its logits are in memory.
        """

    def outputs(self) -> Any:
        """Write the outputs of rows with statistics, and keep what `find_terms` needs of them."""

    def find_terms(self, upstream: dict[str, Tensor | None]) -> None:
        """Turn upstream gradients into terms, which any logit's gradient follows from.

        Two heads in forward also write the gradients of the part's logits, which are in memory.
        """


class Forward(NamedTuple):
    """Results of a forward pass."""

    outputs: Any  # of `call.shape`: 0 in skipped rows
    source: Source  # of all computed rows
    row_index: RowIndex  # in the caller's order
    plan: Plan
    head_grads: HeadGradients | None  # of the sum of the losses, where they are computed in forward


def forward_with_gradient(source: Source, losses: Losses | KnownLosses | None = None, name: str = "") -> Forward:
    """Run `forward`, and return outputs with a gradient if one is wanted and not computed there."""
    (hidden, weight, *_), needs = source.call.head, needed_gradients(source.call)
    with without_autocast(hidden.device, name or f"{source.name} forward"):
        results = forward(source, needs, losses)
    if results.head_grads is not None or not any(needs):
        return results
    return results._replace(outputs=source.output_type(*VocabularyFunction.apply(hidden, weight, results)))


@torch.no_grad()
def forward(source: Source, needs: Sequence[bool], losses: Losses | KnownLosses | None = None) -> Forward:
    """Compute outputs, and gradients if the losses are known; `needs`: gradients of hidden and weight.

    `KnownLosses` have no effect where the plan leaves gradients to backward.
    """
    call, options, head_grads = source.call, source.call.options, None
    # Launched before the host waits for the number of rows, if it does.
    rows = call.backend.prepare_rows(call.head, call.labels, options.ignore_index, call.shard)
    row_index = RowIndex.from_labels(call.labels, options)
    plan = plan_of(source, row_index.count, needs, options.logits_cache_bytes, losses)
    if isinstance(losses, KnownLosses) and not plan.in_forward:
        losses = None
    # A known loss's hidden gradient, before it is scaled, may exceed the range of fp16.
    unscaled_dtype = torch.float32 if plan.in_forward and call.head.hidden.dtype == torch.float16 else None
    tokens = _tokens(source, row_index, plan, unscaled_dtype)
    block_index = tokens[0].row_index  # in the order of the blocks
    source.take_rows(block_index.select_rows(rows), block_index, plan)
    if losses is not None:
        losses.select(block_index)
    if plan.in_forward:
        keep_fp32_sum = keeps_fp32_weight_sum(call) or tokens[0].num_blocks > 1
        head_grads = HeadGradients(tokens[0], call, plan, needs, keep_fp32_sum=keep_fp32_sum)
    # Blocks of all heads: every gather starts first, because ranks must run collectives in one order. Unpacked at once:
    # `zip` would keep the first tuple, and so its hidden states.
    for block, *of_teacher in zip(*(of_head.blocks() for of_head in tokens), strict=True):
        block_source = source.of_block(block, *of_teacher)
        for part in block_source.parts_with_stats(plan):
            if losses is not None:
                upstream = losses.add(part.outputs(), part.rows.ignored)
                if head_grads is not None:
                    part.find_terms(upstream)
        if head_grads is not None:
            head_grads.add_block(block, block_source)
    outputs = source.outputs() if losses is None else losses.outputs(source.subset(slice(0, 0)).outputs)
    outputs = block_index.scatter_outputs(outputs, call.shape)
    return Forward(outputs, source, row_index, plan, head_grads)


class VocabularyFunction(torch.autograd.Function):
    """Per-token outputs of a source over a vocab-sharded weight, as `forward` computed them.

    hidden  replicated, or sharded along the sequence  -> its gradient is summed over the group
    weight  this rank's shard                          -> its gradient is complete on this rank
    Saves some floats per token, fewer than twenty, and the cache, if any, instead of N x V logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, results: Forward) -> tuple[Any, ...]:
        outputs, row_index, plan = results.outputs, results.row_index, results.plan
        source: Any = results.source
        ctx.set_materialize_grads(False)
        fields = {name: getattr(source, name) for name in source.kept}
        ctx.types = {name: type(field) for name, field in fields.items()}
        kept = [leaf for field in fields.values() for leaf in (field if isinstance(field, tuple) else (field,))]
        tensors = (leaf if isinstance(leaf, Tensor) else None for leaf in kept)
        # Autograd saves no inference tensors: they have no version that tells of changes in place.
        saved = [tensor.clone() if tensor is not None and tensor.is_inference() else tensor for tensor in tensors]
        ctx.save_for_backward(hidden, weight, row_index.index, *saved)
        ctx.unsaved = [leaf if tensor is None else None for leaf, tensor in zip(kept, saved, strict=True)]
        ctx.source = replace(source, call=source.call.without_tensors(), **dict.fromkeys(source.kept))
        ctx.num_tokens, ctx.plan = row_index.num_tokens, plan
        others = (output for name, output in outputs._asdict().items() if name not in source.differentiable)
        ctx.mark_non_differentiable(*(output for output in others if isinstance(output, Tensor)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        check_backward(ctx.source.name, *grad_outputs)
        hidden, weight, index, *saved = map(as_saved, ctx.saved_tensors)
        kept = iter(leaf if tensor is None else tensor for leaf, tensor in zip(ctx.unsaved, saved, strict=True))
        fields = {
            name: of(*islice(kept, len(of._fields))) if issubclass(of, tuple) else next(kept)
            for name, of in ctx.types.items()
        }
        source = replace(ctx.source, call=ctx.source.call.with_tensors(hidden, weight), **fields)
        call, needs, row_index = source.call, ctx.needs_input_grad[:2], RowIndex(ctx.num_tokens, index)
        plan, cache_bytes = ctx.plan or plan_of(source, row_index.count, needs, 0), 0
        if plan.cache_tokens:  # they become gradients in place: a second backward recomputes
            cache_bytes = call.options.logits_cache_bytes
            ctx.plan, ctx.source = None, replace(ctx.source, cache=None)
        with without_autocast(hidden.device, f"{source.name} backward"):
            tokens = _tokens(source, row_index, plan)
            row_index = tokens[0].row_index
            upstream = dict.fromkeys(source.output_type._fields)
            for name, grad in zip(upstream, grad_outputs, strict=True):
                if grad is not None:
                    upstream[name] = row_index.select(grad.reshape(ctx.num_tokens, *grad.shape[len(call.shape) :]))
            source.find_terms(upstream)
            if call.options.skip_ignored is True:
                grad_index = RowIndex.from_mask(source.has_grad, call.options.tp_group).index
                if grad_index is not None:
                    source, row_index = source.subset(grad_index), row_index.subset(grad_index)
                    plan = plan_of(source, row_index.count, needs, cache_bytes)
                    tokens = _tokens(source, row_index, plan)
            head_grads = HeadGradients(tokens[0], call, plan, needs)
            for block, *of_teacher in zip(*(of_head.blocks() for of_head in tokens), strict=True):
                head_grads.add_block(block, source.of_block(block, *of_teacher))
            return *head_grads.results(), None


def needed_gradients(call: Call) -> tuple[bool, bool]:
    """Return whether hidden and weight need a gradient."""
    enabled = torch.is_grad_enabled()
    return enabled and call.head.hidden.requires_grad, enabled and call.head.weight.requires_grad


def plan_of(
    source: Source,
    num_tokens: int,
    needs: Sequence[bool],
    logits_cache_bytes: int | None,
    losses: Losses | KnownLosses | None = None,
) -> Plan:
    call, size = source.call, source.call.size
    if source.teacher is not None:
        copied_row = max(4 * head.hidden.shape[1] * copies_to_fp32(head.hidden) for head in (call.head, source.teacher))
        size = size_of_two_heads(size, copied_row)
    return plan_call(
        size,
        num_tokens,
        call.shard.num_columns,
        call.options.workspace_bytes,
        known_loss=losses is not None,
        only_if_faster=losses is not None and losses.only_if_faster,
        keeps_fp32_sum=losses is not None and keeps_fp32_weight_sum(call),
        logits_cache_bytes=logits_cache_bytes,
        needs_grad=any(needs),
        needs_weight=needs[1],
    )


def _tokens(
    source: Source, row_index: RowIndex, plan: Plan, grad_dtype: torch.dtype | None = None
) -> tuple[Tokens, ...]:
    """Return the tokens of each head."""
    hiddens = (source.call.head.hidden,) if source.teacher is None else (source.call.head.hidden, source.teacher.hidden)
    block_tokens, options = plan.block_tokens, source.call.options
    return tuple(tokens_in_blocks(hidden, row_index, block_tokens, options, grad_dtype) for hidden in hiddens)


def keeps_fp32_weight_sum(call: Call) -> bool:
    """Return whether even the weight gradient of a single block is kept in fp32 until a known loss scales it."""
    return call.options.weight_grad_sink is not None or call.head.weight.dtype == torch.float16
