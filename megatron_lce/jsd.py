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

The gradient of a logit needs the row's whole KL first, so there are three steps: both heads' logits with their softmax
statistics, the sums over the vocabulary, and the gradient. The first two end with one exchange over the group each.
Forward keeps the logits of a block of tokens for its sums where the workspace has room for them.

Underflow: log2 p = z log2 e - lse is finite for any logit, and each probability multiplies a logarithm. log m is taken
of an m held above the smallest normal number; where m is below it, p_s and p_t are zero, and zero times a finite number
is what such a term is worth. Where student and teacher have equal logits, log(p_s / m) is a rounding of zero and so is
the gradient.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.backends.choice import load_jsd_backend
from megatron_lce.core import collectives, validation
from megatron_lce.core.agreement import agreed_options
from megatron_lce.core.jsd_autograd import linear_jsd_autograd
from megatron_lce.core.jsd_pass import JsdPass
from megatron_lce.core.jsd_stats import Head
from megatron_lce.core.known_loss import known_loss
from megatron_lce.core.options import WORKSPACE_BYTES, Backend, Options, WeightGradSink
from megatron_lce.core.products import laid_out
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
    token_weights: Tensor | None = None,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    ignore_index: int = -100,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    skip_ignored: bool | int = False,
    workspace_bytes: int = WORKSPACE_BYTES,
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
        token_weights: floating, one a token (of the labels' shape), without gradient. Given, the result is the sum of
            weight times divergence, and its gradients are made in forward, where the logits are: two products for each
            head fewer. A token whose weight is 0 is an ignored row. In fp16 weights should be of about 1, and the sum
            divided afterwards: the gradients are made before a loss scale is known.
        tp_group: the ranks that the vocabulary is sharded over; `None`: the weights are whole.
        sequence_parallel: both hiddens are sharded along their first dimension; they are gathered inside and the
            student's gradient is reduce-scattered. Nothing to do on a single rank.
        ignore_index: rows with this label have loss 0 and no gradient.
        vocab_start: first global id of this shard; `None`: rank * V_local, all shards being equal.
        vocab_size: true size of the vocabulary; columns at or past it are padding. `None`: every column counts.
        skip_ignored: leave ignored rows out of products, statistics and collectives, as `linear_cross_entropy` does.
            True: they are counted on the device, for which the host waits once, and backward leaves out rows whose
            upstream gradient is zero too, for which it waits once more; with `token_weights` it has nothing left to
            wait for. An int: how many rows are not ignored, known to the host; every loss is NaN where it is not the
            labels' count. False: all rows are computed.
        workspace_bytes: most that transient buffers take, for any number of tokens (with `token_weights` see below).
            Beside it backward holds an fp32 accumulator of the student hidden's gradient (4 N H bytes) and, under
            `sequence_parallel`, the gathered hiddens.
        backend: "triton", "torch", or "auto": triton on a GPU that Triton supports, torch elsewhere. A named backend
            that cannot run raises.
        weight_grad_sink: for integrations: where the student weight's gradient is added, instead of being returned; see
            `megatron_lce.core.options.WeightGradSink`.

    Returns:
        The loss of each token in nats: fp32, [...] (under `sequence_parallel` [s, ...]), the same bits on every rank.
        Its upstream gradient, one number a token, must be equal on every rank of the group.
        With `token_weights` an fp32 scalar; backward may be called on it once, with any upstream gradient, and scales
        the gradients that forward made (one that is not finite makes ignored rows' NaN, too). Over these the call takes
        at most the workspace and the fp32 sum of the weight's gradient, 4 V H bytes of the group's largest shard, and
        nothing that grows with the tokens (under `sequence_parallel` what is gathered of both hidden states and, until
        it is scattered, the gradient of all ranks' tokens); forward's blocks have the room of the weight's gradient
        until it is made of that sum, as in `linear_token_loss`.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it, what it must be and what it was.
        RuntimeError: in backward with `create_graph=True`; in a second backward with `token_weights`.
    """
    call = _prepare_call(**locals())
    primitives = load_jsd_backend(backend, student_hidden.device)
    if token_weights is None:
        return linear_jsd_autograd(*call.inputs, call.options, primitives).view(call.shape)
    with_gradient = torch.is_grad_enabled() and (student_hidden.requires_grad or student_weight.requires_grad)
    with torch.no_grad():
        run = JsdPass(*call.inputs, token_weights.reshape(-1), call.options, primitives, with_gradient)
    return known_loss(call.student.hidden, call.student.weight, run, call.options, with_gradient)


class _Call(NamedTuple):
    """A validated call, its tokens in one dimension."""

    shape: tuple[int, ...]  # of its tokens before
    student: Head
    teacher: Head
    labels: Tensor  # [N]
    temperature: float | Tensor  # [N] if a tensor
    beta: float
    options: Options

    @property
    def inputs(self) -> tuple[Head, Head, Tensor, float | Tensor, float]:
        return self.student, self.teacher, self.labels, self.temperature, self.beta


def _prepare_call(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    student_logits_scale: float,
    student_softcap: float | None,
    teacher_logits_scale: float,
    teacher_softcap: float | None,
    **keywords: Any,
) -> _Call:
    """Check the arguments of `linear_jsd`, on every rank of the group at the first call of their kind."""
    student = Head(student_hidden, student_weight, student_logits_scale, student_softcap)
    teacher = Head(teacher_hidden, teacher_weight, teacher_logits_scale, teacher_softcap)
    options = agreed_options(
        keywords["tp_group"],
        lambda ranks: _checked(student, teacher, ranks, **keywords),
        lambda: _describe(student, teacher, **keywords),
        student_weight,
        keywords["vocab_start"],
        {"the shape of student_hidden": validation.shape_of(student_hidden)},
    )
    sequence_shards = collectives.group_size(options.tp_group) if options.sequence_parallel else 1
    labels = _labels_of(student, keywords["labels"], options.ignore_index, sequence_shards)
    temperature = keywords["temperature"]
    return _Call(
        tuple(labels.shape),
        _flat(student),
        _flat(teacher._replace(hidden=teacher_hidden.detach(), weight=teacher_weight.detach())),
        labels.reshape(-1),
        temperature.reshape(-1) if isinstance(temperature, Tensor) else float(temperature),
        float(keywords["beta"]),
        options,
    )


def _checked(
    student: Head,
    teacher: Head,
    ranks: int,
    *,
    labels: Tensor | None,
    beta: float,
    temperature: float | Tensor,
    token_weights: Tensor | None,
    tp_group: ProcessGroup | None,
    sequence_parallel: bool,
    ignore_index: int,
    vocab_start: int | None,
    vocab_size: int | None,
    skip_ignored: bool | int,
    workspace_bytes: int,
    backend: Backend,
    weight_grad_sink: WeightGradSink | None,
) -> Options:
    validation.check_flag("sequence_parallel", sequence_parallel)
    sequence_shards = ranks if sequence_parallel else 1
    _check_heads(student, teacher)
    validation.check_integer("ignore_index", ignore_index)
    labels = _labels_of(student, labels, ignore_index, sequence_shards)
    validation.check_labels_of("student_hidden", student.hidden, labels, sequence_shards)
    validation.check_temperature(temperature, labels)
    if token_weights is not None:
        _check_token_weights(token_weights, labels)
    validation.check_skip_ignored(skip_ignored, labels.numel())
    validation.check_number("beta", beta)
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must lie in [0, 1], got {beta}")
    for name, head in (("student", student), ("teacher", teacher)):
        validation.check_number(f"{name}_logits_scale", head.logits_scale)
        if head.softcap is not None:
            validation.check_number(f"{name}_softcap", head.softcap, positive=True)
    validation.check_options(
        vocab_size=vocab_size, softcap=None, logits_cache_bytes=0, workspace_bytes=workspace_bytes, backend=backend
    )
    first, num_columns = owned_columns(student.weight, tp_group, vocab_start, vocab_size)
    return Options(
        tp_group=tp_group if ranks > 1 else None,
        sequence_parallel=sequence_shards > 1,
        logits_scale=1.0,  # each head has its own
        softcap=None,
        ignore_index=ignore_index,
        vocab_start=first,
        num_columns=num_columns,
        largest_shard=student.weight.shape[0],
        vocab_size=vocab_size,
        entropy=False,
        telemetry=False,
        skip_ignored=skip_ignored,
        logits_cache_bytes=0,
        workspace_bytes=workspace_bytes,
        reduce_grad_hidden=True,
        weight_grad_sink=weight_grad_sink,
    )


def _labels_of(student: Head, labels: Tensor | None, ignore_index: int, sequence_shards: int) -> Tensor:
    """Those given, or of rows that all count."""
    if labels is not None:
        return labels
    shape = validation.labels_shape("student_hidden", student.hidden, sequence_shards)
    return torch.full(shape, 1 if ignore_index == 0 else 0, device=student.hidden.device)


def _check_token_weights(token_weights: Tensor, labels: Tensor) -> None:
    validation.check_tensor("token_weights", token_weights)
    if not token_weights.is_floating_point():
        raise TypeError(f"token_weights must be a floating tensor, got {token_weights.dtype}")
    if token_weights.shape != labels.shape:
        raise ValueError(
            f"token_weights must have labels' shape, {tuple(labels.shape)}, got {tuple(token_weights.shape)}"
        )
    if token_weights.device != labels.device:
        raise ValueError(f"token_weights must be on labels' device, {labels.device}, got {token_weights.device}")
    if token_weights.requires_grad:
        raise ValueError("token_weights must not require grad: it gets no gradient; got requires_grad=True")


def _describe(student: Head, teacher: Head, *, beta: float, **keywords: Any) -> dict[str, Any]:
    """What every rank of a group must call with; values that may change from call to call by their kinds only."""
    own = {"tp_group", "vocab_start", "labels", "skip_ignored"}
    by_type = ("temperature", "token_weights", "weight_grad_sink")
    heads = {
        f"{name}_{argument}": validation.kind_of(value) if isinstance(value, Tensor) else value
        for name, head in (("student", student), ("teacher", teacher))
        for argument, value in head._asdict().items()
    }
    return {
        **heads,
        "gradients": (torch.is_grad_enabled(), *(getattr(x, "requires_grad", None) for x in student[:2])),
        "beta": beta if isinstance(beta, (int, float)) and beta in (0, 1) else "between 0 and 1",
        **{name: value for name, value in keywords.items() if name not in own.union(by_type)},
        **{name: type(keywords[name]).__name__ for name in by_type},
        "skip_ignored": validation.kind_of_skipping(keywords["skip_ignored"]),
    }


def _flat(head: Head) -> Head:
    """The head with its tokens in one dimension."""
    return Head(
        laid_out(head.hidden.reshape(-1, head.hidden.shape[-1])),
        laid_out(head.weight.contiguous()),
        float(head.logits_scale),
        None if head.softcap is None else float(head.softcap),
    )


def _check_heads(student: Head, teacher: Head) -> None:
    """Check that both heads are whole, see the same tokens and hold the same rows of a vocabulary."""
    (student_hidden, student_weight, *_), (teacher_hidden, teacher_weight, *_) = student, teacher
    for name, head in (("student", student), ("teacher", teacher)):
        validation.check_tensor(f"{name}_hidden", head.hidden)
        validation.check_tensor(f"{name}_weight", head.weight)
        validation.check_head(f"{name}_hidden", head.hidden, f"{name}_weight", head.weight)
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
