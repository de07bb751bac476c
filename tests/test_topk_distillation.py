"""`topk_divergence` against its definition, and with K as large as the vocabulary against `linear_jsd`'s oracle."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import megatron_lce
from tests.jsd_oracle import jsd_of_products
from tests.problems import make_problem

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


@pytest.mark.parametrize(("kind", "beta"), [("forward", 0.5), ("reverse", 0.5), ("jsd", 0.3)])
def test_of_all_ids_is_the_divergence_of_the_distributions(kind, beta):
    ids = torch.arange(40).expand(6, -1)
    (student, s), (teacher, t) = logprobs_at(0, ids), logprobs_at(1, ids)
    exact = jsd_of_products(student, teacher, beta={"forward": 0.0, "reverse": 1.0, "jsd": beta}[kind])
    for tail in TAILS:
        found = megatron_lce.topk_divergence(s.float(), t.float(), kind, tail=tail, beta=beta)
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "tail"), list(itertools.product(KINDS, TAILS)))
def test_of_some_ids(kind, tail):
    ids = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(row))[:9] for row in range(6)])
    (_, s), (_, t) = logprobs_at(0, ids), logprobs_at(1, ids)
    s = s.float().requires_grad_()
    padded = F.pad(t.float(), (0, 2), value=-torch.inf)
    found = megatron_lce.topk_divergence(F.pad(s, (0, 2)), padded, kind, tail=tail, beta=0.3)
    (grad,) = torch.autograd.grad(found.sum(), s)
    leaf = s.detach().double().requires_grad_()
    exact = definition(kind, tail, t.exp(), leaf.exp(), 0.3)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad.double(), torch.autograd.grad(exact.sum(), leaf)[0], rtol=1e-4, atol=1e-5)


def test_jsd_at_its_ends_is_forward_and_reverse():
    ids = torch.arange(9).expand(6, -1)
    (_, s), (_, t) = logprobs_at(0, ids), logprobs_at(1, ids)
    for tail, (beta, kind) in itertools.product(TAILS, ((0, "forward"), (0.0, "forward"), (1.0, "reverse"))):
        student = s.float().requires_grad_()
        of_end, of_kind = (
            megatron_lce.topk_divergence(student, t.float(), name, tail=tail, beta=beta) for name in ("jsd", kind)
        )
        assert torch.equal(of_end, of_kind)
        assert of_end.all()
        grads = [torch.autograd.grad(loss.sum(), student, retain_graph=True)[0] for loss in (of_end, of_kind)]
        assert torch.equal(*grads)


@pytest.mark.parametrize("gap", [8.0, 16.0, 20.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_small_tail_keeps_its_digits(kind, gap):
    """Of logprobs that are exact but for their rounding to fp32."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 30, dtype=torch.float64, generator=generator)
    logits[:, 0] += gap
    leaf = logits.log_softmax(-1)[:, :4].float().requires_grad_()
    teacher = torch.randn(5, 30, dtype=torch.float64, generator=generator).log_softmax(-1)[:, :4].float()
    found = megatron_lce.topk_divergence(leaf, teacher, kind, tail="bin")
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    exact_leaf = leaf.detach().double().requires_grad_()
    q = exact_leaf.exp()
    exact = definition(kind, "bin", teacher.double().exp(), q, 0.5)
    assert (1 - q.sum(-1) < 400 * math.exp(-gap)).all()
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), torch.autograd.grad(exact.sum(), exact_leaf)[0], rtol=1e-5, atol=1e-6)


def test_distils_a_teachers_topk(backend, device):
    """A student with a head of its own comes to agree with the teacher on its K ids."""
    teacher, problem = (make_problem(12, 16, 60, device, seed=seed) for seed in (1, 2))
    top = megatron_lce.linear_topk(teacher.hidden, teacher.weight, 8, backend=backend)
    hidden, weight = (t.clone().requires_grad_() for t in problem[:2])
    optimizer, losses = torch.optim.Adam([hidden, weight], lr=0.05), []
    for _ in range(25):
        out = megatron_lce.linear_cross_entropy(
            hidden, weight, problem.labels, candidates=top.ids, entropy=False, backend=backend
        )
        loss = megatron_lce.topk_divergence(out.candidate_logprobs, top.logprobs, tail="bin").mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("tail", TAILS)
def test_ignored_tokens_of_the_recipe(tail, backend, device):
    """Masked, they count 0 and get no gradient; `linear_token_loss` leaves them out by itself."""
    teacher, problem = (make_problem(7, 16, 60, device, seed=seed) for seed in (1, 2))
    labels = problem.labels.clone()
    labels[2:4] = -100
    top = megatron_lce.linear_topk(teacher.hidden, teacher.weight, 8, backend=backend)
    hidden, weight = (t.clone().requires_grad_() for t in problem[:2])
    keywords = {"candidates": top.ids, "entropy": False, "backend": backend}
    out = megatron_lce.linear_cross_entropy(hidden, weight, labels, **keywords)
    loss = megatron_lce.topk_divergence(out.candidate_logprobs, top.logprobs, "reverse", tail=tail)
    loss = loss.masked_fill(labels == -100, 0.0)
    loss.sum().backward()
    assert not loss[2:4].any()
    assert not hidden.grad[2:4].any()
    known = megatron_lce.linear_token_loss(
        problem.hidden,
        problem.weight,
        labels,
        lambda out, teacher: megatron_lce.topk_divergence(out.candidate_logprobs, teacher, "reverse", tail=tail),
        top.logprobs,
        **keywords,
    )
    torch.testing.assert_close(known.loss, loss.detach().sum())
    rows = labels != -100
    keywords["candidates"] = top.ids[rows]
    out = megatron_lce.linear_cross_entropy(problem.hidden[rows], weight, labels[rows], **keywords)
    alone = megatron_lce.topk_divergence(out.candidate_logprobs, top.logprobs[rows], "reverse", tail=tail)
    torch.testing.assert_close(loss[rows], alone)
