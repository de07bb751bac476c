"""`enable_fused_linear_ce` and its handle on one rank; several ranks: torchrun_tests/run_megatron.py."""

import copy
import math
import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from megatron_lce import capture_lm_head, enable_fused_linear_ce
from megatron_lce.core import passes, tokens
from megatron_lce.core.tokens import RowIndex
from tests import megatron_world
from tests.megatron_world import VOCAB_SIZE, assert_refused, enable, state


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


REMOVED = ("it was removed, or the model was enabled once more",)


def test_enabling_twice_removing_and_enabling_again(model):
    before = state(model)
    first = enable(model)
    second = enable(model, vocab_size=100)
    assert (first.enabled, second.enabled) == (False, True)
    assert (first.reasons, second.reasons) == (REMOVED, ())
    first.remove()
    assert second.enabled
    second.remove()
    second.remove()
    assert (second.enabled, second.reasons) == (False, REMOVED)
    assert state(model) == before
    third = enable(model)
    assert third.enabled
    for unsupported in (nn.Linear(2, 2), [model, model]):  # the flag off asks nothing of a model
        off = enable(unsupported, use_fused_linear_ce=False, on_unsupported="raise")
        assert (off.enabled, off.reasons) == (False, ("use_fused_linear_ce is False",))
    assert not third.enabled
    assert state(model) == before


def test_errors(untied):
    assert_refused(TypeError, "must be or hold a megatron-core language model, got an empty list", enable, [])
    assert_refused(TypeError, r"model must be a torch.nn.Module or a list of them, got NoneType", enable, None)
    assert_refused(ValueError, "model must hold one LM head, got 2", enable, [untied, untied])
    modes = "on_unsupported must be 'fallback' or 'raise', got 'ignore'"
    assert_refused(ValueError, modes, enable, untied, on_unsupported="ignore")
    assert_refused(TypeError, "temperature", enable, untied, temperature=2.0)
    for option, value, message in (
        ("softcap", -3.0, "softcap must be positive and finite, got -3.0"),
        ("workspace_bytes", -1, "workspace_bytes must be at least 0, got -1"),
        ("logits_cache_bytes", "2GiB", "logits_cache_bytes must be an int, got str"),
        ("vocab_size", 0, "vocab_size must be at least 1, got 0"),
        ("skip_masked", 1, "skip_masked must be a bool, got int"),
        ("use_fused_linear_ce", "False", "use_fused_linear_ce must be a bool, got str"),
        ("backend", "tritom", "backend must be 'auto', 'triton' or 'torch', got 'tritom'"),
    ):
        assert_refused((TypeError, ValueError), message, enable_fused_linear_ce, untied, **{option: value})


def test_a_call_that_is_refused_leaves_the_loss_as_it_was(untied):
    handle = enable(untied)
    untied.output_layer.bias = nn.Parameter(torch.zeros(VOCAB_SIZE))
    before = state(untied)
    assert_refused(ValueError, "output_layer has a bias", enable, untied, on_unsupported="raise")
    assert state(untied) == before
    assert handle.enabled


def test_a_capture_is_closed_first(untied, tensors, labels):
    before = state(untied)
    expected = untied(*tensors, labels=labels)
    for enabled in (False, True):
        handle = enable(untied, use_fused_linear_ce=enabled)
        with capture_lm_head(untied) as head:
            inside = state(untied)
            message = "capture_lm_head is open on this model: enable before or after it"
            assert_refused(RuntimeError, message, enable, untied)
            if enabled:
                replaced = f"{type(untied.output_layer).__name__}.forward"
                message = f"capture_lm_head has replaced {replaced} after enable_fused_linear_ce: undo"
                for remove in (handle.remove, lambda: enable(untied, use_fused_linear_ce=False)):
                    assert_refused(RuntimeError, message, remove)
            assert state(untied) == inside
            assert untied(*tensors, labels=labels).numel() == 0
        assert head.hidden is not None
        assert handle.enabled == enabled
        enable(untied, use_fused_linear_ce=False)
        assert state(untied) == before
    assert torch.equal(untied(*tensors, labels=labels), expected)


def test_a_deep_copy_of_an_enabled_model_is_its_own(untied, tensors, labels):
    """Where process groups are handed over in the memo."""
    expected = untied(*tensors, labels=labels)
    handle = enable(untied)
    groups = torch.distributed.distributed_c10d._world.pg_map  # process groups cannot be copied
    deep = copy.deepcopy(untied, {id(group): group for group in groups})
    deep.output_layer.weight.data.zero_()
    for disable in (False, True):
        if disable:
            enable(deep, use_fused_linear_ce=False)
        loss = deep(*tensors, labels=labels)
        torch.testing.assert_close(loss, torch.full_like(loss, math.log(VOCAB_SIZE)))
        torch.testing.assert_close(untied(*tensors, labels=labels), expected)
    assert handle.enabled
    assert "forward" not in vars(deep.output_layer)


def test_a_weight_that_is_a_dtensor_is_refused(untied, device):
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(untied.output_layer.tp_group, device.type)
    weight = torch.distributed.tensor.distribute_tensor(untied.output_layer.weight.data, mesh, [Shard(0)])
    untied.output_layer.weight = nn.Parameter(weight)
    reason = "the head's weight is a DTensor of torch.float32, not a plain fp32, bf16 or fp16"
    assert_refused(ValueError, f"not used: {reason}", enable, untied, on_unsupported="raise")
    assert_refused(ValueError, f"cannot be captured: {reason}", capture_lm_head(untied).__enter__)


def test_a_loss_replaced_after_enabling_is_restored_first(untied):
    before = state(untied)
    handle = enable(untied)
    ours = untied.compute_language_model_loss
    untied.compute_language_model_loss = other = lambda labels, logits: logits
    replaced = ("the head's forward or the model's loss was replaced by other code",)
    assert (handle.enabled, handle.reasons) == (False, replaced)
    message = r"\S*test_enable has replaced GPTModel.compute_language_model_loss after enable_fused_linear_ce: undo"
    for remove in (handle.remove, lambda: enable(untied, use_fused_linear_ce=False)):
        assert_refused(RuntimeError, message, remove)
    assert untied.compute_language_model_loss is other
    untied.compute_language_model_loss = ours
    assert handle.enabled
    handle.remove()
    assert state(untied) == before


def test_skipping_by_the_name_that_it_has_in_a_call(untied, tensors, labels):
    with pytest.warns(UserWarning, match="^skip_ignored is called skip_masked here$"):
        assert "skip_masked=True" in repr(enable(untied, skip_ignored=True))
    both = {"skip_ignored": True, "skip_masked": True}
    assert_refused(
        TypeError, "skip_ignored must not be given beside skip_masked, its name here", enable, untied, **both
    )
    with capture_lm_head(untied) as head:
        untied(*tensors)
    labels[:, ::2] = -100
    expected = head.linear_cross_entropy(labels, skip_ignored=True)
    with pytest.warns(UserWarning, match="^skip_masked is called skip_ignored here$"):
        found = head.linear_cross_entropy(labels, skip_masked=True)
    assert torch.equal(found.logprobs, expected.logprobs)


def test_warnings_point_at_the_callers_line(device, tensors, labels):
    """Also those of a forward pass, whatever is around the model."""
    model = megatron_world.build(device, ddp=True, dtype=torch.bfloat16).train()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        enable_fused_linear_ce(model, skip_ignored=True, backend="torch")
        model(*tensors)
        model(*tensors, labels=labels)
        with capture_lm_head(model) as head:
            model(*tensors)
        head.linear_cross_entropy(labels, skip_masked=True, backend="torch")
        model.module.module.output_layer.bias = nn.Parameter(torch.zeros(VOCAB_SIZE))
        enable_fused_linear_ce(model)
    ours = [one for one in told if re.match("skip_|fused linear", str(one.message))]
    assert len({one.lineno for one in ours}) == len(ours) == 5
    assert {one.filename for one in ours} == {__file__}
