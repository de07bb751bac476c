"""The weight gradient's destinations: returned, or added to a sink; blocks of tokens; odd H; `FusedLinearHead`."""

import pytest
import torch
from torch import nn

import megatron_lce
from megatron_lce import linear_cross_entropy, linear_token_loss
from tests import jsd_oracle
from tests.oracle import relative_error
from tests.problems import make_problem, smallest_workspace

FP32, BF16 = torch.float32, torch.bfloat16


class Sink:
    """An fp32 buffer that holds something already, as Megatron's `main_grad` does from the second microbatch on."""

    def __init__(self, weight):
        self.start = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)).to(weight.device)
        self.grad = self.start.clone()
        self.finished = 0

    def buffer(self):
        return self.grad

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize(
    ("dtype", "workspace_bytes", "logits_cache_bytes"),
    [(FP32, 2**17, 0), (BF16, 2**16, 0), (BF16, 2**29, 2**30), (BF16, 2**16, 2**30)],
)
def test_a_sink_gets_what_would_be_returned(dtype, workspace_bytes, logits_cache_bytes, backend, device):
    problem = make_problem(150, 16, 301, device, dtype)
    keywords = {"backend": backend, "workspace_bytes": workspace_bytes, "logits_cache_bytes": logits_cache_bytes}
    returned = problem.run(**keywords)
    sink = Sink(problem.weight)
    added = problem.run(**keywords, weight_grad_sink=sink)
    assert sink.finished == 1
    assert added.grad_weight is None
    assert torch.equal(added.grad_hidden, returned.grad_hidden)
    # The sink keeps the fp32 sum, which the returned gradient rounds to its own dtype. A BLAS may add the 150 tokens in
    # another order where rows have other strides.
    order = 150 * torch.finfo(FP32).eps * returned.grad_weight.abs().max().item()
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": order}
    torch.testing.assert_close(sink.grad - sink.start, returned.grad_weight.float(), **tolerance)


def test_a_sink_takes_no_rows_that_are_padded(device):
    problem = make_problem(5, 13, 301, device, BF16)
    with pytest.raises(ValueError, match="weight_grad_sink must be None where H is no multiple of 8"):
        linear_cross_entropy(*problem[:3], weight_grad_sink=Sink(problem.weight))


def token_loss(problem, weight, **keywords):
    return linear_token_loss(problem.hidden, weight, problem.labels, lambda out: -out.logprobs, **keywords).loss


@pytest.mark.parametrize(("hidden_size", "first"), [(13, 0), (20, 8)])
def test_odd_rows_that_start_at_16_bytes(hidden_size, first, backend, device):
    """What lies between the rows of a part of a wider hidden is not read."""
    problem = make_problem(150, hidden_size, 301, device, BF16)
    part = problem.hidden.new_full((150, 32), torch.nan)[:, first : first + hidden_size].copy_(problem.hidden)

    def gradients(hidden):
        inputs = hidden.requires_grad_(), problem.weight.requires_grad_()
        loss = token_loss(problem._replace(hidden=hidden), problem.weight, workspace_bytes=2**17, backend=backend)
        return torch.autograd.grad(loss, inputs)

    for actual, expected in zip(gradients(part), gradients(problem.hidden), strict=True):
        torch.testing.assert_close(actual, expected)


def weighted_jsd(problem, weight, **keywords):
    teacher = problem.hidden.flip(0), problem.weight
    return jsd_oracle.weighted_jsd(problem.hidden, weight, *teacher, weights=problem.labels / 301, **keywords)


@pytest.mark.parametrize("operation", [token_loss, weighted_jsd])
def test_a_sink_takes_nothing_of_the_workspace(operation, backend, device):
    """What is refused is refused in front of the first pass: after it, other ranks would wait for this one."""
    problem = make_problem(5, 16, 301, device, BF16)

    def gradient(workspace_bytes):
        weight, sink = problem.weight.clone().requires_grad_(), Sink(problem.weight)
        loss = operation(problem, weight, workspace_bytes=workspace_bytes, backend=backend, weight_grad_sink=sink)
        loss.backward()
        return sink.grad - sink.start

    smallest = smallest_workspace(gradient)
    expected = gradient(2**29)
    for more in (0, 1_000):
        error = relative_error(gradient(smallest + more), expected)
        assert error <= 2**-8  # logits that are kept and those that are made again round in other places


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
