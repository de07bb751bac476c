"""`linear_topk`: ties, rows without a result, memory. Values: test_cases.py."""

import pytest
import torch

import megatron_lce
from tests.cases import on_a_grid
from tests.live_bytes import peak_live_bytes
from tests.problems import make_problem

FP32, BF16 = torch.float32, torch.bfloat16


def test_ties_go_to_the_lowest_id(backend, device):
    """Values of three kinds, exact in any dtype, so that most are ties, in chunks and within one."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 3, (700, 8), generator=generator).to(device, BF16)
    hidden = torch.tensor([[1.0] + [0.0] * 7, [0.0] * 8, [-1.0, 1.0] + [0.0] * 6], device=device, dtype=BF16)
    logits = hidden.double() @ weight.double().T
    ids = logits.sort(dim=1, descending=True, stable=True).indices
    for k in (1, 4, 40, 250):
        assert torch.equal(megatron_lce.linear_topk(hidden, weight, k, backend=backend).ids, ids[:, :k])


def test_padding_and_broken_rows(backend, device):
    problem = make_problem(3, 16, 20, device)
    temperature = torch.tensor([1.0, 0.0, 2.0], device=device)
    hidden = problem.hidden.clone().requires_grad_()
    found = megatron_lce.linear_topk(hidden, problem.weight, 5, vocab_size=5, temperature=temperature, backend=backend)
    assert not any(part.requires_grad for part in found)
    assert found.ids[::2].sort(-1).values.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert (found.ids[1] == -1).all()
    assert found.logprobs[1].isnan().all()
    assert torch.allclose(found.mass[::2], torch.ones(2, device=device))
    nothing = megatron_lce.linear_topk(problem.hidden[:0], problem.weight, 2, backend=backend)
    assert [part.shape for part in nothing] == [(0, 2), (0, 2), (0,), (0,)]


@pytest.mark.parametrize("columns", [256, 300])
def test_rows_of_infinite_logits(columns, backend, device):
    """A row of -inf only has no distribution; beside finite logits -inf is a probability of 0; +inf is NaN."""
    hidden = torch.tensor([[-3e38], [-1e38], [1.0], [torch.inf]], device=device)
    weight = torch.full((columns, 1), 8.0, device=device)
    weight[[1, 7, 200]] = 2.0
    assert (hidden @ weight.T).isneginf().sum(1).tolist() == [columns, columns - 3, 0, 0]
    found = megatron_lce.linear_topk(hidden, weight, 4, backend=backend)
    assert found.ids.tolist() == [[-1] * 4, [1, 7, 200, 0], [0, 2, 3, 4], [-1] * 4]
    for part in (found.logprobs, found.lse[:, None], found.mass[:, None]):
        assert part.isnan().all(1).tolist() == [True, False, False, True]
    assert found.logprobs[1, :3].exp().tolist() == pytest.approx([1 / 3] * 3)
    assert found.logprobs[1, 3] == -torch.inf
    whole = megatron_lce.linear_cross_entropy(hidden, weight, found.ids[:, 0].clamp(min=0), backend=backend)
    torch.testing.assert_close(found.lse, whole.lse, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "hidden_size", "columns", "k", "workspace", "keywords"),
    [
        (FP32, 32, 20000, 1, 2**20, {}),
        (FP32, 32, 3000, 40, 2**20, {}),
        (BF16, 2048, 1500, 4, 2**21, {"logits_dtype": BF16}),  # where no product of 16 bits gives fp32, it takes copies
        (BF16, 16, 2000, 300, 2**21, {}),
    ],
)
def test_memory_stays_within_the_workspace(dtype, hidden_size, columns, k, workspace, keywords, backend, device):
    problem = make_problem(40, hidden_size, columns, device, dtype)
    heads = on_a_grid(problem.hidden, 31), on_a_grid(problem.weight, 127)  # of exact products, which all round alike
    keywords = {"workspace_bytes": workspace, "backend": backend, **keywords}
    peak, found = peak_live_bytes(lambda: megatron_lce.linear_topk(*heads, k, **keywords))
    per_token = 64 * problem.labels.numel()
    assert peak <= workspace + sum(part.nbytes for part in found) + per_token
    whole = megatron_lce.linear_topk(*heads, k, **keywords | {"workspace_bytes": 2**28})
    assert torch.equal(found.ids, whole.ids)
