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

The gradient of a logit needs the row's whole KL first, so for 0 < beta < 1 there are three passes over both heads'
products: softmax statistics (one exchange over the group gives both log-sum-exps), the two sums over the vocabulary
(one exchange), and the gradient, slab by slab. The ends take two: their KL follows from statistics that a single pass
accumulates, see `megatron_lce.core.jsd_stats`.

Underflow: log2 p = z log2 e - lse is finite for any logit, and each probability multiplies a logarithm. log m is taken
of an m held above the smallest normal number; where m is below it, p_s and p_t are zero, and zero times a finite number
is what such a term is worth. Where student and teacher have equal logits, log(p_s / m) is a rounding of zero and so is
the gradient.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.backends.choice import load_jsd_backend
from megatron_lce.core import collectives, validation
from megatron_lce.core.jsd_autograd import linear_jsd_autograd
from megatron_lce.core.jsd_stats import Head
from megatron_lce.core.options import Backend, Options, WeightGradSink
from megatron_lce.cross_entropy import owned_columns


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
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    ignore_index: int = -100,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    workspace_bytes: int = 512 * 2**20,
    backend: Backend = "auto",
    weight_grad_sink: WeightGradSink | None = None,
) -> Tensor:
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
        labels: int64, one a token (under `sequence_parallel` the full [s, ...]); only tells which rows are ignored.
            `None`: no row is.
        beta: weight of the teacher in the mixture, in [0, 1].
        temperature: a positive float, or a floating tensor, one a token, without gradient; a row whose temperature is
            not positive and finite is NaN.
        student_logits_scale, teacher_logits_scale: factor on the head's products (MuP).
        student_softcap, teacher_softcap: bound of the head's logits before the temperature, as in Gemma; `None`: no
            bound.
        tp_group: the ranks that the vocabulary is sharded over; `None`: the weights are whole.
        sequence_parallel: both hiddens are sharded along their first dimension; they are gathered inside and the
            student's gradient is reduce-scattered. Nothing to do on a single rank.
        ignore_index: rows with this label have loss 0 and no gradient.
        vocab_start: first global id of this shard; `None`: rank * V_local, all shards being equal.
        vocab_size: true size of the vocabulary; columns at or past it are padding. `None`: every column counts.
        workspace_bytes: most that transient buffers take, for any number of tokens. Beside it backward holds an fp32
            accumulator of the student hidden's gradient (4 N H bytes) and, under `sequence_parallel`, the gathered
            hiddens.
        backend: "triton", "torch", or "auto": triton on a GPU that Triton supports, torch elsewhere. A named backend
            that cannot run raises.
        weight_grad_sink: for integrations: where the student weight's gradient is added, instead of being returned; see
            `megatron_lce.core.options.WeightGradSink`.

    Returns:
        The loss of each token in nats: fp32, [...] (under `sequence_parallel` [s, ...]), the same bits on every rank.
        Its upstream gradient, one number a token, must be equal on every rank of the group.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it, what it must be and what it was.
    """
    validation.check_group(tp_group)
    validation.check_flag("sequence_parallel", sequence_parallel)
    ranks = collectives.group_size(tp_group)
    sequence_parallel = sequence_parallel and ranks > 1
    shape = _check_heads(
        student_hidden, student_weight, teacher_hidden, teacher_weight, ranks if sequence_parallel else 1
    )
    validation.check_integer("ignore_index", ignore_index)
    if labels is None:
        labels = torch.full(shape, 1 if ignore_index == 0 else 0, device=student_hidden.device)
    validation.check_labels_of("student_hidden", student_hidden, labels, ranks if sequence_parallel else 1)
    validation.check_temperature(temperature, labels)
    validation.check_number("beta", beta)
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must lie in [0, 1], got {beta}")
    for name, scale in (
        ("student_logits_scale", student_logits_scale),
        ("teacher_logits_scale", teacher_logits_scale),
    ):
        validation.check_number(name, scale)
    for name, softcap in (("student_softcap", student_softcap), ("teacher_softcap", teacher_softcap)):
        if softcap is not None:
            validation.check_number(name, softcap, positive=True)
    validation.check_options(
        vocab_size=vocab_size, softcap=None, logits_cache_bytes=0, workspace_bytes=workspace_bytes, backend=backend
    )
    first, num_columns = owned_columns(student_weight, tp_group, vocab_start, vocab_size)
    options = Options(
        tp_group=tp_group if ranks > 1 else None,
        sequence_parallel=sequence_parallel,
        logits_scale=1.0,  # each head has its own
        softcap=None,
        ignore_index=ignore_index,
        vocab_start=first,
        num_columns=num_columns,
        entropy=False,
        telemetry=False,
        largest_shard=student_weight.shape[0],
        skip_ignored=False,
        logits_cache_bytes=0,
        workspace_bytes=workspace_bytes,
        reduce_grad_hidden=True,
        weight_grad_sink=weight_grad_sink,
    )
    flat_temperature = temperature.reshape(-1) if isinstance(temperature, Tensor) else float(temperature)
    loss = linear_jsd_autograd(
        _head(student_hidden, student_weight, student_logits_scale, student_softcap),
        _head(teacher_hidden.detach(), teacher_weight.detach(), teacher_logits_scale, teacher_softcap),
        labels.reshape(-1),
        flat_temperature,
        float(beta),
        options,
        load_jsd_backend(backend, student_hidden.device),
    )
    return loss.reshape(shape)


def _head(hidden: Tensor, weight: Tensor, logits_scale: float, softcap: float | None) -> Head:
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])
    return Head(flat_hidden, weight.contiguous(), float(logits_scale), None if softcap is None else float(softcap))


def _check_heads(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, sequence_shards: int
) -> tuple[int, ...]:
    """Check that both heads are whole, see the same tokens and hold the same rows of a vocabulary; the loss's shape."""
    for name, tensor in (
        ("student_hidden", student_hidden),
        ("student_weight", student_weight),
        ("teacher_hidden", teacher_hidden),
        ("teacher_weight", teacher_weight),
    ):
        validation.check_tensor(name, tensor)
    validation.check_head("student_hidden", student_hidden, "student_weight", student_weight)
    validation.check_head("teacher_hidden", teacher_hidden, "teacher_weight", teacher_weight)
    if teacher_hidden.device != student_hidden.device:
        raise ValueError(
            f"teacher_hidden must be on student_hidden's device, {student_hidden.device}, got {teacher_hidden.device}"
        )
    if teacher_hidden.shape[:-1] != student_hidden.shape[:-1]:
        raise ValueError(
            "teacher_hidden must have student_hidden's shape but for H, "
            f"{tuple(student_hidden.shape)}, got {tuple(teacher_hidden.shape)}"
        )
    if teacher_weight.shape[0] != student_weight.shape[0]:
        raise ValueError(
            "teacher_weight must hold as many rows of the vocabulary as student_weight, "
            f"{student_weight.shape[0]}, got {teacher_weight.shape[0]}"
        )
    return validation.labels_shape("student_hidden", student_hidden, sequence_shards)
