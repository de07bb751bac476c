"""Models under torch.compile: head and loss are breaks of the graph at most, and never errors of the compiler."""

import contextlib
import warnings

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_lce import capture_lm_head
from tests import megatron_world
from tests.megatron_world import enable


@pytest.fixture
def compiled(untied):
    torch._dynamo.reset()
    untied.decoder.forward = torch.compiler.disable(untied.decoder.forward)  # takes most of the compiler's time
    yield torch.compile(untied, backend="aot_eager")
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def without_the_compilers_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("grad", [True, False])
def test_logits_and_loss_of_a_compiled_model_are_those_of_the_model(untied, compiled, device, grad):
    """With labels and without, by turns: what was compiled for the one must not serve the other."""
    tensors, labels = megatron_world.inputs(device)
    with torch.set_grad_enabled(grad):
        logits, loss = untied(*tensors), untied(*tensors, labels=labels)
        if grad:
            of_logits = megatron_world.gradients(untied, logits.square().sum())
            of_loss = megatron_world.gradients(untied, loss.sum())
        enable(untied)
        for _ in range(2):
            actual = compiled(*tensors)
            torch.testing.assert_close(actual, logits)
            assert type(actual) is torch.Tensor
            fused = compiled(*tensors, labels=labels)
            torch.testing.assert_close(fused, loss, rtol=1e-5, atol=1e-6)
            if grad:
                megatron_world.assert_same_gradients(megatron_world.gradients(untied, actual.square().sum()), of_logits)
                megatron_world.assert_same_gradients(megatron_world.gradients(untied, fused.sum()), of_loss)


@pytest.mark.parametrize(("enabled", "with_labels"), [(True, False), (False, True)])
def test_a_capture_around_a_compiled_model(untied, compiled, device, enabled, with_labels):
    tensors, labels = megatron_world.inputs(device)
    expected = torch.log_softmax(untied(*tensors), -1).gather(-1, labels[..., None])[..., 0]
    expected_gradients = megatron_world.gradients(untied, expected.sum())
    if enabled:
        enable(untied)
    for captured in (True, False, True):  # one pass before, and between, that nothing captures
        with capture_lm_head(compiled) if captured else contextlib.nullcontext() as head:
            output = compiled(*tensors, labels=labels if with_labels else None)
        if captured:
            assert output.numel() == 0
            logprobs = head.linear_cross_entropy(labels, backend="torch").logprobs
            torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-6)
            megatron_world.assert_same_gradients(megatron_world.gradients(untied, logprobs.sum()), expected_gradients)


def test_code_that_reads_in_a_compiled_model(untied, compiled, device):
    tensors, labels = megatron_world.inputs(device)
    expected = untied(*tensors, labels=labels)
    enable(untied)
    fused, read = untied.compute_language_model_loss, []
    untied.compute_language_model_loss = lambda labels, logits: (read.append(logits.sum()), fused(labels, logits))[1]
    torch.testing.assert_close(compiled(*tensors, labels=labels), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(read[0], untied(*tensors).sum())


def test_changed_logits_in_a_compiled_model_are_refused(untied, compiled, device):
    tensors, labels = megatron_world.inputs(device)
    enable(untied)
    fused = untied.compute_language_model_loss
    untied.compute_language_model_loss = lambda labels, logits: (logits.div_(2), fused(labels, logits))[1]
    with pytest.raises(RuntimeError, match="in front of a fused loss"):
        compiled(*tensors, labels=labels)
