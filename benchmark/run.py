"""Our head beside its peers in one process: `python -m benchmark.run --shapes S1,S2,S3 --providers all`.

Prints tables and writes JSON, after every measurement, so that a run that is stopped loses nothing. What a provider
cannot do, is not installed or fails at is a result too and stands in both.
"""

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmark import measure, pictures, report
from benchmark.ours import MIB, Ours, cache_bytes
from benchmark.providers import MODES, PROVIDERS, Head, Provider, select_providers
from benchmark.results import Results
from benchmark.shapes import Inputs, Shape, make_inputs, parse_shape
from scripts.arguments import HelpFormatter

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT_SHAPES = {"cuda": ("S1", "2048x1024x32768"), "cpu": ("64x128x1000", "64x128x1000")}  # times, errors

# Compiling takes minutes on a CPU.
DEFAULT_PROVIDERS = {"cuda": "ours,ours-cached,eager,compile", "cpu": "ours,eager"}


class Run:
    """The heads that could be loaded, and the measurements over them."""

    def __init__(self, results: Results, providers: list[Provider], dtype: torch.dtype, budget_ms: float):
        self.results, self.device, self.dtype, self.budget_ms = results, results.device, dtype, budget_ms
        self.heads: list[tuple[Provider, Head]] = []
        for provider in providers:
            head = results.load(provider.name, provider.load, provider.package, holds_logits=provider.holds_logits)
            if head is not None:
                self.heads.append((provider, head))

    @contextlib.contextmanager
    def inputs(self, shape: Shape) -> Iterator[Inputs]:
        measure.free_memory(self.device)
        yield make_inputs(shape, self.dtype, self.device)

    def _take_turns(
        self, section: str, shape: Shape, inputs: Inputs, steps: list[tuple[dict, Callable[[], object]]]
    ) -> None:
        """The steps take turns with each other and with the products."""
        products = functools.partial(measure.measure_products, inputs, self.device, budget_ms=self.budget_ms)
        self.results.take_turns(
            section,
            [(record, measure.Timed(step, self.device)) for record, step in steps],
            lambda: self.results.attempt("products", {"shape": shape.name}, products),
            budget_ms=self.budget_ms,
        )

    def times(self, shape: Shape, modes: list[str]) -> None:
        """Every head that has the mode, mode by mode."""
        with self.inputs(shape) as inputs:
            for mode in modes:
                measure.free_memory(self.device)
                steps = []
                for provider, head in self.heads:
                    record = {"shape": shape.name, "mode": mode, "provider": provider.name}
                    if mode in provider.modes:
                        record |= {"gradients_mib": measure.gradients_mib(inputs, mode, head)}
                        steps.append((record, functools.partial(measure.run_step, head, inputs, mode)))
                    else:
                        self.results.unsupported("times", record, provider.missing)
                self._take_turns("times", shape, inputs, steps)

    def errors(self, shape: Shape) -> None:
        """Every head against fp64, in the first mode with gradients that it supports."""
        with self.inputs(shape) as inputs:
            expected = measure.oracle(inputs)
            for provider, head in self.heads:
                mode = _gradient_mode(provider)
                record = {"shape": shape.name, "provider": provider.name, "mode": mode}
                error = functools.partial(measure.measure_error, head, inputs, mode, expected)
                self.results.attempt("errors", record, error)

    def cache_budgets(self, shape: Shape, fractions: list[float], modes: list[str]) -> None:
        """Time and memory of ours over `logits_cache_bytes`."""
        with self.inputs(shape) as inputs:
            steps = []
            for fraction in fractions:
                budget = cache_bytes(shape.tokens, shape.vocab, fraction)
                for mode in modes:
                    record = {"shape": shape.name, "mode": mode, "fraction": fraction, "logits_cache_bytes": budget}
                    record |= {"gradients_mib": measure.gradients_mib(inputs, mode)}
                    steps.append((record, functools.partial(measure.run_step, Ours(fraction), inputs, mode)))
            self._take_turns("cache", shape, inputs, steps)

    def workspaces(self, shape: Shape, sizes_mib: list[int], modes: list[str]) -> None:
        """Time and memory of `linear_token_loss` over `workspace_bytes`."""
        with self.inputs(shape) as inputs:
            steps = []
            for size in sizes_mib:
                for mode in modes:
                    record = {"shape": shape.name, "mode": mode, "provider": "ours-token", "workspace_mib": size}
                    record |= {"gradients_mib": measure.gradients_mib(inputs, mode)}
                    head = Ours(workspace_bytes=size * MIB, token_loss=True)
                    steps.append((record, functools.partial(measure.run_step, head, inputs, mode)))
            self._take_turns("workspace", shape, inputs, steps)

    def host_times(self, shape: Shape, modes: list[str]) -> None:
        """How long a call keeps the host, beside how long the device takes."""
        with self.inputs(shape) as inputs:
            for mode in modes:
                for provider, head in self.heads:
                    if mode in provider.modes:
                        record = {"shape": shape.name, "mode": mode, "provider": provider.name}
                        step = functools.partial(measure.run_step, head, inputs, mode)
                        host = functools.partial(measure.host_times, step, self.device, budget_ms=self.budget_ms)
                        self.results.attempt("host", record, host)

    def memory(self, shape: Shape, tokens: list[int], modes: list[str]) -> None:
        """Extra peak memory over the number of tokens at the shape's H and V."""
        for count in tokens:
            with self.inputs(replace(shape, tokens=count)) as inputs:
                for provider, head in self.heads:
                    for mode in [mode for mode in modes if mode in provider.modes] or [_gradient_mode(provider)]:
                        measure.free_memory(self.device)
                        record = {"shape": shape.name, "tokens": count, "mode": mode, "provider": provider.name}
                        self.results.attempt("memory", record, functools.partial(self._peak, head, inputs, mode))

    def _peak(self, head: Head, inputs: Inputs, mode: str) -> dict:
        def step() -> object:
            return measure.run_step(head, inputs, mode)

        step()  # compiles
        peak = measure.peak_mib(step, self.device)
        return {"peak_mib": peak, "gradients_mib": measure.gradients_mib(inputs, mode, head)}


def _gradient_mode(provider: Provider) -> str:
    return next(mode for mode in provider.modes if mode != "fwd")


def numbers(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    shapes, error_shape = DEFAULT_SHAPES[arguments.device]
    shapes = shapes if arguments.shapes is None else arguments.shapes
    error_shape = error_shape if arguments.error_shape is None else arguments.error_shape
    try:
        arguments.host_shapes = [parse_shape(text) for text in numbers(arguments.host_shapes)]
        arguments.shapes = [parse_shape(text) for text in numbers(shapes)]
        arguments.error_shape = parse_shape(error_shape) if error_shape else None
        arguments.providers = select_providers(arguments.providers or DEFAULT_PROVIDERS[arguments.device])
    except ValueError as error:
        parser.error(str(error))
    arguments.modes, arguments.memory_modes = numbers(arguments.modes), numbers(arguments.memory_modes)
    if unknown := set(arguments.modes + arguments.memory_modes) - set(MODES):
        parser.error(f"a mode must be one of {', '.join(MODES)}, got {', '.join(sorted(unknown))}")
    return arguments


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.run", description=__doc__.splitlines()[0], formatter_class=HelpFormatter
    )
    add = parser.add_argument
    here = "cuda" if torch.cuda.is_available() else "cpu"
    add("--shapes", help=f"Comma-separated: S1, S2, S3 or NxHxV; None: {DEFAULT_SHAPES[here][0]}.")
    names = f"Comma-separated: all, {', '.join(PROVIDERS)}"
    add("--providers", help=f"{names}; None: {DEFAULT_PROVIDERS[here]}.")
    add("--modes", default=",".join(MODES), help="Comma-separated kinds of a step.")
    add("--dtype", choices=DTYPES, default="bf16", help="Type of hidden and weight.")
    add("--device", choices=("cuda", "cpu"), default=here, help="Where to run.")
    add("--budget-ms", type=float, default=100.0, help="Time of a head's repeats in each round, in ms.")
    add("--error-shape", help=f"Shape of the comparison with fp64, '' for none; None: {DEFAULT_SHAPES[here][1]}.")
    add("--cache-fractions", default="", help="Cache budgets as parts of the 16-bit logits, such as 0,0.25,0.5,1.")
    add("--workspace-mib", default="", help="Workspaces of linear_token_loss in MiB, such as 192,640,1280.")
    add(
        "--host-shapes", default="", help="Shapes at which the host's time of a call is taken, such as 2048x1024x32000."
    )
    add("--memory-tokens", default="", help="Token counts of the memory curve, such as 1024,8192,131072.")
    add("--memory-modes", default="", help="Kinds of its steps; empty: each head's first with gradients.")
    add("--output", type=Path, default=Path("benchmark.json"), help="JSON file to write.")
    add("--pictures", type=Path, help="Folder for the pictures; None: no pictures.")
    return parser


def main(argv: list[str] | None = None) -> dict:
    """Runs what the arguments ask for and returns the document that was written."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse_arguments(argv)
    dtype = DTYPES[arguments.dtype]
    results = Results(torch.device(arguments.device), dtype, arguments.output, {"command": argv})
    run = Run(results, arguments.providers, dtype, arguments.budget_ms)
    for shape in arguments.shapes:
        run.times(shape, arguments.modes)
    if arguments.error_shape:
        run.errors(arguments.error_shape)
    if fractions := [float(text) for text in numbers(arguments.cache_fractions)]:
        run.cache_budgets(arguments.shapes[0], fractions, [mode for mode in arguments.modes if mode in ("rl", "sft")])
    gradient_modes = [mode for mode in arguments.modes if mode != "fwd"]
    if sizes := [int(text) for text in numbers(arguments.workspace_mib)]:
        run.workspaces(arguments.shapes[0], sizes, gradient_modes)
    for shape in arguments.host_shapes:
        run.host_times(shape, gradient_modes)
    if tokens := [int(text) for text in numbers(arguments.memory_tokens)]:
        run.memory(
            arguments.shapes[0], tokens, arguments.memory_modes
        )  # last: where a peer overruns an index, it takes the device with it
    results.save()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    report.print_tables(results.document)
    if arguments.pictures:
        pictures.draw(results.document, arguments.pictures)
    print(f"Report: {arguments.output}")
    return results.document


if __name__ == "__main__":
    main()
