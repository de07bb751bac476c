"""Merging statistics: any order and any cut gives the same bits, on both implementations of the merge."""

import pytest
import torch

from megatron_lce.backends.choice import load_backend
from megatron_lce.core.statistics import (
    LN_2,
    LOG2_E,
    UNIT,
    empty_extremes,
    merge_extremes,
    num_extremes,
    packed_rows,
    unpack_extremes,
)

TOKENS = 7


@pytest.fixture
def merges(backend, device):
    return load_backend(backend, device)


def parts_of(logits, labels, width):
    """Statistics [chunks, K, N] of logits [N, V] in base 2, from their definition, in fp64."""
    parts = []
    for first in range(0, logits.shape[1], width):
        part = logits[:, first : first + width].double()
        maximum, argmax = part.max(dim=1)
        shifted = part - maximum[:, None]
        here = (labels >= first) & (labels < first + width)
        label_logit = torch.where(here, logits.gather(1, labels[:, None])[:, 0], -torch.inf)
        extremes = [maximum, label_logit, part.amin(dim=1), argmax + first]
        exp = shifted.exp2()
        sums = [value.sum(dim=1) for value in (exp, exp * shifted, exp.square(), part, part.square())]
        parts.append(torch.stack([*extremes, *sums]).float())
    return torch.stack(parts)


def make_logits(device, level=0.0, spread=4.0, columns=50):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(TOKENS, columns, generator=generator) * spread + level
    labels = torch.randint(columns, (TOKENS,), generator=generator)
    return logits.to(device), labels.to(device)


def merged(merges, parts, columns=50):
    extremes, sums = merges.sum_chunks(parts, parts, columns, True, True)
    torch.testing.assert_close(extremes, merge_extremes(parts, True), rtol=0.0, atol=0.0, equal_nan=True)
    return unpack_extremes(extremes, True), sums


@pytest.mark.parametrize("width", [50, 25, 7, 1])
@pytest.mark.parametrize(("level", "spread"), [(0.0, 4.0), (-1e4, 1.0), (1e4, 1.0), (0.0, 3000.0)])
def test_parts_merge_to_the_whole(width, level, spread, merges, device):
    logits, labels = make_logits(device, level, spread)
    extremes, sums = merged(merges, parts_of(logits, labels, width))
    exact = logits.double()
    shifted = exact - exact.amax(dim=1, keepdim=True)
    assert torch.equal(extremes.max_logit, logits.amax(dim=1))
    assert torch.equal(extremes.min_logit, logits.amin(dim=1))
    assert torch.equal(extremes.argmax, logits.argmax(dim=1).float())
    assert torch.equal(extremes.label_logit, logits.gather(1, labels[:, None])[:, 0])
    sum_exp, sum_exp_logit, sum_exp_squared, sum_logit, sum_logit_squared, _ = sums.double() * UNIT
    torch.testing.assert_close(sum_exp, shifted.exp2().sum(dim=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(sum_exp_logit, (shifted.exp2() * shifted).sum(dim=1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sum_exp_squared, (2 * shifted).exp2().sum(dim=1), rtol=1e-6, atol=0)
    relative = exact / exact.abs().amax(dim=1, keepdim=True)
    torch.testing.assert_close(sum_logit, relative.sum(dim=1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sum_logit_squared, relative.square().sum(dim=1), rtol=1e-6, atol=0)
    assert (sums[-1] == 50).all()
    assert (sum_exp >= 1).all()


def test_statistics_give_logprobs_and_entropy(merges, device):
    """The formulas of the module's docstring, base 2 to nats included."""
    logits, labels = make_logits(device)
    extremes, sums = merged(merges, parts_of(logits * LOG2_E, labels, 10))
    sum_exp, sum_exp_logit = sums[:2].double() * UNIT
    lse = (extremes.max_logit + sum_exp.log2()) * LN_2
    entropy = (sum_exp.log2() - sum_exp_logit / sum_exp) * LN_2
    distribution = torch.distributions.Categorical(logits=logits.double())
    torch.testing.assert_close(lse, logits.double().logsumexp(dim=1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-5, atol=1e-5)


def test_no_order_of_chunks_or_ranks_is_preferred(merges, device):
    """Bits are the same for any permutation, and for any cut of the chunks over ranks."""
    logits, labels = make_logits(device, level=3.0, columns=800)
    parts = parts_of(logits, labels, 4)
    extremes, sums = merged(merges, parts, 800)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1)).to(device)
    shuffled_extremes, shuffled_sums = merged(merges, parts[order], 800)
    assert torch.equal(torch.stack(extremes), torch.stack(shuffled_extremes))
    assert torch.equal(sums, shuffled_sums)
    ranks = [parts[:1], parts[1:130], parts[130:]]
    of_all = torch.stack([merge_extremes(rank, True) for rank in ranks])
    of_ranks = [merges.sum_chunks(rank, of_all, 4 * len(rank), True, True) for rank in ranks]
    assert all(torch.equal(of_rank, torch.stack(extremes)) for of_rank, _ in of_ranks)
    assert torch.equal(sum(sums_of_rank for _, sums_of_rank in of_ranks), sums)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_empty_part_changes_nothing(position, merges, device):
    logits, labels = make_logits(device, level=-1e4)
    parts = list(parts_of(logits, labels, 25)[:, : num_extremes(True)])
    expected = merge_extremes(torch.stack(parts), True)
    parts.insert(position, empty_extremes(TOKENS, True, device))
    assert torch.equal(merge_extremes(torch.stack(parts), True), expected)


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("telemetry", [True, False])
def test_rows_that_are_not_asked_for_do_not_change_the_others(entropy, telemetry, merges, device):
    logits, labels = make_logits(device)
    parts = parts_of(logits, labels, 20)
    kept = [0, 1, *([2, 3] if telemetry else []), 4, *([5] if entropy else []), *([6, 7, 8] if telemetry else [])]
    assert len(kept) == packed_rows(entropy, telemetry)
    extremes, sums = merged(merges, parts)
    some = parts[:, kept].contiguous()
    some_extremes, some_sums = merges.sum_chunks(some, some, 50, entropy, telemetry)
    assert torch.equal(some_extremes, torch.stack(extremes)[: num_extremes(telemetry)])
    kept = [0, *([1] if entropy else []), *([2, 3, 4, 5] if telemetry else [])]
    assert torch.equal(some_sums, sums[kept])


def test_ties_go_to_the_lowest_id_wherever_it_lies(merges, device):
    logits, labels = make_logits(device)
    logits[:, [5, 30, 49]] = 99.0
    parts = parts_of(logits, labels, 10)
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
        assert (merge_extremes(parts[order], True)[3] == 5).all()


@pytest.mark.parametrize("part", [0, 1])
def test_a_nan_row_stays_nan_and_alone(part, merges, device):
    logits, labels = make_logits(device)
    parts = parts_of(logits, labels, 25)
    parts[part, 0, 3] = float("nan")
    extremes, _ = merged(merges, parts)
    assert extremes.max_logit.isnan().nonzero().flatten().tolist() == [3]
