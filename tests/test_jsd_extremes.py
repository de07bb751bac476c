"""What `linear_jsd` makes of numbers that are not finite, underflow or agree; the bounds of its loss."""

import math

import pytest
import torch

from megatron_lce import linear_jsd
from tests.jsd_oracle import JsdInputs, evaluate_jsd, make_inputs, materialised_jsd
from tests.oracle import largest_error, relative_error
from tests.problems import BETAS

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("beta", BETAS)
def test_unusable_temperatures_make_their_rows_nan_and_no_other(beta, backend, device):
    inputs = make_inputs(8, 24, 16, 70, device)
    temperature = torch.ones(8, device=device)
    temperature[:4] = torch.tensor([0.0, -1.0, math.nan, math.inf])
    labels = torch.tensor([-100, 5, 5, 5, 5, 5, 5, 5], device=device)
    result = inputs.run(backend, beta=beta, temperature=temperature, labels=labels)
    assert result.loss.isnan().tolist() == [False, True, True, True, False, False, False, False]
    assert result.loss[0] == 0
    assert result.grad_hidden[1:4].isnan().all()
    assert not result.grad_hidden[[0, 4, 5, 6, 7]].isnan().any()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("argument", [0, 2], ids=JsdInputs._fields[:4:2])
def test_nan_in_a_tokens_hidden_makes_its_row_nan_and_no_other(argument, beta, backend, device):
    """Loss and gradients: a step that is skipped where a gradient is NaN must be skipped."""
    inputs = make_inputs(6, 8, 12, 20, device)
    clean = inputs.run(backend, beta=beta)
    inputs[argument][2, 1] = math.nan
    broken = inputs.run(backend, beta=beta)
    assert broken.loss[2].isnan()
    assert broken.grad_hidden[2].isnan().all()
    assert broken.grad_weight.isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(broken.loss[others], clean.loss[others])
    assert torch.equal(broken.grad_hidden[others], clean.grad_hidden[others])


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("argument", [1, 3], ids=JsdInputs._fields[1:4:2])
@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_not_finite_in_a_weight_makes_every_row_nan(weighted, argument, value, beta, backend, device):
    """One column of the logits; infinities of either sign, by the token's hidden."""
    inputs = make_inputs(6, 8, 12, 20, device)
    inputs[argument][2, 1] = value
    result = inputs.run(backend, weighted=weighted, beta=beta)
    for part in result:
        assert part.isnan().all()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_gradient_vanishes_where_student_equals_teacher(beta, dtype, backend, device):
    inputs = make_inputs(9, 24, 24, 130, device, dtype)
    typical = inputs.run(backend, beta=beta)
    equal = inputs._replace(teacher_hidden=inputs.student_hidden, teacher_weight=inputs.student_weight)
    result = equal.run(backend, beta=beta)
    assert result.loss.abs().max() <= 1e-6
    for name in ("grad_hidden", "grad_weight"):
        assert getattr(result, name).norm() <= 1e-5 * getattr(typical, name).norm(), name


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.1, 0.999, 1 - 1e-6])
def test_close_heads_keep_their_digits_wherever_beta_lies(beta, backend, device):
    """Loss and gradient are about min(beta, 1 - beta) and beta times what they are between: so are their errors."""
    near = make_inputs(8, 24, 24, 130, device)
    apart = 0.01
    near = near._replace(
        teacher_hidden=near.student_hidden + apart * near.teacher_hidden, teacher_weight=near.student_weight
    )
    actual = near.run(backend, beta=beta)
    expected = evaluate_jsd(materialised_jsd, near.to(torch.float64), beta=beta)
    eps = torch.finfo(FP32).eps
    assert largest_error(actual.loss, expected.loss) <= 4 * eps * min(beta, 1 - beta)  # of ratios near 1
    for name in ("grad_hidden", "grad_weight"):  # of logits up to 16
        assert relative_error(getattr(actual, name), getattr(expected, name)) <= 16 * eps / apart, name


@pytest.mark.parametrize("beta", [0, 0.1, 0.9, 1])
def test_probabilities_that_underflow_on_either_side(beta, backend, device):
    """Logits of +-1000: each head's mass is on columns that are impossible to the other, or on the same one."""
    inputs = make_inputs(16, 8, 8, 130, device, logit_std=300.0)
    same = inputs._replace(teacher_hidden=inputs.student_hidden * 2, teacher_weight=inputs.student_weight)
    for problem in (inputs, same):
        result = problem.check(backend, beta=beta)
        assert result.loss.isfinite().all()
        assert result.grad_hidden.isfinite().all()
        assert result.grad_weight.isfinite().all()


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_loss_stays_within_its_bounds(beta, backend, device):
    """Zero where the heads agree, the entropy of (beta, 1 - beta) where they have nothing in common."""
    apart = make_inputs(64, 8, 8, 128, device, logit_std=300.0)
    near = make_inputs(64, 8, 8, 128, device)
    near = near._replace(teacher_hidden=near.student_hidden * 1.0001, teacher_weight=near.student_weight)
    largest = torch.tensor(-beta * math.log(beta) - (1 - beta) * math.log(1 - beta))
    losses = torch.cat([linear_jsd(*i[:4], beta=beta, backend=backend) for i in (apart, near)])
    assert losses.min() >= 0
    assert losses.max() <= largest * (1 + 2 * torch.finfo(FP32).eps)
    assert losses.max() >= 0.999 * largest


@pytest.mark.parametrize("beta", BETAS)
def test_very_negative_logits(beta, backend, device):
    inputs = make_inputs(8, 8, 8, 70, device)
    for hidden, weight in (inputs[:2], inputs[2:4]):
        hidden[:, 0], weight[:, 0] = 100.0, -100.0
    inputs.check(backend, beta=beta)
