"""What the two heads' primitives share, and the statistics of two softmaxes p and q from which KL(p || q) follows.

All logits are in base 2, as in `megatron_lce.core.softmax_stats`. Over part of the vocabulary, with m_p and m_q the
largest ones,

    sum_p  sum of 2^(z_p - m_p)
    sum_q  sum of 2^(z_q - m_q)
    gap    sum of 2^(z_p - m_p) ((z_p - m_p) - (z_q - m_q))

    KL(p || q) = sum of p (log2 p - log2 q) = gap / sum_p + log2(sum_q / sum_p)

Where p is far from q the gap's terms have one sign; where it is close they are small; where it is equal they are zero
and so is the result. A term whose 2^(z_p - m_p) underflows is 0 times a finite number.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.products import Copies, copies_of

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
        return scale * (self.logits_scale if self.softcap is None else self.softcap)


def both_copies(student: Head, teacher: Head) -> Copies:
    """Bytes that a token and a column take in copies of unaligned inputs."""
    copies = (copies_of(head.hidden) for head in (student, teacher))
    return Copies(*map(sum, zip(*copies, strict=True)))


class RowTerms(NamedTuple):
    """What each token brings to the divergence (the first six) and to its gradient: rows of [8, N] fp32.

    A log-sum-exp comes in two parts, so that log2 p = (z - max) - log_sum keeps its last digits however large z is.
    """

    student_scale: Tensor  # `Head.row_scale`
    student_max: Tensor
    student_log_sum: Tensor  # log2 of the sum of 2^(z - max)
    teacher_scale: Tensor
    teacher_max: Tensor
    teacher_log_sum: Tensor
    student_kl: Tensor  # KL(p_student || m), beta = 1: KL(p_student || p_teacher); base 2
    coefficient: Tensor  # what the gradient of a product is a multiple of, but for a softcap's slope


class KlStats(NamedTuple):
    """The rows of a packed [..., 5, N] fp32 tensor, in the order in which they are packed."""

    max_p: Tensor
    sum_p: Tensor
    max_q: Tensor
    sum_q: Tensor
    gap: Tensor

    def kl(self) -> Tensor:
        """KL(p || q) in base 2."""
        return self.gap / self.sum_p + (self.sum_q / self.sum_p).log2()


def unpack_kl(packed: Tensor) -> KlStats:
    return KlStats(*packed.unbind(dim=-2))


def empty_kl_stats(num_tokens: int, device: torch.device) -> Tensor:
    """Packed [5, N] of no columns at all: the neutral element of a merge."""
    packed = torch.zeros(KL_ROWS, num_tokens, device=device)
    stats = unpack_kl(packed)
    stats.max_p.fill_(-torch.inf)
    stats.max_q.fill_(-torch.inf)
    return packed


def merge_kl_stats(packed: Tensor) -> Tensor:
    """[S, 5, N] of S disjoint sets of columns -> [5, N] of their union."""
    parts = unpack_kl(packed)
    max_p, shift_p = _shift(parts.max_p)
    max_q, shift_q = _shift(parts.max_q)
    scale_p, scale_q = shift_p.exp2(), shift_q.exp2()
    finite_shift = torch.where(scale_p > 0, shift_p - shift_q, 0.0)
    gap = scale_p * (parts.gap + parts.sum_p * finite_shift)
    return torch.stack(
        [max_p, (scale_p * parts.sum_p).sum(dim=0), max_q, (scale_q * parts.sum_q).sum(dim=0), gap.sum(dim=0)]
    )


def _shift(maxima: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of [S, N], and how far below it each part lies: -inf for an empty part."""
    largest = maxima.amax(dim=0)
    return largest, torch.where(maxima == -torch.inf, -torch.inf, maxima - largest)
