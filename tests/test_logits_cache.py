"""Kept exponentials: 16-bit inputs on the triton backend."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_lce
from megatron_lce.core.lm_head import new_cache
from megatron_lce.core.plan import HeadSize, ScratchBytes
from tests.live_bytes import kept_bytes
from tests.oracle import Upstream, assert_within, comparisons, oracle, relative_error
from tests.problems import make_problem

pytest.importorskip("triton")
BF16, FP16 = torch.bfloat16, torch.float16
ALL = 100 * (640 * 2 + 5 * 4)  # of 100 tokens, 600 columns: 16-bit exponentials, the largest logit of each 128 columns


def kept_by_a_cache(problem, logits_cache_bytes=None, **keywords):
    """Bytes that a call keeps for backward beyond those of one without a cache."""
    inputs = problem.hidden, problem.weight.requires_grad_(), problem.labels
    call = functools.partial(megatron_lce.linear_cross_entropy, *inputs, backend="triton", **keywords)
    kept, without = (kept_bytes(functools.partial(call, logits_cache_bytes=size)) for size in (logits_cache_bytes, 0))
    return kept - without


@pytest.mark.parametrize(("logits_cache_bytes", "expected"), {1: 0, ALL - 1: 0, ALL: ALL, 2**30: ALL}.items())
def test_all_logits_are_kept_if_they_fit(logits_cache_bytes, expected, device):
    assert kept_by_a_cache(make_problem(100, 24, 600, device, BF16), logits_cache_bytes) == expected


def size_of(columns):
    """A head of 16 as the Triton backend plans it, by its columns."""
    return HeadSize(
        16,
        columns,
        2,
        stats_rows=2,
        scratch=ScratchBytes(128, caches=True),
        needs_weight_acc=True,
        shards_aligned=False,
    )


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**24))
def test_a_cache_takes_no_more_than_it_may(num_tokens, num_columns, logits_cache_bytes):
    hidden = torch.empty(0, dtype=BF16)
    size = size_of(num_columns)
    cache = new_cache(size, num_tokens, num_columns, hidden)
    taken = sum(tensor.untyped_storage().nbytes() for tensor in cache)
    assert size.fits_cache(num_tokens, logits_cache_bytes) == (taken <= logits_cache_bytes)


def test_what_lies_behind_a_row_is_zero(device):
    """Some products read it: torch's 16-bit one on a CPU with AMX, where NaN times nothing was NaN."""
    cache = new_cache(size_of(600), 100, 600, torch.empty(0, dtype=BF16, device=device))
    behind = cache.exp.as_strided((100, 40), (640, 1), 600)
    assert cache.exp.stride() == (640, 1)
    assert (behind == 0).all()


def test_a_cache_on_peaked_rows(device):
    """p(label) > 0.99: 1 - p must come from the exact logprob, not from a 16-bit exponential."""
    problem = make_problem(100, 32, 600, device, BF16, logit_std=1.0)
    problem.labels.fill_(5)
    problem.weight[:, 0] = 0.0
    problem.weight[5] = torch.nn.functional.one_hot(torch.tensor(0), 32)
    problem.hidden[:, 0] = torch.linspace(12.0, 15.0, 100)  # the label's logit
    problem = problem._replace(upstream=Upstream(problem.upstream.logprobs))
    result = problem.check("triton", only_here={"logits_cache_bytes": 2**30})
    p = result.outputs.logprobs.exp()
    assert (p > 0.98).all()
    assert (p < 0.9999).all()
    bf16_step = 2.0**-7
    assert relative_error(result.grad_weight[5], oracle(*problem).grad_weight[5]) <= bf16_step


@pytest.mark.parametrize(("softcap", "largest"), [(None, 18.0), (15.0, 48.0)])
def test_the_largest_logit_of_a_cache_is_exact(softcap, largest, device):
    """Where nearly all of p is another token's than the label's, the entropy's gradient is made of small log p, and
    near a softcap little of its slope is left: an exponential of 8 bits says neither.
    """
    problem = make_problem(30, 32, 300, device, BF16, logit_std=1.0)
    problem.weight[:31] = 4.0 * torch.eye(32)[1:]
    problem.hidden[range(30), range(1, 31)] = torch.linspace(0.9, 1.1, 30).to(problem.hidden) * (largest / 4.0)
    problem.labels[:] = 40
    entropy, lse = problem.upstream.entropy, problem.upstream.lse
    upstream = Upstream(entropy=entropy) if softcap is None else Upstream(lse=lse)
    problem = problem._replace(upstream=upstream)
    problem.check("triton", only_here={"logits_cache_bytes": 2**30}, softcap=softcap)


@pytest.mark.parametrize(
    "kind", ["no other", "large logits", "far below", "only the label", "no gradient", "ignored", "tiny", "huge", "NaN"]
)
def test_rows_of_a_cache(kind, device):
    """Every second row is of that kind; each half is within its budget by itself."""
    problem = make_problem(60, 32, 700, device, BF16, logit_std=1.5)
    problem.hidden[:, 0], problem.weight[:, 0] = 0.0, 1.0
    usual, others = slice(0, None, 2), slice(1, None, 2)
    logprobs, lse = problem.upstream.logprobs, problem.upstream.lse
    if kind == "large logits":
        problem.hidden[others] *= 30.0
    elif kind == "far below":
        problem.hidden[others, 0] = -100.0
    elif kind == "only the label":
        lse[others] = logprobs[others]
    elif kind in ("no gradient", "tiny", "huge"):
        for upstream in (logprobs, lse):
            upstream[others] *= {"no gradient": 0.0, "tiny": 2.0**-103, "huge": 2.0**118}[kind]
    elif kind in ("ignored", "NaN"):
        problem.labels[others] = {"ignored": -100, "NaN": 10_000}[kind]
    problem = problem._replace(upstream=Upstream(logprobs, lse=lse))
    actual = problem.run("triton", logits_cache_bytes=2**30, entropy=False)
    expected = oracle(*problem, entropy=False)
    for rows in (usual, others):
        part = actual._replace(grad_hidden=actual.grad_hidden[rows])
        assert_within(comparisons(part, expected, *problem, hidden_rows=rows, entropy=False))


def test_a_second_backward_recomputes_what_became_gradients(device):
    problem = make_problem(37, 24, 600, device, BF16)
    upstream = [problem.upstream.logprobs, problem.upstream.entropy]
    for skip in (False, True):
        hidden, weight = (tensor.clone().requires_grad_() for tensor in problem[:2])
        for grad in upstream:
            grad[::3] = 0.0
        keywords = {"skip_ignored": skip, "backend": "triton"}
        out = megatron_lce.linear_cross_entropy(hidden, weight, problem.labels, **keywords)
        pairs = (out.logprobs, out.entropy), (hidden, weight), upstream
        first, second, third = (torch.autograd.grad(*pairs, retain_graph=True) for _ in range(3))
        out = megatron_lce.linear_cross_entropy(hidden, weight, problem.labels, logits_cache_bytes=0, **keywords)
        without = torch.autograd.grad((out.logprobs, out.entropy), *pairs[1:])
        for kept, again, last, recomputed in zip(first, second, third, without, strict=True):
            assert not torch.equal(kept, recomputed)  # something was kept
            assert torch.equal(again, recomputed)
            assert torch.equal(last, recomputed)


@pytest.mark.parametrize(("tokens", "keeps"), [(96, True), (97, False)])
def test_by_default_all_logits_of_4_h_computed_tokens_are_kept(tokens, keeps, device):
    problem = make_problem(tokens + 8, 24, 600, device, BF16)
    problem.labels[:8] = -100
    assert kept_by_a_cache(problem, skip_ignored=True) == keeps * tokens * (640 * 2 + 5 * 4)


@pytest.mark.parametrize(
    ("temperature", "softcap", "keeps"),
    [
        (1.0, 30.0, True),
        (1.0, 8.0, True),
        (1.0, 0.5, False),
        (30.0, 0.5, False),
        (30.0, 239.0, False),
        ("each", 30.0, False),
    ],
)
def test_a_low_softcap_keeps_nothing(temperature, softcap, keeps, device):
    """Its gradients, and those that need no cache: test_cases.py."""
    problem = make_problem(60, 24, 600, device, BF16, logit_std=1.0)
    if temperature == "each":
        temperature = torch.ones(60, device=device)
    assert (kept_by_a_cache(problem, 2**30, temperature=temperature, softcap=softcap) > 0) == keeps
