"""The primitives of `megatron_lce.jsd` in plain torch, one slab of both heads' logits at a time."""

import torch
from torch import Tensor

from megatron_lce.backends.torch.cross_entropy import (
    logits_base2,
    merge_extremes,
    softmax_stats,
    softmax_stats_bytes,
    sum_chunks,
    upcast_row_bytes,
)
from megatron_lce.backends.torch.rows import prepare_rows
from megatron_lce.core.blocks import BlockBytes, Blocks, cut, plan_blocks
from megatron_lce.core.jsd_stats import KL_ROWS, Head, RowTerms, empty_kl_stats, merge_kl_stats
from megatron_lce.core.products import Copies

__all__ = [
    "divergence",
    "divergence_bytes",
    "grad_logits",
    "grad_logits_bytes",
    "kl_stats",
    "merge_extremes",
    "merge_kl_stats",
    "new_scratch",
    "prepare_rows",
    "scratch_bytes",
    "softmax_stats",
    "softmax_stats_bytes",
    "stats_bytes",
    "sum_chunks",
    "sum_parts",
]


# Under this a probability counts as zero: m is held above it, so that 0 * log(p / m) is 0 where both underflow.
_TINY = torch.finfo(torch.float32).tiny

_STATS_BYTES, _DIVERGENCE_BYTES, _GRAD_BYTES = 3 * 4, 5 * 4, 3 * 4  # of a logit, in a pass's intermediates


def scratch_bytes(student: Head, teacher: Head) -> int:
    """Nothing: both heads' logits are in the slab."""
    return 0


def new_scratch(student: Head, teacher: Head, most_bytes: int) -> Tensor:
    return student.hidden.new_empty(0, dtype=torch.float32)


def stats_bytes(student: Head, teacher: Head, num_columns: int, copies: Copies) -> BlockBytes:
    """What `kl_stats` takes for its intermediates."""
    return _block_bytes(_STATS_BYTES, student, teacher)


def divergence_bytes(student: Head, teacher: Head, num_columns: int, copies: Copies) -> BlockBytes:
    return _block_bytes(_DIVERGENCE_BYTES, student, teacher)


def grad_logits_bytes(student: Head, teacher: Head, copies: Copies) -> BlockBytes:
    """What `grad_logits` takes for its intermediates and its output, and the products after it for their copies."""
    slope = 0 if student.softcap is None else 4
    per_logit, *upcasts = _block_bytes(_GRAD_BYTES + slope + student.hidden.element_size(), student, teacher)
    return BlockBytes(per_logit, *map(max, upcasts, copies))


def kl_stats(p: Head, q: Head, row_scales: Tensor, *, scratch: Tensor, workspace_bytes: int) -> Tensor:
    """Packed statistics [5, N] of V columns, see `megatron_lce.core.jsd_stats`; row_scales [2, N], p's first."""
    num_tokens = row_scales.shape[1]
    packed = row_scales.new_empty(KL_ROWS, num_tokens)
    blocks = _plan(p, q, workspace_bytes, _STATS_BYTES)
    for tokens in cut(num_tokens, blocks.tokens):
        merged = empty_kl_stats(tokens.stop - tokens.start, row_scales.device)
        for columns in cut(p.weight.shape[0], blocks.columns):
            slab = _slab_kl_stats(p.block(tokens, columns), q.block(tokens, columns), row_scales[:, tokens])
            merged = merge_kl_stats(torch.stack([merged, slab]))
        packed[:, tokens] = merged
    return packed


def divergence(
    student: Head, teacher: Head, terms: Tensor, *, beta: float, scratch: Tensor, workspace_bytes: int
) -> Tensor:
    """[2, N] base-2 sums over V columns: the divergence for 0 < beta < 1, and KL(p_student || m).

    terms: the first six rows of `RowTerms`.
    """
    num_tokens = terms.shape[1]
    sums = terms.new_zeros(2, num_tokens)
    blocks = _plan(student, teacher, workspace_bytes, _DIVERGENCE_BYTES)
    for tokens in cut(num_tokens, blocks.tokens):
        for columns in cut(student.weight.shape[0], blocks.columns):
            parts = (student.block(tokens, columns), teacher.block(tokens, columns))
            sums[:, tokens] += _slab_divergence(*parts, terms[:, tokens], beta)
    return sums


def grad_logits(
    student: Head,  # of one slab
    teacher: Head,
    terms: Tensor,  # [8, N] fp32, `RowTerms`
    out: Tensor,  # [N, C] of the student's dtype
    *,
    beta: float,
    scratch: Tensor,
) -> None:
    """Gradient of one slab of the student's products."""
    rows = RowTerms(*terms.unsqueeze(2))
    log_ps = _logits(student, terms[0])
    slope = None if student.softcap is None else (log_ps / rows.student_scale).square_().neg_().add_(1.0)
    log_ps.sub_(rows.student_max).sub_(rows.student_log_sum)
    log_pt = _log_probability(teacher, *terms[3:6])
    if beta == 0:
        grad = log_ps.exp2_().sub_(log_pt.exp2_())
    else:
        ps = log_ps.exp2()
        log_m = log_pt
        if beta < 1:
            log_m = log_pt.exp2_().mul_(beta).add_(ps, alpha=1 - beta).clamp_min_(_TINY).log2_()
        grad = log_ps.sub_(log_m).sub_(rows.student_kl).mul_(ps)
    grad.mul_(rows.coefficient)
    out.copy_(grad if slope is None else grad.mul_(slope))


def sum_parts(parts: Tensor) -> Tensor:
    """[S, K, N] -> [K, N]."""
    return parts.sum(dim=0)


def _logits(head: Head, row_scale: Tensor) -> Tensor:
    """Base-2 logits [N, C]."""
    return logits_base2(head.hidden, head.weight, row_scale, head.softcap_scale)


def _log_probability(head: Head, row_scale: Tensor, max_logit: Tensor, log_sum: Tensor) -> Tensor:
    """log2 p of one head, [N, C]."""
    return _logits(head, row_scale).sub_(max_logit[:, None]).sub_(log_sum[:, None])


# A slab's tensors are the locals of a function of its own, so that they are gone before the next slab's come.


def _slab_divergence(student: Head, teacher: Head, terms: Tensor, beta: float) -> Tensor:
    """[2, N]: `divergence` of one slab."""
    log_ps, log_pt = _log_probability(student, *terms[:3]), _log_probability(teacher, *terms[3:])
    ps, pt = log_ps.exp2(), log_pt.exp2()
    log_m = torch.mul(pt, beta).add_(ps, alpha=1 - beta).clamp_min_(_TINY).log2_()
    kl_s = log_ps.sub_(log_m).mul_(ps)
    kl_t = log_pt.sub_(log_m).mul_(pt)
    student_kl = kl_s.sum(dim=1)
    return torch.stack([kl_s.mul_(1 - beta).add_(kl_t, alpha=beta).sum(dim=1), student_kl])


def _slab_kl_stats(p: Head, q: Head, row_scales: Tensor) -> Tensor:
    """[5, N]: packed statistics of one slab."""
    p_logits, q_logits = _logits(p, row_scales[0]), _logits(q, row_scales[1])
    max_p, max_q = p_logits.amax(dim=1), q_logits.amax(dim=1)
    p_logits.sub_(max_p[:, None])
    q_logits.sub_(max_q[:, None])
    gap = p_logits - q_logits
    exp_p = p_logits.exp2_()
    return torch.stack([max_p, exp_p.sum(dim=1), max_q, q_logits.exp2_().sum(dim=1), gap.mul_(exp_p).sum(dim=1)])


def _plan(first: Head, second: Head, workspace_bytes: int, per_logit: int) -> Blocks:
    num_tokens, num_columns = first.hidden.shape[0], first.weight.shape[0]
    block_bytes = _block_bytes(per_logit, first, second)
    return plan_blocks(num_tokens, num_columns, workspace_bytes, block_bytes, preferred_columns=4096)


def _block_bytes(per_logit: int, student: Head, teacher: Head) -> BlockBytes:
    """One head's inputs are copied to fp32 at a time, where they are."""
    per_token = max(upcast_row_bytes(head.hidden) for head in (student, teacher))
    per_column = max(upcast_row_bytes(head.weight) for head in (student, teacher))
    return BlockBytes(per_logit, per_token, per_column)
