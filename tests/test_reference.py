"""The oracle itself, against torch: what everything else is compared with must be right first."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron_lce.core.options import DIFFERENTIABLE_SCALARS
from tests.problems import make_problem
from tests.reference import reference_linear_cross_entropy


@pytest.fixture
def head(device):
    problem = make_problem(9, 12, 31, device)
    return problem.hidden.double(), problem.weight.double(), problem.labels


@pytest.mark.parametrize(
    ("temperature", "logits_scale", "softcap"), [(1.0, 1.0, None), (0.4, 1.0, None), (0.7, 1.3, 2.5)]
)
def test_outputs_and_gradients_are_those_of_torch(temperature, logits_scale, softcap, head):
    """A softcap acts before the temperature, telemetry is of the scaled logits; padded columns, ignored rows."""
    *head, labels = head
    hidden, weight = (tensor.requires_grad_() for tensor in head)
    labels = labels % 30
    labels[::4] = -100
    form = {"logits_scale": logits_scale, "softcap": softcap}
    out = reference_linear_cross_entropy(hidden, weight, labels, temperature, vocab_size=30, telemetry=True, **form)
    logits = (logits_scale * hidden @ weight.T)[:, :30]
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    expected = {
        "logprobs": -cross_entropy(logits, labels, reduction="none"),
        "entropy": torch.distributions.Categorical(logits=logits).entropy(),
        "lse": logits.exp().sum(dim=1).log(),
        "max_logit": logits.amax(dim=1),
        "min_logit": logits.amin(dim=1),
        "argmax": logits.argmax(dim=1),
        "sum_pi_squared": logits.softmax(dim=1).square().sum(dim=1),
        "logits_norm": logits.square().sum(dim=1).sqrt(),
        "mean_logit": logits.sum(dim=1) / 30,
    }
    for name, value in expected.items():
        value = value.where(labels != -100, 0)
        torch.testing.assert_close(getattr(out, name), value)
        if name in DIFFERENTIABLE_SCALARS:
            results = (getattr(out, name), value)
            actual, exact = (torch.autograd.grad(r.sum(), (hidden, weight), retain_graph=True) for r in results)
            torch.testing.assert_close(actual, exact)


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
