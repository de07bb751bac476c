"""Candidates: logprobs at K more ids of each token, and their part of the gradient of the logits.

Forward combines `indexed_logits` with the log-sum-exp of the statistics. With upstream gradients g, backward adds
sum over k of g_k (1[candidate k] - p) to the gradient of the logits. The second part is the gradient of a log-sum-exp
whose upstream is reduced by the sum of g. The first changes K columns of a row, which are overwritten in the slab. They
are computed in fp32 from the candidates' logprobs, because 1 - p would be lost in a 16-bit p near 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.call import Call
from megatron_lce.core.lm_head import LOWEST_LOG_P, RowInputs, RowSoftmax, RowTerms


class CandidateGradients(NamedTuple):
    """Gradients of the candidates' products, which replace the slab's."""

    columns: Tensor  # [N, K] int64 numbers in this shard, each once a row; -1: none
    grad: Tensor  # [N, K] fp32

    def select(self, tokens: slice | Tensor) -> "CandidateGradients":
        return CandidateGradients(self.columns[tokens], self.grad[tokens])


def candidate_logprobs(
    logits: Tensor,  # [N, K] base 2, overwritten
    ids: Tensor,  # [N, K] global
    labels: Tensor,  # [N] global
    rows: RowInputs,
    softmax: RowSoftmax,
    out: Tensor,  # [N, K]
) -> Tensor:
    """Write logprobs to `out`: 0 at padding and in ignored rows, NaN in broken ones. Return them in base 2.

    A candidate that is the label has the bits of its logprob.
    """
    log_p = logits.sub_(softmax.max_logit[:, None]).sub_(softmax.log_sum[:, None]).clamp_(max=0.0)
    label_logprob, to_nats = softmax.label_logprob[:, None], rows.to_nats[:, None]
    log_p = torch.where(ids == labels[:, None], label_logprob, log_p)
    log_p.masked_fill_(label_logprob.isneginf(), torch.nan)  # no rank owns the label
    padding = (ids < 0) & ~(label_logprob * to_nats).isnan() & ~label_logprob.isneginf()
    out.copy_((log_p * to_nats).masked_fill_(padding | rows.ignored[:, None], 0.0))
    return log_p


def candidate_gradients(
    upstream: Tensor,  # [N, K] fp32, 0 at padding
    ids: Tensor,  # [N, K] global
    log_p: Tensor,  # [N, K] base 2
    rows: RowInputs,
    softmax: RowSoftmax,
    packed_terms: Tensor,  # [6 or 7, N]; the upstream gradient of the log-sum-exp is reduced by `upstream`
    call: Call,
) -> CandidateGradients:
    """Return the complete gradient of the candidates' products, from all outputs."""
    columns = ids - call.shard.start
    columns.masked_fill_((columns < 0) | (columns >= call.shard.num_columns) | rows.ignored[:, None], -1)
    terms = RowTerms(*packed_terms[:, :, None])
    grad = log_p.exp2() * (terms.p_term - terms.entropy_term * log_p.clamp(min=LOWEST_LOG_P))
    grad += torch.where(columns == rows.labels[:, None], terms.label_term, 0.0)
    if terms.mean_term is not None:
        grad += terms.mean_term
    factor = rows.scale[:, None] * call.head.slope
    if call.head.softcap is not None:
        logits = (log_p + softmax.log_sum[:, None]) + softmax.max_logit[:, None]
        slope = 1.0 - (logits / rows.scale[:, None]).square_()
        grad *= slope
        factor = factor * slope
    upstream, columns = _sum_repeated(upstream, columns)
    return CandidateGradients(columns, grad.addcmul_(upstream, factor * rows.to_nats[:, None]))


def _sum_repeated(upstream: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the upstream gradients of repeated columns of a row at the first place; set the other columns to -1."""
    by_column, order = columns.sort(dim=1, stable=True)
    is_first = torch.ones_like(by_column, dtype=torch.bool)
    is_first[:, 1:] = by_column[:, 1:] != by_column[:, :-1]
    flat, size = is_first.reshape(-1), columns.numel()
    starts = torch.arange(size + 1, dtype=torch.int64, device=columns.device)
    starts[:size].masked_fill_(~flat, size)
    starts = starts.flip(0).cummin(0).values.flip(0)  # for each place the next first place
    sums = torch.segment_reduce(upstream.gather(1, order).reshape(-1), "sum", offsets=starts, unsafe=True)
    sums = torch.zeros_like(upstream).scatter_(1, order, sums.view(upstream.shape))
    return sums, columns.masked_fill(~is_first.new_zeros(is_first.shape).scatter_(1, order, is_first), -1)
