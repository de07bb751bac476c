"""Types of `linear_jsd` that core and backends share: two heads, each token's statistics, and their results.

All logits are in base 2, as in `megatron_lce.core.statistics`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.rows import Rows
from megatron_lce.core.statistics import LN_2


class Head(NamedTuple):
    """One model's last layer; both heads have the same tokens and the same rows of the vocabulary.

    With its products `x = hidden @ weight.T` its logits are `scale * x`, or `scale * tanh(softcap_scale * x)`.
    """

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H], hidden's dtype
    logits_scale: float = 1.0
    softcap: float | None = None
    scale: Tensor | None = None  # [N] fp32; None until `of_rows`

    @property
    def softcap_scale(self) -> float | None:
        """The factor from products to the argument of tanh, or None without a softcap."""
        return None if self.softcap is None else self.logits_scale / self.softcap

    def of_rows(self, hidden: Tensor, scale: Tensor) -> "Head":
        """Return the head of these rows, whose scale [N] is that at a logits_scale of 1."""
        factor = self.logits_scale if self.softcap is None else self.softcap
        return self._replace(hidden=hidden, scale=scale if factor == 1.0 else scale * factor)

    def block(self, tokens: slice, columns: slice) -> "Head":
        """Return the head of some tokens and some columns."""
        assert self.scale is not None
        return self._replace(hidden=self.hidden[tokens], weight=self.weight[columns], scale=self.scale[tokens])


class Heads(NamedTuple):
    """Student, teacher, and per-token inputs of their comparison."""

    student: Head
    teacher: Head
    beta: float
    labels: Tensor | None = None  # [N] int32 columns; outside [0, C): none of these; None: no student's outputs
    coefficient: Tensor | None = None  # [N] fp32, multiplies a row's gradient; 0: the row is zero; None: no gradient

    def block(self, tokens: slice, columns: slice) -> "Heads":
        """Return both heads of some tokens and some columns."""
        student, teacher = (head.block(tokens, columns) for head in (self.student, self.teacher))
        labels, coefficient = (None if each is None else each[tokens] for each in (self.labels, self.coefficient))
        return Heads(student, teacher, self.beta, labels, coefficient)


class JsdStats(NamedTuple):
    """Statistics of each token: rows of [6, N] fp32, base 2, with the same bits on every rank.

    A sum of exponentials is NaN if a logit of the row is not finite, and so is all that follows from it.
    """

    student_max: Tensor
    student_sum: Tensor  # sum of 2^(z - max); with two parts log2 p keeps its last digits for any z
    teacher_max: Tensor
    teacher_sum: Tensor
    divergence: Tensor
    student_kl: Tensor  # KL(p_student || m); beta = 1: KL(p_student || p_teacher); beta = 0: unused
    # With labels there are these, too, [9, N] together.
    expected: Tensor | None = None  # sum of p_student (z - max)
    label_logit: Tensor | None = None  # z - max of the label
    label_owned: Tensor | None = None  # 1; 0: the label is none of the columns


SOFTMAX_ROWS = 4  # rows of `JsdStats` that are both softmaxes'; the others are sums


def merged_softmaxes(parts: Tensor) -> Tensor:
    """Merge softmax rows of S disjoint sets of columns, [S, 4, N], to their union's, [4, N]."""
    max_logits, sums = parts[:, ::2], parts[:, 1::2]
    largest = max_logits.amax(dim=0)
    return torch.stack([largest, (max_logits - largest).exp2_().mul_(sums).sum(dim=0)], dim=1).flatten(0, 1)


def losses_in_nats(stats: Tensor, rows: Rows, beta: float) -> tuple[Tensor, Tensor]:
    """Return the loss of each token in nats, [N], and to_nats, NaN if the loss is."""
    divergence = JsdStats(*stats).divergence
    # A row that is not finite in either head is NaN in to_nats, and so in its gradient on every rank: a rank's backward
    # may see finite logits of the row only.
    to_nats = torch.where(divergence.isfinite() | rows.ignored, rows.to_nats, torch.nan)
    # Rounding may carry a divergence past its bounds; a clamp passes NaN.
    return torch.where(rows.ignored, 0.0, divergence.clamp(0.0, _largest_divergence(beta)) * to_nats), to_nats


def student_outputs(stats: Tensor, rows: Rows) -> Tensor:
    """Return the student's logprobs, entropy and lse in nats, [3, N]: 0 in ignored rows, NaN in broken ones."""
    max_logit, total, *_, expected, label_logit, label_owned = stats
    log_sum, to_nats = total.log2(), torch.where(label_owned == 0, torch.nan, rows.to_nats)
    outputs = torch.stack([label_logit - log_sum, log_sum - expected, max_logit + log_sum])
    return torch.where(rows.ignored, 0.0, outputs * to_nats)


def _largest_divergence(beta: float) -> float:
    """Divergence in bits of two distributions without a common id."""
    return math.inf if beta in (0, 1) else -beta * math.log2(beta) - (1 - beta) * math.log2(1 - beta)


def gradient_coefficient(upstream: Tensor, to_nats: Tensor, scale: Tensor, student: Head, beta: float) -> Tensor:
    """Return the factor of a row's gradient of products, [N]: upstream, scale / temperature, and from bits to nats."""
    factor = upstream * to_nats * scale * student.logits_scale  # scale is log2 e / temperature
    if beta > 0:  # the gradient has a logarithm, in base 2
        factor = factor * LN_2
    if beta < 1:
        factor = factor * (1 - beta)
    return torch.where(to_nats == 0, 0.0, factor)
