"""`linear_jsd` with `token_weights`: a scalar whose gradients are made in forward."""

import math

import pytest
import torch

from megatron_lce import linear_jsd
from tests.jsd_oracle import evaluate_weighted_jsd
from tests.jsd_problems import BETAS, BF16, FP32, Products, check, ignoring, make_inputs, workspace_of


@pytest.mark.parametrize(
    ("dtypes", "beta", "tokens", "keywords"),
    [
        ((FP32, FP32), 0.5, 300, {}),
        ((BF16, BF16), 0.5, 140, {"student_softcap": 3.0}),  # blocks of 128 and less
        ((BF16, FP32), 0, 140, {"vocab_size": 70}),
        ((BF16, BF16), 0, 300, {"student_softcap": 3.0}),
        ((BF16, BF16), 1, 300, {"student_logits_scale": 0.7}),
        ((FP32, BF16), 0.5, 40, {}),  # too few for what is kept
    ],
    ids=str,
)
def test_known_weights_give_the_gradients_of_the_weighted_sum(dtypes, beta, tokens, keywords, backend, device):
    inputs = make_inputs((75, 2), 24, 16, 90, device, *dtypes)
    inputs.upstream[::3] = 0.0
    labels = ignoring(slice(0, None, 7), (75, 2), device)
    temperature = torch.linspace(0.5, 4.0, 150, device=device).view(75, 2)
    for skip in (False, True) if tokens == 140 else (False,):
        only_here = {"workspace_bytes": workspace_of(tokens, inputs, backend), "skip_ignored": skip}
        keywords = {**keywords, "beta": beta, "labels": labels, "temperature": temperature}
        result = check(backend, inputs, only_here=only_here, evaluate=evaluate_weighted_jsd, **keywords)
        assert result.loss.shape == ()
        assert result.loss.dtype == FP32
        assert (result.grad_hidden[(labels == -100) | (inputs.upstream == 0)] == 0).all()


@pytest.mark.parametrize("beta", BETAS)
def test_gradients_are_as_small_as_the_weights(beta, backend, device):
    """To the last bit: what rounding leaves of a number that should be nothing is not, beside a small gradient."""
    inputs = make_inputs(20, 8, 16, 1300, device)  # columns of several programs
    whole = check(backend, inputs, evaluate=evaluate_weighted_jsd, beta=beta)
    small = inputs._replace(upstream=inputs.upstream * 2.0**-30)
    tiny = evaluate_weighted_jsd(linear_jsd, small, beta=beta, backend=backend)
    assert torch.equal(tiny.grad_hidden * 2.0**30, whole.grad_hidden)
    assert torch.equal(tiny.grad_weight * 2.0**30, whole.grad_weight)


def test_known_weights_need_each_heads_logits_once(backend, device):
    """In blocks whose gradients are collected: products that sum over tokens are of more of them than logits are."""
    inputs = make_inputs(400, 8, 16, 60, device, BF16)
    with Products(8, 16) as products:
        evaluate_weighted_jsd(linear_jsd, inputs, workspace_bytes=workspace_of(200, inputs, backend), backend=backend)
    for computed in products.shapes.values():
        assert sum(rows * width for rows, width in computed) == 400 * 60
        assert max(rows for rows, _ in computed) <= 256


def test_a_token_of_weight_zero_is_ignored(backend, device):
    """Whatever is in it; and `skip_ignored=True` leaves it out."""
    inputs = make_inputs(12, 8, 12, 30, device)
    inputs.upstream[:5] = 0.0
    clean = evaluate_weighted_jsd(linear_jsd, inputs, backend=backend)
    inputs.student_hidden[2] = math.nan
    for skip in (True, 12):
        result = evaluate_weighted_jsd(linear_jsd, inputs, skip_ignored=skip, backend=backend)
        torch.testing.assert_close(result.loss, clean.loss)
        assert not result.grad_hidden[:5].any()
        if skip is True:  # a CPU's library may take another order of sums for seven rows than for twelve
            torch.testing.assert_close(result.grad_weight, clean.grad_weight, rtol=1e-6, atol=1e-7)


def test_what_is_not_finite_makes_the_weighted_sum_nan(backend, device):
    inputs = make_inputs(12, 8, 12, 30, device)
    inputs.teacher_hidden[2, 1] = math.nan
    result = evaluate_weighted_jsd(linear_jsd, inputs, backend=backend)
    assert result.loss.isnan()
    assert result.grad_hidden.isnan().any(dim=1).nonzero().flatten().tolist() == [2]
    miscounted = evaluate_weighted_jsd(linear_jsd, make_inputs(12, 8, 12, 30, device), skip_ignored=0, backend=backend)
    assert miscounted.loss.isnan()


@pytest.mark.parametrize("shape", [(0, 3), 5])
def test_known_weights_where_nothing_counts(shape, backend, device):
    inputs = make_inputs(shape, 8, 12, 30, device)
    result = evaluate_weighted_jsd(linear_jsd, inputs._replace(upstream=inputs.upstream * 0), backend=backend)
    assert result.loss == 0
    assert not result.grad_weight.any()


def test_backward_scales_what_forward_made_once(backend, device):
    inputs = make_inputs(9, 24, 16, 70, device)
    once = evaluate_weighted_jsd(linear_jsd, inputs, backend=backend)
    scaled = evaluate_weighted_jsd(linear_jsd, inputs, upstream=-0.25, backend=backend)
    assert torch.equal(scaled.grad_hidden, once.grad_hidden * -0.25)
    assert torch.equal(scaled.grad_weight, once.grad_weight * -0.25)
    tensors = [t.clone() for t in inputs[:4]]
    tensors[1].requires_grad_()
    loss = linear_jsd(*tensors, token_weights=inputs.upstream, backend=backend)
    with pytest.raises(RuntimeError, match="linear_jsd has no double backward"):
        torch.autograd.grad(loss, tensors[1], create_graph=True)
    loss.backward(retain_graph=True)
    assert torch.equal(tensors[1].grad, once.grad_weight)
    with pytest.raises(RuntimeError, match="a second backward through linear_jsd is not possible"):
        loss.backward()
    with torch.no_grad():
        alone = linear_jsd(*tensors, token_weights=inputs.upstream, backend=backend)
    torch.testing.assert_close(alone, loss.detach())
