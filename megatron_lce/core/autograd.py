"""The one autograd function: the order of launches and collectives, and what is saved between them."""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.blocks import BlockBytes, plan_blocks, smallest_workspace
from megatron_lce.core.collectives import Pending
from megatron_lce.core.head_gradients import (
    Slab,
    accumulator_bytes_per_column,
    computed_slabs,
    head_gradients,
    kept_slabs,
)
from megatron_lce.core.options import LinearCrossEntropyOutput, Options
from megatron_lce.core.products import copied_row_bytes, full_fp32, row_stride
from megatron_lce.core.rows import Rows, Saved, softcap_scale
from megatron_lce.core.softmax_stats import empty_stats


class _LinearCrossEntropy(torch.autograd.Function):
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
        backend: ModuleType,
        grad_enabled: bool,
    ) -> tuple[Tensor | None, ...]:
        device_type = hidden.device.type
        _check_workspace(hidden, weight, options, backend, ctx.needs_input_grad if grad_enabled else None)
        with torch.autocast(device_type, enabled=False), full_fp32():
            rows = backend.prepare_rows(labels, temperature, options)
            num_tokens = labels.shape[0]
            cached = 0
            if grad_enabled:
                cached = backend.cache_columns(num_tokens, options.num_columns, hidden, options.logits_cache_bytes)
            cache = backend.LogitsCache.allocate(num_tokens, cached, hidden) if cached else None
            packed = _stats_over_group(hidden, weight, rows, options, backend, cache)
            outputs, saved = backend.finish(packed, rows, options)
        ctx.set_materialize_grads(False)
        if grad_enabled:
            ctx.save_for_backward(hidden, weight, *rows, *saved)
            ctx.options, ctx.backend, ctx.cache, ctx.cached_columns = options, backend, cache, cached
        ctx.mark_non_differentiable(*(t for t in outputs[3:] if t is not None))
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_lse: Tensor | None, *_: None
    ):
        if ctx.cached_columns and ctx.cache is None:
            raise RuntimeError(
                "a second backward through linear_cross_entropy needs logits_cache_bytes=0: "
                "the first one turned the kept logits into gradients in place"
            )
        hidden, weight, labels, row_scale, to_nats, *saved = ctx.saved_tensors
        rows = Rows(labels, row_scale, to_nats)
        cache, ctx.cache = ctx.cache, None
        options, backend = ctx.options, ctx.backend
        with torch.autocast(hidden.device.type, enabled=False), full_fp32():
            terms = backend.row_terms(rows, Saved(*saved), grad_logprobs, grad_entropy, grad_lse, options)
            entropy = grad_entropy is not None

            def slabs(hidden: Pending, bytes_per_column: int) -> Iterator[Slab]:
                return _grad_logits_slabs(
                    hidden, weight, rows, terms, options, backend, cache, entropy, bytes_per_column
                )

            grad_hidden, grad_weight = head_gradients(
                hidden,
                weight,
                labels.shape[0],
                options,
                slabs,
                needs_hidden=ctx.needs_input_grad[0],
                needs_weight=ctx.needs_input_grad[1],
            )
        return grad_hidden, grad_weight, None, None, None, None, None


def linear_cross_entropy_autograd(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor | float, options: Options, backend: ModuleType
) -> LinearCrossEntropyOutput:
    """Apply the function to flattened inputs: hidden [N, H], labels [N]; outputs [N]."""
    grad_enabled = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return LinearCrossEntropyOutput(
        *_LinearCrossEntropy.apply(hidden, weight, labels, temperature, options, backend, grad_enabled)
    )


def _check_workspace(
    hidden: Tensor, weight: Tensor, options: Options, backend: ModuleType, needs_grad: Sequence[bool] | None
) -> None:
    """The smallest block of every pass must find room before the first one runs; `needs_grad`: None without backward.

    Asked of the whole shard, padding included, so that ranks with equal shards agree.
    """
    smallest = smallest_workspace(backend.softmax_stats_bytes(hidden, weight, options.entropy, options.telemetry))
    if needs_grad is not None:
        backward = backend.grad_logits_bytes(hidden, weight)
        if needs_grad[1]:
            backward = backward._replace(per_column=backward.per_column + accumulator_bytes_per_column(weight, options))
        smallest = max(smallest, smallest_workspace(backward))
    if options.workspace_bytes < smallest:
        raise ValueError(f"workspace_bytes must be at least {smallest} for this head, got {options.workspace_bytes}")


def _stats_over_group(
    hidden: Tensor, weight: Tensor, rows: Rows, options: Options, backend: ModuleType, cache: Any
) -> Tensor:
    """Packed statistics of the whole vocabulary, the same bits on every rank."""
    num_tokens = rows.labels.shape[0]
    if num_tokens == 0:
        return empty_stats(0, options.entropy, options.telemetry, hidden.device)
    if options.sequence_parallel and options.tp_group is not None:
        hidden = collectives.gather_rows(hidden, options.tp_group)
    if options.num_columns == 0:
        packed = empty_stats(num_tokens, options.entropy, options.telemetry, hidden.device)
    else:
        packed = backend.softmax_stats(
            hidden,
            weight[: options.num_columns],
            rows.labels,
            rows.scale,
            softcap_scale=softcap_scale(options),
            entropy=options.entropy,
            telemetry=options.telemetry,
            vocab_start=options.vocab_start,
            workspace_bytes=options.workspace_bytes,
            cache=cache,
        )
    if options.tp_group is not None:
        packed = collectives.stack_over_group(packed, options.tp_group)
        packed = backend.merge_stats(packed, options.entropy, options.telemetry)
    return packed


def _grad_logits_slabs(
    hidden: Pending,
    weight: Tensor,
    rows: Rows,
    terms: Tensor,
    options: Options,
    backend: ModuleType,
    cache: Any,
    entropy: bool,
    bytes_per_column: int,
) -> Iterator[Slab]:
    """Gradients of the logits, the kept columns first (in place), then the others in one reused buffer."""
    num_tokens, num_columns = rows.labels.shape[0], options.num_columns
    scale = softcap_scale(options)
    first = 0
    if cache is not None:
        first = cache.exp.shape[1]
        backend.grad_logits_from_cache(
            cache, rows.labels, rows.scale, terms, softcap=scale is not None, entropy=entropy
        )
        copies = BlockBytes(0, copied_row_bytes(hidden.tensor), copied_row_bytes(weight))  # else one slab of everything
        blocks = plan_blocks(
            num_tokens, first, options.workspace_bytes, copies, per_column_if_tokens_are_cut=bytes_per_column
        )
        yield from kept_slabs(cache.exp, num_columns, blocks)
        cache.free()
    if first == num_columns:
        return
    blocks = plan_blocks(
        num_tokens,
        row_stride(num_columns - first, hidden.tensor.dtype.itemsize),
        options.workspace_bytes,
        backend.grad_logits_bytes(hidden.tensor, weight),
        per_column_if_tokens_are_cut=bytes_per_column,
    )

    def compute(tokens: slice, columns: slice, grad: Tensor) -> None:
        backend.grad_logits(
            hidden.wait()[tokens],
            weight[columns],
            rows.labels[tokens],
            rows.scale[tokens],
            terms[:, tokens],
            grad,
            first_column=columns.start,
            softcap_scale=scale,
            entropy=entropy,
        )

    yield from computed_slabs(hidden.tensor, slice(first, num_columns), blocks, compute)
