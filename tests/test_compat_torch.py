"""torch's own call: the same results from the same arguments, and reasons where they cannot be had."""

import inspect
import math

import pytest
import torch

from megatron_lce import compat
from tests.problems import logits_of, make_problem, with_gradients

FP32, BF16 = torch.float32, torch.bfloat16
torch_lce = getattr(torch.nn.functional, "linear_cross_entropy", None)
needs_torch_lce = pytest.mark.skipif(torch_lce is None, reason="this torch has no linear_cross_entropy")


@needs_torch_lce
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("ignore_index", [-100, 3, None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(9,), ()], ids=str)
def test_equals_torch(shape, reduction, ignore_index, ignored, dtype, device):
    problem = make_problem(shape, 24, 31, device, dtype)
    target = torch.where(problem.labels == 3, 4, problem.labels)
    if ignored != "none":
        rows = slice(None) if ignored == "all" or not shape else slice(0, 4)
        target[(rows if shape else ...)] = -100 if ignore_index is None else ignore_index
    keywords = {"reduction": reduction, "ignore_index": ignore_index}
    results = []
    for function in (compat.torch_linear_cross_entropy, torch_lce):
        hidden, weight = (t.detach().clone().requires_grad_() for t in problem[:2])
        loss = function(hidden, weight, target, **keywords)
        loss.backward(torch.ones_like(loss) * 1.5)
        results.append((loss.detach(), hidden.grad, weight.grad))
    actual, expected = results
    assert actual[0].dtype == expected[0].dtype == dtype
    # torch's own logits and gradients of them are rounded to the inputs' dtype; ours are not
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == FP32 else {"rtol": 4e-2, "atol": 4e-2}
    torch.testing.assert_close(actual[0], expected[0], equal_nan=True, **tolerance)
    if not expected[0].isnan().any():
        torch.testing.assert_close(actual[1:], expected[1:], **tolerance)


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("smoothing", "weighted"), [(0.0, False), (0.0, True), (0.1, False), (1.0, False)])
def test_class_weights_and_label_smoothing(smoothing, weighted, reduction, ignored, device):
    problem = make_problem(19, 24, 31, device)
    target = problem.labels.clone()
    if ignored:
        target[::3] = -100
    weight = torch.rand(31, generator=torch.Generator().manual_seed(1)).to(device) if weighted else None
    keywords = {"reduction": reduction, "label_smoothing": smoothing}

    def ours(hidden, head):
        return compat.torch_linear_cross_entropy(hidden, head, target, weight=weight, **keywords)

    def exact(hidden, head):
        of_classes = None if weight is None else weight.double()
        return torch.nn.functional.cross_entropy(hidden @ head.T, target, weight=of_classes, **keywords)

    actual, expected = with_gradients(problem, ours), with_gradients(problem, exact, torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_mean_in_bf16_is_rounded_once(label_smoothing, device):
    problem = make_problem(9, 24, 31, device, BF16)
    exact = torch.nn.functional.cross_entropy(logits_of(problem), problem.labels, label_smoothing=label_smoothing)
    assert compat.torch_linear_cross_entropy(*problem[:3], label_smoothing=label_smoothing) == exact.to(BF16)


@needs_torch_lce
def test_every_keyword_of_torch_is_known():
    ours = inspect.signature(compat.torch_linear_cross_entropy).parameters
    assert set(inspect.signature(torch_lce).parameters) <= set(ours)


@pytest.mark.parametrize("skip_ignored", [True, 5])
def test_label_smoothing_takes_nothing_of_a_row_that_is_skipped(skip_ignored, device):
    problem = make_problem(7, 24, 70, device)
    problem.labels[[2, 6]] = -100

    def gradients(value):
        hidden, weight = (tensor.detach().clone() for tensor in problem[:2])
        hidden[2] = value
        inputs = hidden.requires_grad_(), weight.requires_grad_()
        loss = compat.torch_linear_cross_entropy(
            *inputs, problem.labels, label_smoothing=0.1, skip_ignored=skip_ignored
        )
        return torch.autograd.grad(loss, inputs)

    for actual, expected in zip(gradients(math.nan), gradients(0.0), strict=True):
        assert torch.equal(actual, expected)
