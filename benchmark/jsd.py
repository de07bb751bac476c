"""Fused divergences of two heads beside their peers in one process.

Forward and backward of the mean over tokens, gradients of the student's hidden and weight: `linear_jsd` of each token
(ours), `linear_divergence` of three kinds (ours-3), and `linear_divergence_loss` of one and of three (ours-loss-1024,
ours-3-loss-1024: the workspace in MiB); Liger's fused linear JSD; and the materialised JSD in eager PyTorch and under
torch.compile. Ratios are to cuBLAS's products in the same run: Fs + Ft + dX + dW, where each head's logits are made
once, and 2 (Fs + Ft) + dX + dW, where backward makes them again.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megatron_lce
from benchmark import measure
from benchmark.providers import Provider
from benchmark.results import Results
from benchmark.shapes import Shape, make_inputs

THREE = ("forward_kl", "tv", "jsd")  # of providers with "-3" in their names

Heads = tuple[Tensor, Tensor, Tensor, Tensor]  # hidden and weight of the student, and of the teacher
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def materialised(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    beta: float,
    kinds: tuple[str, ...] = ("jsd",),
) -> Tensor:
    """Mean over tokens of the sum of these divergences, from whole logits, in fp32 at least."""
    student, teacher = (
        (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32)).log_softmax(-1)
        for hidden, weight in ((student_hidden, student_weight), (teacher_hidden, teacher_weight))
    )
    total = torch.zeros((), dtype=student.dtype, device=student.device)
    if "forward_kl" in kinds:
        total = total + _kl(teacher, student).mean()
    if "tv" in kinds:
        total = total + 0.5 * (student.exp() - teacher.exp()).abs().sum(-1).mean()
    if "jsd" not in kinds:
        return total
    if beta in (0, 1):
        return total + (_kl(teacher, student) if beta == 0 else _kl(student, teacher)).mean()
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return total + (beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)).mean()


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _ours(*heads_and_beta: Any, kinds: tuple[str, ...] = ("jsd",), loss_workspace: int | None = None) -> Tensor:
    """With a loss in a workspace of so many bytes; None: of each token."""
    *heads, beta = heads_and_beta
    if loss_workspace is None:
        return _sum(megatron_lce.linear_divergence(*heads, kinds=kinds, beta=beta)).mean()
    labels = torch.zeros(len(heads[0]), dtype=torch.int64, device=heads[0].device)
    options = {"kinds": kinds, "beta": beta, "workspace_bytes": loss_workspace}
    return megatron_lce.linear_divergence_loss(*heads, labels, _sum, **options).loss / len(labels)


def _sum(out: megatron_lce.LinearDivergenceOutput) -> Tensor:
    return sum(divergence for divergence in out if divergence is not None)


def _load_liger() -> Loss:
    from liger_kernel.ops import LigerFusedLinearJSDFunction

    # no labels, the beta that follows, ignore_index, temperature, accumulation in the weight's dtype, default kernels
    return lambda *tensors_and_beta: LigerFusedLinearJSDFunction.apply(
        *tensors_and_beta[:4], None, tensors_and_beta[4], -100, 1.0, None, None, None
    )


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("ours", lambda: _ours),
        Provider("ours-3", lambda: partial(_ours, kinds=THREE)),
        Provider("ours-loss-1024", lambda: partial(_ours, loss_workspace=2**30)),
        Provider("ours-3-loss-1024", lambda: partial(_ours, kinds=THREE, loss_workspace=2**30)),
        Provider("liger", _load_liger, package="liger-kernel"),
        Provider("compile", lambda: torch.compile(materialised, dynamic=False), holds_logits=True),
        Provider("eager", lambda: materialised, holds_logits=True),
    )
}


def make_heads(tokens: int, student: int, teacher: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Heads:
    """The student's hidden and weight, and the teacher's, which take no gradient."""
    of_student = make_inputs(Shape("student", tokens, student, vocab), dtype, device, seed=0)
    of_teacher = make_inputs(Shape("teacher", tokens, teacher, vocab), dtype, device, seed=1)
    return of_student.hidden, of_student.weight, of_teacher.hidden.detach(), of_teacher.weight.detach()


def step(loss: Loss, heads: Heads, beta: float) -> tuple[Tensor, ...]:
    """The loss and the gradients of the student's hidden and weight."""
    value = loss(*heads, beta)
    return value.detach(), *torch.autograd.grad(value, heads[:2])


def measure_error(loss: Loss, heads: Heads, beta: float, kinds: tuple[str, ...]) -> dict:
    """Loss and gradients against the materialised form in fp64."""
    exact = tuple(tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in heads)
    pairs = zip(step(loss, heads, beta), step(partial(materialised, kinds=kinds), exact, beta), strict=True)
    names = ("loss_relative_error", "grad_hidden_relative_error", "grad_weight_relative_error")
    return {name: measure.relative_error(*pair) for name, pair in zip(names, pairs, strict=True)}


def measure_products(heads: Heads, budget_ms: float) -> dict:
    student, teacher = (measure.measure_products(*pair, budget_ms=budget_ms) for pair in (heads[:2], heads[2:]))
    student["student_logits_ms"] = student.pop("logits_ms")
    return student | {"teacher_logits_ms": teacher["logits_ms"]}


def times(results: Results, losses: dict[str, Loss], arguments: Any) -> None:
    """At each beta all providers take turns with the products."""
    budget_ms = arguments.budget_ms
    heads = make_heads(*arguments.shape, results.dtype, results.device)
    shape = {"shape": "x".join(map(str, arguments.shape))}
    products = partial(results.attempt, "jsd_products", shape, partial(measure_products, heads, budget_ms))
    for beta in arguments.betas:
        measure.free_memory(results.device)
        turns = []
        for name, loss in losses.items():
            record = shape | {"beta": beta, "provider": name}
            record["gradients_mib"] = sum(tensor.nbytes for tensor in heads[:2]) / measure.MIB
            turns.append((record, measure.Timed(partial(step, loss, heads, beta), results.device)))
        results.take_turns("jsd", turns, products, budget_ms=budget_ms)


def measure_case(results: Results, arguments: Any) -> None:
    losses = results.load(PROVIDERS[name] for name in arguments.providers)
    times(results, losses, arguments)
    measure.free_memory(results.device)
    heads = make_heads(*arguments.error_shape, results.dtype, results.device)
    shape = {"shape": "x".join(map(str, arguments.error_shape))}
    for beta, (name, loss) in itertools.product(arguments.betas, losses.items()):
        error = partial(measure_error, loss, heads, beta, THREE if "-3" in name else ("jsd",))
        results.attempt("jsd_errors", shape | {"beta": beta, "provider": name}, error)
