"""The one autograd function: the order of launches and collectives, and what is saved between them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lce.core.blocks import (
    smallest_workspace,
    tokens_per_block,
)
from megatron_lce.core.group_stats import stats_over_group
from megatron_lce.core.head_gradients import Slab, accumulator_bytes_per_column, head_gradients
from megatron_lce.core.logit_gradients import LogitGradients, grad_logits_slabs
from megatron_lce.core.options import DIFFERENTIABLE, LinearCrossEntropyOutput, Options
from megatron_lce.core.products import copies_of, own_arithmetic
from megatron_lce.core.protocols import CrossEntropyBackend
from megatron_lce.core.rows import Rows, RowTerms, Saved
from megatron_lce.core.tokens import (
    Counted,
    TokenBlock,
    Tokens,
    counted_rows,
    rows_that_count,
    rows_to_compute,
    spread,
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
        grad_enabled: bool,
    ) -> tuple[Tensor | None, ...]:
        check_workspace(hidden, weight, options, backend, ctx.needs_input_grad if grad_enabled else None)
        num_tokens = labels.shape[0]
        with own_arithmetic(hidden.device, "linear_cross_entropy forward"):
            # Before the rows are counted, which waits for the device: what follows then starts sooner.
            rows = backend.prepare_rows(labels, temperature, options)
            counted = counted_rows(labels, rows, options)
            tokens = _tokens(hidden, num_tokens, counted.rows, weight, options, backend)
            order = tokens.order()
            rows = rows_to_compute(rows, order, counted)
            cache = backend.new_cache(tokens.num_computed, hidden, options) if grad_enabled else None
            extremes, sums = stats_over_group(tokens, weight, rows, options, backend, cache)
            outputs, saved = backend.finish(extremes, sums, rows, options)
            outputs = spread(outputs, Counted(order, counted.unless_nan), num_tokens)
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
            tokens = _tokens(hidden, ctx.num_tokens, counted, weight, options, backend)
            order = tokens.order()
            rows, saved = Rows(*per_row[:3]), Saved(*per_row[3:])
            given = dict(zip(LinearCrossEntropyOutput._fields, grad_outputs, strict=True))
            upstream = tuple(_select(given[name], order) for name in DIFFERENTIABLE)
            terms = backend.row_terms(rows, saved, upstream, options)
            kept, of_kept = _rows_with_gradient(rows, terms, options)
            if kept is not None and of_kept is not None:
                *of_rows, terms = of_kept
                rows, cache = Rows(*of_rows), cache and cache.select(kept)
                order = kept if order is None else order.index_select(0, kept)
                tokens = _tokens(hidden, ctx.num_tokens, order, weight, options, backend)
            problem = LogitGradients(weight, rows, terms, options, backend)
            entropy = given["entropy"] is not None

            def slabs(block: TokenBlock, bytes_per_column: int) -> Iterator[Slab]:
                return grad_logits_slabs(problem, block, cache, entropy, bytes_per_column)

            gradients = head_gradients(
                tokens,
                weight,
                options,
                slabs,
                needs_hidden=ctx.needs_input_grad[0],
                needs_weight=ctx.needs_input_grad[1],
            )
        return *gradients, None, None, None, None, None


def linear_cross_entropy_autograd(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor | float,
    options: Options,
    backend: CrossEntropyBackend,
) -> LinearCrossEntropyOutput:
    """Apply the function to flattened inputs: hidden [N, H], labels [N]; outputs [N]."""
    grad_enabled = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return LinearCrossEntropyOutput(
        *LinearCrossEntropyFunction.apply(hidden, weight, labels, temperature, options, backend, grad_enabled)
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
        backward = backend.grad_logits_bytes(hidden, copies_of(hidden))
        if needs_grad[1]:
            backward = backward._replace(per_column=backward.per_column + accumulator_bytes_per_column(weight, options))
        smallest = max(smallest, smallest_workspace(backward))
    if options.workspace_bytes < smallest:
        raise ValueError(f"workspace_bytes must be at least {smallest} for this head, got {options.workspace_bytes}")


def _tokens(
    hidden: Tensor,
    num_tokens: int,
    counted: Tensor | None,
    weight: Tensor,
    options: Options,
    backend: CrossEntropyBackend,
) -> Tokens:
    """The computed rows, in the blocks that backward's outer loop takes."""
    computed = num_tokens if counted is None else counted.shape[0]
    block_bytes = backend.grad_logits_bytes(hidden, copies_of(hidden))
    per_column = block_bytes.per_column + accumulator_bytes_per_column(weight, options)
    block = tokens_per_block(
        computed, options.largest_shard, options.workspace_bytes, block_bytes._replace(per_column=per_column)
    )
    return Tokens(hidden, num_tokens, counted, block, options)


def _select(per_token: Any, rows: Tensor | None) -> Any:
    return per_token.index_select(0, rows) if isinstance(per_token, Tensor) and rows is not None else per_token


def _rows_with_gradient(rows: Rows, terms: Tensor, options: Options) -> tuple[Tensor | None, Sequence[Tensor] | None]:
    """Under `skip_ignored=True` the rows whose gradient is not zero, and rows and terms of them; None: all."""
    if options.skip_ignored is not True:
        return None, None
    # NaN counts: a broken row's terms are, whatever its upstream gradient.
    counts = terms[2:5].any(dim=0)
    if (mean_term := RowTerms(*terms).mean_term) is not None:
        counts |= mean_term != 0
    return rows_that_count(counts, options, lambda kept: (*rows.of(kept), terms.index_select(1, kept)))
