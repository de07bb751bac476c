"""Gradients of one head's logits: from terms of each row, by recomputing logits, or from the logits cache."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from megatron_lce.core.call import Call
from megatron_lce.core.candidates import CandidateGradients, candidate_gradients
from megatron_lce.core.collectives import Pending
from megatron_lce.core.logits_cache import LogitsCache
from megatron_lce.core.options import DIFFERENTIABLE_SCALARS
from megatron_lce.core.rows import RowInputs, RowSoftmax
from megatron_lce.core.tokens import TokenBlock


@dataclass
class GradLogitsInputs:
    """Inputs of `grad_logits` for all computed rows, or for the rows of a block as `GradLogits`."""

    call: Call
    rows: RowInputs
    terms: Tensor  # [6 or 7, N] fp32, `RowTerms`
    entropy: bool  # it has an upstream gradient
    candidates: CandidateGradients | None = None  # they replace the gradients of the candidates' products
    cached: Tensor | None = None  # [N, C] finished gradients of all products, in weight's dtype
    hidden: Pending | None = None  # [N, H] of a block

    def subset(self, index: slice | Tensor) -> Self:
        """Return some of the rows, without the cache."""
        candidates = None if self.candidates is None else self.candidates.select(index)
        rows, terms = self.rows.select(index), self.terms[:, index]
        return replace(self, rows=rows, terms=terms, candidates=candidates, cached=None)

    def take_block(self, block: TokenBlock) -> Self:
        """Return the rows of a block. The last one takes the cache along, so that it is freed as early as possible."""
        row_slice = block.row_slice
        cached = None if self.cached is None else self.cached[row_slice]
        if row_slice.stop == self.rows.labels.shape[0]:
            self.cached = None
        return replace(self.subset(row_slice), cached=cached, hidden=block.hidden)

    def write(self, grad: Tensor, token_slice: slice, col_slice: slice) -> None:
        """Recompute the logits of a slab, and write their gradients."""
        assert self.hidden is not None
        call = self.call
        call.backend.grad_logits(
            self.hidden.wait()[token_slice],
            call.weight[col_slice],
            self.rows.select(token_slice),
            self.terms[:, token_slice],
            grad,
            call.options,
            slab_start=col_slice.start,
            entropy=self.entropy,
        )
        if self.candidates is not None:
            candidates = self.candidates.select(token_slice)
            call.backend.write_columns(grad, candidates.columns - col_slice.start, candidates.grad)

    def use_cache(self, cache: LogitsCache | None) -> None:
        """Turn cached exponentials into gradients, in place; None: this shard has no columns."""
        if cache is None:
            return
        backend = self.call.backend
        backend.grad_logits_from_cache(cache, self.rows, self.terms, self.call.options, entropy=self.entropy)
        if self.candidates is not None:
            backend.write_columns(cache.exp, *self.candidates)
        self.cached = cache.exp


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
