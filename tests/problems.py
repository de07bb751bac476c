"""Inputs of the tests, and the one assertion that most of them make."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import megatron_lce
from megatron_lce.backends.choice import load_backend
from megatron_lce.core import plan
from megatron_lce.core.call_plan import plan_call
from megatron_lce.core.plan import COLUMN_STEP, slab_row_stride
from tests.jsd_oracle import JsdInputs
from tests.oracle import Result, Upstream, assert_within, comparisons, evaluate, oracle, random_upstream

BETAS = [0, 0.5, 1]  # both ends and between

_USUAL = nullcontext()


@contextmanager
def wide_blocks_of(num_tokens: int | None) -> Iterator[None]:
    """Plans with blocks of so many tokens where 4,096 are usual; None: as usual."""
    plan_call.cache_clear()  # plans are made once for a configuration
    with mock.patch.object(plan, "WIDE_BLOCK", num_tokens or plan.WIDE_BLOCK):
        yield
    plan_call.cache_clear()


class Problem(NamedTuple):
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    upstream: Upstream

    def run(self, backend: str, within: AbstractContextManager = _USUAL, **keywords: Any) -> Result:
        with within:
            return evaluate(megatron_lce.linear_cross_entropy, *self, backend=backend, **keywords)

    def check(self, backend: str, *, only_here: dict[str, Any] | None = None, **keywords: Any) -> Result:
        """Run, assert that every result is within its budget of the oracle's, and return the results.

        `only_here`: keywords that the oracle does not have.
        """
        actual = self.run(backend, **keywords, **(only_here or {}))
        expected = oracle(*self, **keywords)
        assert_within(comparisons(actual, expected, *self, **keywords))
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


def all_equal(one: Result, other: Result) -> bool:
    """Outputs and gradients, bit by bit."""
    outputs = zip(one.outputs, other.outputs, strict=True)
    gradients = ((one.grad_hidden, other.grad_hidden), (one.grad_weight, other.grad_weight))
    return all(a is b if a is None else torch.equal(a, b) for a, b in (*outputs, *gradients))


def with_gradients(
    problem: Problem, function: Callable[..., Any], dtype: torch.dtype = torch.float32, upstream: Any = None
) -> list[Tensor]:
    """What a function of hidden and weight in this dtype returns, one tensor or several, and both gradients, in fp32.

    `upstream`: of what is returned; None: numbers from -0.5 to 1.5.
    """
    leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in problem[:2]]
    returned = function(*leaves)
    returned = [returned] if isinstance(returned, Tensor) else list(returned)
    if upstream is None:
        upstream = [torch.linspace(-0.5, 1.5, r.numel(), device=r.device, dtype=r.dtype).view_as(r) for r in returned]
    torch.autograd.backward(returned, [grad.to(value) for grad, value in zip(upstream, returned, strict=True)])
    return [tensor.detach().float() for tensor in (*returned, *(leaf.grad for leaf in leaves))]


def logits_of(problem: Problem) -> Tensor:
    """[N, V] in fp64."""
    hidden = problem.hidden.double().reshape(-1, problem.hidden.shape[-1])
    return hidden @ problem.weight.double().T


def smallest_workspace(call: Callable[..., Any]) -> int:
    """Bytes, as the refusal of a call with one byte names them."""
    with pytest.raises(ValueError, match=r"^workspace_bytes must be at least \d+ .*got 1$") as refused:
        call(workspace_bytes=1)
    return int(str(refused.value).split("at least ")[1].split()[0])


def ignored_labels(rows: slice, shape: tuple[int, ...] | int, device: torch.device) -> Tensor:
    labels = torch.zeros(shape, dtype=torch.int64, device=device)
    labels.view(-1)[rows] = -100
    return labels


def workspace_of(tokens: int, inputs: JsdInputs, backend: str) -> int:
    """Bytes that both heads' logits of so many tokens take, and half as many: gradients, copies."""
    num_columns, device = inputs.student_weight.shape[0], inputs.student_hidden.device
    scratch = load_backend(backend, device).scratch_bytes(inputs.student_hidden, inputs.student_weight, False)
    per_token = 6 * 4 * min(num_columns, scratch.divergence_columns)
    wide = max(4 * inputs[i].shape[-1] * (inputs[i].dtype != torch.float32) for i in (0, 2))
    copied = wide if device.type == "cpu" else 0
    return int(1.5 * tokens * (slab_row_stride(num_columns) * 8 + per_token + copied)) + COLUMN_STEP * copied
