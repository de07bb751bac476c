"""Types of divergences that core and backends share: two heads, each token's statistics, and the terms of the gradient.

All logits are in base 2, as in `megatron_lce.core.statistics`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from megatron_lce.core.lm_head import LMHead, RowInputs
from megatron_lce.core.options import LinearCrossEntropyOutput
from megatron_lce.core.statistics import LN_2

Kind = Literal["forward_kl", "reverse_kl", "tv", "jsd"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class LinearDivergenceOutput(NamedTuple):
    """Per-token divergences of the shape of labels, fp32; one that was not requested is `None`.

    Each has its own upstream gradient, which must be equal on every rank, and the same bits on every rank. 0 in ignored
    rows.

    forward_kl  KL(p_t || p_s) in nats
    reverse_kl  KL(p_s || p_t) in nats
    tv          1 - sum of min(p_s, p_t), total variation; its gradient is 0 where p_s = p_t
    jsd         beta KL(p_t || m) + (1 - beta) KL(p_s || m) in nats; beta = 0: forward_kl; beta = 1: reverse_kl
    student     with `return_student` a `LinearCrossEntropyOutput` of logprobs, entropy and lse, without gradient
    """

    forward_kl: Tensor | Any = None  # `Any` as in `LinearCrossEntropyOutput`
    reverse_kl: Tensor | Any = None
    tv: Tensor | Any = None
    jsd: Tensor | Any = None
    student: LinearCrossEntropyOutput | Any = None


def computed_kind(kind: Kind, beta: float) -> Kind:
    """Return the kind whose formula is used: at the ends a jsd is one of the others."""
    return kind if kind != "jsd" or 0 < beta < 1 else "forward_kl" if beta == 0 else "reverse_kl"


class Heads(NamedTuple):
    """Student, teacher, and per-token inputs of their comparison: the same tokens and columns of both."""

    student: LMHead
    teacher: LMHead
    scales: tuple[Tensor, Tensor]  # [N] fp32 each, as in `RowInputs`
    beta: float
    kinds: tuple[Kind, ...]  # the divergences, or those with a gradient; see `computed_kind`
    labels: Tensor | None = None  # [N] int32 columns; outside [0, C): not in this shard; None: no student outputs
    terms: Tensor | None = None  # [5, N], packed `GradTerms`; None: no gradient


class DivergenceStats(NamedTuple):
    """Statistics of each token: rows of [10, N] fp32, base 2, with the same bits on every rank.

    If a logit of the row is not finite, the sum of exponentials is NaN, and all that is derived from it. Sums of
    divergences that were not asked for are 0.
    """

    student_max: Tensor
    student_sum: Tensor  # sum of 2^(z - max); kept apart from max, so that log2 p keeps its last digits for any z
    teacher_max: Tensor
    teacher_sum: Tensor
    forward_kl: Tensor  # KL(p_t || p_s)
    reverse_kl: Tensor  # KL(p_s || p_t)
    tv: Tensor  # half the sum of |p_s - p_t|: one minus the sum of minima would lose the digits of a small one
    tv_sign: Tensor  # sum of p_s sign(p_s - p_t)
    jsd: Tensor  # beta KL(p_t || m) + (1 - beta) KL(p_s || m)
    student_kl: Tensor  # KL(p_s || m)
    # With labels, [13, N].
    mean_shifted_logit: Tensor | None = None  # sum of p_s (z - max)
    label_logit: Tensor | None = None  # z - max of the label
    has_label: Tensor | None = None  # 1, or 0 if the label is not among the columns


# Backward recomputes logits, whose last bits may flip a sign. That of a probability beyond this is taken from tv_sign,
# to which it adds at least 0.4, and all others at most 0.3.
SIGN_OF_MOST = 0.7
SOFTMAX_ROWS = 4  # the first rows of `DivergenceStats` describe both softmaxes; the others are sums
DIVERGENCE_ROWS, LABEL_ROWS = 10, 3  # all rows without labels, and what labels add


class GradTerms(NamedTuple):
    """Terms from which the gradient of any product x of the student follows: rows of [5, N] fp32.

    With r = log2(p_t / p_s), and d logit / d product but for the tanh of a softcap in each term,

        dx = forward_kl (p_s - p_t) + p_s (p_term + reverse_kl r + tv sign(p_s - p_t) + jsd log2(m / p_s))

    If the terms of the divergences are 0, so is the gradient, whatever the logits are.
    """

    forward_kl: Tensor
    reverse_kl: Tensor
    tv: Tensor
    jsd: Tensor
    p_term: Tensor


def merged_softmaxes(softmaxes: Tensor) -> Tensor:
    """Merge the softmax rows [S, 4, N] of S disjoint sets of columns, to [4, N]."""
    max_logits, sums = softmaxes[:, ::2], softmaxes[:, 1::2]
    max_logit = max_logits.amax(dim=0)
    return torch.stack([max_logit, (max_logits - max_logit).exp2_().mul_(sums).sum(dim=0)], dim=1).flatten(0, 1)


def divergences_in_nats(
    stats: Tensor, rows: RowInputs, kinds: Iterable[Kind], beta: float
) -> tuple[LinearDivergenceOutput, Tensor]:
    """Return the divergences of each token, and to_nats, NaN if one of them is."""
    named_stats, to_nats, divergences = DivergenceStats(*stats), rows.to_nats, {}
    # Of two distributions without a common id. Rounding may exceed it. A clamp preserves NaN.
    max_divergence = {"tv": 1.0, "jsd": sum(-w * math.log2(w) for w in (beta, 1 - beta) if w > 0)}
    for kind in kinds:
        formula = computed_kind(kind, beta)
        value = getattr(named_stats, formula)
        # NaN in to_nats makes the gradient of a row NaN on every rank, even if all logits on a rank are finite.
        to_nats = torch.where(value.isfinite() | rows.ignored, to_nats, torch.nan)
        divergences[kind] = value.clamp(0.0, max_divergence.get(formula, math.inf))
    for kind, value in divergences.items():
        divergences[kind] = torch.where(rows.ignored, 0.0, value * (to_nats * (1 / LN_2) if kind == "tv" else to_nats))
    return LinearDivergenceOutput(**divergences), to_nats


def student_outputs(stats: Tensor, rows: RowInputs) -> LinearCrossEntropyOutput:
    """Return the student's logprobs, entropy and lse in nats, [N] each: 0 in ignored rows, NaN in broken ones."""
    max_logit, sum_exp, *_, mean_shifted_logit, label_logit, has_label = stats
    log_sum, to_nats = sum_exp.log2(), torch.where(has_label == 0, torch.nan, rows.to_nats)
    outputs = torch.stack([label_logit - log_sum, log_sum - mean_shifted_logit, max_logit + log_sum])
    return LinearCrossEntropyOutput(*torch.where(rows.ignored, 0.0, outputs * to_nats))


def gradient_terms(
    upstream: Mapping[Kind, Tensor],  # [N] each
    stats: Tensor,
    to_nats: Tensor,
    scale: Tensor,  # the student's
    student: LMHead,
    beta: float,
) -> Tensor:
    """Return packed `GradTerms`, [5, N]."""
    grad_scale = to_nats * scale * student.slope
    # In the order of `KINDS`; LN_2 where the gradient contains a base-2 logarithm.
    factors = dict(zip(KINDS, (1.0, -LN_2, 0.5, -LN_2 * (1 - beta)), strict=True))
    named_stats, terms = DivergenceStats(*stats), torch.zeros_like(stats[: len(GradTerms._fields)])
    named_terms = GradTerms(*terms)
    for kind, gradient in upstream.items():
        formula = computed_kind(kind, beta)
        getattr(named_terms, formula).add_(gradient * grad_scale, alpha=factors[formula])
    for term, mean in (
        (named_terms.reverse_kl, named_stats.reverse_kl),
        (named_terms.tv, -named_stats.tv_sign),
        (named_terms.jsd, named_stats.student_kl),
    ):
        named_terms.p_term.addcmul_(term, mean)
    return terms.masked_fill_(to_nats == 0, 0.0)
