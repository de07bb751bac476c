"""`skip_ignored`: products of the rows that count alone; backward's blocks of tokens. Values: test_cases.py."""

import pytest
import torch

import megatron_lce
from tests.jsd_oracle import make_inputs
from tests.live_bytes import Products, parts_of_a_product
from tests.oracle import Upstream
from tests.problems import ignored_labels, ignoring, make_problem, wide_blocks_of

FP32, BF16 = torch.float32, torch.bfloat16
SOME = slice(0, None, 3)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_count_that_is_not_the_labels_makes_everything_nan(wrong, backend, device):
    problem = ignoring(make_problem(12, 8, 30, device), slice(0, 6))
    candidates = torch.full((12, 2), -1, device=device)
    result = problem.run(backend, skip_ignored=6 + wrong, telemetry=True, candidates=candidates)
    assert all(output.isnan().all() for name, output in result.outputs._asdict().items() if name != "argmax")
    assert (result.outputs.argmax == -1).all()
    assert result.grad_weight.isnan().any()
    inputs, labels = make_inputs(12, 8, 12, 30, device), ignored_labels(slice(0, 6), 12, device)
    for weighted in (False, True):
        divergence = inputs.run(backend, labels=labels, skip_ignored=6 + wrong, weighted=weighted)
        assert divergence.loss.isnan().all()
        assert divergence.grad_weight.isnan().any()


@pytest.mark.parametrize(
    ("dtype", "hidden_size", "logits_cache_bytes", "softcap"),
    [
        (FP32, 24, 0, None),
        (BF16, 24, 0, None),
        (BF16, 24, None, None),
        (BF16, 24, 2**30, 5.0),
        (BF16, 8, None, None),  # the logits of 36 rows are not kept, those of 20 would be
        (BF16, 24, 30_000, None),  # likewise
    ],
    ids=str,
)
def test_rows_without_an_upstream_gradient_take_no_part_in_backward(
    dtype, hidden_size, logits_cache_bytes, softcap, backend, device
):
    problem = ignoring(make_problem(40, hidden_size, 601, device, dtype), slice(0, 4))
    upstream = Upstream(*(grad.clone() for grad in problem.upstream[:-1]))
    for grad in upstream[:-1]:
        grad[::2] = 0.0
    upstream.entropy[6] = upstream.mean_logit[8] = 1.0  # one of them is enough
    problem = problem._replace(upstream=upstream)
    products = Products()
    only_here = {"skip_ignored": True, "logits_cache_bytes": logits_cache_bytes, "within": products}
    problem.check(backend, only_here=only_here, telemetry=True, softcap=softcap)
    parts = parts_of_a_product(dtype, backend, device)
    assert products.logits_in_gradients(hidden_size, parts) == 2 * 20 * 601


@pytest.mark.parametrize("weighted", [False, True])
def test_the_same_of_a_divergence(weighted, backend, device):
    """But for a broken row, which is NaN whatever its upstream gradient."""
    inputs, labels = make_inputs(40, 24, 16, 300, device, BF16), ignored_labels(slice(0, 4), 40, device)
    inputs.upstream[::2] = 0.0
    keywords = {"skip_ignored": True, "weighted": weighted, "within": (products := Products())}
    inputs.check(backend, labels=labels, only_here=keywords)
    assert products.logits_in_gradients(24) == 2 * 18 * 300
    if weighted:  # rows without a weight are ignored, whatever is in them
        return
    temperature = torch.ones(40, device=device)
    temperature[6] = 0.0
    products.shapes.clear()
    result = inputs.run(backend, labels=labels, temperature=temperature, **keywords)
    assert products.logits_in_gradients(24) == 2 * 19 * 300
    assert result.grad_hidden.isnan().any(dim=1).nonzero().flatten().tolist() == [6]


@pytest.mark.parametrize("skip", [True, 14, False])
def test_upstream_gradients_are_read_where_the_rows_are(skip, backend, device):
    """Of any strides, and in labels' shape: a sum's are one number, a transposed loss's lie the other way round."""
    problem = ignoring(make_problem((7, 3), 24, 70, device), SOME)
    drawn = torch.randn(3, 7, generator=torch.Generator().manual_seed(2)).to(device)
    found = []
    for strided in (True, False):
        hidden, weight = (tensor.clone().requires_grad_() for tensor in problem[:2])
        out = megatron_lce.linear_cross_entropy(hidden, weight, problem.labels, skip_ignored=skip, backend=backend)
        upstream = [drawn.T, torch.tensor(2.0, device=device).expand(7, 3)]
        if not strided:
            upstream = [grad.contiguous() for grad in upstream]
        found.append(torch.autograd.grad((out.logprobs, out.entropy), (hidden, weight), upstream))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][0].flatten(0, 1)[SOME].eq(0).all()


def test_outputs_are_tensors_of_their_own(backend, device):
    """A caller may change one in place: no other shares its memory, nor backward."""
    problem = ignoring(make_problem((7, 3), 24, 70, device), SOME)
    hidden = problem.hidden.clone().requires_grad_()
    out = megatron_lce.linear_cross_entropy(hidden, *problem[1:3], skip_ignored=True, telemetry=True, backend=backend)
    kept = [output.clone() for output in out[1:-1]]
    (expected,) = torch.autograd.grad(out.entropy.sum(), hidden, retain_graph=True)
    out.logprobs.mul_(3.0)
    assert all(torch.equal(one, other) for one, other in zip(out[1:-1], kept, strict=True))
    assert torch.equal(torch.autograd.grad(out.entropy.sum(), hidden)[0], expected)


def test_a_broken_row_stays_nan_without_an_upstream_gradient(backend, device):
    problem = make_problem(12, 8, 30, device)
    problem.labels[3] = 1000
    for grad in problem.upstream[:-1]:
        grad[::3] = 0.0
    result = problem.run(backend, skip_ignored=True)
    assert result.grad_hidden.isnan().any(dim=1).nonzero().flatten().tolist() == [3]


def test_no_gradient_at_all(backend, device):
    problem = make_problem(12, 8, 30, device)
    nothing = torch.zeros(12, device=device)
    problem = problem._replace(upstream=Upstream(nothing))
    inputs = make_inputs(12, 8, 12, 30, device)._replace(upstream=nothing)
    skipped = {"skip_ignored": True}
    for head, keywords in ((problem, skipped), (inputs, skipped), (inputs, {"weighted": True})):
        result = head.run(backend, **keywords)
        assert not result.grad_hidden.any()
        assert not result.grad_weight.any()


@pytest.mark.parametrize(
    ("dtype", "hidden_size", "skip", "logits_cache_bytes"),
    [(FP32, 24, False, 0), (BF16, 24, False, 0), (BF16, 13, False, 0), (BF16, 24, True, 2**30)],
    ids=str,
)
def test_blocks_of_tokens_outside(dtype, hidden_size, skip, logits_cache_bytes, backend, device):
    """Where the shard has fewer columns than there are tokens, the weight's gradient is what accumulates."""
    problem = ignoring(make_problem(300, hidden_size, 140, device, dtype), slice(0, None, 9))
    only_here = {"skip_ignored": skip, "logits_cache_bytes": logits_cache_bytes, "workspace_bytes": 140_000}
    with wide_blocks_of(16):
        problem.check(backend, only_here=only_here | {"within": (products := Products())})
    count, padded = 266 if skip else 300, -(-hidden_size // 8) * 8 if dtype == BF16 else hidden_size
    parts = parts_of_a_product(dtype, backend, device)
    assert products.logits_in_gradients(padded, parts) == 2 * count * 140
    assert max(size for m, k, n in products.shapes if n == padded for size in (m, k)) < count  # of tokens, at a time


@pytest.mark.parametrize("skip", [False, True, 3])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_hidden_state_that_is_not_finite_at_an_ignored_row(bad, skip, backend, device):
    """As the docstring says: outputs are 0; the weight's gradient multiplies 0 with it, unless the row is left out."""
    problem = ignoring(make_problem(4, 8, 20, device, BF16), slice(1, 2))
    problem.hidden[1] = bad
    result = problem.run(backend, skip_ignored=skip)
    assert result.outputs.logprobs[1] == 0
    assert bool(result.grad_weight.isnan().all()) == (skip is False)
    if skip:
        assert not result.grad_hidden[1].any()
