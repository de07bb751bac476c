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
from megatron_lce.core.options import DIFFERENTIABLE
from megatron_lce.core.rows import Rows, RowTerms, SoftmaxOfRow
from megatron_lce.core.tokens import TokenBlock


@dataclass
class GradLogitsInputs:
    """Inputs of `grad_logits` for all computed rows, or for the rows of a block as `GradLogits`."""

    call: Call
    rows: Rows
    terms: Tensor  # [6 or 7, N] fp32, `RowTerms`
    entropy: bool  # it has an upstream gradient
    candidates: CandidateGradients | None = None  # they replace the gradients of the candidates' products
    cached: CachedGradLogits | None = None
    hidden: Pending | None = None  # [N, H] of a block

    def subset(self, index: Tensor) -> Self:
        """Return some of the computed rows."""
        return self._select(index, None if self.cached is None else self.cached._replace(row_index=index))

    def of_block(self, block: TokenBlock) -> Self:
        """Return the rows of a block. The last one takes the cache along, so that it is freed as early as possible."""
        rows, cached = block.rows, self.cached
        if cached is not None and cached.row_index is not None:
            cached = cached._replace(row_index=cached.row_index[rows])
        elif cached is not None:
            cached = CachedGradLogits(cached.grad[rows], None if cached.factor is None else cached.factor[rows])
        if rows.stop == self.rows.labels.shape[0]:
            self.cached = None
        return self._select(rows, cached, block.hidden)

    def _select(self, index: slice | Tensor, cached: CachedGradLogits | None, hidden: Pending | None = None) -> Self:
        candidates = None if self.candidates is None else self.candidates.select(index)
        rows, terms = self.rows.select(index), self.terms[:, index]
        return replace(self, rows=rows, terms=terms, candidates=candidates, cached=cached, hidden=hidden)

    def write(self, grad: Tensor, token_slice: slice, col_slice: slice) -> None:
        """Copy cached gradients to a slab; recompute the other logits, and write their gradients."""
        num_copied = 0
        if self.cached is not None:
            num_copied = max(0, min(col_slice.stop, self.cached.grad.shape[1]) - col_slice.start)
            if num_copied > 0:
                self._copy(grad[:, :num_copied], token_slice, col_slice.start)
            else:
                self.cached = None  # all are copied
        if num_copied < grad.shape[1]:
            self._recompute(grad[:, num_copied:], token_slice, slice(col_slice.start + num_copied, col_slice.stop))

    def _copy(self, grad: Tensor, token_slice: slice, start: int) -> None:
        """Copy cached gradients of the columns from `start` on."""
        assert self.cached is not None
        assert self.cached.row_index is not None
        cached, index = self.cached.grad[:, start : start + grad.shape[1]], self.cached.row_index[token_slice]
        torch.index_select(cached, 0, index, out=grad)
        if self.cached.factor is not None:
            self.call.backend.scale(grad, self.cached.factor[index], grad, accumulate=False)

    def _recompute(self, grad: Tensor, token_slice: slice, col_slice: slice) -> None:
        assert self.hidden is not None
        call, rows, terms = self.call, self.rows.select(token_slice), self.terms[:, token_slice]
        call.backend.grad_logits(
            self.hidden.wait()[token_slice],
            call.weight[col_slice],
            rows,
            terms,
            grad,
            call.options,
            first_column=col_slice.start,
            entropy=self.entropy,
        )
        if self.candidates is not None:
            candidates = self.candidates.select(token_slice)
            call.backend.write_columns(grad, candidates.columns - col_slice.start, candidates.grad)

    def use_cache(self, cache: LogitsCache, plan: Plan) -> None:
        """Turn cached exponentials into gradients, in place.

        The mean logit under a softcap needs the slope at every logit, which exponentials do not give. Its gradient is
        recomputed into the memory of the cache for a block, else in slabs.
        """
        call, (num_tokens, num_columns) = self.call, cache.exp.shape
        if call.options.softcap is not None and RowTerms(*self.terms).mean_term is not None:
            if self.hidden is not None:
                self._recompute(cache.exp, slice(0, num_tokens), slice(0, num_columns))
                self.cached = CachedGradLogits(cache.exp)
            return
        # With an entropy, exponentials are relative to different references.
        factored = self.candidates is None and not call.options.entropy and num_columns == call.shard.columns
        factor = call.backend.grad_logits_from_cache(
            cache, self.rows, self.terms, call.options, entropy=self.entropy, factored=factored and plan.scales_hidden
        )
        if self.candidates is not None:
            call.backend.write_columns(cache.exp, *self.candidates)
        self.cached = CachedGradLogits(cache.exp, factor)


def grad_logits_inputs(
    call: Call,
    rows: Rows,
    softmax: SoftmaxOfRow,
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
    differentiable = [upstream[name] for name in DIFFERENTIABLE]
    terms, has_grad = call.backend.row_terms(rows, softmax, differentiable, call.options)
    inputs = GradLogitsInputs(call, rows, terms, entropy=upstream["entropy"] is not None)
    if candidate_upstream is None or ids is None or log_p is None:
        return inputs, has_grad
    unknown = (log_p.isnan() & (ids >= 0)).any(dim=1)  # an id of no rank makes the gradient NaN, as a label does
    terms[2].masked_fill_(unknown & ~rows.ignored, torch.nan)
    inputs.candidates = candidate_gradients(candidate_upstream, ids, log_p, rows, softmax, terms, call)
    return inputs, has_grad | (candidate_upstream != 0).any(dim=1)
