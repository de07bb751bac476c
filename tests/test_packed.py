"""Labels within each sequence and never across two."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lce.api import shift_labels as packed
from megatron_lce.api.shift_labels import shift_labels

IGNORED = -100
TOKENS = torch.zeros(1, 8, dtype=torch.int64)


def bounds_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("padded", [False, True])
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=7), st.integers(0, 5))
def test_sequences_shift_one_by_one(padded, sizes, rest):
    """Packed, or padded at their ends, with tokens behind the last of them that belong to none."""
    lengths, places = [length for length, _ in sizes], [length + padded * padding for length, padding in sizes]
    tokens, expected = list(range(1, sum(places) + rest + 1)), []
    for start, length, place in zip(bounds_of(places)[:-1].tolist(), lengths, places, strict=True):
        own = tokens[start + 1 : start + length]
        expected += own + [IGNORED] * (place - len(own))
    bounds = {"cu_seqlens": bounds_of(lengths)}
    if padded:
        bounds["cu_seqlens_padded"] = bounds_of(places)
    labels = shift_labels(torch.tensor([tokens], dtype=torch.int64), **bounds)
    assert labels.tolist() == [expected + [IGNORED] * rest]


def test_bounds_that_nobody_looks_at_never_take_a_label_from_elsewhere(device, monkeypatch):
    monkeypatch.setattr(packed, "_on_host", lambda bounds: False)  # as if they were on a device
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
