"""Distillation: the generalised Jensen-Shannon divergence of two vocab-sharded LM heads, without their logits.

A head's logits are z = scale hidden @ weight.T, under a softcap z = softcap tanh(scale hidden @ weight.T / softcap).
With p_s = softmax(z_s / T) of the student, p_t of the teacher and m = beta p_t + (1 - beta) p_s, one token's loss is

    0 < beta < 1    beta KL(p_t || m) + (1 - beta) KL(p_s || m)
    beta = 0        KL(p_t || p_s), forward KL
    beta = 1        KL(p_s || p_t), reverse KL

(Agarwal et al., On-Policy Distillation of Language Models, 2024, section 2; the ends are that paper's convention, not
the limits of the middle, which are zero.) A gradient reaches the student only. With L the loss and y = z_s / T,

    dL/dp_s = (1 - beta) (log(p_s / m) + 1) - (beta p_t + (1 - beta) p_s) (1 - beta) / m = (1 - beta) log(p_s / m)
    dL/dy   = p_s (dL/dp_s - sum of p_s dL/dp_s) = (1 - beta) p_s (log(p_s / m) - KL(p_s || m))

and at the ends, by the same steps,

    beta = 0        dL/dy = p_s - p_t
    beta = 1        dL/dy = p_s (log(p_s / p_t) - KL(p_s || p_t))

A product gets scale / T of that, times 1 - tanh^2 under the student's softcap.

Underflow: with r = log2(p_t / p_s), taken of differences of logits, log2(m / p) of the head that weighs more in m is
log2(1 + w (q / p - 1)), where q is the other's probability and w its weight: it keeps its digits where the heads are
close, and where they are far apart it is finite, and multiplies a probability that is zero.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.arguments import checked_together, shaped
from megatron_lce.core import validation
from megatron_lce.core.collectives import waited
from megatron_lce.core.distillation import find_divergences, jsd_with_gradient
from megatron_lce.core.options import WORKSPACE_BYTES, BackendName, LinearCrossEntropyOutput, Options, WeightGradSink
from megatron_lce.core.products import laid_out, own_arithmetic, product
from megatron_lce.core.two_heads import Head, Heads


def linear_jsd(
    student_hidden: Tensor,  # [..., H_student]
    student_weight: Tensor,  # [V_local, H_student]
    teacher_hidden: Tensor,  # [..., H_teacher]
    teacher_weight: Tensor,  # [V_local, H_teacher]
    *,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    student_logits_scale: float = 1.0,
    teacher_logits_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    token_weights: Tensor | None = None,
    teacher_temperature: float | Tensor | None = None,
    return_student: bool = False,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    ignore_index: int = -100,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    skip_ignored: bool | int = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    backend: BackendName = "auto",
    weight_grad_sink: WeightGradSink | None = None,
) -> Tensor | tuple[Tensor, LinearCrossEntropyOutput]:
    """Per-token generalised Jensen-Shannon divergence of a student's and a teacher's LM head, without their logits.

    `beta KL(p_t || m) + (1 - beta) KL(p_s || m)` with `m = beta p_t + (1 - beta) p_s` for 0 < beta < 1; forward KL,
    `KL(p_t || p_s)`, for beta = 0 and reverse KL, `KL(p_s || p_t)`, for beta = 1 (Agarwal et al. 2024). Both softmaxes
    are taken at `temperature`. Gradients of the student shrink with its square: a caller who wants them comparable
    across temperatures multiplies the loss by temperature**2 (Hinton et al. 2015), which is not done here.

    Args:
        student_hidden: [..., H_student], fp32, bf16 or fp16; under `sequence_parallel` this rank's [s / tp, ..., H].
        student_weight: [V_local, H_student] of its dtype, this rank's rows of the vocabulary.
        teacher_hidden: [..., H_teacher] for the same tokens; its size and dtype may be others. It gets no gradient.
        teacher_weight: [V_local, H_teacher] of its dtype, the same rows of the same vocabulary. It gets no gradient.
        labels: int64, one a token (under `sequence_parallel` the full [s, ...]); tells which rows are ignored, and is
            read for nothing else but `return_student`. `None`: no row is.
        beta: weight of the teacher in the mixture, in [0, 1].
        temperature: a positive float, or a floating tensor, one a token, without gradient; a row whose temperature is
            not positive and finite is NaN.
        student_logits_scale, teacher_logits_scale: factor on the head's products (MuP).
        student_softcap, teacher_softcap: bound of the head's logits before the temperature, as in Gemma; `None`: no
            bound.
        token_weights: floating, one a token (of the labels' shape), without gradient. Given, the result is the sum of
            weight times divergence, and its gradients are made in forward, where the logits are: two products for each
            head fewer. A token whose weight is 0 is an ignored row. In fp16 weights should be of about 1, and the sum
            divided afterwards: the gradients are made before a loss scale is known.
        teacher_temperature: temperature of the teacher's softmax alone, as above; `None`: `temperature`.
        return_student: True also returns what `linear_cross_entropy` gives of the student at `temperature`: logprobs of
            `labels`, entropy and lse, from the logits that are there, without gradient.
        tp_group, sequence_parallel, ignore_index, vocab_start, vocab_size, skip_ignored: as `linear_cross_entropy`
            takes them, for both heads alike. Under `sequence_parallel` both hiddens are sharded. With `token_weights`
            `skip_ignored=True` leaves backward nothing to wait for.
        workspace_bytes: most that transient buffers take, for any number of tokens (with `token_weights` see below).
            Beside it backward holds an fp32 accumulator of the student hidden's gradient (4 N H bytes) and, under
            `sequence_parallel`, the gathered hiddens.
        backend: "triton", "torch", or "auto": triton on a GPU that Triton supports, torch elsewhere. A named backend
            that cannot run raises.
        weight_grad_sink: as `linear_cross_entropy` takes it, for the student's weight.

    Returns:
        The loss of each token in nats: fp32, [...] (under `sequence_parallel` [s, ...]), the same bits on every rank.
        Its upstream gradient, one number a token, must be equal on every rank of the group.
        With `token_weights` an fp32 scalar; backward may be called on it once, with any upstream gradient, and scales
        the gradients that forward made (one that is not finite makes ignored rows' NaN, too). Over these the call takes
        at most the workspace and the fp32 sum of the weight's gradient, 4 V H bytes of the group's largest shard, and
        nothing that grows with the tokens (under `sequence_parallel` what is gathered of both hidden states and, until
        it is scattered, the gradient of all ranks' tokens); forward's blocks have the room of the weight's gradient
        until it is made of that sum, as in `linear_token_loss`.

        With `return_student` a tuple: the loss, and a `LinearCrossEntropyOutput` of every token, where one that is
        ignored, be it by its weight, is 0, and one whose label no rank owns is NaN.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it, what it must be and what it was.
        RuntimeError: in backward with `create_graph=True`; in a second backward with `token_weights`.
    """
    teacher_hidden, teacher_weight, token_weights = map(waited, (teacher_hidden, teacher_weight, token_weights))
    student = Head(student_hidden, student_weight, student_logits_scale, student_softcap)
    teacher = Head(teacher_hidden, teacher_weight, teacher_logits_scale, teacher_softcap)
    options = Options(  # each head has a logits_scale and a softcap of its own
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        temperature=temperature,
        ignore_index=ignore_index,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        entropy=False,
        skip_ignored=skip_ignored,
        workspace_bytes=workspace_bytes,
        backend=backend,
        weight_grad_sink=weight_grad_sink,
    )

    own = {
        **_describe(student, teacher, beta),
        "token_weights": type(token_weights).__name__,
        "teacher_temperature": type(teacher_temperature).__name__,
        "return_student": return_student,
    }
    names = ("student_hidden", "student_weight", "labels")
    with checked_together(
        "linear_jsd", student_hidden, student_weight, labels, options, names=names, own=own
    ) as checks:
        shape = checks.head()
        _check(student, teacher, beta, shape, token_weights, teacher_temperature)
        validation.check_flag("return_student", return_student)
        if labels is None and return_student:
            raise ValueError("labels must be given for return_student, got None")
        if labels is None:
            labels = student_hidden.new_full(shape, int(ignore_index == 0), dtype=torch.int64)  # no row is ignored
            checks.rest(labels)
        else:
            checks.rest()
    call = replace(checks.call(), product=product)
    step = 16 // teacher_hidden.element_size()
    heads = Heads(
        Head(call.hidden, call.weight, float(student_logits_scale), student_softcap),
        Head(
            laid_out(teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1]), step),
            laid_out(teacher_weight.detach().contiguous(), step),
            float(teacher_logits_scale),
            teacher_softcap,
        ),
        float(beta),
    )
    if isinstance(teacher_temperature, Tensor):
        teacher_temperature = teacher_temperature.reshape(-1)
    weights = None if token_weights is None else token_weights.reshape(-1)
    with_gradient = torch.is_grad_enabled() and (student_hidden.requires_grad or student_weight.requires_grad)
    with own_arithmetic(student_hidden.device, "linear_jsd forward"):
        with_sum = with_gradient and weights is not None
        found = find_divergences(call, heads, teacher_temperature, return_student, weights, with_sum)
    loss = jsd_with_gradient(found, call)
    loss = loss if weights is not None else loss.view(call.shape)
    if not return_student:
        return loss
    return loss, LinearCrossEntropyOutput(*shaped(found.student_outputs, call.shape))


def _check(
    student: Head,
    teacher: Head,
    beta: float,
    shape: tuple[int, ...],
    token_weights: Tensor | None,
    teacher_temperature: Tensor | float | None,
) -> None:
    """Check what `linear_jsd` requires beside what every operation does; `shape`: of labels."""
    for name, head in (("student", student), ("teacher", teacher)):
        validation.check_tensor(f"{name}_hidden", head.hidden)
        validation.check_tensor(f"{name}_weight", head.weight)
        validation.check_head(f"{name}_hidden", head.hidden, f"{name}_weight", head.weight, fp32_weight=False)
        validation.check_number(f"{name}_logits_scale", head.logits_scale)
        if head.softcap is not None:
            validation.check_number(f"{name}_softcap", head.softcap, positive=True)
    for name, requirement, of in (
        ("teacher_hidden", "be on student_hidden's device", lambda head: head.hidden.device),
        ("teacher_hidden", "have student_hidden's shape but for H", lambda head: tuple(head.hidden.shape[:-1])),
        ("teacher_weight", "hold as many rows of the vocabulary as student_weight", lambda head: len(head.weight)),
    ):
        validation.check_same(name, requirement, of(student), of(teacher))
    if token_weights is not None:
        validation.check_per_token("token_weights", token_weights, shape, student.hidden.device)
        if not token_weights.is_floating_point():
            raise TypeError(f"token_weights must be a floating tensor, got {token_weights.dtype}")
    if teacher_temperature is not None:
        validation.check_temperature(teacher_temperature, shape, student.hidden.device, "teacher_temperature")
    validation.check_fraction("beta", beta)


def _describe(student: Head, teacher: Head, beta: float) -> dict[str, Any]:
    """Return what must be equal on every rank, beside the arguments that every operation has."""
    heads = {
        f"{name}_{argument}": validation.kind_of(value) if isinstance(value, Tensor) else value
        for name, head in (("student", student), ("teacher", teacher))
        for argument, value in head._asdict().items()
    }
    return heads | {"beta": beta if isinstance(beta, (int, float)) and beta in (0, 1) else "between 0 and 1"}
