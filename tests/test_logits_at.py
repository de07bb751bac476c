"""`linear_logits_at`: layouts of ids, bits, and rows without a result. Values: test_cases.py."""

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
