"""`topk_divergence` against its definition, and with K as large as the vocabulary against `linear_jsd`'s oracle."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import megatron_lce
from tests.jsd_oracle import jsd_of_products

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
