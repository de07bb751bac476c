"""Labels within each sequence and never across two."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_lce
from megatron_lce.api import shift_labels as packed
from megatron_lce.api.shift_labels import shift_labels
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


def test_bounds_on_the_host_serve_tokens_on_any_device(device):
    tokens, bounds = torch.arange(12)[None], torch.tensor([0, 4, 12])
    labels = shift_labels(tokens.to(device), cu_seqlens=bounds)
    assert torch.equal(labels.cpu(), shift_labels(tokens, cu_seqlens=bounds))


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


BOUNDS = torch.tensor([0, 3, 8])
BAD = [  # tokens, keywords, the error, and what is said
    (TOKENS[0], {}, ValueError, r"tokens must be \[b, s\] or \[1, total\], got \(8,\)"),
    (TOKENS.int(), {}, TypeError, "tokens must be int64, got torch.int32"),
    ([[1, 2]], {}, TypeError, "tokens must be a torch.Tensor, got list"),
    (TOKENS, {"mask": TOKENS[0]}, ValueError, r"mask must have tokens' shape, \(1, 8\), got \(8,\)"),
    (TOKENS, {"mask": [1] * 8}, TypeError, "mask must be a torch.Tensor, got list"),
    (TOKENS.repeat(2, 1), {"cu_seqlens": BOUNDS}, ValueError, r"must lie in one row, .* got \(2, 8\)"),
    (TOKENS, {"cu_seqlens": BOUNDS[:1]}, ValueError, r"cu_seqlens must be .* got torch.int64 \(1,\)"),
    (TOKENS, {"cu_seqlens": BOUNDS.float()}, ValueError, "cu_seqlens must be integers"),
    (TOKENS, {"cu_seqlens": BOUNDS.bool()}, ValueError, "cu_seqlens must be integers .* torch.bool"),
    (TOKENS, {"cu_seqlens": BOUNDS + 1}, ValueError, "cu_seqlens must start with 0, got 1"),
    (TOKENS, {"cu_seqlens": BOUNDS * 3 // 2}, ValueError, "cu_seqlens must end within the row of 8, got 12"),
    (TOKENS, {"cu_seqlens": torch.tensor([0, 5, 3])}, ValueError, "cu_seqlens must not fall, got 3 after 5"),
    (TOKENS, {"cu_seqlens": BOUNDS.to("meta")}, ValueError, "must be on the host or cpu, got meta"),
    (TOKENS, {"cu_seqlens": [0, 8]}, TypeError, "cu_seqlens must be a torch.Tensor, got list"),
    (TOKENS, {"ignore_index": "a"}, TypeError, "ignore_index must be an int, got str"),
    (TOKENS, {"ignore_index": -100.5}, TypeError, "ignore_index must be an int, got float"),
]
BAD_PADDED = [  # bounds of sequences and of their padding
    (None, BOUNDS, ValueError, "cu_seqlens must be given with .* got None"),
    (BOUNDS, BOUNDS[:2], ValueError, "cu_seqlens_padded must have as many bounds as cu_seqlens, 3, got 2"),
    (BOUNDS, torch.tensor([0, 2, 8]), ValueError, "cu_seqlens must fit into cu_seqlens_padded, got a sequence of 3 in"),
    (BOUNDS, [0, 3, 8], TypeError, "cu_seqlens_padded must be a torch.Tensor, got list"),
]
BAD += [(TOKENS, {"cu_seqlens": own, "cu_seqlens_padded": padded}, *row) for own, padded, *row in BAD_PADDED]


@pytest.mark.parametrize(("tokens", "keywords", "error", "message"), BAD, ids=range(len(BAD)))
def test_messages(tokens, keywords, error, message):
    with pytest.raises(error, match=message):
        shift_labels(tokens, **keywords)
