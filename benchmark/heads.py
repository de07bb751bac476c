"""Our head beside its peers in one process, over ignored rows too."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmark import measure, providers
from benchmark.measure import run_step
from benchmark.ours import Ours
from benchmark.providers import Head, Provider
from benchmark.results import Results
from benchmark.shapes import Inputs, Shape, make_inputs

IGNORED = -100


class Run:
    """The heads that could be loaded, and the measurements over them."""

    def __init__(self, results: Results, providers: list[Provider], budget_ms: float):
        self.results, self.device, self.budget_ms = results, results.device, budget_ms
        heads = results.load(providers)
        self.heads = [(provider, heads[provider.name]) for provider in providers if provider.name in heads]

    def inputs(self, shape: Shape) -> Inputs:
        measure.free_memory(self.device)
        return make_inputs(shape, self.results.dtype, self.device)

    def take_turns(self, section: str, shape: Shape, steps: list[tuple[dict, Head, str]]) -> None:
        """Steps (what tells them apart, head, mode) take turns with each other and with the products."""
        inputs = self.inputs(shape)
        turns = [
            measure.turn({"shape": shape.name, "mode": mode, **properties}, head, inputs, mode)
            for properties, head, mode in steps
        ]
        products = partial(measure.measure_products, inputs.hidden, inputs.weight, budget_ms=self.budget_ms)
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
        inputs = self.inputs(shape)
        self.each("errors", shape, inputs, [], partial(measure.measure_error, expected=measure.oracle(inputs)))

    def memory(self, shape: Shape, modes: list[str]) -> None:
        """Extra peak memory at one number of tokens."""

        def peak(head: Head, inputs: Inputs, mode: str) -> dict:
            record = measure.Timed(partial(run_step, head, inputs, mode), self.device).warm_up()
            return record | {"gradients_mib": measure.gradients_mib(inputs, mode)}

        self.each("memory", shape, self.inputs(shape), modes, peak, tokens=shape.tokens)


def measure_heads(results: Results, arguments: Any) -> None:
    run, shapes = Run(results, arguments.providers, arguments.budget_ms), arguments.shapes
    for shape, mode in itertools.product(shapes, arguments.modes):
        run.times(shape, mode)
    for shape in arguments.error_shape:
        run.errors(shape)
    for tokens in arguments.memory_tokens:  # last: where a peer overruns an index, it takes the device with it
        run.memory(replace(shapes[0], tokens=tokens), arguments.memory_modes)


def ignore(inputs: Inputs, share: float) -> tuple[Inputs, Tensor]:
    """The inputs with this share of rows ignored, scattered, and the others."""
    order = torch.randperm(len(inputs.labels), generator=torch.Generator().manual_seed(0)).to(inputs.labels.device)
    first = round(share * len(order))
    return replace(inputs, labels=inputs.labels.index_fill(0, order[:first], IGNORED)), order[first:].sort().values


def alone(inputs: Inputs, rows: Tensor) -> Inputs:
    """These rows, as a program would hand them over that had left out the others itself."""
    hidden = inputs.hidden.detach()[rows].requires_grad_()
    per_row = (tensor[rows] for tensor in (inputs.labels, inputs.grad_logprobs, inputs.grad_entropy))
    return Inputs(hidden, inputs.weight, *per_row)


def results_of(head: Head, inputs: Inputs, mode: str, rows: Tensor | None = None) -> dict[str, Tensor]:
    """Logprobs and hidden's gradient, of these rows if there are others, and the weight's gradient."""
    (logprobs, *_), (grad_hidden, grad_weight) = run_step(head, inputs, mode)
    if rows is not None and len(logprobs) != len(rows):
        logprobs, grad_hidden = logprobs[rows], grad_hidden[rows]
    return {"logprobs": logprobs.detach(), "grad_hidden": grad_hidden, "grad_weight": grad_weight}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest of logprobs, and the relative ones of the gradients."""
    logprobs = (found["logprobs"] - expected["logprobs"]).abs()
    relative = {name: measure.relative_error(found[name], expected[name]) for name in found if name != "logprobs"}
    largest = {"logprobs": logprobs.max().item() if len(logprobs) else 0.0}
    return {f"{name}_difference": value for name, value in (largest | relative).items()}


def measure_rows(results: Results, arguments: Any) -> None:
    """Time over the share of ignored rows.

    Our head with `skip_ignored` False, True and the number of the others stands beside the same head on those rows
    alone, and a peer that drops ignored rows. Mode `rl-cached` keeps all logits. Every head's results are compared with
    those of our head without skipping.
    """
    peer = results.load([providers.PROVIDERS["ours"], providers.PROVIDERS["cce"]]).get("cce")
    for shape, mode, share in itertools.product(arguments.shapes, arguments.modes, arguments.shares):
        measure.free_memory(results.device)
        inputs = make_inputs(shape, results.dtype, results.device)
        _time_rows(results, {"shape": shape.name, "mode": mode, "ignored": share}, inputs, peer, arguments.budget_ms)
        del inputs


def _time_rows(results: Results, case: dict, inputs: Inputs, peer: Head | None, budget_ms: float) -> None:
    given, rows = ignore(inputs, case["ignored"])
    mode = case["mode"].removesuffix("-cached")
    ours = partial(Ours, cache_fraction=float(case["mode"] == "rl-cached"))
    heads: dict[str, tuple[Head, Inputs]] = {
        "ours": (ours(), given),
        "ours-skip": (ours(skip_ignored=True), given),
        "ours-count": (ours(skip_ignored=len(rows)), given),
        "ours-alone": (ours(), alone(given, rows)),
    }
    if peer is not None and mode in providers.PROVIDERS["cce"].modes:
        heads["cce"] = (peer, given)
    expected = functools.cache(partial(results_of, Ours(), given, mode, rows))

    def compare(head: Head, its_inputs: Inputs, _: dict) -> dict:
        return differences(results_of(head, its_inputs, mode, rows), expected())

    turns = []
    for name, head in heads.items():
        record = case | {"layout": "scattered", "provider": name}
        turns.append(measure.turn(record, *head, mode, partial(compare, *head)))
    results.take_turns("rows", turns, lambda: None, budget_ms=budget_ms)
