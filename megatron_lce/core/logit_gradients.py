"""Gradients of the logits of a block, slab by slab, from the logits cache or from recomputed products."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.call import Call
from megatron_lce.core.call_plan import Plan
from megatron_lce.core.candidates import CandidateGradients, candidate_gradients
from megatron_lce.core.head_gradients import Slab, computed_slabs, kept_slabs
from megatron_lce.core.logits_cache import LogitsCache
from megatron_lce.core.options import DIFFERENTIABLE
from megatron_lce.core.rows import Rows, RowTerms, SoftmaxOfRow
from megatron_lce.core.tokens import TokenBlock


class LogitGradients(NamedTuple):
    """Inputs of `grad_logits` for all computed rows."""

    call: Call
    rows: Rows
    terms: Tensor  # [6 or 7, N] fp32, `RowTerms`
    entropy: bool  # it has an upstream gradient
    candidates: CandidateGradients | None = None  # they replace the gradients of the candidates' products

    def select(self, tokens: slice | Tensor) -> "LogitGradients":
        candidates = None if self.candidates is None else self.candidates.select(tokens)
        return self._replace(rows=self.rows.select(tokens), terms=self.terms[:, tokens], candidates=candidates)

    def compute(self, hidden: Tensor, tokens: slice, columns: slice, grad: Tensor) -> None:
        """Recompute these products and write their gradient to `grad`."""
        call, part = self.call, self.select(tokens)
        inputs = hidden[tokens], call.weight[columns], part.rows, part.terms
        call.backend.grad_logits(*inputs, grad, call.options, first_column=columns.start, entropy=self.entropy)
        if part.candidates is not None:
            call.backend.write_columns(grad, part.candidates.columns - columns.start, part.candidates.grad)


def gradient_inputs(
    call: Call,
    rows: Rows,
    softmax: SoftmaxOfRow,
    upstream: dict[str, Tensor | None],  # of these rows' outputs
    ids: Tensor | None = None,  # [N, K], of the candidates
    log_p: Tensor | None = None,  # [N, K] base 2, of the candidates
) -> tuple[LogitGradients, Tensor]:
    """Return the inputs of `grad_logits`, and a mask [N] of rows with a nonzero gradient."""
    of_candidates = None
    if ids is not None and (grad := upstream["candidate_logprobs"]) is not None:
        of_candidates = grad.float().masked_fill(ids < 0, 0.0)
        of_lse = 0.0 if upstream["lse"] is None else upstream["lse"].float()
        upstream = {**upstream, "lse": of_lse - of_candidates.sum(dim=1)}
    differentiable = [upstream[name] for name in DIFFERENTIABLE]
    terms, counts = call.backend.row_terms(rows, softmax, differentiable, call.options)
    gradients = LogitGradients(call, rows, terms, entropy=upstream["entropy"] is not None)
    if of_candidates is None or ids is None or log_p is None:
        return gradients, counts
    unknown = (log_p.isnan() & (ids >= 0)).any(dim=1)  # an id of no rank makes the gradient NaN, as a label does
    terms[2].masked_fill_(unknown & ~rows.ignored, torch.nan)
    candidates = candidate_gradients(of_candidates, ids, log_p, rows, softmax, terms, call)
    return gradients._replace(candidates=candidates), counts | (of_candidates != 0).any(dim=1)


@dataclass
class CacheGradients:
    """Gradients computed in place in the cache; they cover columns [0, C)."""

    grad: Tensor  # [*, C]
    factor: Tensor | None = None  # [*] fp32; the gradient is factor * grad
    rows: Tensor | None = None  # [N] int64, the rows of `grad` that backward computes; None: all

    def copy(self, call: Call, rows: Tensor, tokens: slice, columns: slice, out: Tensor) -> None:
        """Copy the gradients of some of these rows to a slab."""
        torch.index_select(self.grad[:, columns], 0, rows[tokens], out=out)
        if self.factor is not None:
            call.backend.scale(out, self.factor[rows[tokens]], out, accumulate=False)


def gradients_of_cache(
    gradients: LogitGradients,
    cache: LogitsCache,
    plan: Plan,
    hidden: Tensor | None = None,  # of the cache's rows
) -> CacheGradients | None:
    """Turn cached exponentials into gradients, in place.

    The mean logit under a softcap needs the slope at every logit, which exponentials do not give. Its gradient is
    recomputed from hidden into the memory of the cache; None without hidden.
    """
    call, (num_tokens, num_columns) = gradients.call, cache.exp.shape
    if call.options.softcap is not None and RowTerms(*gradients.terms).mean_term is not None:
        if hidden is None:
            return None
        gradients.compute(hidden, slice(0, num_tokens), slice(0, num_columns), cache.exp)
        return CacheGradients(cache.exp)
    # With an entropy, exponentials are relative to different references.
    factored = gradients.candidates is None and not call.options.entropy and num_columns == call.shard.columns
    factored = factored and plan.scales_hidden
    inputs = cache, gradients.rows, gradients.terms, call.options
    factor = call.backend.grad_logits_from_cache(*inputs, entropy=gradients.entropy, factored=factored)
    if gradients.candidates is not None:
        call.backend.write_columns(cache.exp, *gradients.candidates)
    return CacheGradients(cache.exp, factor)


def grad_logits_slabs(
    gradients: LogitGradients, block: TokenBlock, plan: Plan, of_cache: CacheGradients | None
) -> Iterator[Slab]:
    """Yield the gradients of a block: from the cache, if any, then from recomputed products in one reused buffer.

    Slabs of the cache are views or, if backward skips rows, copies.
    """
    call, num_tokens, first = gradients.call, block.rows.stop - block.rows.start, 0

    def filled(columns: slice, fill: Callable[[slice, slice, Tensor], None]) -> Iterator[Slab]:
        return computed_slabs(call.weight, num_tokens, columns, plan, fill)

    if of_cache is not None:
        first = of_cache.grad.shape[1]
        if of_cache.rows is None:
            factor = None if of_cache.factor is None else of_cache.factor[block.rows]
            yield from kept_slabs(of_cache.grad[block.rows], factor)
        else:
            yield from filled(slice(0, first), partial(of_cache.copy, call, of_cache.rows[block.rows]))
        if block.rows.stop == gradients.rows.labels.shape[0]:
            del of_cache.grad  # its memory is free for recomputed slabs and casts
    if first < call.shard.columns:
        compute = partial(gradients.select(block.rows).compute, block.hidden.wait())
        yield from filled(slice(first, call.shard.columns), compute)
