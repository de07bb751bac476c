"""Inputs of the tests, and the one assertion that most of them make."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import megatron_lce
from tests.oracle import Result, Upstream, comparisons, evaluate, oracle, random_upstream


class Problem(NamedTuple):
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    upstream: Upstream

    def run(self, backend: str, **keywords: Any) -> Result:
        return evaluate(megatron_lce.linear_cross_entropy, *self, backend=backend, **keywords)

    def check(self, backend: str, *, only_here: dict[str, Any] | None = None, **keywords: Any) -> Result:
        """Run, assert that every result is within its budget of the oracle's, and return the results.

        `only_here`: keywords that the oracle does not have.
        """
        actual = self.run(backend, **keywords, **(only_here or {}))
        expected = oracle(*self, **keywords)
        for name, error, allowed in comparisons(actual, expected, *self, **keywords):
            assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.1e}"
        return actual


def make_problem(
    shape: tuple[int, ...] | int,
    hidden_size: int,
    num_columns: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    logit_std: float = 2.0,
    seed: int = 0,
) -> Problem:
    """Normal hidden and weight whose products have a standard deviation of `logit_std`; labels of `shape`."""
    shape = (shape,) if isinstance(shape, int) else shape
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, hidden_size, generator=generator)
    weight = torch.randn(num_columns, hidden_size, generator=generator) * (logit_std / hidden_size**0.5)
    labels = torch.randint(num_columns, shape, generator=generator)
    upstream = random_upstream(shape, generator)
    return Problem(
        hidden.to(device, dtype),
        weight.to(device, dtype),
        labels.to(device),
        Upstream(*(None if u is None else u.to(device) for u in upstream)),
    )


def ignoring(problem: Problem, rows: slice) -> Problem:
    labels = problem.labels.clone()
    labels.view(-1)[rows] = -100
    return problem._replace(labels=labels)


def assert_same_outputs(one: Result, other: Result) -> None:
    assert all(a is b if a is None else torch.equal(a, b) for a, b in zip(one.outputs, other.outputs, strict=True))


def all_equal(one: Result, other: Result) -> bool:
    """Outputs and gradients, bit by bit."""
    outputs = zip(one.outputs, other.outputs, strict=True)
    gradients = ((one.grad_hidden, other.grad_hidden), (one.grad_weight, other.grad_weight))
    return all(a is b if a is None else torch.equal(a, b) for a, b in (*outputs, *gradients))


def logits_of(problem: Problem, temperature: float | Tensor = 1.0) -> Tensor:
    """[N, V] in fp64."""
    hidden = problem.hidden.double().reshape(-1, problem.hidden.shape[-1])
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1, 1)
    return hidden @ problem.weight.double().T / temperature
