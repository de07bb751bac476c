"""One head as a source of the passes: statistics of the vocabulary, outputs, and gradients of its logits.

The statistics of some tokens are launched at once, and fill the cache, if any; the ranks exchange extremes, then sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call
from megatron_lce.core.call_plan import Plan
from megatron_lce.core.candidates import CandidateGradients, candidate_gradients, candidate_logprobs
from megatron_lce.core.collectives import Pending
from megatron_lce.core.lm_head import ExpCache, RowInputs, RowSoftmax, new_cache
from megatron_lce.core.logits_at import csr_from_dense, logits_over_group
from megatron_lce.core.options import (
    DIFFERENTIABLE_OUTPUTS,
    DIFFERENTIABLE_SCALARS,
    LinearCrossEntropyOutput,
    Options,
)
from megatron_lce.core.plan import slices
from megatron_lce.core.statistics import merge_extremes, new_empty_stats
from megatron_lce.core.tokens import RowIndex, TokenBlock

MOVED_BYTES = 2**26  # most bytes of cached rows that are moved at once


@dataclass
class OneHead:
    """Some rows of one head, a `Source`; a field is None until its number of tokens or its values are known."""

    name: ClassVar[str] = "linear_cross_entropy"
    output_type: ClassVar[type] = LinearCrossEntropyOutput
    differentiable: ClassVar[tuple[str, ...]] = DIFFERENTIABLE_OUTPUTS
    kept: ClassVar[tuple[str, ...]] = ("rows", "softmax", "ids", "log_p")
    teacher: ClassVar[None] = None

    call: Call
    rows: RowInputs | Any = None
    hidden: Pending | Any = None  # [N, H] of a block
    labels: Tensor | None = None  # [N] global, with candidates
    ids: Tensor | None = None  # [N, K] global, of candidates
    log_p: Tensor | Any = None  # [N, K] base 2, of candidates: their logits, until outputs are written
    cache: ExpCache | None = None  # of these rows, or of one block after the other
    # Extremes and sums of rows whose outputs are not written, in one list of all rows and their blocks.
    merged: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    softmax: RowSoftmax | Any = None
    terms: Tensor | Any = None  # [6 or 7, N] fp32, `RowTerms`
    has_grad: Tensor | Any = None
    entropy: bool = False  # it has an upstream gradient
    candidates: CandidateGradients | None = None  # they replace the gradients of the candidates' products

    def take_rows(self, rows: RowInputs, row_index: RowIndex, plan: Plan) -> None:
        call, self.rows = self.call, rows
        if call.candidates is not None:
            self.labels, self.ids = row_index.select(call.labels), row_index.select(call.candidates)
            self.log_p = torch.empty_like(self.ids, dtype=torch.float32)
        if plan.cache_tokens:
            num_tokens = min(plan.cache_tokens, row_index.count)
            self.cache = new_cache(call.size, num_tokens, call.shard.num_columns, call.head.hidden)

    def subset(self, index: slice | Tensor) -> Self:
        some = replace(self, rows=self.rows.select(index), cache=None)
        if isinstance(index, Tensor) and self.cache is not None:
            some.cache = self.cache.keep(index, min(self.call.options.workspace_bytes, MOVED_BYTES))
        for name in ("labels", "ids", "log_p"):
            if (tensor := getattr(self, name)) is not None:
                setattr(some, name, tensor[index])
        if self.terms is not None:
            some.terms = self.terms[:, index]
            some.candidates = None if self.candidates is None else self.candidates.select(index)
        return some

    def of_block(self, *blocks: TokenBlock) -> Self:
        (block,) = blocks
        rows, num_rows, of_block = block.row_slice, self.rows.labels.shape[0], self.subset(block.row_slice)
        of_block.hidden = block.hidden
        if self.cache is not None:
            is_shared = self.cache.exp.shape[0] < num_rows  # by the blocks
            of_block.cache = self.cache.select(slice(0, block.num_tokens) if is_shared else rows)
            self.cache = self.cache if is_shared or rows.stop < num_rows or self.terms is None else None  # freed early
        return of_block

    def parts_with_stats(self, plan: Plan) -> Iterator[Self]:
        call, hidden, shard = self.call, self.hidden.wait(), self.call.shard
        weight = call.head.weight[: shard.num_columns]
        for tokens in slices(hidden.shape[0], plan.stats_tokens):
            stats = call.backend.softmax_stats(
                call.head._replace(hidden=hidden[tokens], weight=weight),
                self.rows.select(tokens),
                call.options,
                vocab_start=shard.start,
                cache=None if self.cache is None else self.cache.select(tokens),
                max_copied_columns=plan.stats_columns,
            )
            self.merged.append(merged_over_group(stats, call))
            del stats  # of chunks
        if self.ids is not None:
            logits = logits_over_group(hidden, csr_from_dense(self.ids), self.rows, call)
            self.log_p.copy_(logits.view(self.ids.shape))
        yield self

    def outputs(self) -> LinearCrossEntropyOutput:
        call, merged, rows, backend = self.call, self.merged, self.rows, self.call.backend
        options = call.options
        if not merged:
            stats = new_empty_stats(0, options.entropy, options.telemetry, call.head.hidden.device)
            merged.append(backend.merge_chunks(stats, stats, 0, options.entropy, options.telemetry))
        extremes, sums = (
            merged[0] if len(merged) == 1 else (torch.cat(each, dim=1) for each in zip(*merged, strict=True))
        )
        merged.clear()
        outputs = new_outputs(rows.labels.shape[0], options, call.head.hidden, self.ids)
        self.softmax = backend.write_outputs(extremes, sums, rows, options, outputs)
        if self.ids is not None and self.labels is not None:
            out = outputs.candidate_logprobs
            self.log_p = candidate_logprobs(self.log_p, self.ids, self.labels, rows, self.softmax, out)
            self.labels = None
        return outputs

    def find_terms(self, upstream: dict[str, Tensor | None]) -> None:
        call, rows, ids, log_p, grad = self.call, self.rows, self.ids, self.log_p, upstream["candidate_logprobs"]
        backend = call.backend
        if ids is not None and grad is not None:
            grad = grad.float().masked_fill(ids < 0, 0.0)
            lse_upstream = 0.0 if upstream["lse"] is None else upstream["lse"].float()
            upstream = {**upstream, "lse": lse_upstream - grad.sum(dim=1)}
        differentiable = [upstream[name] for name in DIFFERENTIABLE_SCALARS]
        self.terms, self.has_grad = backend.row_terms(rows, self.softmax, differentiable, call.head)
        self.entropy = upstream["entropy"] is not None
        if ids is not None and grad is not None:
            # An id of no rank makes the gradient NaN, as a label does.
            unknown = (log_p.isnan() & (ids >= 0)).any(dim=1)
            self.terms[2].masked_fill_(unknown & ~rows.ignored, torch.nan)
            self.candidates = candidate_gradients(grad, ids, log_p, rows, self.softmax, self.terms, call)
            self.has_grad = self.has_grad | (grad != 0).any(dim=1)
        self.ids = self.log_p = None

    def take_cached(self) -> Tensor | None:
        """Turn cached exponentials into gradients, in place."""
        cache, self.cache = self.cache, None
        if cache is None:  # nothing was cached, or the shard has no columns
            return None
        call, backend, (exp, shift) = self.call, self.call.backend, cache
        backend.grad_logits(call.head, self.rows, self.terms, exp, slab_start=0, entropy=self.entropy, shift=shift)
        if self.candidates is not None:
            backend.write_columns(exp, *self.candidates)
        return exp

    def write(self, grad: Tensor, token_slice: slice, col_slice: slice) -> None:
        """Recompute the logits of a slab, and write their gradients."""
        head, backend = self.call.head, self.call.backend
        backend.grad_logits(
            head._replace(hidden=self.hidden.wait()[token_slice], weight=head.weight[col_slice]),
            self.rows.select(token_slice),
            self.terms[:, token_slice],
            grad,
            slab_start=col_slice.start,
            entropy=self.entropy,
            shift=None,
        )
        if self.candidates is not None:
            candidates = self.candidates.select(token_slice)
            backend.write_columns(grad, candidates.columns - col_slice.start, candidates.grad)


def new_outputs(num_rows: int, options: Options, like: Tensor, ids: Tensor | None) -> LinearCrossEntropyOutput:
    """Allocate the requested outputs on like's device; `ids` [..., K] of candidates."""
    outputs: dict[str, Any] = {"entropy": None}
    requested = {"logprobs": True, "entropy": options.entropy, "lse": True, "candidate_logprobs": False}
    requested["mean_logit"] = bool(options.telemetry)
    for name in LinearCrossEntropyOutput._fields:
        if requested.get(name, options.telemetry is True):
            outputs[name] = like.new_empty(num_rows, dtype=torch.int64 if name == "argmax" else torch.float32)
    if ids is not None:
        outputs["candidate_logprobs"] = like.new_empty(num_rows, ids.shape[-1], dtype=torch.float32)
    return LinearCrossEntropyOutput(**outputs)


def merged_over_group(stats: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Merge statistics [chunks, K, N] of all shards: the ranks exchange extremes, then sums.

    The backend's `merge_chunks` returns integer sums, whose bits do not depend on the order (`core.statistics`).
    """
    group, entropy, telemetry = call.options.tp_group, call.options.entropy, call.options.telemetry
    if call.shard.num_columns == 0:
        stats = new_empty_stats(stats.shape[2], entropy, telemetry, stats.device)
    all_extremes = stats
    if group is not None:
        all_extremes = collectives.all_gather_stack(merge_extremes(stats, telemetry), group)
    extremes, sums = call.backend.merge_chunks(stats, all_extremes, call.shard.num_columns, entropy, telemetry)
    if group is not None:
        collectives.all_reduce_sum(sums, group)
    return extremes, sums
