"""Time over the share of ignored rows.

Our head with `skip_ignored` False, True and the number of the others, beside the same head on those rows alone and a
peer that drops ignored rows. Ignored rows are scattered, or the first ones. Every head's results are compared with
those of our head without skipping. Mode `rl-cached` keeps all logits; `backward` is the time of a backward alone, where
no label is ignored, but the upstream gradients of these rows are zero.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megatron_lce
from benchmark import measure
from benchmark.ours import Ours
from benchmark.providers import PROVIDERS, Head
from benchmark.results import Results
from benchmark.shapes import Inputs, Shape, make_inputs

IGNORED = -100
MODES = {"rl": "rl", "rl-cached": "rl", "backward": "rl", "logprob": "logprob"}  # and of which step each is
PEER = "cce"
LAYOUTS = ("scattered", "contiguous")


def ignore(inputs: Inputs, share: float, layout: str) -> tuple[Inputs, Tensor]:
    """The inputs with this share of rows ignored, and the others."""
    num_tokens = len(inputs.labels)
    order = torch.arange(num_tokens, device=inputs.labels.device)
    if layout == "scattered":
        order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(0)).to(order.device)
    first = round(share * num_tokens)
    return replace(inputs, labels=inputs.labels.index_fill(0, order[:first], IGNORED)), order[first:].sort().values


def backward_alone(head: Ours, inputs: Inputs) -> Callable[[], object]:
    """Of a forward that runs here, once."""
    tensors = inputs.hidden, inputs.weight
    out = megatron_lce.linear_cross_entropy(*tensors, inputs.labels, skip_ignored=head.skip_ignored)
    upstream = inputs.grad_logprobs, inputs.grad_entropy
    return partial(torch.autograd.grad, (out.logprobs, out.entropy), tensors, upstream, retain_graph=True)


def alone(inputs: Inputs, rows: Tensor) -> Inputs:
    """These rows, as a program would hand them over that had left out the others itself."""
    hidden = inputs.hidden.detach()[rows].requires_grad_()
    per_row = (tensor[rows] for tensor in (inputs.labels, inputs.grad_logprobs, inputs.grad_entropy))
    return Inputs(hidden, inputs.weight, *per_row)


def differences(head: Head, inputs: Inputs, mode: str, rows: Tensor, expected: dict[str, Tensor]) -> dict:
    """How far logprobs and gradients of these rows, and the weight's gradient, are from the expected ones."""
    found = results_of(head, inputs, mode)
    if len(inputs.labels) != len(rows):
        found |= {name: found[name][rows] for name in ("logprobs", "grad_hidden")}
    largest = (found["logprobs"] - expected["logprobs"]).abs().max().item() if len(rows) else 0.0
    return {"logprobs_difference": largest} | {
        f"{name}_difference": measure.relative_error(found[name], expected[name])
        for name in ("grad_hidden", "grad_weight")
    }


def results_of(head: Head, inputs: Inputs, mode: str) -> dict[str, Tensor]:
    (logprobs, *_), (grad_hidden, grad_weight) = measure.run_step(head, inputs, mode)
    return {"logprobs": logprobs.detach(), "grad_hidden": grad_hidden, "grad_weight": grad_weight}


def take_turns(
    results: Results, shape: Shape, inputs: Inputs, case: tuple[float, str, str], peer: Head | None, budget_ms: float
) -> None:
    """All heads at one share of ignored rows."""
    share, layout, mode = case
    given, rows = ignore(inputs, share, layout)
    if mode == "backward":
        counts = given.labels != IGNORED
        upstream = {"grad_logprobs": inputs.grad_logprobs * counts, "grad_entropy": inputs.grad_entropy * counts}
        given = replace(inputs, **upstream)
    ours = partial(Ours, cache_fraction=1.0 if mode == "rl-cached" else 0.0)
    heads: dict[str, tuple[Head, Inputs]] = {
        "ours": (ours(), given),
        "ours-skip": (ours(skip_ignored=True), given),
        "ours-count": (ours(skip_ignored=len(rows)), given),
        "ours-alone": (ours(), alone(given, rows)),
    }
    if mode == "backward":
        del heads["ours-count"]  # of the labels
    if peer is not None and mode in PROVIDERS[PEER].modes:
        heads[PEER] = (peer, given)
    turns = []
    for name, (head, its_inputs) in heads.items():
        record = {"shape": shape.name, "mode": mode, "ignored": share, "layout": layout, "provider": name}
        record |= {"gradients_mib": measure.gradients_mib(its_inputs, MODES[mode])}
        if mode == "backward" and isinstance(head, Ours):
            step = backward_alone(head, its_inputs)
        else:
            step = partial(measure.run_step, head, its_inputs, MODES[mode])
        turns.append((record, measure.Timed(step, results.device)))
    results.take_turns("rows", turns, lambda: None, budget_ms=budget_ms)
    expected = results_of(Ours(), given, MODES[mode])
    expected |= {name: expected[name][rows] for name in ("logprobs", "grad_hidden")}
    for (record, _), (head, its_inputs) in zip(turns, heads.values(), strict=True):
        results.complete("rows", record, partial(differences, head, its_inputs, MODES[mode], rows, expected))


def measure_case(results: Results, arguments: Any) -> None:
    peer = results.load([PROVIDERS["ours"], PROVIDERS[PEER]]).get(PEER)
    for shape in arguments.shapes:
        measure.free_memory(results.device)
        inputs = make_inputs(shape, results.dtype, results.device)
        for mode, share in itertools.product(arguments.modes, arguments.shares):
            for layout in arguments.layouts if share else arguments.layouts[:1]:
                take_turns(results, shape, inputs, (share, layout, mode), peer, arguments.budget_ms)
        del inputs
