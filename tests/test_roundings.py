"""The budgets themselves: few numbers are within them whatever a processor rounds, and of many an error is found."""

import random

import pytest
import torch

from megatron_lce.core.divergence_types import KINDS
from tests.cases import BF16, FP16, FP32, Ranks, case
from tests.checks import check_case
from tests.findings import Asserted
from tests.jsd_oracle import JsdResult, evaluate_jsd, jsd_comparisons, make_inputs, materialised_jsd
from tests.oracle import Result, comparisons, oracle
from tests.problems import make_problem

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
