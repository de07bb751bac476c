"""NVIDIA's compute-sanitizer over a small call of every kernel and option, and over faults that it must find.

python -m tests.sanitizer                       # every tool; exits with 1 after an error, or a fault not found
python -m tests.sanitizer --tools memcheck --compute-sanitizer /usr/local/cuda/bin/compute-sanitizer
python -m tests.sanitizer --calls --device cpu  # the calls alone, under Triton's interpreter
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import megatron_lce
from megatron_lce.api.model_loss import model_loss
from megatron_lce.core.known_loss import UpstreamCheck
from tests.operations import OPERATIONS, tensors_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# A fault that each tool must find. None for synccheck: what it looks for hangs a GPU.
FAULTS = {"memcheck": "oob", "racecheck": "race", "synccheck": None, "initcheck": "uninitialized"}
# Hopper's cuBLAS kernels end in an internal error of racecheck, and initcheck reports their tiles past a matrix's end.
# There the calls multiply without them.
WITHOUT_CUBLAS = ["--without-cublas"]
# initcheck does not see what a tensor descriptor stores: it runs the code of 8.0, which has none. JSD reads whole
# vectors, and top-k whole chunks, and they mask what lies behind the vocabulary: with 384 columns nothing does.
AS_SM80, COLUMNS = ["--as-sm80"], 300
HOW = {"racecheck": WITHOUT_CUBLAS, "initcheck": [*WITHOUT_CUBLAS, *AS_SM80, "--columns", "384"]}


def head(
    device: torch.device, dtype: torch.dtype, tokens: int = 40, size: int = 72, columns: int = 0, fp32: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden, weight (`fp32`: in that) and labels; every fifth token is ignored."""
    columns = columns or COLUMNS
    generator = torch.Generator().manual_seed(tokens + size + columns)
    hidden = torch.randn(tokens, size, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(columns, size, generator=generator).mul(0.2).to(device, FP32 if fp32 else dtype)
    labels = torch.randint(columns, (tokens,), generator=generator)
    labels[::5] = -100
    return hidden, weight.requires_grad_(), labels.to(device)


def known_loss(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
    upstream = UpstreamCheck(known=True)
    return model_loss(hidden, weight, labels, upstream=upstream, logits_cache_bytes=0, **options)[0].sum()


def topk(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> megatron_lce.TopK:
    return megatron_lce.linear_topk(hidden, weight, 5, **options)


def run(name: str, device: torch.device, dtype: torch.dtype = BF16, **options: Any) -> list[Tensor]:
    """Outputs of one call, and the gradients of what has some."""
    shape = {name: options.pop(name) for name in ("tokens", "size", "columns", "fp32") if name in options}
    hidden, weight, labels = head(device, dtype, **shape)
    if options.pop("temperatures", False):
        options["temperature"] = torch.linspace(0.5, 2.0, len(labels), dtype=FP32, device=device)
    call = {"known loss": known_loss, "topk": topk}.get(name) or OPERATIONS[name]
    found = tensors_of(call(hidden, weight, labels, backend="triton", **options))
    losses = [torch.where(x.isnan(), 0.0, x).sin().double().sum() for x in found if x.requires_grad]
    return [*(x.detach() for x in found), *(torch.autograd.grad(sum(losses), (hidden, weight)) if losses else ())]


def calls() -> Iterator[tuple[str, Callable[[torch.device], list[Tensor]]]]:
    """Yield every call's name, and the call, which returns its outputs and gradients."""
    cache, one, few = {"logits_cache_bytes": 2**20}, "cross-entropy", {"entropy": False}
    table: list[tuple[str, dict[str, Any]]] = [
        *((one, {"dtype": dtype}) for dtype in (BF16, FP16, FP32)),
        *((one, {"dtype": dtype, "softcap": 5.0}) for dtype in (BF16, FP32)),
        *((one, {"dtype": dtype, "fp32": True}) for dtype in (BF16, FP16)),
        (one, {"tokens": 1, "size": 1, "columns": 1}),
        (one, {"tokens": 129, "size": 200, "columns": 257, **few}),
        (one, {"size": 77, "vocab_size": 290, "temperatures": True, "logits_scale": 0.5}),
        (one, {"telemetry": True}),
        (one, {"telemetry": True, "softcap": 5.0, **cache}),
        (one, {"logits_dtype": BF16}),
        ("candidates", {}),
        ("candidates", few | cache),
        (one, {"skip_ignored": True}),
        (one, {"skip_ignored": True, **few, **cache}),
        (one, cache),
        (one, {"dtype": FP16, "softcap": 5.0, **cache}),
        (one, few | cache),
        (one, {"dtype": FP16, "telemetry": True, **few, **cache}),
        (one, {"dtype": FP32, "tokens": 200, "columns": 700, "workspace_bytes": 2**19}),
        ("token loss", {"tokens": 300}),
        ("token loss", {"tokens": 300, "workspace_bytes": 2**18}),
        ("token loss", {"dtype": FP32, "tokens": 300, "skip_ignored": True}),
        ("known loss", {}),
        *(("jsd", {"beta": beta}) for beta in (0.0, 0.3, 1.0)),
        ("jsd", {"beta": 0.6, "student_softcap": 5.0, "teacher_softcap": 9.0}),
        ("jsd", {"skip_ignored": True}),
        ("divergences", {}),
        ("jsd, known weights", {"kinds": ("jsd", "tv")}),
        ("jsd, known weights", {"dtype": FP32, "beta": 0.0}),
        *((name, {"dtype": dtype}) for name in ("logits at ids", "support", "topk") for dtype in (BF16, FP32)),
        *((name, {"softcap": 5.0, "temperature": 0.7}) for name in ("logits at ids", "support", "topk")),
    ]
    for name, options in table:
        described = ", ".join(f"{option}={value}" for option, value in options.items())
        yield f"{name}({described})", lambda device, name=name, options=options: run(name, device, **options)


def multiply_without_cublas() -> None:
    """Replace torch's matrix products by elementwise ones, for the small matrices of these calls."""

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        result = (a.float()[:, :, None] * b.float()[None]).sum(1).to(out_dtype or a.dtype)
        return result if out is None else out.copy_(result)

    def addmm(
        total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        result = total + mm(a, b, out_dtype or total.dtype)
        return result if out is None else out.copy_(result)

    torch.mm, torch.addmm, Tensor.__matmul__ = mm, addmm, mm  # type: ignore[assignment, method-assign]


def run_calls(device: torch.device) -> None:
    for name, call in calls():
        found = call(device)
        print(f"{name}: {len(found)} tensors, sum {sum(float(x.cpu().double().nan_to_num().sum()) for x in found):.6g}")
    print("calls ran")


class Result(NamedTuple):
    """The outcome of a tool over the calls or a planted fault."""

    tool: str
    program: str
    passed: bool
    errors: int  # that the tool reports; -1: it did not finish
    seconds: float
    kernels: list[str]  # where it found them
    detail: str  # the first error, or the end of the output


def check(tool: str, program: str, arguments: list[str], sanitizer: str, timeout: float) -> Result:
    """Run a program under a tool; the calls must have no error, a planted fault one."""
    command = [sanitizer, "--tool", tool, "--print-limit", "20", sys.executable, "-m", "tests.sanitizer"]
    if program == "calls":
        arguments = [*arguments, *HOW.get(tool, [])]
    # Memory of a caching allocator is all allocated, and written, as far as a tool can see.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_INTERPRET": "0"}
    start = time.perf_counter()
    try:
        process = subprocess.run(
            [*command, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=timeout,
        )  # fmt: skip
        output, ended = process.stdout, process.returncode == 0 or "ERROR SUMMARY" in process.stdout
    except subprocess.TimeoutExpired as error:
        partial = error.stdout or ""
        output, ended = partial if isinstance(partial, str) else partial.decode(errors="replace"), False
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", output)
    errors = sum(map(int, summaries)) if summaries and ended else -1
    kernels = sorted(
        set(re.findall(r"=========.* (?:in|at) (?:block .* in |void )?([\w:]*kernel\w*)(?! launch)", output))
    )
    first = re.search(r"^========= (?!COMPUTE-SANITIZER)(?!\s).*(\n=========  .*){0,3}", output, re.M)
    expected = errors > 0 if program != "calls" else errors == 0 and "calls ran" in output
    detail = first[0][10:] if first and errors > 0 else "" if expected else output[-2000:]
    return Result(tool, program, expected, errors, round(time.perf_counter() - start, 1), kernels[:8], detail)


def drive(tools: list[str], sanitizer: str, timeout: float, output: Path | None) -> bool:
    """Run each tool over the calls and its planted fault, print a table, and return whether all results pass."""
    for how in [[], AS_SM80] if "initcheck" in tools else [[]]:  # compiles every kernel
        subprocess.run([sys.executable, "-m", "tests.sanitizer", "--calls", *how], check=True)
    results = []
    print(f"{'tool':10} {'program':14} {'errors':>6} {'s':>6}  ", flush=True)
    for tool in tools:
        programs = {"calls": ["--calls"]}
        if fault := FAULTS[tool]:
            programs[fault] = ["--plant", fault]
        for program, arguments in programs.items():
            result = check(tool, program, arguments, sanitizer, timeout)
            results.append(result)
            verdict = "ok" if result.passed else f"FAILED {' '.join(result.kernels)}\n{result.detail}"
            print(f"{tool:10} {program:14} {result.errors:6} {result.seconds:6}  {verdict}", flush=True)
    text = json.dumps([result._asdict() for result in results], indent=1)
    print(text) if output is None else output.write_text(text + "\n")
    return all(result.passed for result in results)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--calls", action="store_true", help="run the calls, without a tool")
    mode.add_argument("--plant", choices=sorted(filter(None, FAULTS.values())), help="run a kernel with that fault")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="of --calls")
    parser.add_argument("--without-cublas", action="store_true", help="with --calls: matrix products by other kernels")
    parser.add_argument("--as-sm80", action="store_true", help="with --calls: kernels compiled for 8.0")
    parser.add_argument("--columns", type=int, default=COLUMNS, help="with --calls: of most heads")
    parser.add_argument("--tools", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--compute-sanitizer", default=shutil.which("compute-sanitizer"), help="path of the program")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of one tool over one program")
    parser.add_argument("--json", type=Path, help="file for the results; None: printed")
    return parser


def main() -> None:
    global COLUMNS
    parser = build_parser()
    given = parser.parse_args()
    COLUMNS = given.columns
    if given.plant:
        from tests import planted_faults

        planted_faults.run(given.plant)
    elif given.calls:
        if given.as_sm80:
            from tests import as_sm80  # noqa: F401
        if given.without_cublas:
            multiply_without_cublas()
        if given.device == "cpu":
            from tests import interpreter

            os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
            interpreter.hasten()
        run_calls(torch.device(given.device))
    elif given.compute_sanitizer is None:
        parser.error("compute-sanitizer is not on PATH: pass --compute-sanitizer (it comes with the CUDA toolkit)")
    else:
        sys.exit(0 if drive(given.tools, given.compute_sanitizer, given.timeout_s, given.json) else 1)


if __name__ == "__main__":
    main()
