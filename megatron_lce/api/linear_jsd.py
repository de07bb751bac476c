"""Distillation: the generalised Jensen-Shannon divergence of two vocab-sharded LM heads, without their logits.

`linear_jsd` defines the loss L. With y = z_s / T of the student, its gradient is

    0 < beta < 1    dL/dy = (1 - beta) p_s (log(p_s / m) - KL(p_s || m))
    beta = 0        dL/dy = p_s - p_t
    beta = 1        dL/dy = p_s (log(p_s / p_t) - KL(p_s || p_t))

because dL/dp_s = (1 - beta) log(p_s / m) in the middle. A product's is scale / T times that, times 1 - tanh^2 under the
student's softcap.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.checks import validation
from megatron_lce.checks.together import checked_together, shaped
from megatron_lce.core.collectives import waited
from megatron_lce.core.eager import eager
from megatron_lce.core.jsd import jsd_forward, jsd_with_gradient
from megatron_lce.core.jsd_heads import Head, Heads, Kind
from megatron_lce.core.options import WORKSPACE_BYTES, BackendName, LinearCrossEntropyOutput, Options, WeightGradSink
from megatron_lce.core.products import laid_out, own_arithmetic, product


@validation.renamed("skip_ignored", "skip_masked")
@eager
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

    With `p_s` and `p_t` the softmax of the student's and the teacher's logits over `temperature`, the loss in nats is

        0 < beta < 1    beta KL(p_t || m) + (1 - beta) KL(p_s || m),  m = beta p_t + (1 - beta) p_s
        beta = 0        KL(p_t || p_s), forward KL
        beta = 1        KL(p_s || p_t), reverse KL

    (Agarwal et al., On-Policy Distillation of Language Models, 2024, section 2, also for the ends: the limits of the
    middle are zero.) Only the student gets gradients. They shrink with temperature**2; multiply the loss by it to
    compensate (Hinton et al. 2015).

    Args:
        student_hidden, student_weight: as in `linear_cross_entropy`, but no DTensors and no fp32 weight with 16 bits.
        teacher_hidden: [..., H_teacher] for the same tokens; size and dtype may differ from the student's.
        teacher_weight: [V_local, H_teacher] of its dtype, the same rows of the same vocabulary.
        labels: int64, one a token (under `sequence_parallel` the full [s, ...]): they say which rows are ignored
            (`None`: none), and `return_student` returns their logprobs.
        beta: weight of the teacher in the mixture, in [0, 1].
        student_logits_scale, teacher_logits_scale, student_softcap, teacher_softcap: as in `linear_cross_entropy`.
        token_weights: floating, of labels' shape, without gradient: the result is then the sum of weight times
            divergence, and its gradients are computed in forward, which saves one product of each head. A token of
            weight 0 is an ignored row, and `skip_ignored=True` does not wait in backward. In fp16 keep weights at about
            1 and divide the sum afterwards, because gradients are computed before a loss scale is known.
        teacher_temperature: temperature of the teacher's softmax alone, like `temperature`; `None`: `temperature`.
        return_student: True: also return the student's logprobs of `labels`, entropy and lse at `temperature`, without
            gradient and without further products.
        temperature, tp_group, sequence_parallel, ignore_index, vocab_start, vocab_size, skip_ignored, workspace_bytes,
            backend, weight_grad_sink: as in `linear_cross_entropy`, for both heads; the sink is for the student's
            weight. Backward holds both gathered hiddens and always accumulates the student's
            hidden-state gradient, unless there are `token_weights`.

    Returns:
        fp32 losses of labels' shape, the same bits on every rank of the group; their upstream gradients must be equal
        on every rank. With `token_weights` an fp32 scalar, whose backward and memory are as in `linear_token_loss`.

        With `return_student` a tuple: the loss, and a `LinearCrossEntropyOutput` of every token: 0 if it is ignored,
        also by its weight, and NaN if no rank owns its label.

    Raises:
        TypeError, ValueError: see `linear_cross_entropy`.
        RuntimeError: in backward with `create_graph=True`; in a second backward with `token_weights`.
    """
    teacher_hidden, teacher_weight, token_weights = map(waited, (teacher_hidden, teacher_weight, token_weights))
    student = Head(student_hidden, student_weight, student_logits_scale, student_softcap)
    teacher = Head(teacher_hidden, teacher_weight, teacher_logits_scale, teacher_softcap)
    options = Options(  # logits_scale and softcap are each head's
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
        "student_logits_scale": student_logits_scale,
        "student_softcap": student_softcap,
        "teacher_hidden": validation.kind_of(teacher_hidden),
        "teacher_weight": validation.kind_of(teacher_weight),
        "teacher_logits_scale": teacher_logits_scale,
        "teacher_softcap": teacher_softcap,
        "beta": int(beta) if isinstance(beta, int | float) and beta in (0, 1) else beta,  # two kinds of their own
        "token_weights": token_weights,
        "teacher_temperature": teacher_temperature,
        "return_student": return_student,
    }
    names = ("student_hidden", "student_weight", "labels")
    with checked_together(
        "linear_jsd", student_hidden, student_weight, labels, options, names=names, own=own
    ) as checks:
        shape = checks.head()
        for name, head in (("student", student), ("teacher", teacher)):
            validation.check_tensor(f"{name}_hidden", head.hidden)
            validation.check_tensor(f"{name}_weight", head.weight)
            validation.check_head(f"{name}_hidden", head.hidden, f"{name}_weight", head.weight, fp32_weight=False)
            validation.check_number(f"{name}_logits_scale", head.logits_scale)
            if head.softcap is not None:
                validation.check_number(f"{name}_softcap", head.softcap, positive=True)
        device, num_rows = student_hidden.device, len(student_weight)
        tokens, of_teacher = tuple(student_hidden.shape[:-1]), tuple(teacher_hidden.shape[:-1])
        wanted = "hold as many rows of the vocabulary as student_weight"
        validation.check_same("teacher_hidden", "be on student_hidden's device", device, teacher_hidden.device)
        validation.check_same("teacher_hidden", "have student_hidden's shape but for H", tokens, of_teacher)
        validation.check_same("teacher_weight", wanted, num_rows, len(teacher_weight))
        if token_weights is not None:
            validation.check_per_token("token_weights", token_weights, shape, device)
            is_floating = token_weights.is_floating_point()
            validation.require(is_floating, "token_weights", "be a floating tensor", token_weights.dtype, TypeError)
        if teacher_temperature is not None:
            validation.check_temperature(teacher_temperature, shape, device, "teacher_temperature")
        validation.check_fraction("beta", beta)
        validation.check_flag("return_student", return_student)
        validation.require(labels is not None or not return_student, "labels", "be given for return_student", None)
        ignores_none = int(ignore_index == 0)
        checks.rest(checks.hidden.new_full(shape, ignores_none, dtype=torch.int64) if labels is None else None)
        validation.check_quotients(student_logits_scale, student_softcap, temperature, "student_")
        if teacher_temperature is None:
            validation.check_quotients(teacher_logits_scale, teacher_softcap, temperature, "teacher_")
        else:
            given = teacher_logits_scale, teacher_softcap, teacher_temperature
            validation.check_quotients(*given, "teacher_", "teacher_temperature")
    call = replace(checks.call(), product=product)
    student = Head(call.hidden, call.weight, float(student_logits_scale), student_softcap)
    step = 16 // teacher_hidden.element_size()
    rows = laid_out(teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1]), step)
    columns = laid_out(teacher_weight.detach().contiguous(), step)
    teacher = Head(rows, columns, float(teacher_logits_scale), teacher_softcap)
    if isinstance(teacher_temperature, Tensor):
        teacher_temperature = teacher_temperature.reshape(-1)
    weights = None if token_weights is None else token_weights.reshape(-1)
    with_gradient = torch.is_grad_enabled() and (student_hidden.requires_grad or student_weight.requires_grad)
    with own_arithmetic(call.hidden.device, "linear_jsd forward"):
        with_sum = with_gradient and weights is not None
        kind: Kind = "forward_kl" if beta == 0 else "reverse_kl" if beta == 1 else "jsd"
        heads = Heads(student, teacher, float(beta), (kind,))
        divergences = jsd_forward(call, heads, teacher_temperature, return_student, weights, with_sum)
    loss = jsd_with_gradient(divergences, call)
    loss = loss if weights is not None else loss.view(call.shape)
    if not return_student:
        return loss
    return loss, LinearCrossEntropyOutput(*shaped(divergences.student_outputs, call.shape))
