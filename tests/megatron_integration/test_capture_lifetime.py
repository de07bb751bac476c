"""How long a capture holds what it captured, how often it is opened, which model it is of, and first mistakes."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from megatron_lce import capture_lm_head, enable_fused_linear_ce
from tests.megatron_world import REFUSED, assert_refused, captured, state


def test_hidden_goes_with_the_result(model, tensors):
    """And with its graph all activations: nothing of a closed capture may hold itself until the collector comes."""
    gc.collect()
    gc.disable()
    try:
        head = captured(model, tensors)
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
def test_a_shallow_copy_of_a_captured_or_enabled_model_is_refused(untied, when, tensors, labels):
    """It shares head and hooks: its pass is recorded, or raises; what is opened on it could not be closed."""
    before = state(untied)
    copies = {"before": copy.copy(untied)}
    message = "model is a shallow copy of a GPTModel for which {} is in effect: pass the original"
    with capture_lm_head(untied) as head:
        copies["inside"] = copy.copy(untied)
        if when == "inside":
            assert copies[when](*tensors).numel() == 0
        else:
            assert_refused(RuntimeError, "inside capture_lm_head holds no logits", copies[when], *tensors)
        assert head.hidden is not None
        assert_refused(RuntimeError, message.format("capture_lm_head"), capture_lm_head(copies[when]).__enter__)
    handle = enable_fused_linear_ce(untied)
    expected = untied(*tensors, labels=labels)
    copies["inside"] = copy.copy(untied)
    for entry in (enable_fused_linear_ce, lambda model: enable_fused_linear_ce(model, use_fused_linear_ce=False)):
        assert_refused(RuntimeError, message.format("enable_fused_linear_ce"), entry, copies[when])
    if when == "inside":
        assert torch.equal(copies[when](*tensors, labels=labels), expected)
    else:
        assert_refused(RuntimeError, REFUSED, copies[when], *tensors, labels=labels)
    handle.remove()
    assert state(untied) == before


READINGS = {
    "mean": lambda logits, labels: logits.float().mean(),
    "sum": lambda logits, labels: logits.sum(),
    "cross_entropy": lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    "gather": lambda logits, labels: logits.float().log_softmax(-1).gather(-1, labels[..., None]),
    "sub": lambda logits, labels: logits - labels[..., None].float(),
    "argmax": lambda logits, labels: logits.argmax(-1),
}


@pytest.mark.parametrize("reading", READINGS)
def test_a_models_output_inside_a_capture_read_as_logits(untied, reading, tensors, labels):
    with capture_lm_head(untied) as head:
        returned = untied(*tensors)
    assert returned.transpose(0, 1).contiguous().float().detach().shape == (*labels.T.shape, 0)
    message = "inside capture_lm_head holds no logits: call head.linear_cross_entropy"
    assert_refused(RuntimeError, message, READINGS[reading], returned, labels)
    assert head.hidden is not None


def test_a_capture_without_with(untied):
    head = capture_lm_head(untied)
    for use in (lambda: head.linear_cross_entropy(None), lambda: head.hidden):
        assert_refused(AttributeError, r"before it is opened: `with capture_lm_head\(model\) as head:`", use)


@pytest.mark.parametrize("entry", [lambda model: capture_lm_head(model).__enter__(), enable_fused_linear_ce])
def test_a_model_that_is_not_megatrons(entry):
    message = "model must be or hold a megatron-core language model, got Linear; for other models "
    assert_refused(TypeError, message + r"\(Hugging Face, FSDP\) there are megatron_lce", entry, torch.nn.Linear(2, 2))
