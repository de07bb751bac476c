"""The oracle, against torch, and the budgets: few numbers are within them, of many an error is found."""

import random

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron_lce.core.divergence_types import KINDS
from megatron_lce.core.options import DIFFERENTIABLE_SCALARS
from tests.cases import BF16, FP16, FP32, Ranks, case
from tests.checks import check_case
from tests.findings import Asserted
from tests.jsd_oracle import JsdResult, evaluate_jsd, jsd_comparisons, make_inputs, materialised_jsd
from tests.oracle import Result, comparisons, oracle
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


OPERATIONS = ("linear_cross_entropy", "linear_token_loss", "linear_jsd", "linear_logits_at")


def small_case(operation: str, seed: int):
    """One token and a few columns, of which ranks may have one each."""
    draw = random.Random(seed)
    dtype, fp32_weight = draw.choice([(FP32, False), (BF16, False), (FP16, False), (BF16, True), (FP16, True)])
    words = {"temperature": draw.choice([1.0, 1.0, 0.3]), "logit_std": draw.choice([6**0.5, 1.0, 10.0])}
    if operation == "linear_jsd":
        kinds = tuple(kind for kind in KINDS if draw.random() < 0.4)
        words |= {"teacher_size": draw.randint(1, 8), "beta": draw.choice([0, 0.3, 1])} | (
            {"kinds": kinds} if kinds else {}
        )
    else:
        words |= {
            "fp32_weight": fp32_weight,
            "softcap": draw.choice([None, None, 5.0]),
            "candidates": draw.randint(1, 3),
        }
    sizes = {"shape": (1,), "hidden_size": draw.randint(1, 8), "shards": (draw.randint(1, 4),)}
    return case(f"seed {seed}", operation=operation, seed=seed, dtype=dtype, **sizes, **words)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(25, 500, 25))])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_few_numbers_are_within_their_budgets(operation, first, backend, device):
    """Of them eager may be right by luck."""
    for seed in range(first, first + 25):
        check_case(small_case(operation, seed), Ranks(backend, None, device), Asserted())


def beyond(found) -> list[str]:
    return [name for name, error, allowed in found if not error <= allowed]


def off(exact: torch.Tensor, dtype: torch.dtype, planted: float) -> torch.Tensor:
    """Rounded, and wrong by so much, norm over norm."""
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(3)).to(exact)
    return (exact + noise * (planted * exact.norm() / noise.norm())).to(dtype)


GRADIENTS = ("grad_hidden", "grad_weight")
PLANTED = [(FP32, 6e-6), (FP16, 1.2e-3), (BF16, 8e-3)]


@pytest.mark.parametrize(("dtype", "planted"), PLANTED, ids=str)
@pytest.mark.parametrize("name", ["nothing", "grad_hidden", "grad_weight"])
@pytest.mark.parametrize("operation", ["linear_cross_entropy", "linear_jsd"])
def test_an_error_of_many_numbers_is_found(operation, name, dtype, planted, device):
    wrong = dict.fromkeys(GRADIENTS, 0.0) | {name: planted}
    std = {"logit_std": 0.5}  # of larger logits a 16-bit rounding, as eager's, is more
    if operation == "linear_jsd":
        inputs = make_inputs(33, 24, 40, 130, device, dtype, **std)
        exact = evaluate_jsd(materialised_jsd, inputs.to(torch.float64))
        actual = JsdResult(
            exact.loss.float(), *(off(getattr(exact, of), dtype, wrong[of]) for of in JsdResult._fields[1:])
        )
        found = jsd_comparisons(actual, inputs)
    else:
        problem = make_problem(33, 24, 130, device, dtype, **std)
        exact = oracle(*problem)
        outputs = exact.outputs._make(None if output is None else output.float() for output in exact.outputs)
        actual = Result(outputs, *(off(getattr(exact, of), dtype, wrong[of]) for of in GRADIENTS))
        found = comparisons(actual, exact, *problem)
    assert beyond(found) == ([] if name == "nothing" else [name])


def test_an_error_of_an_output_is_found(device):
    problem = make_problem(33, 24, 130, device)
    exact = oracle(*problem, telemetry=True)
    for name in ("logprobs", "entropy", "lse", "max_logit", "min_logit", "sum_pi_squared", "logits_norm", "mean_logit"):
        outputs = exact.outputs._replace(**{name: getattr(exact.outputs, name) + 1e-4})
        assert beyond(comparisons(exact._replace(outputs=outputs), exact, *problem, telemetry=True)) == [name]
