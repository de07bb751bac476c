"""Gradients of a block's logits, slab by slab: from what was kept of them, or from their products once more."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.blocks import Blocks, plan_blocks
from megatron_lce.core.head_gradients import Slab, computed_slabs, kept_slabs
from megatron_lce.core.options import Options
from megatron_lce.core.products import slab_row_stride
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
    entropy: bool  # whether it has an upstream gradient

    def select(self, tokens: slice | Tensor) -> "LogitGradients":
        return self._replace(rows=self.rows.select(tokens), terms=self.terms[:, tokens])

    @property
    def want_every_logit(self) -> bool:
        """The mean's gradient takes the softcap's slope at each, also where an exponential kept nothing of it."""
        return self.options.softcap is not None and RowTerms(*self.terms).mean_term is not None

    def compute(self, hidden: Tensor, tokens: slice, columns: slice, grad: Tensor) -> None:
        """Gradients of these products, ready once more."""
        here = self.select(tokens)
        self.backend.grad_logits(
            hidden[tokens],
            self.weight[columns],
            here.rows,
            here.terms,
            grad,
            first_column=columns.start,
            softcap_scale=softcap_scale(self.options),
            entropy=self.entropy,
        )


@dataclass
class ReadyGradients:
    """Gradients of the first columns' products that are there already."""

    grad: Tensor  # [*, C]
    factor: Tensor | None = None  # [*] fp32 that it is still to be multiplied by
    rows: Tensor | None = None  # [N] int64, which of them; None: all N

    def free(self) -> None:
        del self.grad


def gradients_of_cache(problem: LogitGradients, cache: LogitsCache) -> ReadyGradients | None:
    """What was kept of every row turns into its gradients, in place; None where they `want_every_logit`."""
    if problem.want_every_logit:
        return None
    options, weight = problem.options, problem.weight
    scaled_hidden = cache.exp.shape[0] * weight.shape[1] * weight.element_size()
    factor = problem.backend.grad_logits_from_cache(
        cache,
        problem.rows,
        problem.terms,
        softcap=options.softcap is not None,
        entropy=problem.entropy,
        factored=not options.entropy  # asked for, it may have had a gradient: what was kept has nothing in common
        and cache.exp.shape[1] == options.num_columns
        and scaled_hidden <= options.workspace_bytes,
    )
    return ReadyGradients(cache.exp, factor)


def gradients_in_cache(problem: LogitGradients, cache: LogitsCache, hidden: Tensor) -> ReadyGradients:
    """The same gradients, in the same place, from their products."""
    num_tokens, num_columns = cache.exp.shape
    problem.compute(hidden, slice(0, num_tokens), slice(0, num_columns), cache.exp)
    return ReadyGradients(cache.exp)


def grad_logits_slabs(
    problem: LogitGradients, block: TokenBlock, bytes_per_column: int, ready: ReadyGradients | None
) -> Iterator[Slab]:
    """Gradients of a block's products, those that are there first, then the others in one reused buffer."""
    here, hidden = problem.select(block.rows), block.hidden
    num_tokens, num_columns = here.rows.labels.shape[0], problem.options.num_columns
    slabs = partial(computed_slabs, hidden.tensor, num_tokens)
    first = 0
    if ready is not None:
        first = ready.grad.shape[1]
        if ready.rows is None:
            factor = None if ready.factor is None else ready.factor[block.rows]
            yield from kept_slabs(ready.grad[block.rows], num_columns, factor)
        else:
            copy = partial(_copy_rows, ready, ready.rows[block.rows], problem.backend)
            blocks = _plan(problem, hidden.tensor, num_tokens, first, bytes_per_column)
            yield from slabs(slice(0, first), num_columns, blocks, copy)
            del copy
        if block.is_last:
            ready.free()
    if first < num_columns:
        blocks = _plan(problem, hidden.tensor, num_tokens, num_columns - first, bytes_per_column)
        compute = partial(here.compute, hidden.wait())
        yield from slabs(slice(first, num_columns), num_columns, blocks, compute)


def _copy_rows(
    ready: ReadyGradients, rows: Tensor, backend: CrossEntropyBackend, tokens: slice, columns: slice, out: Tensor
) -> None:
    torch.index_select(ready.grad[:, columns], 0, rows[tokens], out=out)
    if ready.factor is not None:
        backend.scale(out, ready.factor[rows[tokens]], out, accumulate=False)


def _plan(
    problem: LogitGradients, hidden: Tensor, num_tokens: int, num_columns: int, bytes_per_column: int = 0
) -> Blocks:
    """Blocks of a buffer of so many columns."""
    options = problem.options
    return plan_blocks(
        num_tokens,
        slab_row_stride(num_columns),
        options.workspace_bytes,
        problem.backend.grad_logits_bytes(hidden),
        per_column_if_tokens_are_cut=bytes_per_column,
    )
