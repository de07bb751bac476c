"""The autograd function of `linear_cross_entropy`: the order of launches and collectives, and what is saved.

For each range of a block's tokens, forward takes statistics, fills the cache, and exchanges extremes, then sums; at the
end it computes all outputs. Backward goes block by block and slab by slab: cached logits first, then recomputed ones.
Each is added to the hidden gradient, then to the weight gradient. A block's hidden gradient is reduced over the group
while its last product for the weight runs; backward returns when all are reduced. If rows are skipped, sequence shards
are gathered and scattered whole; `skip_ignored=True` also takes a collective and a host wait in each pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lce.core.call import Call, check_backward
from megatron_lce.core.call_plan import Plan, plan_cross_entropy
from megatron_lce.core.group_statistics import outputs_over_group
from megatron_lce.core.head_gradients import HeadGradients
from megatron_lce.core.logit_gradients import grad_logits_inputs
from megatron_lce.core.logits_cache import new_cache
from megatron_lce.core.matmul import without_autocast
from megatron_lce.core.options import DIFFERENTIABLE_OUTPUTS, LinearCrossEntropyOutput
from megatron_lce.core.row_index import RowIndex
from megatron_lce.core.rows import RowInputs, RowSoftmax
from megatron_lce.core.tokens import tokens_in_blocks


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Per-token logprobs, entropy and lse over a vocab-sharded weight.

    hidden  replicated, or sharded along the sequence  -> its gradient is summed over the group
    weight  this rank's shard                          -> its gradient is complete on this rank
    Saves a few floats per token, and a cache of `logits_cache_bytes`, instead of N x V logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, call: Call, grad_enabled: bool) -> tuple[Tensor | None, ...]:
        options = call.options
        needs = ctx.needs_input_grad if grad_enabled else (False, False)
        with without_autocast(hidden.device, "linear_cross_entropy forward"):
            # Launched before the host waits for the number of rows, if it does.
            rows = call.backend.prepare_rows(call.labels, call.temperature, options, call.shard)
            row_index = RowIndex.from_labels(call.labels, options)
            plan = _plan(call, row_index.count, needs, options.logits_cache_bytes)
            tokens = tokens_in_blocks(hidden, row_index, plan.block_tokens, options)
            block_index = tokens.row_index  # in the order of the blocks
            rows = block_index.select_rows(rows)
            cache = new_cache(call.size, block_index.count, call.shard.num_columns, hidden) if plan.caches else None
            ids = None if call.candidates is None else block_index.select(call.candidates)
            labels = call.labels if ids is None else block_index.select(call.labels)
            outputs, softmax, log_p = outputs_over_group(tokens.blocks(), rows, labels, ids, call, plan, cache)
            outputs = block_index.scatter_outputs(outputs)
        for output in outputs:
            if output is not None:
                output.resize_((*call.shape, *output.shape[1:]))  # a view could not be changed in place
        ctx.set_materialize_grads(False)
        if grad_enabled:
            ctx.save_for_backward(hidden, weight, row_index.index, *rows, *softmax, call.candidates, log_p)
            ctx.num_tokens, ctx.call, ctx.plan = row_index.num_tokens, call.without_tensors(), plan
            ctx.cache, ctx.cache_is_spent = cache, False
        others = (output for name, output in outputs._asdict().items() if name not in DIFFERENTIABLE_OUTPUTS)
        ctx.mark_non_differentiable(*(output for output in others if output is not None))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        check_backward("linear_cross_entropy", *grad_outputs)
        if ctx.cache_is_spent:
            raise RuntimeError(
                "a second backward through linear_cross_entropy needs logits_cache_bytes=0: "
                "the first one turned the kept logits into gradients in place"
            )
        hidden, weight, index, *per_row, ids, log_p = ctx.saved_tensors
        rows, softmax = RowInputs(*per_row[: len(RowInputs._fields)]), RowSoftmax(*per_row[len(RowInputs._fields) :])
        call, plan, needs = ctx.call.with_tensors(hidden, weight), ctx.plan, ctx.needs_input_grad[:2]
        with without_autocast(hidden.device, "linear_cross_entropy backward"):
            tokens = tokens_in_blocks(hidden, RowIndex(ctx.num_tokens, index), plan.block_tokens, call.options)
            upstream = _select_upstream(grad_outputs, len(call.shape), tokens.row_index)
            ids = None if ids is None else tokens.row_index.select(ids)
            inputs, has_grad = grad_logits_inputs(call, rows, softmax, upstream, ids, log_p)
            if plan.caches:
                inputs.use_cache(ctx.cache)
                ctx.cache, ctx.cache_is_spent = None, True
            elif call.options.skip_ignored is True:
                grad_index = RowIndex.from_mask(has_grad, call.options.tp_group).index
                if grad_index is not None:
                    inputs = inputs.subset(grad_index)
                    row_index = tokens.row_index.subset(grad_index)
                    plan = _plan(call, row_index.count, needs)
                    tokens = tokens_in_blocks(hidden, row_index, plan.block_tokens, call.options)
            head_grads = HeadGradients(tokens, call, plan, needs)
            for block in tokens.blocks():
                head_grads.add_block(block, inputs.take_block(block))
            return *head_grads.results(), None, None


def linear_cross_entropy_autograd(call: Call) -> LinearCrossEntropyOutput:
    """Return outputs of `call.shape` with a gradient."""
    grad_enabled = torch.is_grad_enabled() and (call.hidden.requires_grad or call.weight.requires_grad)
    return LinearCrossEntropyOutput(*LinearCrossEntropyFunction.apply(call.hidden, call.weight, call, grad_enabled))


def _select_upstream(grad_outputs: Sequence[Tensor | None], dims: int, row_index: RowIndex) -> dict[str, Tensor | None]:
    """Return the upstream gradients of the computed rows, [n, ...], by the names of the outputs."""
    upstream: dict[str, Tensor | None] = dict.fromkeys(LinearCrossEntropyOutput._fields)
    for name, grad in zip(upstream, grad_outputs, strict=True):
        if grad is not None:
            upstream[name] = row_index.select(grad.reshape(row_index.num_tokens, *grad.shape[dims:]))
    return upstream


def _plan(call: Call, num_tokens: int, needs: Sequence[bool], logits_cache_bytes: int = 0) -> Plan:
    """`needs`: gradients of hidden and weight."""
    needs_hidden, needs_weight, *_ = needs
    return plan_cross_entropy(
        call.size,
        num_tokens,
        call.shard.num_columns,
        call.options.workspace_bytes,
        logits_cache_bytes=logits_cache_bytes,
        needs_grad=needs_hidden or needs_weight,
        needs_weight=needs_weight,
    )
