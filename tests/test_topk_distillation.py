"""`topk_divergence` against its definition, and with K as large as the vocabulary against `linear_jsd`'s oracle."""

import itertools

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
    p, q = t.exp(), leaf.exp()
    if tail == "bin":
        p, q = (torch.cat([one, 1 - one.sum(-1, keepdim=True)], -1) for one in (p, q))
    if tail == "renormalise":
        p, q = (one / one.sum(-1, keepdim=True) for one in (p, q))
    m = 0.3 * p + 0.7 * q
    exact = {
        "forward": (p * (p / q).log()).sum(-1),
        "reverse": (q * (q / p).log()).sum(-1),
        "jsd": (0.3 * p * (p / m).log() + 0.7 * q * (q / m).log()).sum(-1),
    }[kind]
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad.double(), torch.autograd.grad(exact.sum(), leaf)[0], rtol=1e-4, atol=1e-5)


def test_frameworks_definitions():
    """verl's forward_kl_topk, and ms-swift's renormalised reverse KL, as they write them over materialised logits."""
    ids = torch.arange(9).expand(6, -1)
    (student, s), (teacher, t) = logprobs_at(0, ids), logprobs_at(1, ids)
    verl = F.kl_div(student.log_softmax(-1).gather(1, ids), t, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(megatron_lce.topk_divergence(s.float(), t.float()), verl.float())
    one, other = (logits.gather(1, ids).log_softmax(-1) for logits in (student, teacher))
    swift = F.kl_div(other, one, reduction="none", log_target=True).sum(-1)
    found = megatron_lce.topk_divergence(s.float(), t.float(), "reverse", tail="renormalise")
    torch.testing.assert_close(found, swift.float())


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "kl"}, "kind must be 'forward', 'reverse' or 'jsd', got 'kl'"),
        ({"tail": ""}, "tail must be 'drop', 'bin' or 'renormalise', got ''"),
        ({"teacher_logprobs": torch.zeros(2, 4)}, "student_logprobs and teacher_logprobs must have one shape"),
    ],
)
def test_errors(changes, message):
    arguments = {"student_logprobs": torch.zeros(2, 3), "teacher_logprobs": torch.zeros(2, 3)}
    with pytest.raises(ValueError, match=message):
        megatron_lce.topk_divergence(**arguments | changes)
