"""What the two heads of `megatron_lce.jsd` share, and the statistics of their softmaxes from which a KL follows.

All logits are in base 2, as in `megatron_lce.core.softmax_stats`. Over part of the vocabulary, with m the largest logit
of a head,

    sum    sum of 2^(z - m), of each head
    gap    sum of 2^(z_p - m_p) ((z_p - m_p) - (z_q - m_q))

    KL(p || q) = sum of p (log2 p - log2 q) = gap / sum_p + log2(sum_q / sum_p)

where p is the teacher's for beta = 0 (forward KL) and the student's otherwise. Where p is far from q the gap's terms
have one sign; where it is close they are small; where it is equal they are zero and so is the result. A term whose
2^(z_p - m_p) underflows is 0 times a finite number.
"""

from typing import NamedTuple

import torch
from torch import Tensor

KL_ROWS = 5


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


class KlStats(NamedTuple):
    """The rows of a packed [..., 5, N] fp32 tensor, in the order in which they are packed."""

    student_max: Tensor
    student_sum: Tensor
    teacher_max: Tensor
    teacher_sum: Tensor
    gap: Tensor

    def kl(self, forward_kl: bool) -> Tensor:
        """KL(p || q) in base 2."""
        sum_p, sum_q = self.student_sum, self.teacher_sum
        if forward_kl:
            sum_p, sum_q = sum_q, sum_p
        return self.gap / sum_p + (sum_q / sum_p).log2()


def empty_kl_stats(num_tokens: int, device: torch.device) -> Tensor:
    """Packed [5, N] of no columns at all: the neutral element of a merge."""
    packed = torch.zeros(KL_ROWS, num_tokens, device=device)
    stats = KlStats(*packed)
    stats.student_max.fill_(-torch.inf)
    stats.teacher_max.fill_(-torch.inf)
    return packed
