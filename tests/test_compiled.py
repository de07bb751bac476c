"""torch.compile: an operation is one break of the graph, which runs as it does uncompiled, and says so to fullgraph."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters

from tests.operations import OPERATIONS
from tests.test_every_operation import COMPAT, head, results

REASON = "megatron_lce runs outside compiled graphs: call torch.compile without fullgraph=True"


ALL = {
    **{name: functools.partial(operation, backend="torch") for name, operation in OPERATIONS.items()},
    **{f"compat: {name}": call for name, call in COMPAT.items()},
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("name", ALL)
def test_one_break_with_the_bits_of_eager(name, device):
    def step(hidden, weight, labels):
        return ALL[name](2 * hidden, weight, labels)

    inputs = head(device, torch.float32)
    expected = results(step, inputs)
    actual = results(torch.compile(step, backend="aot_eager"), inputs)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    (reason,) = counters["graph_break"]  # of the operation, and of nothing inside it
    assert REASON in reason


@pytest.mark.parametrize("name", ALL)
def test_fullgraph_is_refused_with_the_reason(name, device):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=REASON):
        torch.compile(ALL[name], backend="aot_eager", fullgraph=True)(*head(device, torch.float32))


def test_what_is_wrong_with_a_call_is_said(device):
    compiled = torch.compile(OPERATIONS["cross-entropy"], backend="aot_eager")
    with pytest.raises(ValueError, match="temperature must be positive and finite, got -1"):
        compiled(*head(device, torch.float32), temperature=-1.0)
