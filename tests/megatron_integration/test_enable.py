"""`enable_fused_linear_ce` on one rank; what needs several is in torchrun_tests/run_megatron.py."""

import warnings

import pytest
import torch

from megatron_lce import enable_fused_linear_ce
from megatron_lce.core import passes, tokens
from megatron_lce.core.row_index import RowIndex
from tests import megatron_world
from tests.megatron_world import VOCAB_SIZE, assert_refused, enable


@pytest.mark.parametrize("training", [True, False])
def test_loss_and_gradients_are_megatrons_without_logits(model, training, device, tensors, labels):
    model.train(training)
    upstream = torch.linspace(-1, 1, labels.numel(), device=device).view_as(labels)

    def run():
        with megatron_world.LogitsSpy() as spy:
            loss = model(*tensors, labels=labels)
            return loss, megatron_world.gradients(model, (loss * upstream).sum()), spy.seen

    expected_loss, expected, seen = run()
    assert seen, "the spy must see Megatron's own logits"
    handle = enable(model, workspace_bytes=megatron_world.SMALL_WORKSPACE)
    assert (handle.enabled, handle.reasons) == (True, ())
    loss, actual, seen = run()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    megatron_world.assert_same_gradients(actual, expected)
    assert seen == []
    with torch.no_grad():
        without_gradient = model(*tensors, labels=labels)
    torch.testing.assert_close(without_gradient, expected_loss, rtol=1e-5, atol=1e-6)
    assert not without_gradient.requires_grad


def test_gradients_of_logits_in_training_are_megatrons_and_said_so_once(untied, tensors):
    expected = megatron_world.gradients(untied, untied(*tensors).square().sum())
    enable(untied)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        untied.eval()(*tensors)
    with pytest.warns(UserWarning, match="not used: the model was called without labels"):
        logits = untied.train()(*tensors)
    actual = megatron_world.gradients(untied, logits.square().sum())
    assert all(torch.equal(actual[name], gradient) for name, gradient in expected.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        untied(*tensors)


@pytest.mark.parametrize("mtp_layers", [0, 1])
def test_masked_tokens_are_ignored_rows(device, mtp_layers, monkeypatch, tensors, labels):
    """Megatron's loss under its mask, and every gradient; the labels themselves are valid."""
    model = megatron_world.build(device, mtp_layers=mtp_layers)
    loss_mask = (torch.arange(labels.numel(), device=device) % 3 == 1).float().view_as(labels)
    expected_loss = model(*tensors, labels=labels, loss_mask=loss_mask)
    expected = megatron_world.gradients(model, (expected_loss * loss_mask).sum())
    computed = []
    in_blocks = tokens.tokens_in_blocks
    monkeypatch.setattr(passes, "tokens_in_blocks", lambda *given: computed.append(given[1].count) or in_blocks(*given))
    enable(model, skip_masked=True)
    for arguments, keywords in (((None, labels), {}), ((), {"labels": labels})):  # decoder_input, labels
        computed.clear()
        loss = model(*tensors, *arguments, loss_mask=loss_mask, **keywords)
        torch.testing.assert_close(loss, expected_loss * loss_mask, rtol=1e-5, atol=1e-6)
        megatron_world.assert_gradients(model, (loss * loss_mask).sum(), expected)
        # The shift for MTP ends each sequence with a label 0.
        assert max(computed) <= loss_mask.sum() + megatron_world.BATCH * mtp_layers
    told = "only negative labels are skipped: GPTModel was called with labels and without loss_mask"
    with pytest.warns(UserWarning, match=told):
        unmasked = model(*tensors, labels=labels)
    assert torch.equal(unmasked == 0, labels < 0)  # without a mask all count
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="skip_masked")
        model(*tensors, labels=labels)  # told once


@pytest.mark.filterwarnings("ignore:fused linear cross-entropy is enabled but was not used")
def test_masked_tokens_stay_megatrons_unless_asked_for(untied, tensors, labels):
    loss_mask = torch.zeros_like(labels)
    handle = enable(untied, skip_masked=True)
    assert repr(handle).endswith("workspace_bytes=536870912, skip_masked=True)")
    assert not untied(*tensors, labels=labels, loss_mask=loss_mask).any()
    message = r"loss_mask must have labels' shape, \(3, 23\), got \(69,\)"
    assert_refused(ValueError, message, untied, *tensors, labels=labels, loss_mask=loss_mask.flatten())
    assert untied(*tensors, loss_mask=loss_mask).shape[-1] == VOCAB_SIZE
    for remove in (handle.remove, lambda: enable(untied)):
        remove()
        assert untied(*tensors, labels=labels, loss_mask=loss_mask).all()


@pytest.mark.filterwarnings("ignore:skip_masked is True but only negative labels are skipped")
def test_all_rows_are_computed_while_a_cuda_graph_is_captured(untied, monkeypatch, tensors, labels):
    labels = labels.where(labels % 3 != 0, -100)
    enable(untied, skip_masked=True)
    expected = untied(*tensors, labels=labels)
    counted = []
    monkeypatch.setattr(RowIndex, "from_mask", lambda *given: counted.append(given))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    torch.testing.assert_close(untied(*tensors, labels=labels), expected)
    assert not counted


@pytest.mark.gpu
def test_a_cuda_graph_of_the_loss_is_of_all_rows(untied, device, labels):
    labels = labels.where(labels % 3 != 0, -100)
    hidden = torch.randn(megatron_world.SEQUENCE, megatron_world.BATCH, 32, device=device)
    enable_fused_linear_ce(untied, skip_masked=True)

    @torch.no_grad()
    def run():
        logits, _ = untied.output_layer(hidden)
        return untied.compute_language_model_loss(labels, logits)

    expected, graph = run(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run()
    graph.replay()
    assert torch.equal(loss, expected)


def test_options_that_this_head_cannot_have_are_known_when_enabling(untied, monkeypatch, tensors, labels):
    """In the first forward pass they would name arguments of other functions."""
    monkeypatch.setattr("megatron_lce.megatron.enable.triton_obstacle", lambda backend, device: "it is a test")
    expected = untied(*tensors, labels=labels)
    for options, reason in (
        ({"vocab_size": VOCAB_SIZE + 1}, f"vocab_size is {VOCAB_SIZE + 1}, but output_layer has {VOCAB_SIZE} outputs"),
        ({"backend": "triton"}, "backend is 'triton', which cannot run: it is a test"),
    ):
        assert_refused(ValueError, f"not used: {reason}$", enable_fused_linear_ce, untied, True, "raise", **options)
        with pytest.warns(UserWarning, match=f"not used: {reason}"):
            handle = enable_fused_linear_ce(untied, **options)
        assert handle.reasons == (reason,)
        assert torch.equal(untied(*tensors, labels=labels), expected)
    assert enable(untied, vocab_size=VOCAB_SIZE).enabled


def test_int32_labels_work_as_in_megatron(untied, tensors, labels):
    expected = untied(*tensors, labels=labels.int())
    enable(untied)
    torch.testing.assert_close(untied(*tensors, labels=labels.int()), expected)
    message = r"labels must be int64, got torch.float32"
    assert_refused(TypeError, message, untied, *tensors, labels=labels.float())
