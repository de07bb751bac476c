"""Our head beside its peers in one process: times, errors, memory, over caches and workspaces, and the host's time."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from benchmark import measure
from benchmark.ours import MIB, Ours, cache_bytes
from benchmark.providers import Head, Provider
from benchmark.results import Results
from benchmark.shapes import Inputs, Shape, make_inputs


class Run:
    """The heads that could be loaded, and the measurements over them."""

    def __init__(self, results: Results, providers: list[Provider], budget_ms: float):
        self.results, self.device, self.budget_ms = results, results.device, budget_ms
        self.heads: list[tuple[Provider, Head]] = []
        for provider in providers:
            head = results.load(provider.name, provider.load, provider.package, holds_logits=provider.holds_logits)
            if head is not None:
                self.heads.append((provider, head))

    @contextlib.contextmanager
    def inputs(self, shape: Shape) -> Iterator[Inputs]:
        measure.free_memory(self.device)
        yield make_inputs(shape, self.results.dtype, self.device)

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


def measure_case(results: Results, arguments: Any) -> None:
    run = Run(results, arguments.providers, arguments.budget_ms)
    shapes, modes = arguments.shapes, arguments.modes
    for shape in shapes:
        run.times(shape, modes)
    if arguments.error_shape:
        run.errors(arguments.error_shape)
    gradient_modes = [mode for mode in modes if mode != "fwd"]
    if arguments.cache_fractions:
        run.cache_budgets(shapes[0], arguments.cache_fractions, [mode for mode in modes if mode in ("rl", "sft")])
    if arguments.workspace_mib:
        run.workspaces(shapes[0], arguments.workspace_mib, gradient_modes)
    for shape in arguments.host_shapes:
        run.host_times(shape, gradient_modes)
    if arguments.memory_tokens:  # last: where a peer overruns an index, it takes the device with it
        run.memory(shapes[0], arguments.memory_tokens, arguments.memory_modes)
