"""Gradients of a block's logits, slab by slab: from what was kept of them, or from their products once more."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from torch import Tensor

from megatron_lce.core.blocks import BlockBytes, Blocks, cut, plan_blocks
from megatron_lce.core.head_gradients import Slab, computed_slabs, kept_slabs
from megatron_lce.core.options import Options
from megatron_lce.core.products import copies_of, slab_row_stride
from megatron_lce.core.protocols import CrossEntropyBackend, LogitsCache
from megatron_lce.core.rows import Rows, RowTerms, softcap_scale
from megatron_lce.core.tokens import TokenBlock


class LogitGradients(NamedTuple):
    """What the gradient of any logit of any computed row is made of."""

    weight: Tensor
    rows: Rows
    terms: Tensor  # [6 or 7, N] fp32, `RowTerms`
    options: Options
    backend: CrossEntropyBackend


def grad_logits_slabs(
    problem: LogitGradients, block: TokenBlock, cache: LogitsCache | None, entropy: bool, bytes_per_column: int
) -> Iterator[Slab]:
    """Gradients of a block's products, the kept columns first, then the others in one reused buffer."""
    weight, options, backend = problem.weight, problem.options, problem.backend
    rows, terms = problem.rows.of(block.rows), problem.terms[:, block.rows]
    hidden, num_tokens, num_columns = block.hidden, rows.labels.shape[0], options.num_columns
    scale = softcap_scale(options)

    def from_cache(kept: LogitsCache, tokens: slice, columns: slice, grad: Tensor) -> None:
        backend.grad_logits_from_cache(
            kept.of(tokens),
            rows.of(tokens),
            terms[:, tokens],
            grad,
            columns,
            softcap=scale is not None,
            entropy=entropy,
        )

    def computed(tokens: slice, columns: slice, grad: Tensor) -> None:
        backend.grad_logits(
            hidden.wait()[tokens],
            weight[columns],
            rows.of(tokens),
            terms[:, tokens],
            grad,
            first_column=columns.start,
            softcap_scale=scale,
            entropy=entropy,
        )

    def plan(num_columns: int, block_bytes: BlockBytes) -> Blocks:
        return plan_blocks(
            num_tokens,
            num_columns,
            options.workspace_bytes,
            block_bytes,
            per_column_if_tokens_are_cut=bytes_per_column,
        )

    first = 0
    copies = copies_of(weight)
    grad_bytes = backend.grad_logits_bytes(hidden.tensor, copies)
    if cache is not None:
        kept, first = cache.of(block.rows), cache.exp.shape[1]
        # The mean's gradient takes the softcap's slope at every logit, also where an exponential kept nothing of it.
        recompute = scale is not None and RowTerms(*terms).mean_term is not None
        if kept.rows is None:
            blocks = plan(first, BlockBytes(0, *copies))
            if recompute:
                for columns, part in itertools.product(cut(first, blocks.columns), cut(num_tokens, blocks.tokens)):
                    computed(part, columns, kept.exp[part, columns])
            else:
                from_cache(kept, slice(0, num_tokens), slice(0, first), kept.exp)
            yield from kept_slabs(kept.exp, num_columns, blocks)
        else:
            every, blocks = slice(0, first), plan(slab_row_stride(first), grad_bytes)
            compute = computed if recompute else partial(from_cache, kept)
            yield from computed_slabs(hidden.tensor, num_tokens, every, num_columns, blocks, compute)
            del compute
        del kept
        if block.is_last:
            cache.free()
    if first < num_columns:
        blocks = plan(slab_row_stride(num_columns - first), grad_bytes)
        every = slice(first, num_columns)
        yield from computed_slabs(hidden.tensor, num_tokens, every, num_columns, blocks, computed)
