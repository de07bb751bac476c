"""Distillation from a teacher's K most probable ids: divergences at these ids, the student's candidates.

With logprobs t of the teacher and s of the student at the K ids, over the whole vocabulary, and p = exp of them,

    forward    sum of p_t (t - s)
    reverse    sum of p_s (s - t)
    jsd        beta sum of p_t (t - m) + (1 - beta) sum of p_s (s - m),  m = log(beta p_t + (1 - beta) p_s)

`jsd` is as in `linear_jsd`: `forward` with beta 0, `reverse` with beta 1. `tail` says what happens to the other ids:

    "drop"         left out: verl's `forward_kl_topk`; NeMo-RL's `zero_outside_topk` with a renormalised teacher
    "bin"          one more id, of probability 1 - sum of p in each model: Megatron-LM's ghost token
    "renormalise"  left out, and both models renormalised over the K: ms-swift's `gkd_logits_topk`, NeMo-RL's default

With "drop" divergences can be negative. Ids with a teacher logprob of -inf are padding; a student logprob of -inf makes
"forward" infinite, and is a probability of 0 in the others. Candidates of an ignored token have logprobs of 0, which
are no distribution: mask its divergence. Both heads need the same `vocab_size`: an id that the student lacks has a
NaN logprob, and makes the token NaN.
"""

from typing import Literal

import torch
from torch import Tensor

from megatron_lce.checks.validation import check_choice, check_fraction

_MIN_TAIL = 1e-30  # the least probability of a tail


def topk_divergence(
    student_logprobs: Tensor,  # [..., K]
    teacher_logprobs: Tensor,  # [..., K]
    kind: Literal["forward", "reverse", "jsd"] = "forward",
    *,
    tail: Literal["drop", "bin", "renormalise"] = "drop",
    beta: float = 0.5,
) -> Tensor:
    """Per-token divergence at a teacher's K ids: [...] fp32, with a gradient to `student_logprobs`.

        top = megatron_lce.linear_topk(teacher_hidden, teacher_weight, 64)                      # no gradient
        out = megatron_lce.linear_cross_entropy(hidden, weight, labels, candidates=top.ids)
        loss = megatron_lce.topk_divergence(out.candidate_logprobs, top.logprobs, "reverse", tail="bin")
        loss = loss.masked_fill(labels == -100, 0.0)  # ignored tokens

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
    check_fraction("beta", beta)
    check_choice("kind", kind, ("forward", "reverse", "jsd"))
    check_choice("tail", tail, ("drop", "bin", "renormalise"))
    if student_logprobs.shape != teacher_logprobs.shape:
        got = f"{tuple(student_logprobs.shape)} and {tuple(teacher_logprobs.shape)}"
        raise ValueError(f"student_logprobs and teacher_logprobs must have one shape, [..., K], got {got}")
    if kind == "jsd":
        kind = "forward" if beta == 0 else "reverse" if beta == 1 else kind
    teacher_mask = ~teacher_logprobs.isneginf()
    teacher, student = (
        _with_tail(x.float(), teacher_mask, tail) for x in (teacher_logprobs.detach(), student_logprobs)
    )
    p_teacher, p_student = teacher.exp(), student.exp()
    finite = student.masked_fill(student.isneginf(), 0.0)  # its factor p_student is 0 there, and 0 log 0 is 0
    if kind == "forward":
        terms = p_teacher * (teacher - student)
    elif kind == "reverse":
        terms = p_student * (finite - teacher)
    else:
        mixture = (beta * p_teacher + (1 - beta) * p_student).clamp(min=_MIN_TAIL).log()
        terms = beta * p_teacher * (teacher - mixture) + (1 - beta) * p_student * (finite - mixture)
    if tail == "bin":
        teacher_mask = torch.nn.functional.pad(teacher_mask, (0, 1), value=True)
    return torch.where(teacher_mask, terms, 0.0).sum(dim=-1)


def _with_tail(logprobs: Tensor, teacher_mask: Tensor, tail: str) -> Tensor:
    """Return finite logprobs [..., K], or [..., K + 1] with a bin, renormalised if asked for; 0 where none counts."""
    # In fp64: where p is near 1, an fp32 sum of probabilities loses the rest.
    p = torch.where(teacher_mask, logprobs, -torch.inf).double().exp().sum(dim=-1, keepdim=True)
    logprobs = torch.where(teacher_mask, logprobs, 0.0)
    if tail == "bin":
        return torch.cat([logprobs, (1 - p).clamp(min=_MIN_TAIL).log().float()], dim=-1)
    return logprobs if tail == "drop" else logprobs - p.clamp(min=_MIN_TAIL).log().float()
