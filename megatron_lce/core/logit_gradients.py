"""Gradients of a block's logits, slab by slab: from what was kept of them, or from their products once more."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.call import Call
from megatron_lce.core.head_gradients import Slab, computed_slabs, kept_slabs
from megatron_lce.core.logits_cache import LogitsCache
from megatron_lce.core.plan import Blocks, plan_slabs
from megatron_lce.core.protocols import Backend
from megatron_lce.core.rows import Rows, RowTerms, softcap_scale
from megatron_lce.core.tokens import TokenBlock


class LogitGradients(NamedTuple):
    """What the gradient of any logit of any computed row is made of."""

    call: Call
    rows: Rows
    terms: Tensor  # [6 or 7, N] fp32, `RowTerms`
    entropy: bool  # whether it has an upstream gradient

    def select(self, tokens: slice | Tensor) -> "LogitGradients":
        return self._replace(rows=self.rows.select(tokens), terms=self.terms[:, tokens])

    @property
    def want_every_logit(self) -> bool:
        """The mean's gradient takes the softcap's slope at each, also where an exponential kept nothing of it."""
        return self.call.options.softcap is not None and RowTerms(*self.terms).mean_term is not None

    def compute(self, hidden: Tensor, tokens: slice, columns: slice, grad: Tensor) -> None:
        """Gradients of these products, made once more."""
        here = self.select(tokens)
        self.call.backend.grad_logits(
            hidden[tokens],
            self.call.weight[columns],
            here.rows,
            here.terms,
            grad,
            first_column=columns.start,
            softcap_scale=softcap_scale(self.call.options),
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


def gradients_of_cache(gradients: LogitGradients, cache: LogitsCache) -> ReadyGradients | None:
    """What was kept of every row turns into its gradients, in place; None where they `want_every_logit`."""
    if gradients.want_every_logit:
        return None
    call = gradients.call
    scaled_hidden = cache.exp.shape[0] * call.weight.shape[1] * call.weight.element_size()
    factor = call.backend.grad_logits_from_cache(
        cache,
        gradients.rows,
        gradients.terms,
        softcap=call.options.softcap is not None,
        entropy=gradients.entropy,
        factored=not call.options.entropy  # asked for, it may have had a gradient: what was kept has nothing in common
        and cache.exp.shape[1] == call.shard.columns
        and scaled_hidden <= call.options.workspace_bytes,
    )
    return ReadyGradients(cache.exp, factor)


def gradients_in_cache(gradients: LogitGradients, cache: LogitsCache, hidden: Tensor) -> ReadyGradients:
    """The same gradients, in the same place, from their products."""
    num_tokens, num_columns = cache.exp.shape
    gradients.compute(hidden, slice(0, num_tokens), slice(0, num_columns), cache.exp)
    return ReadyGradients(cache.exp)


def grad_logits_slabs(
    gradients: LogitGradients, block: TokenBlock, bytes_per_column: int, ready: ReadyGradients | None
) -> Iterator[Slab]:
    """Gradients of a block's products, those that are there first, then the others in one reused buffer."""
    here, hidden, call = gradients.select(block.rows), block.hidden, gradients.call
    num_tokens, num_columns = here.rows.labels.shape[0], call.shard.columns
    slabs = partial(computed_slabs, hidden.tensor, num_tokens)

    def blocks(columns: int) -> Blocks:
        workspace = call.options.workspace_bytes
        return plan_slabs(call.size, num_tokens, columns, workspace, per_column_if_tokens_are_cut=bytes_per_column)

    first = 0
    if ready is not None:
        first = ready.grad.shape[1]
        if ready.rows is None:
            factor = None if ready.factor is None else ready.factor[block.rows]
            yield from kept_slabs(ready.grad[block.rows], num_columns, factor)
        else:
            copy = partial(_copy_rows, ready, ready.rows[block.rows], call.backend)
            yield from slabs(slice(0, first), num_columns, blocks(first), copy)
            del copy
        if block.is_last:
            ready.free()
    if first < num_columns:
        compute = partial(here.compute, hidden.wait())
        yield from slabs(slice(first, num_columns), num_columns, blocks(num_columns - first), compute)


def _copy_rows(
    ready: ReadyGradients, rows: Tensor, backend: Backend, tokens: slice, columns: slice, out: Tensor
) -> None:
    torch.index_select(ready.grad[:, columns], 0, rows[tokens], out=out)
    if ready.factor is not None:
        backend.scale(out, ready.factor[rows[tokens]], out, accumulate=False)
