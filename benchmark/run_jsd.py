"""Fused linear JSD beside its peers in one process: `python -m benchmark.run_jsd`.

Forward and backward of the mean over tokens, gradients of the student's hidden and weight: `megatron_lce.linear_jsd` of
each token, and with `token_weights` (ours-weights-512: its workspace in MiB); Liger's fused linear JSD; and the
materialised form in eager PyTorch and under torch.compile. Ratios are to cuBLAS's products in the same run:
Fs + Ft + dX + dW, where each head's logits are made once, and 2 (Fs + Ft) + dX + dW, where backward makes them again.
"""

import argparse
import functools
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import megatron_lce
from benchmark import measure, pictures, report
from benchmark.ratios import add_jsd_ratios
from benchmark.results import Results
from benchmark.run import DTYPES
from benchmark.shapes import Inputs, Shape, choose, make_inputs
from scripts.arguments import HelpFormatter

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def materialised(
    student_hidden: Tensor,  # [N, Hs]
    student_weight: Tensor,  # [V, Hs]
    teacher_hidden: Tensor,  # [N, Ht]
    teacher_weight: Tensor,  # [V, Ht]
    beta: float,
) -> Tensor:
    """Mean generalised JSD over whole logits, in fp32 at least."""
    student, teacher = (
        (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32)).log_softmax(-1)
        for hidden, weight in ((student_hidden, student_weight), (teacher_hidden, teacher_weight))
    )
    if beta == 0:
        return _kl(teacher, student).mean()
    if beta == 1:
        return _kl(student, teacher).mean()
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return (beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)).mean()


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _ours(student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, beta: float):
    return megatron_lce.linear_jsd(student_hidden, student_weight, teacher_hidden, teacher_weight, beta=beta).mean()


def _ours_weights(*tensors: Tensor, workspace_bytes: int = 2**29) -> Tensor:
    *heads, beta = tensors
    tokens = heads[0].shape[0]
    weights = heads[0].new_full((tokens,), 1 / tokens, dtype=torch.float32)
    return megatron_lce.linear_jsd(*heads, beta=beta, token_weights=weights, workspace_bytes=workspace_bytes)


def _load_liger() -> Loss:
    from liger_kernel.ops import LigerFusedLinearJSDFunction

    # no labels, the beta that follows, ignore_index, temperature, accumulation in the weight's dtype, default kernels
    return lambda *tensors_and_beta: LigerFusedLinearJSDFunction.apply(
        *tensors_and_beta[:4], None, tensors_and_beta[4], -100, 1.0, None, None, None
    )


@dataclass(frozen=True)
class Provider:
    """How to load a head's loss, the distribution whose version is reported, and whether it keeps N x V tensors."""

    load: Callable[[], Loss]
    package: str | None = None
    holds_logits: bool = False


PROVIDERS = {
    "ours": Provider(lambda: _ours),
    "ours-weights-512": Provider(lambda: _ours_weights),
    "ours-weights-1024": Provider(lambda: functools.partial(_ours_weights, workspace_bytes=2**30)),
    "liger": Provider(_load_liger, "liger-kernel"),
    "compile": Provider(lambda: torch.compile(materialised, dynamic=False), holds_logits=True),
    "eager": Provider(lambda: materialised, holds_logits=True),
}


# Time and comparison with fp64; a CPU's are over in seconds.
DEFAULT_SHAPES = {
    "cuda": ("8192x2048x4096x151936", "1024x512x1024x32768"),
    "cpu": ("64x32x48x1000", "64x32x48x1000"),
}
DEFAULT_PROVIDERS = {"cuda": "all", "cpu": "ours,ours-weights-512,liger,eager"}  # compiling takes minutes on a CPU


@dataclass(frozen=True)
class Heads:
    """Both heads' inputs. The teacher's take no gradient."""

    student: Inputs
    teacher: Inputs

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.student.hidden, self.student.weight, self.teacher.hidden.detach(), self.teacher.weight.detach()


def make_heads(tokens: int, student: int, teacher: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Heads:
    return Heads(
        make_inputs(Shape("student", tokens, student, vocab), dtype, device, seed=0),
        make_inputs(Shape("teacher", tokens, teacher, vocab), dtype, device, seed=1),
    )


def step(loss: Loss, tensors: tuple[Tensor, ...], beta: float) -> tuple[Tensor, ...]:
    """The loss and the gradients of the student's hidden and weight."""
    value = loss(*tensors, beta)
    return value.detach(), *torch.autograd.grad(value, tensors[:2])


def measure_error(loss: Loss, heads: Heads, beta: float) -> dict:
    """Loss and gradients against the materialised form in fp64."""
    exact = [tensor.detach().double() for tensor in heads.tensors()]
    for tensor in exact[:2]:
        tensor.requires_grad_()
    reference, actual = step(materialised, tuple(exact), beta), step(loss, heads.tensors(), beta)
    names = ("loss_relative_error", "grad_hidden_relative_error", "grad_weight_relative_error")
    return {
        name: ((value.double() - expected).norm() / expected.norm()).item()
        for name, value, expected in zip(names, actual, reference, strict=True)
    }


def measure_products(heads: Heads, device: torch.device, budget_ms: float) -> dict:
    student = measure.measure_products(heads.student, device, budget_ms=budget_ms)
    teacher = measure.measure_products(heads.teacher, device, budget_ms=budget_ms)
    student["student_logits_ms"] = student.pop("logits_ms")
    return student | {"teacher_logits_ms": teacher["logits_ms"]}


def times(results: Results, losses: dict[str, Loss], arguments: argparse.Namespace, dtype: torch.dtype) -> None:
    """At each beta all providers take turns with the products."""
    device, budget_ms = results.device, arguments.budget_ms
    heads = make_heads(*arguments.shape, dtype, device)
    measure_them = functools.partial(measure_products, heads, device, budget_ms)
    shape = {"shape": _text(arguments.shape)}
    gradients_mib = measure.gradients_mib(heads.student, "sft")
    for beta in arguments.betas:
        measure.free_memory(device)
        turns = [
            (
                shape | {"beta": beta, "provider": name, "gradients_mib": gradients_mib},
                measure.Timed(functools.partial(step, loss, heads.tensors(), beta), device),
            )
            for name, loss in losses.items()
        ]
        results.take_turns(
            "jsd", turns, lambda: results.attempt("jsd_products", dict(shape), measure_them), budget_ms=budget_ms
        )


def _text(shape: list[int]) -> str:
    return "x".join(map(str, shape))


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    defaults = DEFAULT_SHAPES[arguments.device]
    try:
        arguments.shape = parse_heads(arguments.shape or defaults[0])
        arguments.error_shape = parse_heads(arguments.error_shape or defaults[1])
        arguments.betas = choose_betas(arguments.betas)
        providers = arguments.providers or DEFAULT_PROVIDERS[arguments.device]
        arguments.providers = choose("a provider", providers, PROVIDERS)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.run_jsd", description=__doc__.splitlines()[0], formatter_class=HelpFormatter
    )
    add = parser.add_argument
    here = "cuda" if torch.cuda.is_available() else "cpu"
    add("--shape", help=f"Tokens x student's H x teacher's H x vocabulary; None: {DEFAULT_SHAPES[here][0]}.")
    add("--error-shape", help=f"Shape of the comparison with fp64; None: {DEFAULT_SHAPES[here][1]}.")
    add("--betas", default="0.5,0,1", help="Comma-separated: 0 is forward KL, 1 reverse KL, between them JSD.")
    names = f"Comma-separated: all, {', '.join(PROVIDERS)}"
    add("--providers", help=f"{names}; None: {DEFAULT_PROVIDERS[here]}.")
    add("--dtype", choices=DTYPES, default="bf16", help="Type of hidden and weight.")
    add("--device", choices=("cuda", "cpu"), default=here, help="Where to run.")
    add("--budget-ms", type=float, default=150.0, help="Time of a head's repeats in each round, in ms.")
    add("--output", type=Path, default=Path("jsd.json"), help="JSON file to write.")
    add("--picture", type=Path, help="Picture to draw; None: no picture.")
    return parser


def parse_heads(text: str) -> list[int]:
    """`NxHsxHtxV` in plain numbers."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", text):
        raise ValueError(
            f"a shape must be tokens x student's H x teacher's H x vocab such as 64x32x48x512, got {text!r}"
        )
    return [int(number) for number in text.split("x")]


def choose_betas(text: str) -> list[float]:
    """Comma-separated numbers from 0 to 1."""
    try:
        betas = [float(number) for number in text.split(",")]
    except ValueError:
        betas = []
    if not betas or not all(0 <= beta <= 1 for beta in betas):
        raise ValueError(f"betas must be comma-separated numbers from 0 to 1, got {text!r}")
    return betas


def main(argv: list[str] | None = None) -> dict:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse_arguments(argv)
    device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
    results = Results(device, dtype, arguments.output, {"command": argv})
    losses = {}
    for name in arguments.providers:
        provider = PROVIDERS[name]
        losses[name] = results.load(name, provider.load, provider.package, holds_logits=provider.holds_logits)
    losses = {name: loss for name, loss in losses.items() if loss is not None}

    times(results, losses, arguments, dtype)
    measure.free_memory(device)
    heads = make_heads(*arguments.error_shape, dtype, device)
    for beta in arguments.betas:
        for name, loss in losses.items():
            record = {"shape": _text(arguments.error_shape), "beta": beta, "provider": name}
            results.attempt("jsd_errors", record, functools.partial(measure_error, loss, heads, beta))

    add_jsd_ratios(results.document)
    results.save()
    report.print_tables(results.document)
    if arguments.picture:
        pictures.draw_jsd(results.document, arguments.picture)
    print(f"Report: {arguments.output}")
    return results.document


if __name__ == "__main__":
    main()
