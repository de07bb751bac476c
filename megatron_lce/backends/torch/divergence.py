"""The functions of `megatron_lce.api.linear_jsd` that read the products of both heads, a chunk of columns at a time."""

import torch
from torch import Tensor

from megatron_lce.core.jsd_heads import SOFTMAX_ROWS, Head, Heads, JsdStats, merged_softmaxes
from megatron_lce.core.plan import cut
from megatron_lce.core.statistics import LN_2

_LARGEST_RATIO = 126.0  # bound of log2 of a ratio of probabilities
_CHUNK_COLUMNS = 1024  # columns of a chunk


def intermediate_bytes(num_columns: int) -> int:
    return 6 * 4 * min(num_columns, _CHUNK_COLUMNS)  # six fp32 numbers a logit


def softmaxes_of_products(heads: Heads, products: Tensor, stats: Tensor) -> None:
    of_chunks = [_chunk_stats(heads, part) for part in products.split(_CHUNK_COLUMNS, dim=2)]
    stats[:SOFTMAX_ROWS] = merged_softmaxes(torch.stack(of_chunks))


def divergence_of_products(heads: Heads, products: Tensor, stats: Tensor) -> None:
    of_chunks = [
        _chunk_divergence(heads, products, columns, stats) for columns in cut(products.shape[2], _CHUNK_COLUMNS)
    ]
    stats[SOFTMAX_ROWS:] = torch.stack(of_chunks).sum(dim=0)


def gradient_of_products(heads: Heads, products: Tensor, stats: Tensor, gradient: Tensor) -> None:
    for columns in cut(products.shape[2], _CHUNK_COLUMNS):
        _chunk_gradient(heads, products[:, :, columns], stats, gradient[:, columns])


# A function per chunk frees its tensors before the next chunk allocates.


def _logits(head: Head, products: Tensor) -> Tensor:
    """Return base-2 logits, [N, C]."""
    assert head.scale is not None
    if head.softcap_scale is None:
        return products * head.scale[:, None]
    return (products * head.softcap_scale).tanh_().mul_(head.scale[:, None])


def _chunk_stats(heads: Heads, products: Tensor) -> Tensor:
    """Return the largest logit and the sum of exponentials of one chunk for both heads, [4, N]."""
    stats = []
    for logits in map(_logits, heads[:2], products):
        largest, unless_nan = logits.amax(dim=1), logits.amin(dim=1) * 0.0  # the sum of 2^-inf would be finite
        stats += [largest, logits.sub_(largest[:, None]).exp2_().sum(dim=1) + unless_nan]
    return torch.stack(stats)


def _chunk_divergence(heads: Heads, products: Tensor, columns: slice, stats: Tensor) -> Tensor:
    """Return the sums of one chunk for rows of `JsdStats` behind the softmaxes, [2, N], with labels [5, N]."""
    student, teacher = map(_logits, heads[:2], products[:, :, columns])
    sums = _divergence_sums(student, teacher, stats, heads.beta)
    if heads.labels is not None:
        owned = (heads.labels >= columns.start) & (heads.labels < columns.stop)
        place = torch.where(owned, heads.labels - columns.start, 0).long()
        student.sub_(stats[0][:, None])
        label_logit = torch.where(owned, student.gather(1, place[:, None])[:, 0], 0.0)
        expected = _probability(student, torch.zeros_like(label_logit), stats[1]).mul_(student).sum(dim=1)
        sums += [expected, label_logit, owned.float()]
    return torch.stack(sums)


def _divergence_sums(student: Tensor, teacher: Tensor, stats: Tensor, beta: float) -> list[Tensor]:
    """Return divergence and KL(p_student || m) of base-2 logits, [N] each."""
    ratio = _log_ratio(student, teacher, stats)
    if beta == 0:
        kl = _probability(teacher, *stats[2:4]).mul_(ratio).sum(dim=1)
        return [kl, kl]
    ps = _probability(student, *stats[:2])
    if beta == 1:
        kl = ps.mul_(ratio.neg_()).sum(dim=1)
        return [kl, kl]
    student_over_m, teacher_over_m = _log_over_mixture(ratio, beta)
    kl_s = student_over_m.mul_(ps)
    kl_t = teacher_over_m.mul_(_probability(teacher, *stats[2:4]))
    student_kl = kl_s.sum(dim=1)
    return [kl_s.mul_(1 - beta).add_(kl_t, alpha=beta).sum(dim=1), student_kl]


def _chunk_gradient(heads: Heads, products: Tensor, stats: Tensor, gradient: Tensor) -> None:
    """Write one chunk of the gradient of the student's products."""
    assert heads.coefficient is not None
    assert heads.student.scale is not None
    coefficient, beta = heads.coefficient[:, None], heads.beta
    student, teacher = map(_logits, heads[:2], products)
    if beta == 0:
        grad = _probability(student, *stats[:2]).sub_(_probability(teacher, *stats[2:4]))
    else:
        ratio = _log_ratio(student, teacher, stats)
        student_over_m = ratio.neg_() if beta == 1 else _log_over_mixture(ratio, beta)[0]
        grad = student_over_m.sub_(stats[5][:, None]).mul_(_probability(student, *stats[:2]))
    if heads.student.softcap_scale is not None:
        grad.mul_(student.div_(heads.student.scale[:, None]).square_().neg_().add_(1.0))
    gradient.copy_(grad.mul_(coefficient).masked_fill_(coefficient == 0, 0.0))


def _probability(logits: Tensor, max_logit: Tensor, total: Tensor) -> Tensor:
    """Return the probabilities of one head, [N, C]."""
    return (logits - max_logit[:, None]).sub_(total.log2()[:, None]).exp2_()


def _log_ratio(student: Tensor, teacher: Tensor, stats: Tensor) -> Tensor:
    """Return log2(p_t / p_s), [N, C], for close heads more precise than log p_t - log p_s."""
    rows = JsdStats(*stats.unsqueeze(2))
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
