"""Mistakes of a first day: each is an error that says what to do."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core")

from megatron_lce import capture_lm_head, enable_fused_linear_ce

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
    with pytest.raises(RuntimeError, match=r"inside capture_lm_head holds no logits: call head.linear_cross_entropy"):
        READINGS[reading](returned, labels)
    assert head.hidden is not None


def test_a_capture_without_with(untied):
    head = capture_lm_head(untied)
    for use in (lambda: head.linear_cross_entropy(None), lambda: head.hidden):
        with pytest.raises(AttributeError, match=r"before it is opened: `with capture_lm_head\(model\) as head:`"):
            use()


@pytest.mark.parametrize("entry", [lambda model: capture_lm_head(model).__enter__(), enable_fused_linear_ce])
def test_a_model_that_is_not_megatrons(entry):
    with pytest.raises(TypeError, match=r"got Linear; for other models \(Hugging Face, FSDP\) there are megatron_lce"):
        entry(torch.nn.Linear(2, 2))
