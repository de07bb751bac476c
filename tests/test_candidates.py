"""`candidates=` of `linear_cross_entropy` against fp64 on materialised logits; of a token loss: test_cases.py."""

import pytest
import torch

import megatron_lce
from tests.oracle import Upstream, oracle
from tests.problems import ignoring, make_problem

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_where_one_token_takes_all_the_probability(dtype, backend, device):
    """A gradient of 1 - p, where p is near 1, keeps its digits though p itself has 16 bits."""
    problem = make_problem(8, 64, 200, device, dtype, logit_std=6.0)
    best = megatron_lce.linear_cross_entropy(*problem[:3], telemetry=True, backend=backend).argmax
    ids = torch.stack([problem.labels, best, torch.full_like(best, -1)], dim=-1)
    drawn = torch.randn(8, 3, generator=torch.Generator().manual_seed(3)).to(device)
    problem = problem._replace(upstream=Upstream(candidate_logprobs=drawn))
    problem.check(backend, candidates=ids, telemetry=True)  # which tells the budget how large logits are


def test_broken_rows_and_ids_of_nobody(backend, device):
    problem = make_problem(7, 24, 70, device)
    problem = ignoring(problem._replace(labels=problem.labels % 61), slice(5, 6))
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, 61, (7, 4), generator=generator).to(device)
    ids[:, 0] = problem.labels
    of_ids = torch.randn(7, 4, generator=generator).to(device)
    problem = problem._replace(upstream=problem.upstream._replace(candidate_logprobs=of_ids))
    problem.labels[4] = 66
    ids[2, 1] = 65
    temperature = torch.tensor([1.0, 0.0, 1.0, 2.0, 1.0, 1.0, 1.0], device=device)
    result = problem.run(backend, candidates=ids, vocab_size=61, temperature=temperature)
    expected = oracle(*problem, candidates=ids, vocab_size=61, temperature=temperature)
    logprobs, exact = result.outputs.candidate_logprobs, expected.outputs.candidate_logprobs
    assert torch.equal(logprobs.isnan(), exact.isnan())
    assert logprobs[[1, 4]].isnan().all()
    assert (logprobs[5] == 0).all()
    broken = result.grad_hidden.isnan()
    assert broken[[1, 2, 4]].all()
    assert not broken[5].any()
    assert torch.equal(broken, expected.grad_hidden.isnan())
