"""The primitives of `megatron_lce.jsd` in plain torch: one head's logits, and what follows from both heads'."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_lce.backends.torch.compaction import compact_rows, gather_rows
from megatron_lce.backends.torch.cross_entropy import upcast_row_bytes
from megatron_lce.backends.torch.rows import prepare_rows
from megatron_lce.backends.torch.scale import scale
from megatron_lce.core.blocks import BlockBytes, cut
from megatron_lce.core.jsd_stats import STATS_ROWS, Found, Head
from megatron_lce.core.products import product
from megatron_lce.core.softmax_stats import LN_2

__all__ = [
    "compact_rows",
    "divergence_and_grad",
    "divergence_parts",
    "gather_rows",
    "grad_logits",
    "grad_logits_bytes",
    "grad_logits_from_kept",
    "logits",
    "logits_bytes",
    "merge_stats",
    "prepare_rows",
    "scale",
    "sum_parts",
]

_LARGEST_RATIO = 126.0  # of two probabilities, in base 2

_CHUNK_COLUMNS = 1024  # that are looked at together
_CHUNK_BYTES = 5 * 4  # of a logit of them, in intermediates


def logits_bytes(student: Head, teacher: Head, num_columns: int) -> BlockBytes:
    """Both heads' logits, the intermediates of a chunk, and one head's inputs in fp32 where they are copied."""
    per_token = max(upcast_row_bytes(head.hidden) for head in (student, teacher))
    per_column = max(upcast_row_bytes(head.weight) for head in (student, teacher))
    return BlockBytes(2 * 4, max(per_token, _CHUNK_BYTES * min(num_columns, _CHUNK_COLUMNS)), per_column)


def logits(
    head: Head,  # [N, H], [C, H]
    row_scale: Tensor,  # [N] fp32
    out: Tensor,  # [N, C] fp32
    *,
    stats: bool,
) -> Tensor | None:
    """Base-2 logits, `row_scale * hidden @ weight.T`, or `row_scale * tanh(softcap_scale * hidden @ weight.T)`.

    `stats`: also returns each chunk's largest logit of a row and the sum of 2^(z - largest), [S, 2, N].
    """
    hidden, weight = head.hidden, head.weight
    # Sums of sums in fp32: one running sum over a long H would lose what full fp32 products are asked for.
    for part in cut(hidden.shape[1], 256 if weight.dtype == torch.float32 else hidden.shape[1]):
        product(hidden[:, part], weight[:, part].T, out, accumulate=part.start > 0)
    if head.softcap_scale is not None:
        out.mul_(head.softcap_scale).tanh_()
    out.mul_(row_scale[:, None])
    return torch.stack([_chunk_stats(out[:, c]) for c in _chunks(out)]) if stats else None


def merge_stats(student: Tensor, teacher: Tensor, out: Tensor) -> None:
    """Largest logits and sums of either head, [S, 2, N] of S disjoint sets of columns -> of their union, [4, N]."""
    out.copy_(torch.cat([_merged(student), _merged(teacher)]))


def divergence_parts(
    student: Tensor,  # [N, C] base-2 logits
    teacher: Tensor,
    found: Tensor,  # [6, N]; the first four of `Found`
    *,
    beta: float,
) -> Tensor:
    """[S, 2, N] base-2 sums over each chunk: the divergence, and KL(p_student || m)."""
    parts = [_chunk_divergence(student[:, c], teacher[:, c], found, beta) for c in _chunks(student)]
    return torch.stack(parts)


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """[S, 2, N] -> [2, N]."""
    out.copy_(parts.sum(dim=0))


def grad_logits_bytes(student: Head, teacher: Head) -> None:
    """There is nothing that makes gradients without logits in memory."""


def grad_logits(*arguments: object, **keywords: object) -> None:
    raise AssertionError("there are only gradients from logits in memory")


def grad_logits_from_kept(
    student: Tensor,  # [N, C] base-2 logits
    teacher: Tensor,
    found: Tensor,  # [6, N]
    coefficient: Tensor,  # [N]; 0: no gradient
    tanh_scale: Tensor | None,  # [N] factor from the student's tanh to its logits; None without a softcap
    out: Tensor,  # [N, C] of the student's dtype
    *,
    beta: float,
) -> None:
    """Gradient of the student's products."""
    for c in _chunks(student):
        _chunk_grad(student[:, c], teacher[:, c], found, coefficient, tanh_scale, out[:, c], beta)


def divergence_and_grad(
    student: Tensor,  # [N, C] base-2 logits
    teacher: Tensor,
    found: Tensor,  # [6, N]; the last two are filled
    coefficient: Tensor,  # [N]
    tanh_scale: Tensor | None,  # [N]
    out: Tensor,  # [N, C]
    *,
    beta: float,
) -> None:
    """What `divergence_parts` adds up to, and what `grad_logits_from_kept` makes of it."""
    sum_parts(divergence_parts(student, teacher, found, beta=beta), found[2 * STATS_ROWS :])
    grad_logits_from_kept(student, teacher, found, coefficient, tanh_scale, out, beta=beta)


# A chunk's tensors are the locals of a function of its own, so that they are gone before the next chunk's come.


def _chunk_stats(logits: Tensor) -> Tensor:
    """[2, N] of one chunk."""
    max_logit = logits.amax(dim=1)
    return torch.stack([max_logit, (logits - max_logit[:, None]).exp2_().sum(dim=1)])


def _merged(parts: Tensor) -> Tensor:
    """[S, 2, N] -> [2, N]."""
    max_logit, total = parts.unbind(dim=1)
    largest = max_logit.amax(dim=0)
    shift = torch.where(max_logit == -torch.inf, -torch.inf, max_logit - largest)  # -inf: of no columns
    return torch.stack([largest, (shift.exp2_() * total).sum(dim=0)])


def _chunk_divergence(student: Tensor, teacher: Tensor, found: Tensor, beta: float) -> Tensor:
    """[2, N] of one chunk."""
    ratio = _log_ratio(student, teacher, found)
    if beta == 0:
        kl = _probability(teacher, *found[2:4]).mul_(ratio).sum(dim=1)
        return torch.stack([kl, kl])
    ps = _probability(student, *found[:2])
    if beta == 1:
        kl = ps.mul_(ratio.neg_()).sum(dim=1)
        return torch.stack([kl, kl])
    student_over_m, teacher_over_m = _log_over_mixture(ratio, beta)
    kl_s = student_over_m.mul_(ps)
    kl_t = teacher_over_m.mul_(_probability(teacher, *found[2:4]))
    student_kl = kl_s.sum(dim=1)
    return torch.stack([kl_s.mul_(1 - beta).add_(kl_t, alpha=beta).sum(dim=1), student_kl])


def _chunk_grad(
    student: Tensor,
    teacher: Tensor,
    found: Tensor,
    coefficient: Tensor,
    tanh_scale: Tensor | None,
    out: Tensor,
    beta: float,
) -> None:
    rows = Found(*found.unsqueeze(2))
    ps = _probability(student, *found[:2])
    if beta == 0:
        grad = ps.sub_(_probability(teacher, *found[2:4]))
    else:
        ratio = _log_ratio(student, teacher, found)
        student_over_m = ratio.neg_() if beta == 1 else _log_over_mixture(ratio, beta)[0]
        grad = student_over_m.sub_(rows.student_kl).mul_(ps)
    if tanh_scale is not None:
        grad.mul_((student / tanh_scale[:, None]).square_().neg_().add_(1.0))
    # What is not finite anywhere in the row makes all of it NaN.
    grad.mul_(torch.where(rows.divergence.isfinite(), coefficient[:, None], torch.nan))
    out.copy_(grad.masked_fill_(coefficient[:, None] == 0, 0.0))


def _probability(logits: Tensor, max_logit: Tensor, total: Tensor) -> Tensor:
    """[N, C] of one head."""
    return (logits - max_logit[:, None]).sub_(total.log2()[:, None]).exp2_()


def _log_ratio(student: Tensor, teacher: Tensor, found: Tensor) -> Tensor:
    """log2(p_t / p_s), [N, C]: where the heads are close this keeps more digits than log p_t - log p_s does."""
    rows = Found(*found.unsqueeze(2))
    ratio = (teacher - rows.teacher_max).sub_(student - rows.student_max)
    return ratio.add_((rows.student_sum / rows.teacher_sum).log2())


def _log_over_mixture(ratio: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log2(p_s / m) and log2(p_t / m) from log2(p_t / p_s), in its memory, for beta between its ends.

    NaN if that is not finite. Of the head that weighs more in m it is -log2(1 + w (q / p - 1)), with the other's
    probability q and weight w, and as exact as it is small. Held where a probability that is so much smaller than the
    other has no weight.
    """
    to_other = (
        (ratio if beta <= 0.5 else ratio.neg_())
        .masked_fill_(ratio.isinf(), torch.nan)
        .clamp_(-_LARGEST_RATIO, _LARGEST_RATIO)
    )
    nearer = (to_other * LN_2).expm1_().mul_(min(beta, 1 - beta)).log1p_().div_(-LN_2)
    farther = to_other.add_(nearer)
    return (nearer, farther) if beta <= 0.5 else (farther, nearer)


def _chunks(logits: Tensor) -> Iterator[slice]:
    return cut(logits.shape[1], _CHUNK_COLUMNS)
