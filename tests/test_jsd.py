"""`linear_jsd`: its graph, its bounds, known weights, and numbers that are not finite. Values: test_cases.py."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron_lce import linear_divergence, linear_jsd
from megatron_lce.core import two_heads
from megatron_lce.core.divergence_types import KINDS
from tests.jsd_oracle import (
    JsdInputs,
    divergences_of_products,
    evaluate_jsd,
    jsd_comparisons,
    log_probabilities,
    make_inputs,
    materialised_jsd,
    weighted_jsd,
)
from tests.live_bytes import Products
from tests.oracle import assert_within, largest_error, relative_error
from tests.problems import BETAS, workspace_of

FP32, BF16 = torch.float32, torch.bfloat16


def test_oracle_is_the_definition():
    """The materialised form against torch's own KL divergence, so that the oracle is not this project's word alone."""
    inputs = make_inputs(9, 8, 12, 50, torch.device("cpu")).to(torch.float64)
    p_s, p_t = ((hidden @ weight.T / 2).softmax(-1) for hidden, weight in (inputs[:2], inputs[2:4]))
    m = 0.3 * p_t + 0.7 * p_s

    def kl(p, q):
        return F.kl_div(q.log(), p, reduction="none").sum(-1)

    for beta, expected in ((0.3, 0.3 * kl(p_t, m) + 0.7 * kl(p_s, m)), (0, kl(p_t, p_s)), (1, kl(p_s, p_t))):
        torch.testing.assert_close(materialised_jsd(*inputs[:4], beta=beta, temperature=2.0), expected)


def test_teacher_gets_no_gradient(backend, device):
    inputs = JsdInputs(*(t.requires_grad_() for t in make_inputs(5, 8, 12, 20, device)[:4]), None)
    linear_jsd(*inputs[:4], backend=backend).sum().backward()
    assert [tensor.grad is None for tensor in inputs[:4]] == [False, False, True, True]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_teacher_that_ran_in_inference_mode(weighted, backend, device):
    inputs = make_inputs(5, 8, 12, 20, device)
    with torch.inference_mode():
        teacher = inputs._replace(teacher_hidden=inputs.teacher_hidden + 0, teacher_weight=inputs.teacher_weight + 0)
    expected = inputs.run(backend, weighted=weighted)

    def overwritten(*heads, **keywords):
        """An engine's buffers hold the next pass before backward."""
        loss = weighted_jsd(*heads, **keywords)
        with torch.inference_mode():
            for tensor in heads[2:4]:
                tensor.zero_()
        return loss

    actual = evaluate_jsd(overwritten, teacher, weighted=weighted, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_a_large_problem_matches_the_oracle(beta, dtypes, backend, device):
    """Many tiles, and blocks of tokens; H and V odd."""
    make_inputs(1000, 513, 770, 20011, device, *dtypes).check(backend, beta=beta)


# Weighted by `linear_divergence_loss`: a scalar whose gradients are made in forward.


@pytest.mark.parametrize("beta", BETAS)
def test_gradients_are_as_small_as_the_weights(beta, backend, device):
    """To the last bit: what rounding leaves of a number that should be nothing is not, beside a small gradient."""
    inputs = make_inputs(20, 8, 16, 1300, device)  # columns of several programs
    whole = inputs.check(backend, only_here={"weighted": True}, beta=beta)
    tiny = inputs._replace(upstream=inputs.upstream * 2.0**-30).run(backend, weighted=True, beta=beta)
    assert torch.equal(tiny.grad_hidden * 2.0**30, whole.grad_hidden)
    assert torch.equal(tiny.grad_weight * 2.0**30, whole.grad_weight)


def test_known_weights_need_each_heads_logits_once(backend, device):
    """In blocks whose gradients are collected: products that sum over tokens are of more of them than logits are."""
    inputs = make_inputs(400, 8, 16, 60, device, BF16)
    with Products() as products:
        inputs.run(backend, weighted=True, workspace_bytes=workspace_of(200, inputs, backend))
    for size in (8, 16):
        computed = [(rows, width) for rows, inner, width in products.shapes if inner == size]
        assert sum(rows * width for rows, width in computed) == 400 * 60
        assert max(rows for rows, _ in computed) <= 256


def test_an_ignored_token_of_a_loss_is_left_out(backend, device):
    """Whatever is in it."""
    inputs = make_inputs(12, 8, 12, 30, device)
    inputs.upstream[:5] = 0.0
    clean = inputs._replace(student_hidden=inputs.student_hidden.clone())
    inputs.student_hidden[2] = math.nan
    for skip in (True, 7):
        result = inputs.run(backend, weighted=True, skip_ignored=skip)
        assert not result.grad_hidden[:5].any()
        assert_within(jsd_comparisons(result, clean))


def test_backward_scales_what_forward_made_once(backend, device):
    inputs = make_inputs(9, 24, 16, 70, device)
    once, scaled = inputs.run(backend, weighted=True), inputs.run(backend, weighted=True, factor=-0.25)
    assert torch.equal(scaled.grad_hidden, once.grad_hidden * -0.25)
    assert torch.equal(scaled.grad_weight, once.grad_weight * -0.25)
    tensors = [t.clone() for t in inputs[:4]]
    tensors[1].requires_grad_()
    loss = weighted_jsd(*tensors, weights=inputs.upstream, backend=backend)
    loss.backward(retain_graph=True)
    assert torch.equal(tensors[1].grad, once.grad_weight)
    with pytest.raises(RuntimeError, match="a second backward through linear_divergence_loss is not possible"):
        loss.backward()


# Numbers that are not finite, underflow or agree; the bounds of the loss.


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
@pytest.mark.parametrize("kind", [*({"beta": beta} for beta in BETAS), {"kinds": ("tv",)}], ids=str)
def test_gradient_vanishes_where_student_equals_teacher(kind, dtype, backend, device):
    inputs = make_inputs(9, 24, 24, 130, device, dtype)
    typical = inputs.run(backend, **kind)
    equal = inputs._replace(teacher_hidden=inputs.student_hidden, teacher_weight=inputs.student_weight)
    result = equal.run(backend, **kind)
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


@pytest.mark.parametrize("apart", [1e-2, 1e-4, 1e-6])
def test_a_small_total_variation_keeps_its_digits(apart, backend, device):
    """Its error is that of two sums of exponentials; one minus a sum of minima has three times as much."""
    products = torch.randn(2, 1300, 12, generator=torch.Generator().manual_seed(3)).to(device) * 2
    products[1] = products[0] + apart * products[1]
    one = torch.eye(12, device=device)
    found = linear_divergence(one, products[0], one, products[1], kinds=("tv",), backend=backend).tv
    exact = divergences_of_products(*products.double().mT)["tv"]
    assert 0.1 * apart < exact[0] < apart
    assert largest_error(found, exact) <= torch.finfo(FP32).eps * (1 + apart)


def test_divergences_without_an_upstream_gradient_have_no_part_in_it(backend, device):
    inputs, found = make_inputs(9, 24, 40, 130, device), []
    for kinds in (KINDS, ("tv",)):
        hidden = inputs.student_hidden.clone().requires_grad_()
        linear_divergence(hidden, *inputs[1:4], kinds=kinds, backend=backend).tv.backward(inputs.upstream)
        found.append(hidden.grad)
    torch.testing.assert_close(*found)


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


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["small workspace", "few rows", "summed"])
def test_last_bits_of_recomputed_products_do_not_turn_tvs_gradient(way, dtype, backend, device, monkeypatch):
    """Where the student is sure it is 4 (1 - p) at most, however close the heads are; a flipped sign would add 2."""
    near = make_inputs(300, 32, 32, 600, device, logit_std=32**0.5)
    hidden = near.student_weight.repeat(2, 1)[:300] * torch.linspace(0.4, 1.2, 300, device=device)[:, None]
    student = hidden + 0.05 * near.student_hidden, near.student_weight
    teacher = (x + 0.01 * y for x, y in zip(student, near[2:4], strict=True))
    inputs = JsdInputs(*student, *teacher, torch.ones(300, device=device)).to(dtype)
    products, calls = two_heads._raw_logits, []

    def with_other_last_bits(*arguments):
        logits = products(*arguments)
        calls.append(logits.shape)
        signs = 1 - 2 * torch.randint(2, logits.shape, generator=torch.Generator().manual_seed(len(calls)))
        return logits.mul_(1 + 2.0**-22 * signs.to(device))

    monkeypatch.setattr(two_heads, "_raw_logits", with_other_last_bits)
    if way == "few rows":
        inputs.upstream[torch.arange(300) % 20 != 0] = 0.0
    keywords = {"workspace_bytes": workspace_of(40, inputs, backend), "skip_ignored": way == "few rows"}
    actual = inputs.run(backend, kinds=("tv",), weighted=way == "summed", **keywords)
    assert sum(rows * columns for _, rows, columns in calls) >= 600 * (315 if way == "few rows" else 600)  # recomputed
    expected = evaluate_jsd(materialised_jsd, inputs.to(torch.float64), kinds=("tv",))
    heads = inputs.to(torch.float64)
    log_s, log_t, _ = log_probabilities(heads[0] @ heads[1].T, heads[2] @ heads[3].T)
    p, likeliest = log_s.exp().max(dim=1)
    is_clear = (log_t - log_s).gather(1, likeliest[:, None])[:, 0].abs() > 2e-5
    largest = heads.student_weight.norm(dim=1).max()
    allowed = torch.where(is_clear, 0.02 * expected.grad_hidden.norm(dim=1), 4 * (1 - p) * largest) + 1e-5 * largest
    assert ((actual.grad_hidden - expected.grad_hidden).norm(dim=1) <= allowed).all()
