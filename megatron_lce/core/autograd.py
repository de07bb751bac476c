"""The one autograd function: the order of launches and collectives, and what is saved between them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lce.core.blocks import smallest_workspace, tokens_per_block
from megatron_lce.core.group_stats import stats_over_group
from megatron_lce.core.head_gradients import Slab, accumulator_bytes_per_column, head_gradients
from megatron_lce.core.logit_gradients import (
    LogitGradients,
    ReadyGradients,
    grad_logits_slabs,
    gradients_of_cache,
)
from megatron_lce.core.options import DIFFERENTIABLE, LinearCrossEntropyOutput, Options
from megatron_lce.core.products import own_arithmetic
from megatron_lce.core.protocols import CrossEntropyBackend
from megatron_lce.core.rows import Rows, Saved
from megatron_lce.core.tokens import (
    Counted,
    TokenBlock,
    Tokens,
    counted_rows,
    new_outputs,
    rows_that_count,
    rows_to_compute,
)
from megatron_lce.core.validation import refuse_double_backward


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Per-token logprobs, entropy and lse over a vocab-sharded weight.

    hidden  replicated, or sharded along the sequence  -> its gradient is summed over the group
    weight  this rank's shard                          -> its gradient is complete on this rank
    Saves a few floats a token, and what `logits_cache_bytes` allows, instead of N x V logits; backward recomputes the
    logits slab by slab.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, H], under sequence parallel [N / tp, H]
        weight: Tensor,  # [V_local, H]
        labels: Tensor,  # [N] int64 global ids
        temperature: Tensor | float,  # [N] if a tensor
        options: Options,
        backend: CrossEntropyBackend,
        shape: torch.Size,  # of the outputs, N elements
        grad_enabled: bool,
    ) -> tuple[Tensor | None, ...]:
        check_workspace(hidden, weight, options, backend, ctx.needs_input_grad if grad_enabled else None)
        num_tokens = labels.shape[0]
        with own_arithmetic(hidden.device, "linear_cross_entropy forward"):
            rows = backend.prepare_rows(labels, temperature, options)
            counted = counted_rows(labels, options)
            tokens = _tokens(hidden, num_tokens, counted, weight, options, backend)
            order = tokens.order()
            rows = rows_to_compute(rows, order, counted)
            outputs = new_outputs(shape, counted, options, labels.device)
            cache = backend.new_cache(tokens.num_computed, hidden, options) if grad_enabled else None
            extremes, sums = stats_over_group(tokens, weight, rows, options, backend, cache)
            saved = backend.finish(extremes, sums, rows, options, outputs, order)
        ctx.set_materialize_grads(False)
        if grad_enabled:
            ctx.save_for_backward(hidden, weight, counted.rows, *rows, *saved)
            ctx.num_tokens, ctx.options, ctx.backend = num_tokens, options, backend
            ctx.cache, ctx.cached = cache, cache is not None
        others = (output for name, output in outputs._asdict().items() if name not in DIFFERENTIABLE)
        ctx.mark_non_differentiable(*(output for output in others if output is not None))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("linear_cross_entropy")
        if ctx.cached and ctx.cache is None:
            raise RuntimeError(
                "a second backward through linear_cross_entropy needs logits_cache_bytes=0: "
                "the first one turned the kept logits into gradients in place"
            )
        hidden, weight, counted, *per_row = ctx.saved_tensors
        options, backend = ctx.options, ctx.backend
        cache, ctx.cache = ctx.cache, None
        with own_arithmetic(hidden.device, "linear_cross_entropy backward"):
            tokens = _tokens(hidden, ctx.num_tokens, Counted(counted), weight, options, backend)
            order = tokens.order()
            rows, saved = Rows(*per_row[:3]), Saved(*per_row[3:])
            flat = (None if grad is None else grad.reshape(-1) for grad in grad_outputs)
            given = dict(zip(LinearCrossEntropyOutput._fields, flat, strict=True))
            upstream = tuple(given[name] for name in DIFFERENTIABLE)
            terms, counts = backend.row_terms(rows, saved, upstream, options, order)
            entropy = given["entropy"] is not None
            problem = LogitGradients(weight, rows, terms, options, backend, entropy)
            ready = None if cache is None else gradients_of_cache(problem, cache)
            del cache
            if options.skip_ignored is True:
                tokens, problem = _rows_with_gradient(tokens, order, problem, counts, ready)

            def slabs(block: TokenBlock, bytes_per_column: int) -> Iterator[Slab]:
                return grad_logits_slabs(problem, block, bytes_per_column, ready)

            gradients = head_gradients(
                tokens,
                weight,
                options,
                backend,
                slabs,
                needs_hidden=ctx.needs_input_grad[0],
                needs_weight=ctx.needs_input_grad[1],
            )
        return *gradients, None, None, None, None, None, None


def linear_cross_entropy_autograd(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor | float,
    options: Options,
    backend: CrossEntropyBackend,
    shape: torch.Size,
) -> LinearCrossEntropyOutput:
    """Apply the function to flattened inputs, hidden [N, H], labels [N]; outputs of a shape of N elements."""
    grad_enabled = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return LinearCrossEntropyOutput(
        *LinearCrossEntropyFunction.apply(hidden, weight, labels, temperature, options, backend, shape, grad_enabled)
    )


def check_workspace(
    hidden: Tensor,
    weight: Tensor,
    options: Options,
    backend: CrossEntropyBackend,
    needs_grad: Sequence[bool] | None,
) -> None:
    """Every pass must find room for its smallest block before the first runs; `needs_grad`: None without backward.

    Asked of the largest shard of the group, so that ranks agree.
    """
    smallest = smallest_workspace(backend.softmax_stats_bytes(hidden, options))
    if needs_grad is not None:
        backward = backend.grad_logits_bytes(hidden)
        if needs_grad[1]:
            backward = backward._replace(per_column=backward.per_column + accumulator_bytes_per_column(weight, options))
        smallest = max(smallest, smallest_workspace(backward))
    if options.workspace_bytes < smallest:
        raise ValueError(f"workspace_bytes must be at least {smallest} for this head, got {options.workspace_bytes}")


def _tokens(
    hidden: Tensor,
    num_tokens: int,
    counted: Counted,
    weight: Tensor,
    options: Options,
    backend: CrossEntropyBackend,
) -> Tokens:
    """The computed rows, in the blocks that backward's outer loop takes."""
    computed = num_tokens if counted.rows is None else counted.rows.shape[0]
    return Tokens(hidden, num_tokens, counted, _block_tokens(computed, hidden, weight, options, backend), options)


def _block_tokens(computed: int, hidden: Tensor, weight: Tensor, options: Options, backend: CrossEntropyBackend) -> int:
    block_bytes = backend.grad_logits_bytes(hidden)
    sum_bytes = accumulator_bytes_per_column(weight, options)
    if options.weight_grad_sink is not None:  # a slab's, on its way to the sink: not the whole weight's
        block_bytes, sum_bytes = block_bytes._replace(per_column=block_bytes.per_column + sum_bytes), 0
    return tokens_per_block(computed, options.largest_shard, options.workspace_bytes, block_bytes, sum_bytes)


def _rows_with_gradient(
    tokens: Tokens, order: Tensor | None, problem: LogitGradients, counts: Tensor, ready: ReadyGradients | None
) -> tuple[Tokens, LogitGradients]:
    """The rows whose gradient is not zero on some rank; `ready` learns which of its own they are."""
    counted = rows_that_count(counts, problem.options)
    if counted.rows is None:
        return tokens, problem
    if ready is not None:
        ready.rows = counted.rows
    rows = counted.rows if order is None else order[counted.rows]
    block = _block_tokens(rows.shape[0], tokens.hidden, problem.weight, problem.options, problem.backend)
    return tokens.select(Counted(rows), block), problem.select(counted.rows)
