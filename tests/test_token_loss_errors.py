"""What `linear_token_loss` refuses: losses that are not of each token for itself, and wrong arguments."""

import contextlib
import functools

import pytest
import torch

import megatron_lce
from tests.problems import make_problem
from tests.test_token_loss import KEPT_BYTES, run

FP32, BF16 = torch.float32, torch.bfloat16


def centred(out, scale=1.0):
    return scale * (out.logprobs.detach().mean() - out.logprobs)


class OfClass:
    def __init__(self, loss):
        self.loss = loss

    def __call__(self, out):
        return self.loss(out)


def decorated(loss):
    @functools.wraps(loss)
    def wrapper(out):
        return loss(out)

    return wrapper


WRAPPED = {
    "factory": lambda loss: lambda out: loss(out),
    "decorator": decorated,
    "class": OfClass,
    "partial": lambda loss: functools.partial(decorated(loss)),
    "torch.compile": functools.partial(torch.compile, backend="eager"),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_loss_that_depends_on_other_tokens_is_refused_beside_one_under_the_same_wrapper(wrapped, device):
    problem = make_problem(6, 8, 40, device, FP32)
    for _ in range(2):
        assert run(problem, WRAPPED[wrapped](lambda out: -out.logprobs), ())[0].loss.isfinite()
        with pytest.raises(ValueError, match="loss must treat each token for itself"):
            run(problem, WRAPPED[wrapped](centred), ())


def test_a_loss_runs_again_until_its_code_has_passed_once(device):
    calls = []

    def loss(out):
        calls.append(len(out.logprobs))
        return centred(out) if wrong else -out.logprobs

    problem = make_problem(6, 8, 40, device, FP32)
    for wrong, expected in ((True, 3), (True, 3), (False, 3), (False, 1)):
        calls.clear()
        with pytest.raises(ValueError, match="treat each token") if wrong else contextlib.nullcontext():
            run(problem, loss, ())
        assert len(calls) == expected


def masked(out, mask):
    """Of the tokens in the mask, relative to the best of them."""
    best = torch.where(mask, out.logprobs.detach(), -torch.inf).max()
    return torch.where(mask, best - out.logprobs, 0.0)


BY_CHANCE = {  # of these tokens half have the mean of all to 5.2e-5, and a part has the largest and the smallest value
    "mean": lambda out, _: -out.logprobs / out.logprobs.detach().mean(),
    "largest": lambda out, _: out.logprobs.detach().max() - out.logprobs,
    "smallest": lambda out, _: out.logprobs.detach().min() - out.logprobs,
    "small": lambda out, _: 1e-6 * centred(out),
    "number": lambda out, _: -out.logprobs / out.logprobs.numel(),
    "of a few": masked,
    "factors": lambda out, factors: -out.logprobs * factors / factors.mean(),
}


@pytest.mark.parametrize("name", BY_CHANCE)
@pytest.mark.parametrize("seed", [65, 316, 1450])
def test_no_token_agrees_by_chance(name, seed, device):
    problem = make_problem(40, 8, 40, device, FP32, seed=seed)
    factors = torch.linspace(0.5, 1.5, 40, device=device)
    if name == "of a few":
        problem.labels[4:] = -100
        factors = problem.labels != -100
    with pytest.raises(ValueError, match="loss must treat each token for itself"):
        run(problem, BY_CHANCE[name], (factors,))


def test_rounding_is_taken_for_no_other_token(device):
    """What is left of 1 after cancellation, and what runs in another place of a shorter tensor."""
    problem = make_problem(4099, 8, 40, device, FP32)
    old = megatron_lce.linear_cross_entropy(*problem[:3]).logprobs
    old = old + 1e-5 * torch.linspace(-1, 1, 4099, device=device).sin()

    def loss(out, old, counted):
        difference = old - out.logprobs
        k3 = difference.exp() - difference - 1
        some = (out.logprobs[counted] - old[counted]).exp() - 1
        return k3 + torch.zeros_like(k3).masked_scatter(counted, some)

    result, _ = run(problem, loss, (old, problem.labels % 3 == 0))
    assert result.loss.isfinite()


@pytest.mark.parametrize("shape", [(2, 50), (50, 2), (12, 10), (10, 12)], ids=str)
def test_a_loss_of_sequences_is_refused_in_either_order(shape, device):
    """No part of the tokens that is looked at holds whole sequences."""
    problem = make_problem(shape, 8, 40, device, FP32)
    sequences = min(shape) if 2 in shape else 12
    ids = torch.arange(sequences, device=device).view([sequences if n == sequences else 1 for n in shape])

    def of_sequences(out, ids):
        sums = torch.zeros(sequences, device=device).index_add(0, ids, out.logprobs.detach())
        return -out.logprobs * (sums / ids.bincount(minlength=sequences))[ids]

    with pytest.raises(ValueError, match="loss must treat each token for itself"):
        run(problem, of_sequences, (ids.expand(shape),))


leaf = torch.ones((), requires_grad=True)
WITHOUT_GRAPH = (lambda out: out.logprobs.detach(), ValueError, "without a graph")
OF_OTHERS = (
    lambda out: out.logprobs * leaf.to(out.logprobs.device),
    ValueError,
    "must not depend on other tensors that require grad",
)
WRONG = [
    WITHOUT_GRAPH,
    OF_OTHERS,
    (lambda out: out.logprobs.sum(), ValueError, r"one number for each of its 5 tokens, \[n\], got \(\)"),
    (lambda out: out.logprobs.double(), TypeError, "float32, got torch.float64"),
    (lambda out: 1.0, TypeError, "must return a tensor"),
    (lambda out: (out.logprobs, {}, 1), TypeError, "or a pair of it and a dict, got a tuple of 3"),
    (lambda out: (out.logprobs, [1]), TypeError, "dict of metrics"),
    (lambda out: (out.logprobs, {"m": out.logprobs.mean()}), ValueError, r"metric 'm' .* got Tensor of shape \(\)"),
]


@pytest.mark.parametrize(("loss", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_what_loss_must_return(loss, error, message, device):
    problem = make_problem(5, 8, 20, device)
    with pytest.raises(error, match=message):
        run(problem, loss, ())


BEHIND = "pass a tensor per token behind the loss, as per_token, which gets its part"
HINTS = [  # of Python's and torch's errors
    (lambda out: -out.entropy, TypeError, r"'NoneType'\noutputs .* not asked for are None: entropy, max_logit, "),
    (lambda out: -out.max_logit.float(), AttributeError, r"'float'\noutputs .* not asked for are None: entropy, max"),
    (lambda out: -out.logprobs * out.logprobs.new_ones(2, 3), RuntimeError, rf"must match.*\n.*: {BEHIND}"),
    (lambda out: -out.logprobs[out.logprobs.new_ones(2, 3) > 0], IndexError, rf"\n.*: {BEHIND}"),
    (lambda out: -out.logprobs * out.logprobs.new_ones(2, 6), ValueError, rf"got \(2, 6\): {BEHIND}"),
]


@pytest.mark.parametrize(("loss", "error", "message"), HINTS, ids=[message for *_, message in HINTS])
def test_a_loss_that_expects_other_arguments_is_told_what_it_gets(loss, error, message, device):
    problem = make_problem((2, 3), 8, 20, device)
    with pytest.raises(error, match=message):
        run(problem, loss, (), entropy=False)


def test_a_loss_of_divergences_is_told_what_it_gets(device):
    hidden, weight, labels, *_ = make_problem((2, 3), 8, 20, device)
    heads, message = (hidden, weight, hidden, weight), r"NoneType.*\noutputs .* are None: reverse_kl, tv, jsd, student$"
    with pytest.raises(TypeError, match=message):
        megatron_lce.linear_divergence_loss(*heads, labels, lambda out: -out.tv, kinds=["forward_kl"])


@pytest.mark.parametrize(
    ("in_later_blocks", "error", "message"),
    [
        WITHOUT_GRAPH,
        OF_OTHERS,
        (lambda out: (out.logprobs, {"m": out.lse}), ValueError, r"same metrics for any tokens, got \[\] and \['m'\]"),
    ],
)
def test_every_block_of_tokens_is_looked_at(in_later_blocks, error, message, device):
    pytest.importorskip("triton")
    problem = make_problem(300, 24, 600, device, BF16)
    calls = []

    def loss(out):
        calls.append(out)
        return -out.logprobs if len(calls) == 1 else in_later_blocks(out)

    with pytest.raises(error, match=message):
        run(problem, loss, (), backend="triton", workspace_bytes=128 * KEPT_BYTES)
    assert len(calls) == 2
