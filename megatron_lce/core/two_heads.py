"""What core and backends share of `megatron_lce.jsd`: two heads, their products, and what is found out of each token.

All logits are in base 2, as in `megatron_lce.core.statistics`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.rows import Rows
from megatron_lce.core.statistics import LN_2


class Head(NamedTuple):
    """One of the two models' last layers; both have the same tokens and the same rows of the vocabulary."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H], hidden's dtype
    logits_scale: float = 1.0
    softcap: float | None = None
    scale: Tensor | None = None  # [N] fp32, see `Products`; None: no rows are known yet

    def of_rows(self, scale: Tensor) -> "Head":
        """The head with its scale, where at a logits_scale of 1 it is this, [N]."""
        factor = self.logits_scale if self.softcap is None else self.softcap
        return self._replace(scale=scale if factor == 1.0 else scale * factor)

    def block(self, tokens: slice, columns: slice) -> "Head":
        """The head of some tokens and some rows of the vocabulary."""
        assert self.scale is not None
        return self._replace(hidden=self.hidden[tokens], weight=self.weight[columns], scale=self.scale[tokens])

    def products(self, values: Tensor) -> "Products":
        """These products of its rows, [N, C]."""
        assert self.scale is not None
        return Products(values, self.scale, None if self.softcap is None else self.logits_scale / self.softcap)


class Products(NamedTuple):
    """One head's `x = hidden @ weight.T`, of which logits are `scale * x` or `scale * tanh(softcap_scale * x)`."""

    values: Tensor  # [N, C] fp32, rows a multiple of `SLAB_ROW_STEP` apart
    scale: Tensor  # [N] fp32
    softcap_scale: float | None


class Pair(NamedTuple):
    """Both heads' products of the same tokens with the same columns, and the beta that compares them."""

    student: Products
    teacher: Products
    beta: float
    labels: Tensor | None = None  # [N] int32 columns; outside [0, C): of other products; None: nothing wants them


class Gradient(NamedTuple):
    """Room for the gradient of the student's products, and the number that each of its rows is a multiple of."""

    coefficient: Tensor  # [N] fp32; 0: the row is zero
    out: Tensor  # [N, C] of the student's dtype, rows as far apart as the products'


class Found(NamedTuple):
    """What forward finds out about each token: rows of [6, N] fp32, base 2, the same bits on every rank.

    A sum of exponentials is NaN where a logit of the row is not finite, and then so is all that follows from it.
    """

    student_max: Tensor
    student_sum: Tensor  # of 2^(z - max): in two parts log2 p keeps its last digits however large z is
    teacher_max: Tensor
    teacher_sum: Tensor
    divergence: Tensor
    student_kl: Tensor  # KL(p_student || m); beta = 1: KL(p_student || p_teacher); beta = 0: of no use
    # These are found where labels are given, and make [9, N] of it.
    expected: Tensor | None = None  # sum of p_student (z - max)
    label_logit: Tensor | None = None  # z - max of the label
    label_owned: Tensor | None = None  # 1, or 0 where the label is no column


STATS_ROWS = 4  # the softmaxes' rows of `Found`; behind them lie the sums


def found_rows(labels: bool) -> int:
    """Number of rows of `Found`."""
    return len(Found._fields) if labels else len(Found._fields) - len(Found._field_defaults)


def merged_stats(parts: Tensor) -> Tensor:
    """Softmax statistics of S disjoint sets of columns, [S, 4, N] -> those of their union, [4, N]."""
    largest, total = parts[:, ::2], parts[:, 1::2]
    of_all = largest.amax(dim=0)
    return torch.stack([of_all, (largest - of_all).exp2_().mul_(total).sum(dim=0)], dim=1).flatten(0, 1)


def losses_in_nats(found: Tensor, rows: Rows, beta: float) -> tuple[Tensor, Tensor]:
    """The loss of each token, [N]; and to_nats, NaN where the loss is."""
    divergence = Found(*found).divergence
    # What is not finite in either head ends here: backward, which may not meet it, takes the row's NaN from to_nats.
    # Every rank has the same divergence, so no rank goes on with a finite gradient.
    to_nats = torch.where(divergence.isfinite() | rows.ignored, rows.to_nats, torch.nan)
    # Rounding may carry a divergence past its bounds; a clamp passes NaN.
    return torch.where(rows.ignored, 0.0, divergence.clamp(0.0, _largest_divergence(beta)) * to_nats), to_nats


def student_outputs(found: Tensor, rows: Rows) -> Tensor:
    """The student's logprobs of the labels, entropy and lse, [3, N]: 0 in ignored rows, NaN in broken ones."""
    max_logit, total, *_, expected, label_logit, label_owned = found
    log_sum, to_nats = total.log2(), torch.where(label_owned == 0, torch.nan, rows.to_nats)
    outputs = torch.stack([label_logit - log_sum, log_sum - expected, max_logit + log_sum])
    return torch.where(rows.ignored, 0.0, outputs * to_nats)


def _largest_divergence(beta: float) -> float:
    """Divergence, in bits, of two distributions with nothing in common."""
    return math.inf if beta in (0, 1) else -beta * math.log2(beta) - (1 - beta) * math.log2(1 - beta)


def gradient_coefficient(upstream: Tensor, to_nats: Tensor, scale: Tensor, student: Head, beta: float) -> Tensor:
    """[N] what a product's gradient is a multiple of: upstream, scale / temperature, and the way from bits to nats."""
    factor = upstream * to_nats * scale * student.logits_scale  # scale is log2 e / temperature
    if beta > 0:  # the gradient has a logarithm, in base 2
        factor = factor * LN_2
    if beta < 1:
        factor = factor * (1 - beta)
    return torch.where(to_nats == 0, 0.0, factor)
