"""`linear_topk`: ties, rows without a result, memory, values in test_cases.py; `topk_divergence` by its definition."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import megatron_lce
from tests.cases import on_a_grid
from tests.jsd_oracle import jsd_of_products
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
    row = megatron_lce.linear_topk(problem.hidden[0], problem.weight, 2, backend=backend)
    assert [part.shape for part in row] == [(2,), (2,), (), ()]


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


KINDS, TAILS = ("forward", "reverse", "jsd"), ("drop", "bin", "renormalise")


def logprobs_at(seed, ids):
    logits = torch.randn(6, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
    return logits, logits.log_softmax(-1).gather(1, ids)


def definition(kind, tail, p, q, beta):
    """In probabilities of teacher and student."""
    if tail == "bin":
        p, q = (torch.cat([one, 1 - one.sum(-1, keepdim=True)], -1) for one in (p, q))
    if tail == "renormalise":
        p, q = (one / one.sum(-1, keepdim=True) for one in (p, q))
    m = beta * p + (1 - beta) * q
    forward, reverse = (p * (p / q).log()).sum(-1), (q * (q / p).log()).sum(-1)
    jsd = (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1)
    return {"forward": forward, "reverse": reverse, "jsd": jsd}[kind]


@pytest.mark.parametrize(
    ("kind", "beta"), [("forward", 0.5), ("reverse", 0.5), ("jsd", 0), ("jsd", 0.0), ("jsd", 0.3), ("jsd", 1.0)]
)
def test_of_all_ids_is_the_divergence_of_the_distributions(kind, beta):
    ids = torch.arange(40).expand(6, -1)
    (student, s), (teacher, t) = logprobs_at(0, ids), logprobs_at(1, ids)
    exact = jsd_of_products(student, teacher, beta={"forward": 0.0, "reverse": 1.0}.get(kind, beta))
    for tail in TAILS:
        found = megatron_lce.topk_divergence(s.float(), t.float(), kind, tail=tail, beta=beta)
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


def check(kind, tail, student, teacher):
    """Value and gradient at logprobs [..., K], rounded to fp32, and two padded ids."""
    student, teacher = student.float().requires_grad_(), teacher.float()
    padded = F.pad(student, (0, 2)), F.pad(teacher, (0, 2), value=-torch.inf)
    found = megatron_lce.topk_divergence(*padded, kind, tail=tail, beta=0.3)
    (grad,) = torch.autograd.grad(found.sum(), student)
    leaf = student.detach().double().requires_grad_()
    exact = definition(kind, tail, teacher.double().exp(), leaf.exp(), 0.3)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), torch.autograd.grad(exact.sum(), leaf)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "tail"), list(itertools.product(KINDS, TAILS)))
def test_of_some_ids(kind, tail):
    ids = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(row))[:9] for row in range(6)])
    (_, student), (_, teacher) = logprobs_at(0, ids), logprobs_at(1, ids)
    check(kind, tail, student, teacher)


@pytest.mark.parametrize("gap", [8.0, 16.0, 20.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_small_tail_keeps_its_digits(kind, gap):
    student, teacher = torch.randn(2, 5, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    student[:, 0] += gap
    student, teacher = (logits.log_softmax(-1)[:, :4] for logits in (student, teacher))
    assert (1 - student.exp().sum(-1) < 400 * math.exp(-gap)).all()
    check(kind, "bin", student, teacher)


@pytest.mark.parametrize(("kind", "tail"), list(itertools.product(KINDS, TAILS)))
def test_an_id_that_the_student_forbids(kind, tail):
    """0 log 0 is 0, so that reverse KL and JSD are what they are of the least probability; forward KL is infinite."""
    ids = torch.arange(9).expand(6, -1)
    (_, student), (_, teacher) = logprobs_at(0, ids), logprobs_at(1, ids)
    never, hardly = (student.clone() for _ in range(2))
    never[:, 3], hardly[:, 3] = -torch.inf, -80.0
    results = []
    for logprobs in (never, hardly):
        leaf = logprobs.float().requires_grad_()
        found = megatron_lce.topk_divergence(leaf, teacher.float(), kind, tail=tail, beta=0.3)
        results.append((found.detach(), *torch.autograd.grad(found.sum(), leaf)))
    (value, grad), (of_hardly, grad_of_hardly) = results
    torch.testing.assert_close(value, torch.full_like(value, torch.inf) if kind == "forward" else of_hardly)
    torch.testing.assert_close(grad, grad_of_hardly, rtol=1e-6, atol=1e-12)
