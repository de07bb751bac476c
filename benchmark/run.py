"""Our head beside its peers in one process: `python -m benchmark.run --shapes S1,S2,S3 --providers all`.

Prints tables and writes JSON, after every measurement, so that a run that is stopped loses nothing. What a provider
cannot do, is not installed or fails at is a result too and stands in both.
"""

import argparse
import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmark import measure, report
from benchmark.providers import MODES, PROVIDERS, Head, Provider, cache_bytes, ours, select_providers
from benchmark.shapes import Inputs, Shape, make_inputs, parse_shape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PACKAGES = ("megatron-lce", "torch", "triton", "nvidia-cutlass-dsl")


class Run:
    """The document that grows, and the one way in which measurements enter it."""

    def __init__(self, device: torch.device, dtype: torch.dtype, budget_ms: float, output: Path, command: list[str]):
        self.device, self.dtype, self.budget_ms, self.output = device, dtype, budget_ms, output
        self.heads: dict[str, Head] = {}
        self.document: dict[str, Any] = {"environment": environment(device), "command": command, "dtype": str(dtype)}
        self.document |= {section: [] for section in report.SECTIONS}

    def save(self) -> None:
        report.add_ratios(self.document)
        self.output.write_text(json.dumps(self.document, indent=1) + "\n")

    def load(self, providers: list[Provider]) -> None:
        """Imports every provider, the missing ones with their reason."""
        for provider in providers:
            record = {"provider": provider.name, "holds_logits": provider.holds_logits}

            def load(provider: Provider = provider) -> dict:
                self.heads[provider.name] = provider.load()
                return {"version": importlib.metadata.version(provider.package) if provider.package else None}

            self.attempt("providers", record, load)

    def attempt(self, section: str, record: dict, measurement: Callable[[], dict]) -> None:
        """Adds the record with what `measurement` returns, or with why there is nothing."""
        try:
            record |= {"status": "ok"} | measurement()
        except torch.OutOfMemoryError:
            record |= {"status": "out of memory"}
        except ImportError as error:
            record |= {"status": "not installed", "reason": str(error)}
        except Exception as error:  # foreign code may raise anything: its failure is a result, and the others still run
            record |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}
        self.document[section].append(record)
        self.save()
        print(report.one_line(section, record), file=sys.stderr, flush=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # raises, and ends the run, where the failure took the device along

    def attempt_mode(
        self, section: str, provider: Provider, mode: str, record: dict, measurement: Callable[[Head], dict]
    ) -> None:
        """`attempt` with the provider's head, unless it is known that it has none for this mode."""
        record = {"provider": provider.name, "mode": mode} | record
        if provider.name not in self.heads:
            return  # the document's `providers` says why
        if mode in provider.modes:
            self.attempt(section, record, lambda: measurement(self.heads[provider.name]))
        else:
            self.document[section].append(record | {"status": "unsupported", "reason": provider.missing})

    @contextlib.contextmanager
    def inputs(self, shape: Shape) -> Iterator[Inputs]:
        measure.free_memory(self.device)
        yield make_inputs(shape, self.dtype, self.device)


def environment(device: torch.device) -> dict:
    """Where and with what the numbers were taken."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def times(run: Run, shape: Shape, providers: list[Provider], modes: list[str]) -> None:
    """Every provider in every mode, between two measurements of the products."""
    with run.inputs(shape) as inputs:

        def products() -> dict:
            return measure.measure_products(shape, inputs, run.device, run.budget_ms)

        run.attempt("products", {"shape": shape.name}, products)
        for provider in providers:
            measure.free_memory(run.device)
            for mode in modes:

                def step(head: Head, mode: str = mode) -> dict:
                    return measure.measure_step(head, inputs, mode, run.device, run.budget_ms)

                run.attempt_mode("times", provider, mode, {"shape": shape.name}, step)
        measure.free_memory(run.device)
        run.attempt("products", {"shape": shape.name}, products)  # again: clocks fall as the GPU warms


def errors(run: Run, shape: Shape, providers: list[Provider]) -> None:
    """Every provider against fp64, in the first mode with gradients that it supports."""
    with run.inputs(shape) as inputs:
        expected = measure.oracle(inputs)
        for provider in providers:
            mode = next(mode for mode in provider.modes if mode != "fwd")

            def error(head: Head, mode: str = mode) -> dict:
                return measure.measure_error(head, inputs, mode, expected)

            run.attempt_mode("errors", provider, mode, {"shape": shape.name}, error)


def cache_budgets(run: Run, shape: Shape, fractions: list[float], modes: list[str]) -> None:
    """Time and memory of ours over `logits_cache_bytes`."""
    with run.inputs(shape) as inputs:
        for fraction in fractions:
            head = ours(fraction)()
            budget = cache_bytes(shape.tokens, shape.vocab, fraction)
            for mode in modes:
                record = {"shape": shape.name, "mode": mode, "fraction": fraction, "logits_cache_bytes": budget}

                def step(head: Head = head, mode: str = mode) -> dict:
                    return measure.measure_step(head, inputs, mode, run.device, run.budget_ms)

                run.attempt("cache", record, step)


def memory(run: Run, shape: Shape, tokens: list[int], providers: list[Provider]) -> None:
    """Extra peak memory over the number of tokens at the shape's H and V, in the first mode with gradients."""
    for count in tokens:
        with run.inputs(Shape(f"{count}x{shape.hidden}x{shape.vocab}", count, shape.hidden, shape.vocab)) as inputs:
            for provider in providers:
                mode = next(mode for mode in provider.modes if mode != "fwd")
                measure.free_memory(run.device)

                def peak(head: Head, mode: str = mode, inputs: Inputs = inputs) -> dict:
                    def step() -> object:
                        return measure.run_step(head, inputs, mode)

                    step()
                    gradients_mib = (inputs.hidden.nbytes + inputs.weight.nbytes) / measure.MIB
                    return {"peak_mib": measure.peak_mib(step, run.device), "gradients_mib": gradients_mib}

                run.attempt_mode("memory", provider, mode, {"shape": shape.name, "tokens": count}, peak)


def numbers(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.run", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="S1", help="comma-separated: S1, S2, S3 or NxHxV (default: %(default)s)")
    parser.add_argument(
        "--providers", default="ours,eager,compile", help=f"comma-separated: all, {', '.join(PROVIDERS)}"
    )
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget-ms", type=float, default=300.0, help="time for the repeats of one measurement")
    parser.add_argument(
        "--error-shape", default="2048x1024x32768", help="shape of the comparison with fp64; '' for none"
    )
    parser.add_argument(
        "--cache-fractions", default="", help="budgets as parts of the 16-bit logits, e.g. 0,0.25,0.5,1"
    )
    parser.add_argument("--memory-tokens", default="", help="token counts of the memory curve, e.g. 1024,8192,131072")
    parser.add_argument("--output", type=Path, default=Path("benchmark.json"))
    parser.add_argument("--pictures", type=Path, help="folder for the pictures")
    arguments = parser.parse_args(argv)
    try:
        arguments.shapes = [parse_shape(text) for text in numbers(arguments.shapes)]
        arguments.error_shape = parse_shape(arguments.error_shape) if arguments.error_shape else None
        arguments.providers = select_providers(arguments.providers)
    except ValueError as error:
        parser.error(str(error))
    arguments.modes = numbers(arguments.modes)
    if unknown := set(arguments.modes) - set(MODES):
        parser.error(f"a mode must be one of {', '.join(MODES)}, got {', '.join(sorted(unknown))}")
    return arguments


def main(argv: list[str] | None = None) -> dict:
    """Runs what the arguments ask for and returns the document that was written."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse_arguments(argv)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device(arguments.device)
    run = Run(device, DTYPES[arguments.dtype], arguments.budget_ms, arguments.output, argv)
    run.load(arguments.providers)
    for shape in arguments.shapes:
        times(run, shape, arguments.providers, arguments.modes)
    if arguments.error_shape:
        errors(run, arguments.error_shape, arguments.providers)
    if arguments.cache_fractions:
        fractions = [float(text) for text in numbers(arguments.cache_fractions)]
        cache_budgets(run, arguments.shapes[0], fractions, [mode for mode in arguments.modes if mode in ("rl", "sft")])
    if arguments.memory_tokens:  # last: where a peer overruns an index, it takes the device with it
        tokens = [int(text) for text in numbers(arguments.memory_tokens)]
        memory(run, arguments.shapes[0], tokens, arguments.providers)
    run.save()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    report.print_tables(run.document)
    if arguments.pictures:
        report.draw_pictures(run.document, arguments.pictures)
    return run.document


if __name__ == "__main__":
    main()
