"""`skip_ignored=True`: what is done before the host knows how many rows count, and how they come to the front."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_lce import cross_entropy
from megatron_lce.backends.choice import load_backend
from megatron_lce.backends.torch.compaction import copy_to_host
from megatron_lce.core.collectives import Pending
from megatron_lce.core.rows import Ahead, Rows
from megatron_lce.core.tokens import Counted, RowNumber, TokenBlock, Tokens
from tests.problems import assert_same_outputs, ignoring, make_problem

BF16 = torch.bfloat16
SOME = slice(0, None, 3)


@pytest.mark.parametrize(
    ("logits_cache_bytes", "expected"),
    [
        (0, ["gather_rows", "softmax_stats", "look", "gather_rows", "grad_logits", "look"]),
        # A cache is as large as the number: its first columns are not.
        (2**30, ["gather_rows", "softmax_stats", "look", "look", "grad_logits_from_cache", "gather_rows", "look"]),
    ],
)
def test_the_device_has_work_while_the_host_waits_for_the_number(logits_cache_bytes, expected, device, monkeypatch):
    backend = pytest.importorskip("megatron_lce.backends.triton.cross_entropy")
    seen = []

    def watch(place, name):
        function = getattr(place, name)

        def spy(*given, **keywords):
            seen.append(name)
            return function(*given, **keywords)

        monkeypatch.setattr(place, name, spy)

    for name in ("gather_rows", "softmax_stats", "grad_logits", "grad_logits_from_cache"):
        watch(backend, name)
    watch(RowNumber, "look")
    problem = ignoring(make_problem(40, 24, 304, device, BF16), SOME)
    problem.run("triton", skip_ignored=True, logits_cache_bytes=logits_cache_bytes)
    assert seen == expected


@pytest.mark.parametrize(
    ("rows", "logits_cache_bytes", "allocated"),
    [
        # 256 columns of all 200 rows, then of those that count: all columns, two tiles, one.
        (slice(0, 150), 2**30, [(200, 256), (50, 600)]),
        (slice(0, 100), 104_500, [(200, 256), (100, 512)]),
        (slice(0, 10), 110_000, [(200, 256), (190, 256)]),
        (slice(0, 0), 2**30, [(200, 256), (200, 600)]),
        (slice(None), 2**30, [(200, 256)]),
        # No tile of all rows fits, so forward waits.
        (slice(0, 150), 50 * 600, [(50, 256)]),
    ],
    ids=str,
)
def test_a_cache_is_begun_before_the_number_is_known(rows, logits_cache_bytes, allocated, device, monkeypatch):
    kernels = pytest.importorskip("megatron_lce.backends.triton.logits_cache")
    seen, allocate = [], kernels.LogitsCache.allocate
    spy = lambda *given: seen.append(given[:2]) or allocate(*given)  # noqa: E731
    monkeypatch.setattr(kernels.LogitsCache, "allocate", spy)
    problem = ignoring(make_problem(200, 24, 600, device, BF16), rows)
    computed = problem.run("triton")
    only_here = {"skip_ignored": True, "logits_cache_bytes": logits_cache_bytes, "workspace_bytes": 1_000_000}
    assert_same_outputs(problem.check("triton", only_here=only_here), computed)
    assert seen == allocated


@pytest.mark.parametrize("largest_shard", [40, 300, 512])
def test_a_cache_is_begun_by_whole_tiles_whatever_the_largest_shard_was(largest_shard, device, monkeypatch):
    """Where ranks' shards are uneven, a second head is planned for by the largest shard of the first."""
    pytest.importorskip("triton")
    agreed = cross_entropy.agreed_options
    stale = lambda *given: replace(agreed(*given), largest_shard=largest_shard)  # noqa: E731
    monkeypatch.setattr(cross_entropy, "agreed_options", stale)
    problem = ignoring(make_problem(9, 24, 520, device, BF16), SOME)
    problem.check("triton", only_here={"skip_ignored": True, "logits_cache_bytes": 2**30})


@pytest.mark.parametrize("num_rows", [0, 1, 300, 9000])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_rows_that_count_come_to_the_front(num_rows, share, backend, device):
    counts = torch.rand(num_rows, device=device) < share
    per_row = [torch.randint(9, (num_rows,), device=device), torch.randn(3, num_rows, device=device)]
    compacted = load_backend(backend, device).compact_rows(counts, per_row, to_host=True)
    number = int(compacted.number)
    assert int(compacted.on_host) == number  # the device is done
    assert number == counts.sum()
    assert torch.equal(compacted.rows[:number], counts.nonzero()[:, 0])
    assert all(
        torch.equal(one[..., :number], of[..., counts]) for one, of in zip(compacted.per_row, per_row, strict=True)
    )
    # What is behind is read too: memory as it was could be anything.
    assert ((compacted.rows >= 0) & (compacted.rows < max(num_rows, 1))).all()
    assert compacted.per_row[1].isfinite().all()


@pytest.mark.parametrize(("number", "copied"), [(0, 0), (70, 70), (100, 0)])
def test_hidden_states_are_gathered_as_far_as_they_count(number, copied, device, monkeypatch):
    """None where all do: the kernels read them where they are."""
    triton = pytest.importorskip("megatron_lce.backends.triton.cross_entropy")
    matrix, rows = torch.randn(1300, 100, device=device).T, torch.randperm(100, device=device)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    on_device = torch.tensor(number, dtype=torch.int32, device=device)
    gathered = triton.gather_rows(matrix, rows, on_device, unless_all=True)
    assert torch.equal(gathered[:copied], matrix[rows[:copied]])
    assert not gathered[copied:].any()
    assert torch.equal(triton.gather_rows(matrix, rows, on_device, unless_all=False)[:number], matrix[rows[:number]])


def test_backward_goes_ahead_with_no_more_rows_than_forward_counted(device, monkeypatch):
    """Of 200 hidden states 40 count, which all have a gradient: labels and terms are there for so many."""
    triton = pytest.importorskip("megatron_lce.backends.triton.cross_entropy")
    seen, function = [], triton.grad_logits

    def spy(hidden, weight, rows, terms, out, **keywords):
        seen.append((len(hidden), len(rows.labels), len(out)))
        function(hidden, weight, rows, terms, out, **keywords)

    monkeypatch.setattr(triton, "grad_logits", spy)
    ignoring(make_problem(200, 16, 64, device), slice(40, None)).check("triton", only_here={"skip_ignored": True})
    assert seen == [(40, 40, 40)]


def test_rows_behind_the_number_are_left_alone(device):
    triton = pytest.importorskip("megatron_lce.backends.triton.cross_entropy")
    hidden, weight = torch.randn(300, 16, device=device), torch.randn(70, 16, device=device)
    labels = torch.full((300,), -1, dtype=torch.int32, device=device)
    rows = Rows(labels, torch.ones(300, device=device), torch.ones(300, device=device))
    terms, grad = torch.ones(6, 300, device=device), torch.full((300, 128), 7.0, device=device)[:, :70]
    ahead = Ahead(torch.tensor(5, dtype=torch.int32, device=device), None)
    triton.grad_logits(
        hidden, weight, rows, terms, grad, first_column=0, softcap_scale=None, entropy=False, ahead=ahead
    )
    torch.testing.assert_close(grad[:5], torch.exp2(hidden[:5] @ weight.T - 2), rtol=1e-4, atol=0.0)
    assert (grad[128:] == 7).all()  # a tile is made as a whole


def test_statistics_of_rows_that_do_not_count_are_numbers(device, monkeypatch):
    """They travel over the group, where NCCL may be told to stop at a NaN of memory as it was, or of such a row."""
    triton = pytest.importorskip("megatron_lce.backends.triton.cross_entropy")
    problem = ignoring(make_problem(200, 24, 300, device), slice(0, 150))
    problem.hidden[:150] = torch.nan
    seen, finish = [], triton.finish

    def spy(extremes, *others):
        seen.append(extremes)
        return finish(extremes, *others)

    monkeypatch.setattr(triton, "finish", spy)
    problem.run("triton", skip_ignored=True, telemetry=True)
    assert seen[0].shape == (4, 200)
    assert not seen[0].isnan().any()


@pytest.mark.parametrize("number", [6, 7])
def test_counted_rows_of_two_ranks_are_one_block(number, device):
    """A block of one row would make the weight's gradient a sum over blocks in fp32."""
    options = SimpleNamespace(sequence_parallel=True)
    assert Tokens(torch.randn(8, 4), 16, Counted(torch.arange(number)), number, options).num_blocks == 1


@pytest.mark.parametrize("number", [0, 3])
def test_hidden_states_are_gathered_once_waited_for_and_freed(number, monkeypatch):
    gathered, waits = [], []

    def start(shard, group):
        whole = torch.cat([shard, shard])
        gathered.append(weakref.ref(whole))
        return Pending(whole, SimpleNamespace(wait=lambda: waits.append(group)))

    monkeypatch.setattr("megatron_lce.core.collectives.start_gather_rows", start)
    options = SimpleNamespace(sequence_parallel=True, tp_group="two ranks")
    every = Tokens(torch.randn(4, 2), 8, Counted(None), 8, options)
    some = every.of(Counted(torch.arange(number)), 8)
    assert len(waits) == (number == 0)
    assert [len(block.hidden.wait()) for block in some.blocks()] == [number] * (number > 0)
    assert [len(block.hidden.wait()) for block in every.blocks()] == [8]
    assert waits
    assert [whole() for whole in gathered] == [None]


@pytest.mark.parametrize(("rows", "block_tokens", "taken"), [(None, 4, False), ([0, 2], 4, True), ([0, 2], 1, False)])
def test_hidden_states_that_were_gathered_ahead_are_taken(rows, block_tokens, taken):
    """Of every row there may be no copy; and several blocks gather their own."""
    options = SimpleNamespace(sequence_parallel=False, tp_group=None)
    counted = Counted(None if rows is None else torch.tensor(rows))
    tokens = Tokens(torch.randn(4, 2), 4, counted, block_tokens, options)
    ahead = TokenBlock(slice(0, 2), Pending(torch.randn(2, 2)), is_first=True, is_last=True)
    tokens.take(ahead)
    block = next(tokens.blocks())
    assert (block.hidden is ahead.hidden) == taken
    assert block.is_last == (tokens.num_blocks == 1)


def test_only_a_cuda_device_is_told_not_to_wait_for_the_copy():
    """Other devices' copies may be under way when the host reads them: there is no event for those."""
    told = {}
    number = SimpleNamespace(is_cuda=False, to=lambda device, non_blocking: told.update({device: non_blocking}))
    copy_to_host(number)
    assert told == {"cpu": False}
