"""Our head beside its peers in one process."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from benchmark import measure
from benchmark.measure import run_step
from benchmark.providers import Head, Provider
from benchmark.results import Results
from benchmark.shapes import Inputs, Shape, make_inputs, rows_of_rank


class Run:
    """The heads that could be loaded, and the measurements over them."""

    def __init__(
        self, results: Results, providers: list[Provider], budget_ms: float, tp_group: ProcessGroup | None = None
    ):
        self.results, self.device, self.budget_ms, self.tp_group = results, results.device, budget_ms, tp_group
        of_one_rank = [provider for provider in providers if tp_group is not None and not provider.parallel]
        for provider in of_one_rank:
            record = {"provider": provider.name, "holds_logits": provider.holds_logits}
            results.unsupported("providers", record, "runs on one rank")
        heads = results.load([provider for provider in providers if provider not in of_one_rank])
        self.heads = [(provider, heads[provider.name]) for provider in providers if provider.name in heads]

    def inputs(self, shape: Shape) -> Inputs:
        """Of this rank."""
        whole = self.whole(shape)
        return whole if self.tp_group is None else whole.of_rank(self.tp_group)

    def whole(self, shape: Shape) -> Inputs:
        measure.free_memory(self.device)
        return make_inputs(shape, self.results.dtype, self.device)

    def take_turns(self, section: str, shape: Shape, steps: list[tuple[dict, Head, str]]) -> None:
        """Steps (what tells them apart, head, mode) take turns with each other and with the products."""
        inputs = self.inputs(shape)
        turns = [
            measure.turn({"shape": shape.name, "mode": mode, **properties}, head, inputs, mode)
            for properties, head, mode in steps
        ]
        hidden = inputs.hidden.detach().repeat(len(inputs.labels) // len(inputs.hidden), 1)  # of all ranks
        products = partial(measure.measure_products, hidden, inputs.weight, budget_ms=self.budget_ms)
        yardstick = partial(self.results.attempt, "products", {"shape": shape.name}, products)
        self.results.take_turns(section, turns, yardstick, budget_ms=self.budget_ms)

    def each(
        self, section: str, shape: Shape, inputs: Inputs, modes: list[str], measured: Callable[..., dict], **more: Any
    ) -> None:
        """`measured(head, inputs, mode)` of every head, in the modes that it has; else in its first with gradients."""
        for provider, head in self.heads:
            first = next(mode for mode in provider.modes if mode != "fwd")
            for mode in [mode for mode in modes if mode in provider.modes] or [first]:
                measure.free_memory(self.device)
                record = {"shape": shape.name, **more, "mode": mode, "provider": provider.name}
                self.results.attempt(section, record, partial(measured, head, inputs, mode))

    def times(self, shape: Shape, mode: str) -> None:
        """Every head that has the mode."""
        steps = []
        for provider, head in self.heads:
            if mode in provider.modes:
                steps.append(({"provider": provider.name}, head, mode))
            else:
                record = {"shape": shape.name, "mode": mode, "provider": provider.name}
                self.results.unsupported("times", record, provider.missing)
        self.take_turns("times", shape, steps)

    def errors(self, shape: Shape) -> None:
        """Every head against fp64."""
        whole = self.whole(shape)
        expected, inputs, measured = measure.oracle(whole), whole, measure.measure_error
        if self.tp_group is not None:
            inputs = whole.of_rank(self.tp_group)
            for name in [name for name in expected if name.startswith("grad_")]:
                expected[name] = rows_of_rank(expected[name], self.tp_group)

            def measured(*arguments: Any, **keywords: Any) -> dict:
                return measure.slowest_rank(measure.measure_error(*arguments, **keywords))

        self.each("errors", shape, inputs, [], partial(measured, expected=expected))

    def memory(self, shape: Shape, modes: list[str]) -> None:
        """Extra peak memory at one number of tokens."""

        def peak(head: Head, inputs: Inputs, mode: str) -> dict:
            record = measure.Timed(partial(run_step, head, inputs, mode), self.device).warm_up()
            return record | {"gradients_mib": measure.gradients_mib(inputs, mode)}

        self.each("memory", shape, self.inputs(shape), modes, peak, tokens=shape.tokens)


def measure_heads(results: Results, arguments: Any) -> None:
    """On one rank; or under tensor and sequence parallelism, where torchrun started as many ranks as `--tp`."""
    if arguments.tp == 1:
        return measure_on_ranks(results, arguments)
    from benchmark.megatron_step import in_megatron

    def measure_parts(results: Results, arguments: Any, device: torch.device) -> None:
        if dist.get_world_size() != arguments.tp:
            raise ValueError(f"--tp must be the number of ranks, {dist.get_world_size()}, got {arguments.tp}")
        measure_on_ranks(results, arguments, dist.group.WORLD)

    in_megatron(measure_parts)(results, arguments)


def measure_on_ranks(results: Results, arguments: Any, tp_group: ProcessGroup | None = None) -> None:
    run, shapes = Run(results, arguments.providers, arguments.budget_ms, tp_group), arguments.shapes
    if tp_group is not None:
        shapes = [replace(shape, name=f"{shape.name} TP={tp_group.size()}") for shape in shapes]
    for shape in arguments.error_shape:
        run.errors(shape)
    for shape, mode in itertools.product(shapes, arguments.modes):
        run.times(shape, mode)
    for tokens in arguments.memory_tokens:  # last: where a peer overruns an index, it takes the device with it
        run.memory(replace(shapes[0], tokens=tokens), arguments.memory_modes)
