"""The oracle itself, against torch: what everything else is compared with must be right first."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron_lce.backends.reference import reference_linear_cross_entropy
from megatron_lce.core.options import DIFFERENTIABLE
from tests.oracle import eager_linear_cross_entropy
from tests.problems import make_problem


@pytest.fixture
def head(device):
    problem = make_problem(9, 12, 31, device)
    return problem.hidden.double(), problem.weight.double(), problem.labels


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_logprobs_and_entropy_are_those_of_torch(temperature, head):
    hidden, weight, labels = head
    out = reference_linear_cross_entropy(hidden, weight, labels, temperature)
    logits = hidden @ weight.T / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(out.logprobs, -cross_entropy(logits, labels, reduction="none"))
    torch.testing.assert_close(out.entropy, distribution.entropy())
    torch.testing.assert_close(out.lse, logits.exp().sum(dim=1).log())


def test_softcap_and_logits_scale_act_before_the_temperature(head):
    hidden, weight, labels = head
    out = reference_linear_cross_entropy(hidden, weight, labels, 0.7, softcap=2.5, logits_scale=1.3)
    logits = 2.5 * torch.tanh(1.3 * hidden @ weight.T / 2.5) / 0.7
    torch.testing.assert_close(out.logprobs, -cross_entropy(logits, labels, reduction="none"))


def test_telemetry_is_of_the_scaled_logits(head):
    hidden, weight, labels = head
    out = reference_linear_cross_entropy(hidden, weight, labels % 30, 0.5, vocab_size=30, telemetry=True)
    logits = (hidden @ weight.T / 0.5)[:, :30]
    assert torch.equal(out.argmax, logits.argmax(dim=1))
    torch.testing.assert_close(out.max_logit, logits.amax(dim=1))
    torch.testing.assert_close(out.min_logit, logits.amin(dim=1))
    torch.testing.assert_close(out.sum_pi_squared, logits.softmax(dim=1).square().sum(dim=1))
    torch.testing.assert_close(out.logits_norm, logits.square().sum(dim=1).sqrt())
    torch.testing.assert_close(out.mean_logit, logits.sum(dim=1) / 30)


def test_ignored_rows_as_in_torch(head):
    hidden, weight, labels = head
    hidden.requires_grad_()
    labels[::4] = -100
    out = reference_linear_cross_entropy(hidden, weight, labels)
    loss = cross_entropy(hidden @ weight.T, labels, reduction="none")
    torch.testing.assert_close(out.logprobs, -loss)
    (actual,) = torch.autograd.grad(-out.logprobs.sum(), hidden)
    (expected,) = torch.autograd.grad(loss.sum(), hidden)
    torch.testing.assert_close(actual, expected)


def test_broken_rows_are_nan_and_leave_the_others_alone(head):
    hidden, weight, labels = head
    good = reference_linear_cross_entropy(hidden, weight, labels)
    broken_labels = labels.clone()
    broken_labels[3] = 31
    temperature = torch.ones(9, dtype=torch.float64, device=hidden.device)
    temperature[5] = -1.0
    hidden.requires_grad_()
    out = reference_linear_cross_entropy(hidden, weight, broken_labels, temperature)
    (grad,) = torch.autograd.grad(out.logprobs.sum(), hidden)
    for output, expected in zip(out[:3], good[:3], strict=True):
        assert output.isnan().nonzero().flatten().tolist() == [3, 5]
        torch.testing.assert_close(output.nan_to_num(0.0), expected.where(~output.isnan(), 0.0))
    assert grad.isnan().any(dim=1).nonzero().flatten().tolist() == [3, 5]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_of_finite_differences(name, head):
    hidden, weight, labels = (t[:4] if t.dim() == 1 or t.shape[0] == 9 else t[:7] for t in head)
    inputs = (hidden.clone().requires_grad_(), weight.clone().requires_grad_())

    def output(hidden, weight):
        out = reference_linear_cross_entropy(hidden, weight, labels % 6, 0.8, softcap=3.0, vocab_size=6, telemetry=True)
        return getattr(out, name)

    assert torch.autograd.gradcheck(output, inputs)


def test_the_formulas_of_the_contract(head):
    """d/dz logprobs = 1[label] - p, d/dz lse = p, d/dz entropy = -p (log p + entropy), d/dz mean_logit = 1 / V, with
    an identity for a head."""
    logits = torch.linspace(-2.0, 3.0, 12, dtype=torch.float64)[None].requires_grad_()
    labels = torch.tensor([7])
    out = reference_linear_cross_entropy(logits, torch.eye(12, dtype=torch.float64), labels, telemetry=True)
    p = logits.detach().softmax(dim=1)
    expected = {
        "logprobs": torch.nn.functional.one_hot(labels, 12) - p,
        "lse": p,
        "entropy": -p * (p.log() + out.entropy.detach()),
        "mean_logit": torch.full_like(p, 1 / 12),
    }
    for name, value in expected.items():
        (grad,) = torch.autograd.grad(getattr(out, name).sum(), logits, retain_graph=True)
        torch.testing.assert_close(grad, value)


def test_eager_in_fp64_is_the_oracle(head):
    """The budgets' yardstick computes the same thing, so that its error is rounding alone."""
    keywords = {"softcap": 3.0, "logits_scale": 0.9, "vocab_size": 29, "telemetry": True}
    hidden, weight, labels = head
    labels = labels % 29
    labels[2] = -100
    temperature = torch.linspace(0.5, 2.0, 9, device=hidden.device)
    eager = eager_linear_cross_entropy(hidden.float(), weight.float(), labels, temperature, **keywords)
    exact = reference_linear_cross_entropy(hidden, weight, labels, temperature, **keywords)
    for output, expected in zip(eager[:5] + eager[6:9], exact[:5] + exact[6:9], strict=True):
        torch.testing.assert_close(output, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_computes_in_fp32(dtype, head):
    hidden, weight, labels = head
    out = reference_linear_cross_entropy(hidden.to(dtype), weight.to(dtype), labels)
    assert out.logprobs.dtype == torch.float32
    exact = reference_linear_cross_entropy(hidden.to(dtype).double(), weight.to(dtype).double(), labels)
    torch.testing.assert_close(out.logprobs, exact.logprobs.float(), rtol=1e-5, atol=1e-5)
