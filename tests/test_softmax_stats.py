"""Merging statistics: any cut of the vocabulary gives those of the whole, on both implementations of the merge."""

import itertools

import pytest
import torch

from megatron_lce.core import softmax_stats
from megatron_lce.core.softmax_stats import LOG2_E, empty_stats, packed_rows, unpack

TOKENS = 7


@pytest.fixture
def merge(backend):
    if backend == "torch":
        return softmax_stats.merge_stats
    from megatron_lce.backends.triton.merge_stats import merge_stats

    return merge_stats


def stats_of(logits, labels, columns):
    """Packed fp32 statistics of a part of the logits [N, V] in base 2, from their definition, in fp64."""
    part = logits[:, columns].double()
    packed = empty_stats(logits.shape[0], True, True, logits.device)
    stats = unpack(packed, True, True)
    maximum = part.amax(dim=1)
    shifted = part - maximum[:, None]
    stats.max_logit.copy_(maximum)
    stats.sum_exp.copy_(shifted.exp2().sum(dim=1))
    stats.sum_exp_logit.copy_((shifted.exp2() * shifted).sum(dim=1))
    stats.min_logit.copy_(part.amin(dim=1))
    stats.argmax.copy_(part.argmax(dim=1) + columns.start)
    here = (labels >= columns.start) & (labels < columns.stop)
    label_logit = logits.gather(1, labels[:, None])[:, 0]
    stats.label_logit.copy_(torch.where(here, label_logit, -torch.inf))
    return packed


def make_logits(device, level=0.0, spread=4.0, columns=50):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(TOKENS, columns, generator=generator) * spread + level
    labels = torch.randint(columns, (TOKENS,), generator=generator)
    return logits.to(device), labels.to(device)


@pytest.mark.parametrize("cuts", [[0, 50], [0, 25, 50], [0, 1, 2, 50], [0, 49, 50], list(range(51))], ids=len)
@pytest.mark.parametrize(("level", "spread"), [(0.0, 4.0), (-1e4, 1.0), (1e4, 1.0), (0.0, 3000.0)])
def test_parts_merge_to_the_whole(cuts, level, spread, merge, device):
    logits, labels = make_logits(device, level, spread)
    parts = [stats_of(logits, labels, slice(a, b)) for a, b in itertools.pairwise(cuts)]
    merged = unpack(merge(torch.stack(parts), True, True), True, True)
    whole = unpack(stats_of(logits, labels, slice(0, 50)), True, True)
    for name in ("max_logit", "min_logit", "argmax", "label_logit"):
        assert torch.equal(getattr(merged, name), getattr(whole, name)), name
    torch.testing.assert_close(merged.sum_exp, whole.sum_exp, rtol=1e-6, atol=0)
    torch.testing.assert_close(merged.sum_exp_logit, whole.sum_exp_logit, rtol=1e-5, atol=1e-6)
    assert (merged.sum_exp >= 1).all()


def test_statistics_give_logprobs_and_entropy(merge, device):
    """The formulas of the module's docstring, base 2 to nats included."""
    logits, labels = make_logits(device)
    parts = torch.stack([stats_of(logits * LOG2_E, labels, slice(a, a + 10)) for a in range(0, 50, 10)])
    stats = unpack(merge(parts, True, True), True, True)
    lse = stats.max_logit + stats.sum_exp.log2()
    entropy = stats.sum_exp.log2() - stats.sum_exp_logit / stats.sum_exp
    distribution = torch.distributions.Categorical(logits=logits.double())
    torch.testing.assert_close((lse / LOG2_E).double(), logits.double().logsumexp(dim=1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close((entropy / LOG2_E).double(), distribution.entropy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_empty_part_changes_nothing(position, merge, device):
    logits, labels = make_logits(device, level=-1e4)
    parts = [stats_of(logits, labels, slice(0, 20)), stats_of(logits, labels, slice(20, 50))]
    expected = merge(torch.stack(parts), True, True)
    parts.insert(position, empty_stats(TOKENS, True, True, device))
    assert torch.equal(merge(torch.stack(parts), True, True), expected)


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("telemetry", [True, False])
def test_rows_that_are_not_asked_for_do_not_change_the_others(entropy, telemetry, merge, device):
    logits, labels = make_logits(device)
    parts = torch.stack([stats_of(logits, labels, slice(0, 20)), stats_of(logits, labels, slice(20, 50))])
    kept = [0, 1, 2, *([3] if entropy else []), *([4, 5] if telemetry else [])]
    assert len(kept) == packed_rows(entropy, telemetry)
    everything = merge(parts, True, True)
    some = merge(parts[:, kept].contiguous(), entropy, telemetry)
    assert torch.equal(some, everything[kept])


def test_ties_go_to_the_lowest_id_wherever_it_lies(merge, device):
    logits, labels = make_logits(device)
    logits[:, [5, 30, 49]] = 99.0
    parts = [stats_of(logits, labels, slice(a, a + 10)) for a in range(0, 50, 10)]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
        merged = unpack(merge(torch.stack([parts[i] for i in order]), True, True), True, True)
        assert (merged.argmax == 5).all()


def test_a_nan_row_stays_nan_and_alone(merge, device):
    logits, labels = make_logits(device)
    parts = torch.stack([stats_of(logits, labels, slice(0, 20)), stats_of(logits, labels, slice(20, 50))])
    parts[:, :4, 3] = float("nan")
    merged = unpack(merge(parts, True, True), True, True)
    lse = merged.max_logit + merged.sum_exp.log2()
    assert lse.isnan().nonzero().flatten().tolist() == [3]
