"""Logprobs of a few rows, as a sampler takes them: replays of a CUDA graph beside cuBLAS's product of the logits.

The call is the trainer's. `same_bits`: its replay has the bits of one call with all rows. `mismatch`: the largest
difference between its logprobs and those of logits that the product rounds to its dtype, as samplers do by default. On
a CPU nothing is captured.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megatron_lce
from benchmark import measure
from benchmark.results import Results
from benchmark.shapes import Inputs, Shape, make_inputs


def logprobs(inputs: Inputs, rows: int) -> Tensor:
    tensors = inputs.hidden[:rows], inputs.weight, inputs.labels[:rows]
    return megatron_lce.linear_cross_entropy(*tensors, temperature=0.8, entropy=False).logprobs


def product(inputs: Inputs, rows: int) -> Tensor:
    return inputs.hidden[:rows] @ inputs.weight.T


def rounded_logprobs(inputs: Inputs, rows: int) -> Tensor:
    logits = product(inputs, rows).float() / 0.8
    return logits.log_softmax(-1).gather(-1, inputs.labels[:rows, None])[:, 0]


def captured(call: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], object], Tensor]:
    """A replay of the call, and the tensor that it fills."""
    result = call()  # compiles
    if device.type != "cuda":
        return call, result
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


@torch.no_grad()
def measure_case(results: Results, arguments: Any) -> None:
    shape = Shape("sampler", max(arguments.rows), arguments.hidden, arguments.vocab)
    inputs = make_inputs(shape, results.dtype, results.device)
    expected = logprobs(inputs, shape.tokens)
    size = {"hidden": shape.hidden, "vocab": shape.vocab}
    for rows in arguments.rows:

        def compare(record: dict, ours: Tensor, rows: int = rows) -> dict:
            mismatch = float((ours - rounded_logprobs(inputs, rows)).abs().max())
            return {"same_bits": torch.equal(ours, expected[:rows]), "mismatch": mismatch}

        turns = []
        for name, function in (("product", product), ("ours", logprobs)):
            replay, result = captured(partial(function, inputs, rows), results.device)
            timed = measure.Timed(replay, results.device)
            if name == "ours":
                replay()
                timed.after = partial(compare, ours=result)
            turns.append((size | {"rows": rows, "provider": name}, timed))
        results.take_turns("sampler", turns, lambda: None, budget_ms=arguments.budget_ms)
        (of_product, _), (ours, _) = turns
        if ours["status"] == of_product["status"] == "ok":
            ours["over_product"] = ours["time_ms"] / of_product["time_ms"]
