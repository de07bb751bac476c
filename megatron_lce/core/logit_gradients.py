"""Gradients of one head's logits: from terms of each row, by recomputing logits, or from the logits cache."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from megatron_lce.core.call import Call
from megatron_lce.core.call_plan import Plan
from megatron_lce.core.candidates import CandidateGradients, candidate_gradients
from megatron_lce.core.collectives import Pending
from megatron_lce.core.head_gradients import CachedGradLogits
from megatron_lce.core.logits_cache import LogitsCache
from megatron_lce.core.options import DIFFERENTIABLE_SCALARS
from megatron_lce.core.rows import RowInputs, RowSoftmax, RowTerms
from megatron_lce.core.tokens import TokenBlock


@dataclass
class GradLogitsInputs:
    """Inputs of `grad_logits` for all computed rows, or for the rows of a block as `GradLogits`."""

    call: Call
    rows: RowInputs
    terms: Tensor  # [6 or 7, N] fp32, `RowTerms`
    entropy: bool  # it has an upstream gradient
    candidates: CandidateGradients | None = None  # they replace the gradients of the candidates' products
    cached: CachedGradLogits | None = None
    hidden: Pending | None = None  # [N, H] of a block

    def subset(self, index: Tensor) -> Self:
        """Return some of the computed rows."""
        return self._select(index, None if self.cached is None else self.cached._replace(copy_index=index))

    def take_block(self, block: TokenBlock) -> Self:
        """Return the rows of a block. The last one takes the cache along, so that it is freed as early as possible."""
        row_slice, cached = block.row_slice, self.cached
        if cached is not None and cached.copy_index is not None:
            cached = cached._replace(copy_index=cached.copy_index[row_slice])
        elif cached is not None:
            factor = None if cached.factor is None else cached.factor[row_slice]
            cached = CachedGradLogits(cached.grad[row_slice], factor)
        if row_slice.stop == self.rows.labels.shape[0]:
            self.cached = None
        return self._select(row_slice, cached, block.hidden)

    def _select(self, index: slice | Tensor, cached: CachedGradLogits | None, hidden: Pending | None = None) -> Self:
        candidates = None if self.candidates is None else self.candidates.select(index)
        rows, terms = self.rows.select(index), self.terms[:, index]
        return replace(self, rows=rows, terms=terms, candidates=candidates, cached=cached, hidden=hidden)

    def write(self, grad: Tensor, token_slice: slice, col_slice: slice) -> None:
        """Copy cached gradients to a slab, recompute the logits of its other columns, and write their gradients."""
        if (num_copied := self._copy_cached(grad, token_slice, col_slice)) == grad.shape[1]:
            return
        grad, col_slice = grad[:, num_copied:], slice(col_slice.start + num_copied, col_slice.stop)
        assert self.hidden is not None
        call, rows, terms = self.call, self.rows.select(token_slice), self.terms[:, token_slice]
        call.backend.grad_logits(
            self.hidden.wait()[token_slice],
            call.weight[col_slice],
            rows,
            terms,
            grad,
            call.options,
            slab_start=col_slice.start,
            entropy=self.entropy,
        )
        if self.candidates is not None:
            candidates = self.candidates.select(token_slice)
            call.backend.write_columns(grad, candidates.columns - col_slice.start, candidates.grad)

    def _copy_cached(self, grad: Tensor, token_slice: slice, col_slice: slice) -> int:
        """Copy the first columns of a slab, and return their number. The cache is freed when no more will be copied."""
        if self.cached is None:
            return 0
        assert self.cached.copy_index is not None
        cached, index = self.cached.grad[:, col_slice], self.cached.copy_index[token_slice]
        if cached.shape[1] == 0:
            self.cached = None
            return 0
        copied = grad[:, : cached.shape[1]]
        torch.index_select(cached, 0, index, out=copied)
        if self.cached.factor is not None:
            self.call.backend.scale_rows(copied, self.cached.factor[index], copied, accumulate=False)
        return cached.shape[1]

    def use_cache(self, cache: LogitsCache, plan: Plan) -> None:
        """Turn cached exponentials into gradients, in place.

        The mean logit under a softcap needs the slope at every logit, which exponentials do not give. Its gradient is
        recomputed into the memory of the cache for a block, else in slabs.
        """
        call, (num_tokens, num_columns) = self.call, cache.exp.shape
        if call.options.softcap is not None and RowTerms(*self.terms).mean_term is not None:
            if self.hidden is not None:
                self.write(cache.exp, slice(0, num_tokens), slice(0, num_columns))
                self.cached = CachedGradLogits(cache.exp)
            return
        # With an entropy, exponentials are relative to different shifts.
        factored = self.candidates is None and not call.options.entropy and num_columns == call.shard.num_columns
        factor = call.backend.grad_logits_from_cache(
            cache, self.rows, self.terms, call.options, entropy=self.entropy, factored=factored and plan.scales_hidden
        )
        if self.candidates is not None:
            call.backend.write_columns(cache.exp, *self.candidates)
        self.cached = CachedGradLogits(cache.exp, factor)


def grad_logits_inputs(
    call: Call,
    rows: RowInputs,
    softmax: RowSoftmax,
    upstream: dict[str, Tensor | None],  # of these rows' outputs
    ids: Tensor | None = None,  # [N, K], of the candidates
    log_p: Tensor | None = None,  # [N, K] base 2, of the candidates
) -> tuple[GradLogitsInputs, Tensor]:
    """Return the inputs of `grad_logits`, and a mask [N] of rows with a nonzero gradient."""
    candidate_upstream = None
    if ids is not None and (grad := upstream["candidate_logprobs"]) is not None:
        candidate_upstream = grad.float().masked_fill(ids < 0, 0.0)
        lse_upstream = 0.0 if upstream["lse"] is None else upstream["lse"].float()
        upstream = {**upstream, "lse": lse_upstream - candidate_upstream.sum(dim=1)}
    differentiable = [upstream[name] for name in DIFFERENTIABLE_SCALARS]
    terms, has_grad = call.backend.row_terms(rows, softmax, differentiable, call.options)
    inputs = GradLogitsInputs(call, rows, terms, entropy=upstream["entropy"] is not None)
    if candidate_upstream is None or ids is None or log_p is None:
        return inputs, has_grad
    unknown = (log_p.isnan() & (ids >= 0)).any(dim=1)  # an id of no rank makes the gradient NaN, as a label does
    terms[2].masked_fill_(unknown & ~rows.ignored, torch.nan)
    inputs.candidates = candidate_gradients(candidate_upstream, ids, log_p, rows, softmax, terms, call)
    return inputs, has_grad | (candidate_upstream != 0).any(dim=1)
