"""Fused linear JSD beside its peers in one process: `python -m benchmark.run_jsd`.

Forward and backward of the mean over tokens, gradients of the student's hidden and weight: `megatron_lce.linear_jsd`,
Liger's fused linear JSD, and the materialised form in eager PyTorch and under torch.compile. A ratio is to the cuBLAS
products that a form without N x V tensors needs, in the same run: 3 (Fs + Ft) + dX + dW for 0 < beta < 1, since the
divergence needs statistics and the gradient needs the divergence, and 2 (Fs + Ft) + dX + dW for beta 0 and 1.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from torch import Tensor

import megatron_lce
from benchmark import measure, report
from benchmark.results import Results
from benchmark.run import DTYPES
from benchmark.shapes import Inputs, Shape, make_inputs

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


def _load_liger() -> Loss:
    from liger_kernel.ops import LigerFusedLinearJSDFunction

    # no labels, the beta that follows, ignore_index, temperature, accumulation in the weight's dtype, default kernels
    return lambda *tensors_and_beta: LigerFusedLinearJSDFunction.apply(
        *tensors_and_beta[:4], None, tensors_and_beta[4], -100, 1.0, None, None, None
    )


PROVIDERS: dict[str, tuple[Callable[[], Loss], str | None]] = {
    "ours": (lambda: _ours, None),
    "liger": (_load_liger, "liger-kernel"),
    "compile": (lambda: torch.compile(materialised, dynamic=False), None),
    "eager": (lambda: materialised, None),
}


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


def limit_ms(document: dict, beta: float) -> float | None:
    """cuBLAS time of the products at this beta, from all measurements in the document."""
    records = [record for record in document["jsd_products"] if record["status"] == "ok"]
    if not records:
        return None
    student, teacher, grad_hidden, grad_weight = (
        median(ms for record in records for ms in record[name])
        for name in ("student_logits_ms", "teacher_logits_ms", "grad_hidden_ms", "grad_weight_ms")
    )
    return (3 if 0 < beta < 1 else 2) * (student + teacher) + grad_hidden + grad_weight


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
    parser = argparse.ArgumentParser(prog="python -m benchmark.run_jsd", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8192x2048x4096x151936", help="tokens x student's H x teacher's H x vocab")
    parser.add_argument("--error-shape", default="1024x512x1024x32768", help="of the comparison with fp64")
    parser.add_argument("--betas", default="0.5,0,1")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget-ms", type=float, default=500.0, help="time of a head's repeats in each round")
    parser.add_argument("--output", type=Path, default=Path("jsd.json"))
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args(argv)
    for name in ("shape", "error_shape"):
        setattr(arguments, name, [int(number) for number in getattr(arguments, name).split("x")])
    arguments.betas = [float(text) for text in arguments.betas.split(",")]
    return arguments


def main(argv: list[str] | None = None) -> dict:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse_arguments(argv)
    device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
    results = Results(device, dtype, arguments.output, {"command": argv})
    losses = {name: results.load(name, *PROVIDERS[name]) for name in arguments.providers.split(",")}
    losses = {name: loss for name, loss in losses.items() if loss is not None}

    times(results, losses, arguments, dtype)
    measure.free_memory(device)
    heads = make_heads(*arguments.error_shape, dtype, device)
    for beta in arguments.betas:
        for name, loss in losses.items():
            record = {"shape": _text(arguments.error_shape), "beta": beta, "provider": name}
            results.attempt("jsd_errors", record, functools.partial(measure_error, loss, heads, beta))

    for record in results.section("jsd"):
        limit = limit_ms(results.document, record["beta"])
        if record["status"] == "ok" and limit:
            record["over_products"] = record["time_ms"] / limit
    results.save()
    print_tables(results.document)
    if arguments.picture:
        draw_picture(results.document, arguments.picture)
    return results.document


def print_tables(document: dict) -> None:
    console = Console(width=150)
    report.print_header(document, console)
    keys = ("shape", "beta", "provider")
    columns = ("time_ms", "over_products", "peak_mib", "gradients_mib", "first_call_s")
    report.print_table(console, "linear JSD, forward and backward", keys, columns, document["jsd"])
    columns = ("loss_relative_error", "grad_hidden_relative_error", "grad_weight_relative_error")
    report.print_table(console, "error against fp64", keys, columns, document["jsd_errors"])


def draw_picture(document: dict, path: Path) -> None:
    """Time of every provider at every beta, with the limit."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    measured = [record for record in document["jsd"] if record["status"] == "ok"]
    betas = list(dict.fromkeys(record["beta"] for record in measured))
    figure, axes = pyplot.subplots(1, max(1, len(betas)), figsize=(5 * max(1, len(betas)), 3), squeeze=False)
    for axis, beta in zip(axes[0], betas, strict=False):
        records = [record for record in measured if record["beta"] == beta]
        limit = limit_ms(document, beta)
        report.draw_bars(axis, records, [(limit, "--", "cuBLAS")] if limit else [], set())
        axis.set_title(f"linear JSD, beta {beta:g}", fontsize=10)
        axis.set_xlabel("ms, lower is better; compile and eager hold N x V tensors", fontsize=8)
    report.save_figure(figure, document, path)


if __name__ == "__main__":
    main()
