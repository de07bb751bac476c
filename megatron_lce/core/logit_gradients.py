"""Gradients of a block's logits, slab by slab, are made of kept exponentials or of recomputed products."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.call import Call
from megatron_lce.core.candidates import CandidateGradients, candidate_gradients
from megatron_lce.core.head_gradients import Slab, computed_slabs, kept_slabs
from megatron_lce.core.logits_cache import LogitsCache
from megatron_lce.core.options import DIFFERENTIABLE
from megatron_lce.core.plan import Blocks, plan_blocks, slab_row_stride
from megatron_lce.core.protocols import Backend
from megatron_lce.core.rows import Rows, RowTerms, Saved
from megatron_lce.core.tokens import TokenBlock


class LogitGradients(NamedTuple):
    """It holds all that the gradient of any logit of any computed row is made of."""

    call: Call
    rows: Rows
    terms: Tensor  # [6 or 7, N] fp32, `RowTerms`
    entropy: bool  # the entropy has an upstream gradient
    candidates: CandidateGradients | None = None  # what replaces the gradients of some products

    def select(self, tokens: slice | Tensor) -> "LogitGradients":
        candidates = None if self.candidates is None else self.candidates.select(tokens)
        return self._replace(rows=self.rows.select(tokens), terms=self.terms[:, tokens], candidates=candidates)

    @property
    def want_every_logit(self) -> bool:
        """Whether exponentials do not suffice: a mean's gradient under a softcap takes the slope at every logit."""
        return self.call.options.softcap is not None and RowTerms(*self.terms).mean_term is not None

    def compute(self, hidden: Tensor, tokens: slice, columns: slice, grad: Tensor) -> None:
        """Recompute these products and write their gradient to `grad`."""
        part = self.select(tokens)
        self.call.backend.grad_logits(
            hidden[tokens],
            self.call.weight[columns],
            part.rows,
            part.terms,
            grad,
            self.call.options,
            first_column=columns.start,
            entropy=self.entropy,
        )
        if part.candidates is not None:
            self.call.backend.write_columns(grad, part.candidates.columns - columns.start, part.candidates.grad)


def logit_gradients(
    call: Call,
    rows: Rows,
    saved: Saved,
    upstream: dict[str, Tensor | None],  # of these rows' outputs
    kept: Sequence[Tensor],  # the candidates' ids and base-2 logprobs, or nothing
) -> tuple[LogitGradients, Tensor]:
    """Return what gradients of logits are made of, and a mask [N] of rows where they are not all zero."""
    of_candidates = None
    if kept and (grad := upstream["candidate_logprobs"]) is not None:
        of_candidates = grad.float().masked_fill(kept[0] < 0, 0.0)
        of_lse = 0.0 if upstream["lse"] is None else upstream["lse"].float()
        upstream = {**upstream, "lse": of_lse - of_candidates.sum(dim=1)}
    differentiable = [upstream[name] for name in DIFFERENTIABLE]
    terms, counts = call.backend.row_terms(rows, saved, differentiable, call.options)
    gradients = LogitGradients(call, rows, terms, upstream["entropy"] is not None)
    if of_candidates is None:
        return gradients, counts
    ids, log_p = kept
    unknown = (log_p.isnan() & (ids >= 0)).any(dim=1)  # an id of no rank makes its row's gradient NaN, as a label does
    terms[2].masked_fill_(unknown & ~rows.ignored, torch.nan)
    candidates = candidate_gradients(of_candidates, ids, log_p, rows, saved, terms, call)
    return gradients._replace(candidates=candidates), counts | (of_candidates != 0).any(dim=1)


@dataclass
class ReadyGradients:
    """It holds finished gradients of the first columns' products, made of a cache in its memory."""

    grad: Tensor  # [*, C]
    factor: Tensor | None = None  # [*] fp32; the gradient is factor * grad
    rows: Tensor | None = None  # [N] int64, the rows of `grad` that backward computes; None: all

    def free(self) -> None:
        del self.grad


def gradients_of_cache(
    gradients: LogitGradients,
    cache: LogitsCache,
    hidden: Tensor | None = None,  # of the cache's rows
) -> ReadyGradients | None:
    """Turn every row's kept exponentials into gradients, in place.

    If the gradients `want_every_logit`, they are computed from hidden to the cache's memory; None without it.
    """
    if gradients.want_every_logit:
        if hidden is None:
            return None
        num_tokens, num_columns = cache.exp.shape
        gradients.compute(hidden, slice(0, num_tokens), slice(0, num_columns), cache.exp)
        return ReadyGradients(cache.exp)
    call = gradients.call
    scaled_hidden = cache.exp.shape[0] * call.weight.shape[1] * call.weight.element_size()
    factor = call.backend.grad_logits_from_cache(
        cache,
        gradients.rows,
        gradients.terms,
        call.options,
        entropy=gradients.entropy,
        factored=gradients.candidates is None
        and not call.options.entropy  # a call with an entropy kept exponentials relative to different references
        and cache.exp.shape[1] == call.shard.columns
        and scaled_hidden <= call.options.workspace_bytes,
    )
    if gradients.candidates is not None:
        call.backend.write_columns(cache.exp, *gradients.candidates)
    return ReadyGradients(cache.exp, factor)


def grad_logits_slabs(
    gradients: LogitGradients, block: TokenBlock, bytes_per_column: int, ready: ReadyGradients | None
) -> Iterator[Slab]:
    """Yield the gradients of a block's products: first those that are ready, then the others in one reused buffer."""
    block_gradients, hidden, call = gradients.select(block.rows), block.hidden, gradients.call
    num_tokens, num_columns = block_gradients.rows.labels.shape[0], call.shard.columns
    slabs = partial(computed_slabs, call.weight, num_tokens)

    def blocks(columns: int) -> Blocks:
        stride, workspace = slab_row_stride(columns), call.options.workspace_bytes
        return plan_blocks(num_tokens, stride, workspace, call.size.slab, per_column_if_tokens_are_cut=bytes_per_column)

    first = 0
    if ready is not None:
        first = ready.grad.shape[1]
        if ready.rows is None:
            factor = None if ready.factor is None else ready.factor[block.rows]
            yield from kept_slabs(ready.grad[block.rows], factor)
        else:
            copy = partial(_copy_rows, ready, ready.rows[block.rows], call.backend)
            yield from slabs(slice(0, first), blocks(first), copy)
            del copy
        if block.is_last:
            ready.free()
    if first < num_columns:
        compute = partial(block_gradients.compute, hidden.wait())
        yield from slabs(slice(first, num_columns), blocks(num_columns - first), compute)


def _copy_rows(
    ready: ReadyGradients, rows: Tensor, backend: Backend, tokens: slice, columns: slice, out: Tensor
) -> None:
    """Copy some rows and columns of the ready gradients, times their factor, to `out`."""
    torch.index_select(ready.grad[:, columns], 0, rows[tokens], out=out)
    if ready.factor is not None:
        backend.scale(out, ready.factor[rows[tokens]], out, accumulate=False)
