"""`megatron-lce doctor`: installed versions, the backend that runs here, and a comparison with fp64."""

import contextlib
import importlib.metadata
import platform
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megatron_lce
from megatron_lce.api.linear_cross_entropy import linear_cross_entropy
from megatron_lce.api.model_loss import model_loss
from megatron_lce.backends.choice import triton_obstacle
from megatron_lce.core.known_loss import UpstreamCheck

OLDEST = {"torch": (2, 9), "triton": (3, 5), "megatron-core": (0, 14)}  # that work
MODULES = {"torch": "torch", "triton": "triton", "megatron-core": "megatron.core"}
TOKENS, HIDDEN, VOCAB, PADDED_VOCAB = 48, 128, 1000, 1024
OUTPUTS = ("logprobs", "entropy")
# Relative errors against fp64, of outputs and of gradients: twice those of eager torch for such a head.
ALLOWED = {"bfloat16": (5e-4, 5e-3), "float32": (2e-6, 2e-6)}


def examine(device: str | None = None) -> dict[str, Any]:
    """Return the report, for JSON, on "cpu" or "cuda" (None: cuda if there is one). No `problems`: all is well."""
    has_cuda = torch.cuda.is_available()
    kind = device or ("cuda" if has_cuda else "cpu")
    found = versions()
    report: dict[str, Any] = {"versions": found, "device": _describe_device(kind), "problems": too_old(found)}
    if kind == "cuda" and not has_cuda:
        report["problems"].append("no CUDA device is available to torch")
        return report
    torch_device = torch.device(kind)
    obstacle = triton_obstacle("auto", torch_device)
    report["backends"] = {"triton": triton_obstacle("triton", torch_device) or "can run", "torch": "can run"}
    report["auto"] = "triton" if kind == "cuda" and obstacle is None else "torch"
    if kind == "cuda" and obstacle is not None:
        report["problems"].append(f"the GPU runs the slower torch backend: {obstacle}")
    report["self_test"] = self_test(torch_device)
    report["problems"] += [f"self-test: {failure}" for failure in report["self_test"]["failures"]]
    return report


def versions() -> dict[str, str | None]:
    """Return the versions of what `import` finds, or why it cannot be imported; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "megatron-lce": megatron_lce.__version__}
    for package, module in MODULES.items():
        try:
            with warnings.catch_warnings(action="ignore"):  # megatron-core names what it does without
                found[package] = str(importlib.import_module(module).__version__)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
            found[package] = None if is_missing else f"cannot be imported: {type(error).__name__}: {error}"
    found["transformer-engine"] = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["transformer-engine"] = importlib.metadata.version("transformer-engine")
    return found


def too_old(found: dict[str, str | None]) -> list[str]:
    """Name the packages that are too old or cannot be imported."""
    problems = [f"{package} {version}" for package, version in found.items() if (version or "").startswith("cannot")]
    for package, oldest in OLDEST.items():
        numbers = tuple(map(int, re.findall(r"\d+", found[package] or "")[:2]))
        if numbers and numbers < oldest and not (found[package] or "").startswith("cannot"):
            problems.append(f"{package} must be at least {'.'.join(map(str, oldest))}, got {found[package]}")
    return problems


def _describe_device(kind: str) -> str:
    if kind == "cpu":
        return f"CPU, {platform.machine()}"
    if not torch.cuda.is_available():
        return "none"
    major, minor = torch.cuda.get_device_capability()
    cuda = torch.version.cuda or torch.version.hip
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, capability {major}.{minor}, CUDA {cuda}"


def self_test(device: torch.device) -> dict[str, Any]:
    """Compare outputs and gradients of the backend that "auto" takes with fp64.

    The head is small, with ignored rows, a padded vocabulary and a temperature per token: in bf16 with and without
    cached logits and with gradients computed in forward, and in fp32.
    """
    failures: list[str] = []
    errors: dict[str, tuple[float, float]] = {}  # the error, and what is allowed
    heads: dict[str, Callable[..., Any]] = {
        "bfloat16": linear_cross_entropy,
        "bfloat16, nothing kept": partial(linear_cross_entropy, logits_cache_bytes=0),
        "bfloat16, known loss": lambda h, w, ids, **others: (
            -model_loss(h, w, ids, upstream=UpstreamCheck(known=True), logits_cache_bytes=0, **others)[0],
        ),
        "float32": linear_cross_entropy,
    }
    of_kernels: tuple[type[Exception], ...] = RuntimeError, ValueError
    with contextlib.suppress(ImportError):
        from triton.errors import TritonError

        of_kernels = *of_kernels, TritonError
    for name, head in heads.items():
        dtype, outputs = name.partition(",")[0], OUTPUTS[:1] if name.endswith("known loss") else OUTPUTS
        inputs = _inputs(getattr(torch, dtype), device)
        exact = _results(_in_fp64, tuple(x.double() if x.is_floating_point() else x for x in inputs), outputs)
        try:
            actual = _results(head, inputs, outputs)
        except of_kernels as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
            continue
        for what, expected in exact.items():
            error_size = float((actual[what].double() - expected).norm() / expected.norm())
            limit = ALLOWED[dtype][what not in outputs]
            errors[f"{name}: {what}"] = error_size, limit
            if not error_size <= limit:
                failures.append(f"{name}: {what} is off by {error_size:.1e}, allowed {limit:.0e}")
    return {"failures": failures, "errors": errors}


def _in_fp64(hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: Tensor, vocab_size: int) -> list[Tensor]:
    """Return logprobs and entropy by plain torch."""
    all_logprobs = (hidden @ weight[:vocab_size].T / temperature[:, None]).log_softmax(dim=-1)
    logprobs = all_logprobs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
    return [torch.where(labels < 0, 0.0, output) for output in (logprobs, entropy)]


def _inputs(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Return hidden, weight, labels, temperature, and the upstream gradients of logprobs and entropy."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float32, generator=generator)
    weight = torch.randn(PADDED_VOCAB, HIDDEN, dtype=torch.float32, generator=generator) * HIDDEN**-0.5
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    labels[::5] = -100
    temperature = torch.rand(TOKENS, dtype=torch.float32, generator=generator) + 0.5
    upstream = torch.randn(2, TOKENS, dtype=torch.float32, generator=generator)
    return tuple(x.to(device) for x in (hidden.to(dtype), weight.to(dtype), labels, temperature, *upstream))


def _results(head: Callable[..., Any], inputs: tuple[Tensor, ...], outputs: tuple[str, ...]) -> dict[str, Tensor]:
    """Return a head's outputs over the vocabulary without its padding, and both gradients."""
    hidden, weight, labels, temperature, *upstream = inputs
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    found = head(hidden, weight, labels, temperature=temperature, vocab_size=VOCAB)[: len(outputs)]
    if len(outputs) == 1:  # a known loss has one upstream gradient
        upstream = [torch.ones_like(found[0])]
    results = *(x.detach() for x in found), *torch.autograd.grad(found, (hidden, weight), upstream)
    return dict(zip((*outputs, "hidden-state gradient", "weight gradient"), results, strict=True))


def format_report(report: dict[str, Any]) -> str:
    named = {**report["versions"], "device": report["device"]}
    lines = [f"{package:<20}{version or 'not installed'}" for package, version in named.items()]
    if "backends" in report:
        lines += ["", f"backend='auto' runs {report['auto']}"]
        lines += [f"  {backend:<11}{verdict}" for backend, verdict in report["backends"].items()]
        failures, errors = report["self_test"]["failures"], report["self_test"]["errors"]
        verdict = f"FAILED, {len(failures)} of its results" if failures else f"passed, {len(errors)} results"
        lines += ["", f"self-test against fp64: {verdict}"]
    lines += ["", *(f"PROBLEM: {problem}" for problem in report["problems"])]
    if not report["problems"]:
        on_cpu = report["device"].startswith("CPU")
        lines.append("no problems found" + "; CPU only: Triton kernels not tested" * on_cpu)
    return "\n".join(lines)
