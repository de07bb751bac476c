"""`linear_jsd` without the rows that are ignored or have no upstream gradient."""

import pytest
import torch

from megatron_lce import linear_jsd
from megatron_lce.core import distillation, tokens
from tests.jsd_oracle import evaluate_jsd
from tests.jsd_problems import BF16, FP32, check, ignoring, make_inputs

SOME, ALL, NONE, ALL_BUT_ONE = slice(0, None, 3), slice(None), slice(0, 0), slice(1, None)


@pytest.mark.parametrize(
    ("rows", "dtypes", "beta"),
    [
        (SOME, (FP32, BF16), 0.5),
        (SOME, (BF16, BF16), 1),
        (ALL, (BF16, BF16), 0.5),
        (NONE, (BF16, BF16), 0),
        (ALL_BUT_ONE, (FP32, FP32), 0),
    ],
    ids=str,
)
def test_skipping_ignored_rows_changes_nothing(rows, dtypes, beta, backend, device):
    inputs = make_inputs((10, 3), 24, 16, 300, device, *dtypes)
    keywords = {"labels": ignoring(rows, (10, 3), device), "beta": beta}
    keywords["temperature"] = torch.linspace(0.5, 2.0, 30, device=device).view(10, 3)
    for skip in (True, int((keywords["labels"] != -100).sum())):
        check(backend, inputs, only_here={"skip_ignored": skip}, **keywords)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_count_that_is_not_the_labels_makes_everything_nan(wrong, backend, device):
    inputs, labels = make_inputs(12, 8, 12, 30, device), ignoring(slice(0, 6), 12, device)
    result = evaluate_jsd(linear_jsd, inputs, labels=labels, skip_ignored=6 + wrong, backend=backend)
    assert result.loss.isnan().all()
    assert result.grad_weight.isnan().any()


def test_rows_without_an_upstream_gradient_take_no_part_in_backward(backend, device, monkeypatch):
    """But for a broken one, which is NaN whatever its upstream gradient."""
    inputs, labels = make_inputs(40, 24, 16, 300, device, BF16), ignoring(slice(0, 4), 40, device)
    inputs.upstream[::2] = 0.0
    seen = []

    def spy(hidden, computed, *others):
        seen.append(computed.count)
        return tokens.tokens_in_blocks(hidden, computed, *others)

    monkeypatch.setattr(distillation, "tokens_in_blocks", spy)
    check(backend, inputs, labels=labels, only_here={"skip_ignored": True})
    assert seen[-1] == 18
    temperature = torch.ones(40, device=device)
    temperature[6] = 0.0
    result = evaluate_jsd(
        linear_jsd, inputs, labels=labels, temperature=temperature, skip_ignored=True, backend=backend
    )
    assert seen[-1] == 19
    assert result.grad_hidden.isnan().any(dim=1).nonzero().flatten().tolist() == [6]


def test_no_upstream_gradient_at_all(backend, device):
    inputs = make_inputs(12, 8, 12, 30, device)._replace(upstream=torch.zeros(12, device=device))
    result = evaluate_jsd(linear_jsd, inputs, skip_ignored=True, backend=backend)
    assert not result.grad_hidden.any()
    assert not result.grad_weight.any()
