"""`candidates=` of `linear_cross_entropy` against fp64 on materialised logits; of a token loss: test_cases.py."""

import pytest
import torch

import megatron_lce
from tests.oracle import Upstream, oracle
from tests.problems import ignoring, make_problem

FP32, BF16 = torch.float32, torch.bfloat16
ALL = Upstream._fields


def with_candidates(problem, width, outputs=ALL, seed=3):
    """The problem with an upstream gradient of those outputs alone; and ids: labels, duplicates, padding, any."""
    generator = torch.Generator().manual_seed(seed)
    num_columns, shape = problem.weight.shape[0], (*problem.labels.shape, width)
    ids = torch.randint(num_columns, shape, generator=generator).to(problem.labels.device)
    ids[..., 0] = problem.labels
    ids[..., -1] = ids[..., width // 2]
    ids.view(-1)[4::7] = -1
    upstream = problem.upstream._replace(candidate_logprobs=torch.randn(shape, generator=generator).to(ids.device))
    upstream = Upstream(**{name: value if name in outputs else None for name, value in upstream._asdict().items()})
    return problem._replace(upstream=upstream), ids


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_where_one_token_takes_all_the_probability(dtype, backend, device):
    """A gradient of 1 - p, where p is near 1, keeps its digits though p itself has 16 bits."""
    problem, ids = with_candidates(make_problem(8, 64, 200, device, dtype, logit_std=6.0), 6, ("candidate_logprobs",))
    best = megatron_lce.linear_cross_entropy(*problem[:3], telemetry=True, backend=backend).argmax
    ids[:, 1] = best
    ids[:, 2:] = -1
    problem.check(backend, candidates=ids, telemetry=True)  # which tells the budget how large logits are


def test_a_mean_over_all_ids_is_the_same_as_the_dense_gradient(backend, device):
    """K as large as the vocabulary: sum of q log p, whose gradient is q - p."""
    problem = make_problem(4, 32, 50, device)
    ids = torch.arange(50, device=device).expand(4, -1)
    q = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).softmax(-1).to(device)
    problem = problem._replace(upstream=Upstream(candidate_logprobs=q))
    result = problem.check(backend, candidates=ids)
    total = result.outputs.candidate_logprobs.exp().sum(-1)
    assert torch.allclose(total, torch.ones_like(total), atol=1e-6)


def test_broken_rows_and_ids_of_nobody(backend, device):
    problem = make_problem(7, 24, 70, device)
    problem, ids = with_candidates(ignoring(problem._replace(labels=problem.labels % 61), slice(5, 6)), 4)
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
