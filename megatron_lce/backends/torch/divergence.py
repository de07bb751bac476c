"""The functions of divergences that read the products of both heads, a chunk of columns at a time."""

import torch
from torch import Tensor

from megatron_lce.core.divergence_types import (
    KINDS,
    SIGN_OF_MOST,
    SOFTMAX_ROWS,
    DivergenceStats,
    GradTerms,
    Heads,
    merged_softmaxes,
)
from megatron_lce.core.lm_head import LMHead
from megatron_lce.core.plan import slices
from megatron_lce.core.statistics import LN_2

_LARGEST_RATIO = 126.0  # bound of log2 of a ratio of probabilities
CHUNK_COLUMNS = 1024  # columns of a chunk


def divergence_softmaxes(heads: Heads, raw_logits: Tensor, stats: Tensor) -> None:
    of_chunks = [_chunk_stats(heads, part) for part in raw_logits.split(CHUNK_COLUMNS, dim=2)]
    stats[:SOFTMAX_ROWS] = merged_softmaxes(torch.stack(of_chunks))


def divergence_sums(heads: Heads, raw_logits: Tensor, stats: Tensor) -> None:
    of_chunks = [
        _chunk_divergence(heads, raw_logits, columns, stats) for columns in slices(raw_logits.shape[2], CHUNK_COLUMNS)
    ]
    rows = DivergenceStats(*stats)
    for name in of_chunks[0]:
        torch.sum(torch.stack([sums[name] for sums in of_chunks]), dim=0, out=getattr(rows, name))


def divergence_grad_logits(heads: Heads, raw_logits: Tensor, stats: Tensor, gradient: Tensor) -> None:
    for columns in slices(raw_logits.shape[2], CHUNK_COLUMNS):
        _chunk_gradient(heads, raw_logits[:, :, columns], stats, gradient[:, columns])


# A function per chunk frees its tensors before the next chunk allocates.


def _logits(head: LMHead, scale: Tensor, raw_logits: Tensor) -> Tensor:
    """Return base-2 logits, [N, C]."""
    if head.softcap_scale is None:
        return raw_logits * scale[:, None]
    return (raw_logits * head.softcap_scale).tanh_().mul_(scale[:, None])


def _chunk_stats(heads: Heads, raw_logits: Tensor) -> Tensor:
    """Return the largest logit and the sum of exponentials of one chunk for both heads, [4, N]."""
    stats = []
    for logits in map(_logits, heads[:2], heads.scales, raw_logits):
        largest, zero_or_nan = logits.amax(dim=1), logits.amin(dim=1) * 0.0  # the sum of 2^-inf would be finite
        stats += [largest, logits.sub_(largest[:, None]).exp2_().sum(dim=1) + zero_or_nan]
    return torch.stack(stats)


def _chunk_divergence(heads: Heads, raw_logits: Tensor, columns: slice, stats: Tensor) -> dict[str, Tensor]:
    """Return the sums of one chunk for rows of `DivergenceStats` behind the softmaxes, [N] each."""
    student, teacher = map(_logits, heads[:2], heads.scales, raw_logits[:, :, columns])
    p_s, p_t = _probability(student, *stats[:2]), _probability(teacher, *stats[2:4])
    ratio = _log_ratio(student, teacher, stats)
    sums: dict[str, Tensor] = {}
    del teacher
    if heads.labels is not None:
        has_label = (heads.labels >= columns.start) & (heads.labels < columns.stop)
        place = torch.where(has_label, heads.labels - columns.start, 0).long()
        student.sub_(stats[0][:, None])
        label_logit = torch.where(has_label, student.gather(1, place[:, None])[:, 0], 0.0)
        mean_shifted_logit = student.mul_(p_s).sum(dim=1)
        sums |= {"mean_shifted_logit": mean_shifted_logit, "label_logit": label_logit, "has_label": has_label.float()}
    del student
    if "forward_kl" in heads.kinds:
        sums["forward_kl"] = (p_t * ratio).sum(dim=1)
    if "reverse_kl" in heads.kinds:
        sums["reverse_kl"] = (p_s * ratio).sum(dim=1).neg_()
    if "tv" in heads.kinds:
        sign = ratio.sign().neg_()
        sums["tv"] = (p_s - p_t).mul_(sign).sum(dim=1).mul_(0.5)
        sums["tv_sign"] = sign.mul_(p_s).sum(dim=1)
    if "jsd" in heads.kinds:
        student_over_m, teacher_over_m = _log_over_mixture(ratio, heads.beta)
        kl_s, kl_t = student_over_m.mul_(p_s), teacher_over_m.mul_(p_t)
        sums["student_kl"] = kl_s.sum(dim=1)
        sums["jsd"] = kl_s.mul_(1 - heads.beta).add_(kl_t, alpha=heads.beta).sum(dim=1)
    return sums


def _chunk_gradient(heads: Heads, raw_logits: Tensor, stats: Tensor, gradient: Tensor) -> None:
    """Write one chunk of the gradient of the student's products."""
    assert heads.terms is not None
    terms = GradTerms(*heads.terms.unsqueeze(2))
    student, teacher = map(_logits, heads[:2], heads.scales, raw_logits)
    ratio = _log_ratio(student, teacher, stats)
    p_s = _probability(student, *stats[:2])
    difference = p_s - _probability(teacher, *stats[2:4]) if "forward_kl" in heads.kinds else None
    del teacher
    grad = terms.p_term.expand_as(ratio).clone()
    if "reverse_kl" in heads.kinds:
        grad.addcmul_(ratio, terms.reverse_kl)
    if "tv" in heads.kinds:
        sign, sum_of_signs = ratio.sign().neg_(), DivergenceStats(*stats.unsqueeze(2)).tv_sign
        sign_of_most = torch.where(sum_of_signs.abs() > SIGN_OF_MOST / 2, sum_of_signs.sign(), 0.0)
        p_max, place = p_s.max(dim=1, keepdim=True)
        sign_there = torch.where(p_max > SIGN_OF_MOST, sign_of_most, sign.gather(1, place))
        grad.addcmul_(sign.scatter_(1, place, sign_there), terms.tv)
        del sign
    if "jsd" in heads.kinds:
        grad.addcmul_(_log_over_mixture(ratio, heads.beta)[0], terms.jsd, value=-1.0)
    grad.mul_(p_s)
    if difference is not None:
        grad.addcmul_(difference, terms.forward_kl)
    if heads.student.softcap_scale is not None:
        grad.mul_(student.div_(heads.scales[0][:, None]).square_().neg_().add_(1.0))
    nothing = (heads.terms[: len(KINDS)] == 0).all(dim=0)
    gradient.copy_(grad.masked_fill_(nothing[:, None], 0.0))


def _probability(logits: Tensor, max_logit: Tensor, total: Tensor) -> Tensor:
    """Return the probabilities of one head, [N, C]."""
    return (logits - max_logit[:, None]).sub_(total.log2()[:, None]).exp2_()


def _log_ratio(student: Tensor, teacher: Tensor, stats: Tensor) -> Tensor:
    """Return log2(p_t / p_s), [N, C], for close heads more precise than log p_t - log p_s."""
    rows = DivergenceStats(*stats.unsqueeze(2))
    ratio = (teacher - rows.teacher_max).sub_(student - rows.student_max)
    return ratio.add_((rows.student_sum / rows.teacher_sum).log2())


def _log_over_mixture(ratio: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return log2(p_s / m) and log2(p_t / m) from log2(p_t / p_s), which is overwritten, for 0 < beta < 1.

    For the head with the larger weight in m it is -log2(1 + w (q / p - 1)), where q and w are the probability and the
    weight of the other head; its error is relative. The ratio is clamped where the smaller probability is negligible.
    """
    to_other = (ratio if beta <= 0.5 else ratio.neg_()).clamp_(-_LARGEST_RATIO, _LARGEST_RATIO)
    nearer = (to_other * LN_2).expm1_().mul_(min(beta, 1 - beta)).log1p_().div_(-LN_2)
    farther = to_other.add_(nearer)
    return (nearer, farther) if beta <= 0.5 else (farther, nearer)
