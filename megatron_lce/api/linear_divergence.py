"""Distillation: divergences of two vocab-sharded LM heads, without their logits.

With `p_s` and `p_t` the softmax of the student's and the teacher's logits, y = z_s / T of the student, s the sign of
p_s - p_t and `m = beta p_t + (1 - beta) p_s`, the divergences D and their gradients are

    forward_kl  KL(p_t || p_s)                                 dD/dy = p_s - p_t
    reverse_kl  KL(p_s || p_t)                                 dD/dy = p_s (log(p_s / p_t) - D)
    tv          sum of |p_s - p_t| / 2                         dD/dy = p_s (s - sum of p_s s) / 2
    jsd         beta KL(p_t || m) + (1 - beta) KL(p_s || m)    dD/dy = (1 - beta) p_s (log(p_s / m) - KL(p_s || m))

because the derivative of jsd by p_s is (1 - beta) log(p_s / m). A product's gradient is scale / T times that, times
1 - tanh^2 under the student's softcap.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from megatron_lce.api.keywords import DivergenceOptions
from megatron_lce.api.linear_token_loss import check_loss, check_tokens_apart, flat_per_token
from megatron_lce.checks import validation
from megatron_lce.checks.together import aligned_head, check_keywords, checked_together, keyword_options
from megatron_lce.core.call import Call
from megatron_lce.core.collectives import all_gather_stack, wait_if_async
from megatron_lce.core.divergence_types import KINDS, Kind, LinearDivergenceOutput
from megatron_lce.core.eager import without_autocast
from megatron_lce.core.known_loss import sum_of_losses
from megatron_lce.core.lm_head import LMHead
from megatron_lce.core.losses import Metrics, TokenLossFunction
from megatron_lce.core.matmul import matmul
from megatron_lce.core.options import LinearCrossEntropyOutput
from megatron_lce.core.passes import forward_with_gradient
from megatron_lce.core.two_heads import TwoHeads

_DEFAULTS: dict[str, Any] = {  # keywords besides `Options`, and their defaults
    "beta": 0.5,
    "student_logits_scale": 1.0,
    "teacher_logits_scale": 1.0,
    "student_softcap": None,
    "teacher_softcap": None,
    "teacher_temperature": None,
    "return_student": False,
    "_teacher_shift": 0,  # of captured heads: the teacher's rows are so much further on in dimension 0, the sequence
}
_STUDENT, _TEACHER = (
    validation.NAMES | {name: f"{role}_{name}" for name in ("hidden", "weight", "logits_scale", "softcap")}
    for role in ("student", "teacher")
)


class DivergenceLoss(NamedTuple):
    """Result of `linear_divergence_loss`: as `TokenLoss`, with a `LinearDivergenceOutput`."""

    loss: Tensor
    outputs: LinearDivergenceOutput
    metrics: Metrics


@validation.renamed("skip_ignored", "skip_masked")
def linear_divergence(
    student_hidden: Tensor,  # [..., H_student]
    student_weight: Tensor,  # [V_local, H_student]
    teacher_hidden: Tensor,  # [..., H_teacher]
    teacher_weight: Tensor,  # [V_local, H_teacher]
    *,
    kinds: Sequence[Kind] = ("forward_kl", "tv"),
    labels: Tensor | None = None,  # [...]
    **options: Unpack[DivergenceOptions],
) -> LinearDivergenceOutput:
    """Per-token divergences of a student's and a teacher's LM head, several at once, without their logits.

        out = megatron_lce.linear_divergence(*student, *teacher, kinds=("forward_kl", "tv"), labels=labels)
        (0.3 * out.forward_kl + 0.7 * out.tv).mean().backward()

    Only the student gets gradients. Those of all but `tv` shrink with temperature**2; multiply the loss by it to
    compensate (Hinton et al. 2015). `1 - tv` is the rate at which speculative sampling accepts the student's tokens
    (Leviathan et al. 2023).

    Args:
        student_hidden, student_weight: as in `linear_cross_entropy`, but no DTensors and no fp32 weight with 16 bits.
        teacher_hidden: [..., H_teacher] for the same tokens; size and dtype may differ from the student's.
        teacher_weight: [V_local, H_teacher] of its dtype, the same rows of the same vocabulary. Tensors of inference
            mode are copied for backward, because nothing tells when they are overwritten: better run under no_grad.
        kinds: "forward_kl", "reverse_kl", "tv" and "jsd" (Agarwal et al., On-Policy Distillation of Language Models,
            2024), at least one; all are computed from the same products.
        labels: int64, one a token (under `sequence_parallel` the full [s, ...]): they say which rows are ignored
            (`None`: none), and `return_student` returns their logprobs.
        beta: 0.5; weight of the teacher in the mixture of "jsd", in [0, 1]. 0 is forward KL and 1 reverse KL (the
            limits of the middle are zero).
        student_logits_scale, teacher_logits_scale, student_softcap, teacher_softcap: as in `linear_cross_entropy`.
        teacher_temperature: temperature of the teacher's softmax alone, like `temperature`; `None`: `temperature`.
        return_student: True: `student` has the logprobs of `labels`, entropy and lse at `temperature`, without
            gradient and without further products; NaN if no rank owns its label.
        temperature, tp_group, sequence_parallel, ignore_index, vocab_start, vocab_size, skip_ignored, workspace_bytes,
            backend, weight_grad_sink: as in `linear_cross_entropy`, for both heads; the sink is for the student's
            weight. Backward holds both gathered hiddens and always accumulates the student's hidden-state gradient.

    Raises:
        TypeError, ValueError: see `linear_cross_entropy`.
        RuntimeError: in backward with `create_graph=True`.
    """
    heads = (student_hidden, student_weight), (teacher_hidden, teacher_weight)
    return forward_with_gradient(_prepare("linear_divergence", *heads, labels, kinds, dict(options))).outputs


def linear_jsd(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    labels: Tensor | None = None,
    **options: Unpack[DivergenceOptions],
) -> Tensor | tuple[Tensor, LinearCrossEntropyOutput]:
    """`linear_divergence` of the one kind "jsd": its tensor; with `return_student` a tuple of it and `student`."""
    heads = student_hidden, student_weight, teacher_hidden, teacher_weight
    out = linear_divergence(*heads, kinds=("jsd",), labels=labels, **options)
    return out.jsd if out.student is None else (out.jsd, out.student)


@validation.renamed("skip_ignored", "skip_masked")
def linear_divergence_loss(
    student_hidden: Tensor,  # [..., H_student]
    student_weight: Tensor,  # [V_local, H_student]
    teacher_hidden: Tensor,  # [..., H_teacher]
    teacher_weight: Tensor,  # [V_local, H_teacher]
    labels: Tensor,  # [...]
    loss: TokenLossFunction,
    *per_token: Tensor,  # [..., *] each
    kinds: Sequence[Kind] = ("forward_kl", "tv"),
    **options: Unpack[DivergenceOptions],
) -> DivergenceLoss:
    """The sum over tokens of a caller's loss of divergences, with both gradients computed in forward.

        def loss(out, weights):
            return weights * (0.3 * out.forward_kl + 0.7 * out.tv), {"acceptance": 1 - out.tv}

        result = megatron_lce.linear_divergence_loss(*student, *teacher, labels, loss, weights)
        (result.loss / num_tokens).backward()

    One product of each head is saved: the logits of both are computed once.

    Args:
        loss: as in `linear_token_loss`, called with the `LinearDivergenceOutput` of some tokens. Weights of 0 do not
            save the work for a token; labels equal to `ignore_index` do, with `skip_ignored`.
        per_token, memory: as in `linear_token_loss`.
        kinds, options: as in `linear_divergence`.

    Raises:
        TypeError, ValueError, RuntimeError: as in `linear_token_loss`.
    """
    name, per_token = "linear_divergence_loss", tuple(wait_if_async(tensor) for tensor in per_token)
    heads = (student_hidden, student_weight), (teacher_hidden, teacher_weight)
    source = _prepare(name, *heads, labels, kinds, dict(options), (loss, per_token))
    call = source.call
    results, losses = sum_of_losses(name, source, loss, flat_per_token(call, per_token))
    with without_autocast(call.head.hidden.device, name), call.telling():
        check_tokens_apart(loss, losses.sample, alternative="linear_divergence")
    return DivergenceLoss(*results)


def _prepare(
    name: str,
    student: tuple[Tensor, Tensor],  # hidden and weight
    teacher: tuple[Tensor, Tensor],
    labels: Tensor | None,
    kinds: Sequence[Kind],
    keywords: dict[str, Any],
    loss_args: tuple[TokenLossFunction, tuple[Tensor, ...]] | None = None,
) -> TwoHeads:
    """Check the arguments, and lay them out; `loss_args`: the caller's loss and its tensors per token."""
    own = {keyword: keywords.pop(keyword, default) for keyword, default in _DEFAULTS.items()}
    beta, own["teacher_temperature"] = own["beta"], wait_if_async(own["teacher_temperature"])
    of_teacher = own["teacher_temperature"], own["teacher_logits_scale"], own["teacher_softcap"]
    teacher_head = LMHead(wait_if_async(teacher[0]), wait_if_async(teacher[1]), *of_teacher)
    of_student = {"logits_scale": own["student_logits_scale"], "softcap": own["student_softcap"]}
    options = keyword_options(keywords, DivergenceOptions, entropy=False, **of_student)
    compared = {
        **own,
        "kinds": kinds,
        "loss": loss_args and loss_args[0],
        "teacher_hidden": validation.describe_tensor(teacher_head.hidden),
        "teacher_weight": validation.describe_tensor(teacher_head.weight),
        "beta": int(beta) if isinstance(beta, int | float) and beta in (0, 1) else beta,  # two kinds of their own
    }
    with checked_together(name, *student, labels, options, names=_STUDENT, compared=compared) as checks:
        check_keywords(name, keywords, DivergenceOptions)
        hidden, weight, names = checks.hidden, checks.weight, _TEACHER | {"temperature": "teacher_temperature"}
        if own["teacher_temperature"] is None:
            teacher_head, names = teacher_head._replace(temperature=checks.options.temperature), _TEACHER
        validation.check_head(hidden, weight, _STUDENT, fp32_weight=False)
        validation.check_head(teacher_head.hidden, teacher_head.weight, names, fp32_weight=False)
        device, rows, teacher_rows = hidden.device, tuple(hidden.shape[:-1]), tuple(teacher_head.hidden.shape[:-1])
        columns = "hold as many rows of the vocabulary as student_weight"
        for what, requirement, expected, got in (
            ("teacher_hidden", "be on student_hidden's device", device, teacher_head.hidden.device),
            ("teacher_hidden", "have student_hidden's shape but for H", rows, teacher_rows),
            ("teacher_weight", columns, len(weight), len(teacher_head.weight)),
        ):
            validation.require(got == expected, what, f"{requirement}, {expected}", got)
        validation.check_logits(teacher_head, checks.shape, names)
        is_sequence = isinstance(kinds, Sequence) and not isinstance(kinds, str)
        validation.require(is_sequence, "kinds", "be a sequence of names", type(kinds).__name__, TypeError)
        validation.require(len(kinds) > 0, "kinds", "name at least one divergence", kinds)
        for kind in kinds:
            validation.check_choice("kinds", kind, KINDS)
        validation.check_fraction("beta", beta)
        validation.check_scalar("return_student", own["return_student"], bool)
        if loss_args is not None:
            check_loss(*loss_args, checks.shape, device)
        elif labels is None:
            validation.require(not own["return_student"], "labels", "be given for return_student", None)
            checks.labels = hidden.new_full(checks.shape, int(options.ignore_index == 0), dtype=torch.int64)
    call = checks.call
    teacher_hidden = _later_rows(teacher_head.hidden.detach(), own["_teacher_shift"], call)
    return TwoHeads(
        replace(call, matmul=matmul),
        aligned_head(teacher_head._replace(hidden=teacher_hidden, weight=teacher_head.weight.detach())),
        kinds=tuple(dict.fromkeys(kinds)),
        beta=float(beta),
        return_student=own["return_student"],
    )


def _later_rows(hidden: Tensor, shift: int, call: Call) -> Tensor:
    """Return the rows [s, ...] `shift` further on, the first ones last; under sequence parallel of all ranks."""
    group = call.options.tp_group
    if group is None or not call.options.sequence_parallel:
        return hidden.roll(-shift, dims=0) if shift else hidden
    for _ in range(shift):
        firsts = all_gather_stack(hidden[:1].contiguous(), group)
        hidden = torch.cat([hidden[1:], firsts[(group.rank() + 1) % group.size()]])
    return hidden
