"""`linear_logits_at`, `support_logprobs`: layouts of ids; certain, ignored and broken rows. Values: test_cases.py."""

import pytest
import torch

import megatron_lce
from tests.problems import make_problem


def test_ids_of_nobody_and_rows_without_a_temperature_are_nan(backend, device):
    problem = make_problem(3, 16, 20, device)
    ids = torch.tensor([[3, 20], [25, 19], [4, -1]], device=device)
    temperature = torch.tensor([1.0, 1.0, 0.0], device=device)
    hidden = problem.hidden.clone().requires_grad_()
    logits = megatron_lce.linear_logits_at(
        hidden, problem.weight, ids, vocab_size=19, temperature=temperature, backend=backend
    )
    assert logits.isnan().tolist() == [[False, True], [True, True], [True, False]]
    logits[0, 0].backward()
    assert not hidden.grad[:2].isnan().any()
    offsets = torch.tensor([1, 2, 2, 3], device=device)
    of_csr = megatron_lce.linear_logits_at(problem.hidden, problem.weight, ids.view(-1), offsets, backend=backend)
    assert of_csr.isnan().tolist() == [True, True, True, True, True, False]


@pytest.mark.parametrize("ids", [[3, -1, 40], [-1, 0]])
def test_no_tokens_beside_ids_and_offsets(ids, backend, device):
    """All ids lie outside the offsets."""
    problem = make_problem(3, 16, 20, device)
    hidden, weight = problem.hidden[:0].clone().requires_grad_(), problem.weight.clone().requires_grad_()
    ids, offsets = torch.tensor(ids, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    logits = megatron_lce.linear_logits_at(hidden, weight, ids, offsets, backend=backend)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.isnan(), ids >= 0)
    assert (logits[ids < 0] == 0).all()
    logprobs = megatron_lce.support_logprobs(hidden, weight, ids[:0], ids, offsets, backend=backend)
    (logits.nansum() + logprobs.sum()).backward()
    assert hidden.grad.shape == (0, 16)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_a_softcaps_tanh(backend, device):
    """Relative to tanh, however small or large it is: a softcap multiplies its error by a large number."""
    x = torch.cat([torch.logspace(-8, 1, 400), torch.tensor([8.7, 8.8, 1e4, torch.inf])])
    x = torch.cat([x, -x]).to(device)
    one = torch.ones(1, 1, device=device)
    ids = torch.zeros(len(x), 1, dtype=torch.int64, device=device)
    found = megatron_lce.linear_logits_at(x[:, None], one, ids, softcap=1.0, backend=backend)[:, 0]
    assert float((found / x.double().tanh() - 1).abs().max()) <= 8 * torch.finfo(torch.float32).eps
    nan = megatron_lce.linear_logits_at(one * torch.nan, one, ids[:1], softcap=1.0, backend=backend)
    assert nan.isnan().all()


FP32, BF16 = torch.float32, torch.bfloat16


def test_the_entropy_beside_them_is_that_of_the_whole_vocabulary(backend, device):
    problem = make_problem((3, 2), 40, 90, device)
    temperature = torch.linspace(0.5, 2.0, 6, device=device).view(3, 2)
    keywords = {"temperature": temperature, "softcap": 3.0, "backend": backend}
    ids, offsets = torch.arange(24, device=device), torch.tensor([0, 1, 2, 9, 9, 20, 24], device=device)
    hidden = problem.hidden.clone().requires_grad_()
    logprobs, entropy = megatron_lce.support_logprobs(hidden, *problem[1:3], ids, offsets, entropy=True, **keywords)
    assert not logprobs.gt(0).any()
    assert torch.equal(entropy, megatron_lce.linear_cross_entropy(*problem[:3], **keywords).entropy)
    assert not entropy.requires_grad
    without = megatron_lce.support_logprobs(*problem[:3], ids[:0], torch.zeros_like(offsets), **keywords)
    assert torch.equal(without, megatron_lce.linear_cross_entropy(*problem[:3], **keywords).logprobs)


def test_one_id_is_exactly_certain_and_trains_nothing(backend, device):
    problem = make_problem(5, 24, 60, device, BF16)
    hidden, weight = (t.clone().requires_grad_() for t in problem[:2])
    ids = problem.labels.repeat_interleave(3)  # repeated ids count once
    offsets = torch.arange(6, device=device) * 3
    logprobs = megatron_lce.support_logprobs(hidden, weight, problem.labels, ids, offsets, backend=backend)
    logprobs.sum().backward()
    assert torch.equal(logprobs, torch.zeros_like(logprobs))
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_rows_that_are_ignored_or_broken(backend, device):
    problem = make_problem(5, 24, 60, device)
    labels = problem.labels.clone()
    labels[1], labels[3] = -100, 7
    ids = torch.tensor([labels[0], 3, 4, 8, 9, labels[2], 60, 1, 2], device=device)
    offsets = torch.tensor([0, 2, 3, 7, 9, 9], device=device)  # 3: outside its set; 2: an id of nobody; 4: no ids
    hidden, weight = (t.clone().requires_grad_() for t in problem[:2])
    keywords = {"backend": backend}
    logprobs = megatron_lce.support_logprobs(hidden, weight, labels, ids, offsets, **keywords)
    whole = megatron_lce.linear_cross_entropy(problem.hidden, problem.weight, labels, **keywords).logprobs
    assert logprobs.isnan().tolist() == [False, False, True, True, False]
    assert logprobs[1] == 0
    assert torch.allclose(logprobs[4], whole[4], atol=1e-6)
    logprobs.sum().backward()
    assert hidden.grad.isnan().any(1).tolist() == [False, False, True, True, False]
    assert (hidden.grad[1] == 0).all()
    certain = megatron_lce.support_logprobs(hidden, weight, labels, ids, offsets, empty_rows=False, **keywords)
    assert certain.isnan().tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_an_upstream_that_is_not_finite_at_rows_without_a_gradient(softcap, backend, device):
    """As the slope of `torch.where(ignored, 0, f(logprobs))` with an f that is infinite at 0."""
    problem = make_problem(4, 24, 60, device)
    labels = problem.labels.clone()
    labels[1] = -100
    problem.hidden[1] = torch.nan
    ids = torch.tensor([labels[0], 3, -1, 4, 5, labels[2], 6, labels[3]], device=device)
    offsets = torch.tensor([0, 3, 5, 7, 8], device=device)  # the last one's label is its only id
    grads = []
    for upstream in (0.0, torch.nan, torch.inf):
        hidden, weight = (t.clone().requires_grad_() for t in problem[:2])
        logprobs = megatron_lce.support_logprobs(hidden, weight, labels, ids, offsets, softcap=softcap, backend=backend)
        logprobs.backward(torch.tensor([1.0, upstream, -2.0, upstream], device=device))
        grads.append((hidden.grad, weight.grad))
    assert grads[0][0][0].any()
    for hidden_grad, weight_grad in grads[1:]:
        assert torch.equal(hidden_grad, grads[0][0])
        assert torch.equal(weight_grad, grads[0][1])


def test_infinite_logits_in_a_set(backend, device):
    """A label of logit -inf is NaN, as in `linear_cross_entropy`; another id of it changes nothing."""
    problem = make_problem(2, 8, 6, device)
    weight = problem.weight.clone()
    weight[5] = torch.tensor([-torch.inf] + [0.0] * 7)
    hidden = problem.hidden.abs().requires_grad_()
    labels = torch.tensor([5, 1], device=device)
    ids, offsets = torch.tensor([2, 5, 1, 5, 4], device=device), torch.tensor([0, 2, 5], device=device)
    logprobs = megatron_lce.support_logprobs(hidden, weight, labels, ids, offsets, backend=backend)
    alone = megatron_lce.support_logprobs(hidden[1:], weight, labels[1:], ids[[2, 4]], offsets[:2], backend=backend)
    assert logprobs.isnan().tolist() == [True, False]
    assert torch.equal(logprobs[1:], alone)
    logprobs.sum().backward()
    assert hidden.grad.isnan().any(1).tolist() == [True, False]
