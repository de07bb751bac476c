"""Labels within each sequence and never across two; the cut over context-parallel ranks as Megatron makes it."""

import functools
import inspect
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_lce
from megatron_lce import packed
from megatron_lce.packed import context_parallel_gather, context_parallel_shard, shift_labels
from tests.problems import make_problem

IGNORED = -100
TOKENS = torch.zeros(1, 8, dtype=torch.int64)


def bounds_of(lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def shifted_one_by_one(sequences):
    """The definition, a sequence at a time, in Python."""
    return [[*sequence[1:], IGNORED] if sequence else [] for sequence in sequences]


def flat(lists):
    return [value for values in lists for value in values]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(0, 5))
def test_packed_sequences_shift_one_by_one(lengths, rest):
    total = sum(lengths) + rest
    tokens = list(range(1, total + 1))
    bounds = bounds_of(lengths).tolist()
    sequences = [tokens[a:b] for a, b in itertools.pairwise(bounds)]
    labels = shift_labels(torch.tensor([tokens], dtype=torch.int64), cu_seqlens=bounds_of(lengths))
    assert labels.tolist() == [flat(shifted_one_by_one(sequences)) + [IGNORED] * rest]


@pytest.fixture
def unseen(monkeypatch):
    """Bounds as they are on a device, where nobody looks at them."""
    monkeypatch.setattr(packed, "_on_host", lambda bounds: False)


def test_unseen_bounds_never_take_a_label_from_elsewhere(unseen, device):
    tokens = torch.arange(1, 9, device=device)[None]
    no = IGNORED
    for bounds, padded, expected in (
        ([0, 3, 12], None, [2, 3, no, 5, 6, 7, 8, no]),
        ([0, 8, 12], None, [2, 3, 4, 5, 6, 7, 8, no]),
        ([0, 4, 6], [0, 2, 8], [2, no, 4, no, no, no, no, no]),
    ):
        bounds, padded = (None if b is None else torch.tensor(b, device=device) for b in (bounds, padded))
        assert shift_labels(tokens, cu_seqlens=bounds, cu_seqlens_padded=padded).tolist() == [expected]


SHARD = functools.partial(context_parallel_shard, TOKENS, 2, 1)
GATHER = functools.partial(context_parallel_gather, TOKENS, None)
CANNOT_BE_CUT = [(SHARD, [0, 3, 8]), *itertools.product([SHARD, GATHER], [[0, 4, 12], [0, 8, 4], [4, 8]])]


@pytest.mark.parametrize(("cut", "bounds"), CANNOT_BE_CUT)
def test_unseen_bounds_that_cannot_be_cut_fail(unseen, bounds, cut):
    """As an error of the index; not for a GPU, whose assertion ends the process."""
    with pytest.raises((IndexError, RuntimeError), match=r"(?i)ind.* is out of .*bounds|index out of range"):
        cut(cu_seqlens_padded=torch.tensor(bounds))


def test_bounds_on_the_host_serve_tokens_on_any_device(device):
    tokens, bounds = torch.arange(12)[None], torch.tensor([0, 4, 12])
    labels = shift_labels(tokens.to(device), cu_seqlens=bounds)
    assert torch.equal(labels.cpu(), shift_labels(tokens, cu_seqlens=bounds))
    shard = context_parallel_shard(tokens.to(device), 2, 1, cu_seqlens_padded=bounds)
    assert torch.equal(shard.cpu(), context_parallel_shard(tokens, 2, 1, cu_seqlens_padded=bounds))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=6))
def test_sequences_padded_at_their_ends(pairs):
    lengths, padding = zip(*pairs, strict=True)
    sequences = [list(range(10 * i + 1, 10 * i + 1 + n)) for i, n in enumerate(lengths)]
    padded = [sequence + [0] * pad for sequence, pad in zip(sequences, padding, strict=True)]
    expected = [s + [IGNORED] * pad for s, pad in zip(shifted_one_by_one(sequences), padding, strict=True)]
    labels = shift_labels(
        torch.tensor([flat(padded)], dtype=torch.int64),
        cu_seqlens=bounds_of(lengths),
        cu_seqlens_padded=bounds_of([len(p) for p in padded]),
    )
    assert labels.tolist() == [flat(expected)]


def test_a_row_a_sequence(device):
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]], device=device)
    assert shift_labels(tokens).tolist() == [[2, 3, IGNORED], [5, 6, IGNORED]]
    assert shift_labels(tokens, ignore_index=-1).tolist() == [[2, 3, -1], [5, 6, -1]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_left_and_right_padding(dtype, device):
    tokens = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 0, 0], [0, 7, 8, 0, 0], [0, 0, 0, 0, 0]], device=device)
    labels = shift_labels(tokens, mask=(tokens != 0).to(dtype))
    no = IGNORED
    assert labels.tolist() == [[no, no, 2, 3, no], [5, 6, no, no, no], [no, 8, no, no, no], [no] * 5]


def test_packed_logprobs_are_those_of_each_sequence_alone(backend, device):
    """What the labels are for: a packed batch trains as its sequences do, and their borders not at all."""
    lengths = [5, 1, 9, 4]
    problem = make_problem((1, sum(lengths)), 24, 70, device)
    labels = shift_labels(problem.labels, cu_seqlens=bounds_of(lengths, device))
    whole = megatron_lce.linear_cross_entropy(problem.hidden, problem.weight, labels, backend=backend)
    ends = bounds_of(lengths).tolist()
    for start, end in itertools.pairwise(ends):
        hidden, tokens = problem.hidden[0, start : end - 1], problem.labels[0, start + 1 : end]
        alone = megatron_lce.linear_cross_entropy(hidden, problem.weight, tokens, backend=backend)
        torch.testing.assert_close(whole.logprobs[0, start : end - 1], alone.logprobs, rtol=1e-6, atol=1e-6)
        assert whole.logprobs[0, end - 1] == 0


# Context parallel


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_rank_has_its_own_tokens(cp_size, device):
    tensor = torch.arange(3 * 16 * 2, device=device).view(3, 16, 2)
    shards = [context_parallel_shard(tensor, cp_size, rank) for rank in range(cp_size)]
    assert all(shard.shape == (3, 16 // cp_size, 2) for shard in shards)
    assert torch.equal(torch.cat(shards, dim=1).sort(dim=1).values, tensor)


@pytest.mark.parametrize("cp_size", [2, 3])
def test_cut_as_megatron_cuts(cp_size, monkeypatch, device):
    megatron_utils = pytest.importorskip("megatron.core.utils")
    tokens = torch.arange(2 * 24, device=device).view(2, 24)
    cut = megatron_utils.get_batch_on_this_cp_rank
    if "is_hybrid_cp" in inspect.signature(cut).parameters:  # newer versions
        cut = functools.partial(cut, is_hybrid_cp=False)
    for rank in range(cp_size):
        for place, prefix in ((megatron_utils.parallel_state, "get_context_parallel_"), (torch.distributed, "get_")):
            monkeypatch.setattr(place, f"{prefix}world_size", lambda group=None: cp_size)
            monkeypatch.setattr(place, f"{prefix}rank", lambda group=None, rank=rank: rank)
        expected = cut({"labels": tokens})["labels"]
        assert torch.equal(context_parallel_shard(tokens, cp_size, rank), expected)


@pytest.mark.parametrize("cp_size", [1, 3])
def test_contiguous_cut(cp_size):
    """The r-th part of each row, whose length need not be a multiple of 2 cp."""
    tensor = torch.arange(2 * 9).view(2, 9)
    shards = [context_parallel_shard(tensor, cp_size, rank, layout="contiguous") for rank in range(cp_size)]
    assert torch.equal(torch.cat(shards, dim=1), tensor)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 4), st.sampled_from(["zigzag", "contiguous"])
)
def test_packed_sequences_are_cut_one_by_one(chunks, cp_size, layout):
    lengths = [(2 if layout == "zigzag" else 1) * cp_size * chunk for chunk in chunks]
    tensor = torch.arange(sum(lengths))[None]
    bounds = bounds_of(lengths)
    for rank in range(cp_size):
        shard = context_parallel_shard(tensor, cp_size, rank, cu_seqlens_padded=bounds, layout=layout)
        pieces = [context_parallel_shard(piece, cp_size, rank, layout=layout) for piece in tensor.split(lengths, dim=1)]
        assert torch.equal(shard, torch.cat(pieces, dim=1))


def test_what_is_behind_the_last_bound_is_cut_as_a_sequence_of_its_own():
    tensor = torch.arange(24)[None]
    for rank in range(2):
        shard = context_parallel_shard(tensor, 2, rank, cu_seqlens_padded=torch.tensor([0, 4, 12]))
        whole = context_parallel_shard(tensor, 2, rank, cu_seqlens_padded=torch.tensor([0, 4, 12, 24]))
        assert torch.equal(shard, whole)


def test_labels_are_shifted_before_they_are_cut(backend, device):
    """Rank by rank, logprobs of the tokens it has; together those of the whole batch."""
    lengths, cp_size = [8, 16], 2
    bounds = bounds_of(lengths, device)
    problem = make_problem((1, 24), 24, 70, device)
    labels = shift_labels(problem.labels, cu_seqlens=bounds)
    whole = megatron_lce.linear_cross_entropy(problem.hidden, problem.weight, labels, backend=backend).logprobs
    for rank in range(cp_size):
        hidden, own, expected = (
            context_parallel_shard(t, cp_size, rank, cu_seqlens_padded=bounds) for t in (problem.hidden, labels, whole)
        )
        logprobs = megatron_lce.linear_cross_entropy(hidden, problem.weight, own, backend=backend).logprobs
        torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [11, 12])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_one_rank_gathers_what_it_has(layout, length):
    """Of any length: nothing is cut, as Megatron cuts nothing for one rank."""
    tensor = torch.randn(1, length, 2, requires_grad=True)
    bounds = torch.tensor([0, length - 8, length])
    shard = context_parallel_shard(tensor, 1, 0, cu_seqlens_padded=bounds, layout=layout)
    whole = context_parallel_gather(shard, None, cu_seqlens_padded=bounds, layout=layout)
    assert torch.equal(whole, tensor)
    upstream = torch.arange(float(length))[:, None]
    (whole * upstream).sum().backward()
    assert torch.equal(tensor.grad, upstream.expand(1, length, 2))


TWO_ROWS = torch.zeros(2, 8, dtype=torch.int64)
BOUNDS = torch.tensor([0, 3, 8])
BAD = [
    (shift_labels, (TOKENS[0],), {}, ValueError, r"tokens must be \[b, s\] or \[1, total\], got \(8,\)"),
    (shift_labels, (TOKENS.int(),), {}, TypeError, "tokens must be int64, got torch.int32"),
    (shift_labels, (TOKENS,), {"mask": TOKENS[0]}, ValueError, r"mask must have tokens' shape, \(1, 8\), got \(8,\)"),
    (shift_labels, (TOKENS,), {"cu_seqlens_padded": BOUNDS}, ValueError, "cu_seqlens must be given with .* got None"),
    (shift_labels, (TWO_ROWS,), {"cu_seqlens": BOUNDS}, ValueError, r"must lie in one row, .* got \(2, 8\)"),
    (shift_labels, (TOKENS,), {"cu_seqlens": BOUNDS[:1]}, ValueError, r"cu_seqlens must be .* got torch.int64 \(1,\)"),
    (shift_labels, (TOKENS,), {"cu_seqlens": BOUNDS.float()}, ValueError, "cu_seqlens must be integers"),
    (
        shift_labels,
        (TOKENS,),
        {"cu_seqlens": BOUNDS, "cu_seqlens_padded": BOUNDS[:2]},
        ValueError,
        "cu_seqlens_padded must have as many bounds as cu_seqlens, 3, got 2",
    ),
    (shift_labels, (TOKENS,), {"cu_seqlens": BOUNDS + 1}, ValueError, "cu_seqlens must start with 0, got 1"),
    (
        shift_labels,
        (TOKENS,),
        {"cu_seqlens": torch.tensor([0, 3, 12])},
        ValueError,
        "cu_seqlens must end within the row of 8, got 12",
    ),
    (
        shift_labels,
        (TOKENS,),
        {"cu_seqlens": torch.tensor([0, 5, 3])},
        ValueError,
        "cu_seqlens must not fall, got 3 after 5",
    ),
    (
        shift_labels,
        (TOKENS,),
        {"cu_seqlens": BOUNDS, "cu_seqlens_padded": torch.tensor([0, 2, 8])},
        ValueError,
        "cu_seqlens must fit into cu_seqlens_padded, got a sequence of 3 in 2",
    ),
    (
        context_parallel_shard,
        (TOKENS, 2, 0),
        {"cu_seqlens_padded": BOUNDS},
        ValueError,
        "cu_seqlens_padded must have lengths that are multiples of 4 for this cut, got 3",
    ),
    (
        context_parallel_shard,
        (TOKENS, 2, 0),
        {"cu_seqlens_padded": torch.tensor([0, 4, 12])},
        ValueError,
        "cu_seqlens_padded must end within the row of 8, got 12",
    ),
    (shift_labels, (TOKENS,), {"cu_seqlens": BOUNDS.to("meta")}, ValueError, "must be on the host or cpu, got meta"),
    (context_parallel_shard, (TOKENS, 2, 0), {"layout": "ring"}, ValueError, "'zigzag' or 'contiguous', got 'ring'"),
    (context_parallel_gather, (TOKENS, "cp"), {}, TypeError, "group must be a .*ProcessGroup or None, got str"),
    (context_parallel_shard, (TOKENS, 2, 2), {}, ValueError, r"cp_rank must be in \[0, 2\), got 2"),
    (context_parallel_shard, (TOKENS, 3, 0), {}, ValueError, r"s a multiple of 6, got \(1, 8\)"),
    (context_parallel_shard, (TOKENS[0], 2, 0), {}, ValueError, r"tensor must be \[b, s, ...\]"),
    (shift_labels, ([[1, 2]],), {}, TypeError, "tokens must be a torch.Tensor, got list"),
    (shift_labels, (TOKENS,), {"mask": [1] * 8}, TypeError, "mask must be a torch.Tensor, got list"),
    (shift_labels, (TOKENS,), {"cu_seqlens": [0, 8]}, TypeError, "cu_seqlens must be a torch.Tensor, got list"),
    (
        shift_labels,
        (TOKENS,),
        {"cu_seqlens": BOUNDS, "cu_seqlens_padded": [0, 3, 8]},
        TypeError,
        "cu_seqlens_padded must be a torch.Tensor, got list",
    ),
    (shift_labels, (TOKENS,), {"cu_seqlens": BOUNDS.bool()}, ValueError, "cu_seqlens must be integers .* torch.bool"),
    (shift_labels, (TOKENS,), {"ignore_index": "a"}, TypeError, "ignore_index must be an int, got str"),
    (shift_labels, (TOKENS,), {"ignore_index": -100.5}, TypeError, "ignore_index must be an int, got float"),
    (context_parallel_shard, ([[1, 2]], 2, 0), {}, TypeError, "tensor must be a torch.Tensor, got list"),
    (context_parallel_shard, (TOKENS, "2", 0), {}, TypeError, "cp_size must be an int, got str"),
    (context_parallel_shard, (TOKENS, 2.0, 0), {}, TypeError, "cp_size must be an int, got float"),
    (context_parallel_shard, (TOKENS, 0, 0), {}, ValueError, "cp_size must be at least 1, got 0"),
    (context_parallel_shard, (TOKENS, 2, 1.0), {}, TypeError, "cp_rank must be an int, got float"),
    (context_parallel_gather, ([[1, 2]], None), {}, TypeError, "tensor must be a torch.Tensor, got list"),
    (
        context_parallel_gather,
        (TOKENS, None),
        {"cu_seqlens_padded": [0, 8]},
        TypeError,
        "cu_seqlens_padded must be a torch.Tensor, got list",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "keywords", "error", "message"), BAD, ids=range(len(BAD)))
def test_messages(function, arguments, keywords, error, message):
    with pytest.raises(error, match=message):
        function(*arguments, **keywords)
