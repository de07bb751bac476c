"""`FusedLinearHead` on one rank; under FSDP2 and over a group: run_parity.py."""

import pytest
import torch
from torch import nn

import megatron_lce
from tests.problems import make_problem


@pytest.fixture
def problem(device):
    return make_problem((3, 4), 16, 50, device)


@pytest.fixture
def head(problem, device):
    plain = nn.Linear(16, 50, bias=False, device=device)
    head = megatron_lce.FusedLinearHead(16, 50, device=device, dtype=torch.float32)
    head.load_state_dict(plain.state_dict())
    return head


def test_without_labels_it_is_a_linear_layer(head, problem):
    assert torch.equal(head(problem.hidden), problem.hidden @ head.weight.T)


def test_with_labels_it_is_the_operation(head, problem):
    keywords = {"temperature": 0.5, "entropy": False, "telemetry": True}
    out = head(problem.hidden, problem.labels, **keywords)
    expected = megatron_lce.linear_cross_entropy(problem.hidden, head.weight, problem.labels, **keywords)
    assert out.entropy is None
    assert all(torch.equal(out[i], expected[i]) for i in (0, *range(2, 9)))
    out.logprobs.sum().backward()
    assert head.weight.grad is not None


def test_keywords_want_labels(head, problem):
    with pytest.raises(TypeError, match="labels must be given beside temperature"):
        head(problem.hidden, temperature=0.5)
