"""Our head beside its peers in one process: times, errors, memory, over caches and workspaces, and the host's time."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from benchmark import measure
from benchmark.measure import gradients_mib, run_step
from benchmark.ours import MIB, Ours, cache_bytes
from benchmark.providers import Head, LigerNative, Provider
from benchmark.results import Results
from benchmark.shapes import Inputs, Shape, make_inputs


class Run:
    """The heads that could be loaded, and the measurements over them."""

    def __init__(self, results: Results, providers: list[Provider], budget_ms: float):
        self.results, self.device, self.budget_ms = results, results.device, budget_ms
        heads: dict[str, Head] = results.load(providers)
        self.heads = [(provider, heads[provider.name]) for provider in providers if provider.name in heads]

    def inputs(self, shape: Shape) -> Inputs:
        measure.free_memory(self.device)
        return make_inputs(shape, self.results.dtype, self.device)

    def take_turns(self, section: str, shape: Shape, inputs: Inputs, steps: Iterable[tuple[dict, Head, str]]) -> None:
        """Steps (what tells them apart, head, mode) take turns with each other and with the products."""
        turns, steps = [], list(steps)
        for properties, head, mode in steps:
            record = {"shape": shape.name, "mode": mode, **properties}
            record["gradients_mib"] = gradients_mib(inputs, mode, head)
            turns.append((record, measure.Timed(partial(run_step, head, inputs, mode), self.device)))
        products = partial(measure.measure_products, inputs, self.device, budget_ms=self.budget_ms)
        yardstick = partial(self.results.attempt, "products", {"shape": shape.name}, products)
        self.results.take_turns(section, turns, yardstick, budget_ms=self.budget_ms)
        for (record, _), (_, head, _) in zip(turns, steps, strict=True):
            self.results.complete(section, record, partial(_outside, head))

    def times(self, shape: Shape, modes: list[str]) -> None:
        """Every head that has the mode, mode by mode."""
        inputs = self.inputs(shape)
        for mode in modes:
            measure.free_memory(self.device)
            for provider, _ in self.heads:
                if mode not in provider.modes:
                    record = {"shape": shape.name, "mode": mode, "provider": provider.name}
                    self.results.unsupported("times", record, provider.missing)
            able = [(provider.name, head) for provider, head in self.heads if mode in provider.modes]
            self.take_turns("times", shape, inputs, [({"provider": name}, head, mode) for name, head in able])

    def errors(self, shape: Shape) -> None:
        """Every head against fp64, in the first mode with gradients that it supports."""
        inputs = self.inputs(shape)
        expected = measure.oracle(inputs)
        for provider, head in self.heads:
            mode = _gradient_mode(provider)
            record = {"shape": shape.name, "provider": provider.name, "mode": mode}
            self.results.attempt("errors", record, partial(measure.measure_error, head, inputs, mode, expected))

    def cache_budgets(self, shape: Shape, fractions: list[float], modes: list[str]) -> None:
        """Time and memory of ours over `logits_cache_bytes`."""
        sizes = {fraction: cache_bytes(shape.tokens, shape.vocab, fraction) for fraction in fractions}
        steps = [
            ({"fraction": fraction, "logits_cache_bytes": size}, Ours(fraction), mode)
            for (fraction, size), mode in itertools.product(sizes.items(), modes)
        ]
        self.take_turns("cache", shape, self.inputs(shape), steps)

    def workspaces(self, shape: Shape, sizes_mib: list[int], modes: list[str]) -> None:
        """Time and memory of `linear_token_loss` over `workspace_bytes`."""
        steps = [
            ({"provider": "ours-token", "workspace_mib": size}, Ours(workspace_bytes=size * MIB, token_loss=True), mode)
            for size, mode in itertools.product(sizes_mib, modes)
        ]
        self.take_turns("workspace", shape, self.inputs(shape), steps)

    def host_times(self, shape: Shape, modes: list[str]) -> None:
        """How long a call keeps the host, beside how long the device takes."""
        inputs = self.inputs(shape)
        for mode, (provider, head) in itertools.product(modes, self.heads):
            if mode in provider.modes:
                record = {"shape": shape.name, "mode": mode, "provider": provider.name}
                step = partial(run_step, head, inputs, mode)
                host = partial(measure.host_times, step, self.device, budget_ms=self.budget_ms)
                self.results.attempt("host", record, host)

    def memory(self, shape: Shape, tokens: list[int], modes: list[str]) -> None:
        """Extra peak memory over the number of tokens at the shape's H and V."""
        for count in tokens:
            inputs = self.inputs(replace(shape, tokens=count))
            for provider, head in self.heads:
                for mode in [mode for mode in modes if mode in provider.modes] or [_gradient_mode(provider)]:
                    measure.free_memory(self.device)
                    record = {"shape": shape.name, "tokens": count, "mode": mode, "provider": provider.name}
                    self.results.attempt("memory", record, partial(self._peak, head, inputs, mode))
            del inputs

    def _peak(self, head: Head, inputs: Inputs, mode: str) -> dict:
        step = partial(run_step, head, inputs, mode)
        step()  # compiles
        peak_mib = measure.peak_mib(step, self.device)
        return {"peak_mib": peak_mib, "gradients_mib": gradients_mib(inputs, mode, head), **_outside(head)}


def _gradient_mode(provider: Provider) -> str:
    return next(mode for mode in provider.modes if mode != "fwd")


def _outside(head: Head) -> dict[str, float]:
    """What the head holds outside of torch's allocator at the shape of its last call, where it knows of such memory."""
    return {"outside_mib": head.outside_mib} if isinstance(head, LigerNative) else {}


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
