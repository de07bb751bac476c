"""How long a capture holds what it captured, how often it is opened, which model it is of, and first mistakes."""

import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F

from megatron_lce import capture_lm_head, enable_fused_linear_ce
from tests import megatron_world
from tests.megatron_world import assert_refused, captured, state


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


def test_what_an_inference_engine_overwrites_is_copied(untied, tensors, labels):
    with torch.inference_mode(), capture_lm_head(untied) as head:
        buffer = untied.decoder.register_forward_hook(lambda module, args, hidden: hiddens.append(hidden))
        hiddens = []
        untied(*tensors)
        buffer.remove()
    expected = head.linear_cross_entropy(labels, backend="torch").logprobs
    with torch.inference_mode():
        hiddens[0].zero_()
    assert torch.equal(head.linear_cross_entropy(labels, backend="torch").logprobs, expected)


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


@pytest.mark.parametrize("use", ["nothing", "hidden", "an operation", "an MTP head"])
def test_a_pass_that_is_lost_unused_is_told(use, device, tensors, labels):
    """Microbatches that are used one by one, as a schedule does, are not."""
    model = megatron_world.build(device, mtp_layers=1)
    uses = {
        "nothing": lambda head: repr(head),
        "hidden": lambda head: head.hidden.detach(),
        "an operation": lambda head: head.linear_cross_entropy(labels, backend="torch"),
        "an MTP head": lambda head: head.mtp_heads[0].linear_cross_entropy(labels, backend="torch"),
    }
    with warnings.catch_warnings(record=True) as told, capture_lm_head(model, mtp="capture") as head:
        warnings.simplefilter("always")
        for _ in range(2):
            model(*tensors)
            uses[use](head)
    message = "a forward pass inside capture_lm_head replaces another, which was not used"
    lost = [one.filename for one in told if str(one.message).startswith(message)]
    assert lost == [__file__] * (use == "nothing")


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
