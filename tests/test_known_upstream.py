"""Losses of an enabled model whose upstream gradient is one number, or turns out not to be, from pass to pass.

More than 4 H tokens, whose logits are not kept: a known loss takes its gradients in forward. Values are those of fp64.
"""

import math

import pytest
import torch

from megatron_lce.core.losses import TokenCrossEntropy
from megatron_lce.core.options import IGNORE_INDEX
from tests.known_passes import PLAIN, Passes
from tests.oracle import assert_within
from tests.problems import make_problem

pytest.importorskip("triton")
TOKENS, HIDDEN, COLUMNS = 80, 16, 300
FORMULAS = [PLAIN, TokenCrossEntropy(z_loss=0.1, label_smoothing=0.2)]
ONE = torch.full((TOKENS,), 0.25)
WEIGHTED = torch.linspace(0.5, 1.5, TOKENS)


@pytest.fixture
def problem(device):
    problem = make_problem(TOKENS, HIDDEN, COLUMNS, device, torch.bfloat16)
    problem.labels[::7] = IGNORE_INDEX
    return problem


def check(passes, upstream, counted=None, in_forward=False):
    assert_within(passes.compare(upstream, counted))
    assert passes.in_forward == in_forward


@pytest.mark.parametrize("formula", FORMULAS, ids=["plain", "z-loss, smoothing"])
@pytest.mark.parametrize("skip", [False, True])
def test_the_first_backward_finds_out(skip, formula, problem):
    passes = Passes(problem, None, formula, skip_ignored=skip)
    check(passes, ONE)
    assert passes.upstream.known
    check(passes, ONE * 2, in_forward=True)
    check(passes, -ONE, in_forward=True)


def test_tokens_out_of_the_mask_keep_their_loss_and_get_no_gradient(problem):
    counted = torch.arange(TOKENS) % 3 > 0
    for known in (None, True):
        passes = Passes(problem, known)
        check(passes, ONE * counted, counted, in_forward=known is True)
        check(passes, ONE * ~counted, ~counted, in_forward=True)  # masks differ from microbatch to microbatch


def test_a_microbatch_without_a_counted_token_says_nothing(problem):
    nothing = torch.zeros(TOKENS, dtype=torch.bool)
    for first in (ONE, WEIGHTED):
        passes = Passes(problem, None)
        check(passes, ONE * 0, nothing)
        assert passes.upstream.known is None
        check(passes, first)
        assert passes.upstream.known == (first is ONE)
    passes = Passes(problem, True)
    check(passes, ONE * 0, nothing, in_forward=True)
    message = r"known_loss needs one upstream gradient for all counted tokens, got 0\.51\d* to 1\.5: "
    with pytest.raises(RuntimeError, match=message):
        passes.run(WEIGHTED)


def test_a_loss_that_weights_tokens_from_the_first_pass_on(problem):
    passes = Passes(problem, None)
    for upstream in (WEIGHTED, ONE, WEIGHTED):
        check(passes, upstream)
    assert passes.upstream.known is False


@pytest.mark.parametrize("known", [None, True])
def test_a_loss_that_weights_tokens_later(known, problem):
    passes = Passes(problem, known)
    check(passes, ONE, in_forward=known is True)
    check(passes, ONE, in_forward=True)
    _, gradients, _ = passes.run(WEIGHTED)
    assert all(gradient.isnan().all() for gradient in gradients)
    message = r"gradients of the last backward pass are NaN: .* enable with known_loss=False"
    with pytest.raises(RuntimeError, match=message):
        passes.run(ONE)
    check(passes, ONE, in_forward=known is True)  # None: any upstream is right now
    if known is None:
        check(passes, WEIGHTED)


def test_a_loss_in_a_checkpoint_counts_as_unknown(problem):
    """Its backward runs forward again, which must save the same tensors, whatever was found out in between."""
    passes = Passes(problem, None)
    passes.checkpointed = True
    check(passes, ONE)
    check(passes, WEIGHTED)
    assert passes.upstream.known is None
    passes.checkpointed = False
    check(passes, ONE)
    assert passes.upstream.known
    passes.checkpointed = True
    check(passes, WEIGHTED)
    passes.checkpointed = False
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):  # a rank may be alone
        check(passes, ONE, in_forward=True)
    told = Passes(problem, True)
    told.checkpointed = True
    check(told, ONE, in_forward=True)


@pytest.mark.parametrize("kind", ["the mask is outside alone", "the mask is not applied"])
def test_masks_of_the_model_and_the_loss_that_differ(kind, problem):
    mask = torch.arange(TOKENS) % 3 > 0
    upstream, counted = (ONE * mask, None) if kind == "the mask is outside alone" else (ONE, mask)
    with pytest.raises(RuntimeError, match=r"got 0 to 0\.25: .* Pass a 0/1 loss_mask to the model's forward"):
        Passes(problem, True).run(upstream, counted)
    passes = Passes(problem, None)
    for _ in range(2):
        check(passes, upstream, counted)


def test_a_mask_of_zeros_that_the_loss_does_not_apply(problem):
    """Gradients from forward would be 0."""
    nothing = torch.zeros(TOKENS, dtype=torch.bool)
    for upstream, numbers in ((ONE, "0 to 0.25"), (-ONE, "-0.25 to 0")):
        with pytest.raises(RuntimeError, match=f"got {numbers}: .* Pass a 0/1 loss_mask to the model's forward"):
            Passes(problem, True).run(upstream, nothing)
        passes = Passes(problem, None)
        check(passes, upstream, nothing)
        assert passes.upstream.known is False


@pytest.mark.parametrize("known", [None, True])
def test_a_loss_times_zero_says_nothing(known, problem):
    """As of a microbatch that is there for its shape alone: the next one is the first that the host looks at."""
    passes = Passes(problem, known)
    check(passes, ONE * 0, in_forward=known is True)
    if known is None:
        check(passes, WEIGHTED)
        assert passes.upstream.known is False
    else:
        with pytest.raises(RuntimeError, match="known_loss needs one upstream gradient"):
            passes.run(WEIGHTED)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_scale_that_overflowed_says_nothing(value, problem):
    passes = Passes(problem, True)
    check(passes, ONE, in_forward=True)
    _, gradients, _ = passes.run(ONE * value)
    assert not any(gradient.isfinite().all() for gradient in gradients)
    check(passes, ONE, in_forward=True)
    passes = Passes(problem, None)
    passes.run(ONE * value)
    assert passes.upstream.known is None


def test_where_all_logits_are_kept_any_upstream_is_right(problem):
    for known in (None, True, False):
        passes = Passes(problem, known, logits_cache_bytes=2**20)
        for upstream in (ONE, WEIGHTED):
            check(passes, upstream)
        assert passes.upstream.known is known


@pytest.mark.parametrize("known", [None, True])
def test_no_tokens(known, problem):
    problem = problem._replace(hidden=problem.hidden[:0], labels=problem.labels[:0])
    losses, gradients, _ = Passes(problem, known).run(ONE[:0])
    assert losses.shape == (0,)
    assert not any(gradient.any() for gradient in gradients)


def test_nothing_is_taken_in_forward_that_saves_no_product(problem):
    """In fp32 logits are computed twice in any case."""
    problem = problem._replace(hidden=problem.hidden.float(), weight=problem.weight.float())
    passes = Passes(problem, None)
    check(passes, ONE)
    assert passes.upstream.known is None
    passes.upstream.known = True
    check(passes, WEIGHTED)
