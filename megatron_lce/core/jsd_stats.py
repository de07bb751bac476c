"""What the two heads of `megatron_lce.jsd` share, and what forward finds out about each of their tokens.

All logits are in base 2, as in `megatron_lce.core.softmax_stats`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Head(NamedTuple):
    """One of the two models' last layers; both have the same tokens and the same rows of the vocabulary."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H], hidden's dtype
    logits_scale: float = 1.0
    softcap: float | None = None

    def block(self, tokens: slice, columns: slice) -> "Head":
        return self._replace(hidden=self.hidden[tokens], weight=self.weight[columns])

    @property
    def softcap_scale(self) -> float | None:
        """Factor from products to the argument of the softcap's tanh; None without a softcap."""
        return None if self.softcap is None else self.logits_scale / self.softcap

    def row_scale(self, scale: Tensor) -> Tensor:
        """Factor from products, or from their tanh, to base-2 logits, where `scale` is it at a logits_scale of 1."""
        factor = self.logits_scale if self.softcap is None else self.softcap
        return scale if factor == 1.0 else scale * factor


class Found(NamedTuple):
    """What forward finds out about each token: rows of [6, N] fp32, base 2, the same bits on every rank."""

    student_max: Tensor
    student_sum: Tensor  # of 2^(z - max): in two parts log2 p keeps its last digits however large z is
    teacher_max: Tensor
    teacher_sum: Tensor
    divergence: Tensor
    student_kl: Tensor  # KL(p_student || m); beta = 1: KL(p_student || p_teacher); beta = 0: of no use


FOUND_ROWS = len(Found._fields)
STATS_ROWS = 2  # a head's: its first two rows, then two of the other's


def fill_with_nothing(stats: Tensor) -> None:
    """[4, N], the first rows of `Found`, of no columns at all: the neutral element of a merge."""
    stats.zero_()
    stats[::STATS_ROWS] = -torch.inf  # the largest logits
