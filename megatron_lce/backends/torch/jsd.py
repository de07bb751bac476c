"""The primitives of `megatron_lce.jsd` in plain torch: one head's logits, and what follows from both heads'."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_lce.backends.torch.compaction import compact_rows, gather_rows
from megatron_lce.backends.torch.cross_entropy import upcast_row_bytes
from megatron_lce.backends.torch.rows import prepare_rows
from megatron_lce.backends.torch.scale import scale
from megatron_lce.core.blocks import BlockBytes, cut
from megatron_lce.core.jsd_stats import Found, Head, KlStats
from megatron_lce.core.products import product

__all__ = [
    "compact_rows",
    "divergence_parts",
    "gather_rows",
    "grad_logits",
    "kl_parts",
    "logits",
    "logits_bytes",
    "merge_kl_stats",
    "prepare_rows",
    "scale",
    "sum_parts",
]

# Under this a probability counts as zero: m is held above it, so that 0 * log(p / m) is 0 where both underflow.
_TINY = torch.finfo(torch.float32).tiny

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
) -> None:
    """Base-2 logits, `row_scale * hidden @ weight.T`, or `row_scale * tanh(softcap_scale * hidden @ weight.T)`."""
    hidden, weight = head.hidden, head.weight
    # Sums of sums in fp32: one running sum over a long H would lose what full fp32 products are asked for.
    for part in cut(hidden.shape[1], 256 if weight.dtype == torch.float32 else hidden.shape[1]):
        product(hidden[:, part], weight[:, part].T, out, accumulate=part.start > 0)
    if head.softcap_scale is not None:
        out.mul_(head.softcap_scale).tanh_()
    out.mul_(row_scale[:, None])


def kl_parts(student: Tensor, teacher: Tensor, *, forward_kl: bool) -> Tensor:
    """[S, 5, N]: packed `KlStats` of each chunk of both heads' logits [N, C]."""
    return torch.stack([_chunk_stats(student[:, c], teacher[:, c], forward_kl) for c in _chunks(student)])


def merge_kl_stats(parts: Tensor, *, forward_kl: bool) -> Tensor:
    """[S, 5, N] of S disjoint sets of columns -> [5, N] of their union."""
    stats = KlStats(*parts.unbind(dim=1))
    student_max, student_shift = _shift(stats.student_max)
    teacher_max, teacher_shift = _shift(stats.teacher_max)
    student_scale, teacher_scale = student_shift.exp2(), teacher_shift.exp2()
    scale, shift, sum_p = student_scale, student_shift - teacher_shift, stats.student_sum
    if forward_kl:
        scale, shift, sum_p = teacher_scale, teacher_shift - student_shift, stats.teacher_sum
    gap = scale * (stats.gap + sum_p * torch.where(scale > 0, shift, 0.0))
    student_sum, teacher_sum = (student_scale * stats.student_sum), (teacher_scale * stats.teacher_sum)
    return torch.stack([student_max, student_sum.sum(0), teacher_max, teacher_sum.sum(0), gap.sum(0)])


def divergence_parts(
    student: Tensor,  # [N, C] base-2 logits
    teacher: Tensor,
    found: Tensor,  # [6, N]; the first four of `Found`
    *,
    beta: float,
) -> Tensor:
    """[S, 2, N] base-2 sums over each chunk: the divergence for 0 < beta < 1, and KL(p_student || m)."""
    parts = [_chunk_divergence(student[:, c], teacher[:, c], found, beta) for c in _chunks(student)]
    return torch.stack(parts)


def sum_parts(parts: Tensor) -> Tensor:
    """[S, 2, N] -> [2, N]."""
    return parts.sum(dim=0)


def grad_logits(
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


# A chunk's tensors are the locals of a function of its own, so that they are gone before the next chunk's come.


def _chunk_stats(student: Tensor, teacher: Tensor, forward_kl: bool) -> Tensor:
    """[5, N] of one chunk."""
    student_max, teacher_max = student.amax(dim=1), teacher.amax(dim=1)
    student, teacher = student - student_max[:, None], teacher - teacher_max[:, None]
    gap = teacher - student if forward_kl else student - teacher
    student.exp2_()
    teacher.exp2_()
    gap = gap.mul_(teacher if forward_kl else student).sum(dim=1)
    return torch.stack([student_max, student.sum(dim=1), teacher_max, teacher.sum(dim=1), gap])


def _chunk_divergence(student: Tensor, teacher: Tensor, found: Tensor, beta: float) -> Tensor:
    """[2, N] of one chunk."""
    log_ps, log_pt = _log_probabilities(student, teacher, found)
    ps, pt = log_ps.exp2(), log_pt.exp2()
    log_m = torch.mul(pt, beta).add_(ps, alpha=1 - beta).clamp_min_(_TINY).log2_()
    kl_s = log_ps.sub_(log_m).mul_(ps)
    kl_t = log_pt.sub_(log_m).mul_(pt)
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
    log_ps, log_pt = _log_probabilities(student, teacher, found)
    if beta == 0:
        grad = log_ps.exp2_().sub_(log_pt.exp2_())
    else:
        ps = log_ps.exp2()
        log_m = log_pt
        if beta < 1:
            log_m = log_pt.exp2_().mul_(beta).add_(ps, alpha=1 - beta).clamp_min_(_TINY).log2_()
        grad = log_ps.sub_(log_m).sub_(rows.student_kl).mul_(ps)
    if tanh_scale is not None:
        grad.mul_((student / tanh_scale[:, None]).square_().neg_().add_(1.0))
    # What is not finite anywhere in the row makes all of it NaN.
    grad.mul_(torch.where(rows.divergence.isfinite(), coefficient[:, None], torch.nan))
    out.copy_(grad.masked_fill_(coefficient[:, None] == 0, 0.0))


def _log_probabilities(student: Tensor, teacher: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """log2 p of both heads, [N, C]."""
    rows = Found(*found.unsqueeze(2))
    return (
        (student - rows.student_max).sub_(rows.student_sum.log2()),
        (teacher - rows.teacher_max).sub_(rows.teacher_sum.log2()),
    )


def _chunks(logits: Tensor) -> Iterator[slice]:
    return cut(logits.shape[1], _CHUNK_COLUMNS)


def _shift(maxima: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of [S, N], and how far below it each part lies: -inf for an empty part."""
    largest = maxima.amax(dim=0)
    return largest, torch.where(maxima == -torch.inf, -torch.inf, maxima - largest)
