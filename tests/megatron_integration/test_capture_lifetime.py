"""How long a capture holds what it captured, how often it is opened, and which model it is of."""

import copy
import gc
import weakref

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_lce import capture_lm_head
from tests.megatron_world import state


def test_hidden_goes_with_the_result(model, tensors):
    """And with its graph all activations: nothing of a closed capture may hold itself until the collector comes."""
    gc.collect()
    gc.disable()
    try:
        with capture_lm_head(model) as head:
            model(*tensors)
        hidden = weakref.ref(head.hidden)
        del head
        assert hidden() is None
    finally:
        gc.enable()


def test_a_capture_is_opened_again_inside_itself_and_after(untied, tensors):
    """Each `with` closes what it opened."""
    before = state(untied)
    capture = capture_lm_head(untied)
    for _ in range(2):
        with capture as outer:
            with capture as inner:
                untied(*tensors)
            assert inner.hidden is not None
            assert outer.hidden is None
            untied(*tensors)
        assert outer.hidden is not None
        assert state(untied) == before


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_shallow_copy_of_a_captured_model_returns_its_logits(untied, when, tensors):
    """It shares the head and the hooks, and is another model."""
    expected = untied(*tensors)
    shallow = copy.copy(untied)
    with capture_lm_head(untied) as head:
        if when == "inside":
            shallow = copy.copy(untied)
        assert torch.equal(shallow(*tensors), expected)
        assert head.hidden is None
