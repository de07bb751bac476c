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
    """The last layer of one model. Both heads have the same tokens and columns.

    With `x = hidden @ weight.T`, its logits are `scale * x` or, under a softcap, `scale * tanh(softcap_scale * x)`.
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
        """Return the head for these rows; `scale` [N] does not include logits_scale or softcap."""
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
    labels: Tensor | None = None  # [N] int32 columns; outside [0, C): not in this shard; None: no student outputs
    coefficient: Tensor | None = None  # [N] fp32 factor of the gradient; 0: the gradient is 0; None: no gradient

    def block(self, tokens: slice, columns: slice) -> "Heads":
        """Return both heads of some tokens and some columns."""
        student, teacher = (head.block(tokens, columns) for head in (self.student, self.teacher))
        labels, coefficient = (None if each is None else each[tokens] for each in (self.labels, self.coefficient))
        return Heads(student, teacher, self.beta, labels, coefficient)


class JsdStats(NamedTuple):
    """Statistics of each token: rows of [6, N] fp32, base 2, with the same bits on every rank.

    If a logit of the row is not finite, the sum of exponentials is NaN, and all that is derived from it.
    """

    student_max: Tensor
    student_sum: Tensor  # sum of 2^(z - max); kept apart from max, so that log2 p keeps its last digits for any z
    teacher_max: Tensor
    teacher_sum: Tensor
    divergence: Tensor
    student_kl: Tensor  # KL(p_student || m); beta = 1: KL(p_student || p_teacher); beta = 0: unused
    # With labels, [9, N].
    expected: Tensor | None = None  # sum of p_student (z - max)
    label_logit: Tensor | None = None  # z - max of the label
    label_owned: Tensor | None = None  # 1, or 0 if the label is not among the columns


SOFTMAX_ROWS = 4  # the first rows of `JsdStats` describe both softmaxes; the others are sums


def merged_softmaxes(parts: Tensor) -> Tensor:
    """Merge the softmax rows [S, 4, N] of S disjoint sets of columns, to [4, N]."""
    max_logits, sums = parts[:, ::2], parts[:, 1::2]
    largest = max_logits.amax(dim=0)
    return torch.stack([largest, (max_logits - largest).exp2_().mul_(sums).sum(dim=0)], dim=1).flatten(0, 1)


def losses_in_nats(stats: Tensor, rows: Rows, beta: float) -> tuple[Tensor, Tensor]:
    """Return the loss of each token in nats, [N], and to_nats, NaN if the loss is."""
    divergence = JsdStats(*stats).divergence
    # NaN in to_nats makes the gradient of a row NaN on every rank, even if all logits on a rank are finite.
    to_nats = torch.where(divergence.isfinite() | rows.ignored, rows.to_nats, torch.nan)
    # In bits, of two distributions without a common id. Rounding may exceed it. A clamp preserves NaN.
    largest = math.inf if beta in (0, 1) else -beta * math.log2(beta) - (1 - beta) * math.log2(1 - beta)
    return torch.where(rows.ignored, 0.0, divergence.clamp(0.0, largest) * to_nats), to_nats


def student_outputs(stats: Tensor, rows: Rows) -> Tensor:
    """Return the student's logprobs, entropy and lse in nats, [3, N]: 0 in ignored rows, NaN in broken ones."""
    max_logit, total, *_, expected, label_logit, label_owned = stats
    log_sum, to_nats = total.log2(), torch.where(label_owned == 0, torch.nan, rows.to_nats)
    outputs = torch.stack([label_logit - log_sum, log_sum - expected, max_logit + log_sum])
    return torch.where(rows.ignored, 0.0, outputs * to_nats)


def gradient_coefficient(upstream: Tensor, to_nats: Tensor, scale: Tensor, student: Head, beta: float) -> Tensor:
    """Return the factor of each row's gradient, [N]: upstream, scale / temperature, and bits to nats."""
    factor = upstream * to_nats * scale * student.logits_scale  # scale is log2 e / temperature
    if beta > 0:  # the gradient contains a base-2 logarithm
        factor = factor * LN_2
    if beta < 1:
        factor = factor * (1 - beta)
    return torch.where(to_nats == 0, 0.0, factor)
