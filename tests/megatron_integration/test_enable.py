"""`enable_fused_linear_ce` on one rank; what needs several is in torchrun_tests/run_megatron.py."""

import copy
import warnings

import pytest
import torch

pytest.importorskip("megatron.core")

from torch import nn
from torch.distributed.tensor import Shard

from megatron_lce import capture_lm_head, enable_fused_linear_ce
from megatron_lce.core import autograd, tokens
from scripts import megatron_runtime
from tests import megatron_world
from tests.megatron_world import VOCAB_SIZE, enable, lora

REMOVED = ("it was removed, or the model was enabled once more",)


def state(model):
    return [dict(vars(module)) for module in (model, model.output_layer)]


def test_loss_and_gradients_are_megatrons(model, device):
    tensors, labels = megatron_world.inputs(device)
    expected_loss = model(*tensors, labels=labels)
    upstream = torch.linspace(-1, 1, labels.numel(), device=device).view_as(labels)
    expected = megatron_world.gradients(model, (expected_loss * upstream).sum())
    handle = enable(model)
    assert handle.enabled
    assert handle.reasons == ()
    loss = model(*tensors, labels=labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    actual = megatron_world.gradients(model, (loss * upstream).sum())
    megatron_world.assert_same_gradients(actual, expected)


def test_no_logits_are_made_in_forward_or_backward(model, device):
    tensors, labels = megatron_world.inputs(device)
    with megatron_world.LogitsSpy() as spy:
        model(*tensors, labels=labels).sum().backward()
    assert spy.seen, "the spy must see Megatron's own logits"
    enable(model, workspace_bytes=megatron_world.SMALL_WORKSPACE)
    with megatron_world.LogitsSpy() as spy:
        model(*tensors, labels=labels).sum().backward()
    assert spy.seen == []


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_labels_work_in_training_in_eval_and_without_gradient(untied, device, training, grad):
    tensors, labels = megatron_world.inputs(device)
    untied.train(training)
    with torch.set_grad_enabled(grad):
        expected = untied(*tensors, labels=labels)
        enable(untied)
        loss = untied(*tensors, labels=labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert loss.requires_grad == grad


@pytest.mark.parametrize("gather", [None, True, False])
def test_without_labels_the_logits_are_megatrons(model, device, gather):
    tensors, _ = megatron_world.inputs(device)
    model.eval()
    expected = model(*tensors, runtime_gather_output=gather)
    enable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        logits = model(*tensors, runtime_gather_output=gather)
    assert type(logits) is torch.Tensor
    assert torch.equal(logits, expected)


def test_gradients_of_logits_in_training_are_megatrons_and_said_so_once(untied, device):
    tensors, _ = megatron_world.inputs(device)
    expected = megatron_world.gradients(untied, untied(*tensors).square().sum())
    enable(untied)
    with pytest.warns(UserWarning, match="not used: the logits were computed or given a hook"):
        logits = untied(*tensors)
    actual = megatron_world.gradients(untied, logits.square().sum())
    assert all(torch.equal(actual[name], gradient) for name, gradient in expected.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        untied(*tensors)


def test_negative_labels_are_ignored_rows(untied, device):
    tensors, labels = megatron_world.inputs(device)
    enable(untied)
    kept = torch.arange(labels.numel(), device=device).view_as(labels) % 3 != 0
    expected = megatron_world.gradients(untied, untied(*tensors, labels=labels)[kept].sum())
    for ignored in (-1, -100):
        loss = untied(*tensors, labels=labels.where(kept, ignored))
        assert (loss[~kept] == 0).all()
        actual = megatron_world.gradients(untied, loss.sum())
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-6)


def masked_sum(loss, loss_mask):
    return (loss * loss_mask).sum()


@pytest.mark.parametrize(("mtp_layers", "skip"), [(0, True), (0, False), (1, True)])
def test_masked_tokens_are_ignored_rows(device, mtp_layers, skip, monkeypatch):
    """Megatron's loss under its mask, and every gradient; the labels themselves are valid."""
    options = megatron_world.options(mtp_layers=mtp_layers, config={"mtp_loss_scaling_factor": 0.1})
    model = megatron_runtime.build_gpt(options, device=device)
    tensors, labels = megatron_world.inputs(device)
    loss_mask = (torch.arange(labels.numel(), device=device) % 3 == 1).float().view_as(labels)
    expected_loss = model(*tensors, labels=labels, loss_mask=loss_mask)
    expected = megatron_world.gradients(model, masked_sum(expected_loss, loss_mask))
    computed = []
    monkeypatch.setattr(autograd, "Tokens", lambda *given: computed.append(tokens.Tokens(*given)) or computed[-1])
    enable(model, ignore_masked=True, skip_ignored=skip)
    for arguments, keywords in (((None, labels), {}), ((), {"labels": labels})):  # decoder_input, labels
        computed.clear()
        loss = model(*tensors, *arguments, loss_mask=loss_mask, **keywords)
        torch.testing.assert_close(loss, expected_loss * loss_mask, rtol=1e-5, atol=1e-6)
        megatron_world.assert_same_gradients(megatron_world.gradients(model, masked_sum(loss, loss_mask)), expected)
        most = max(rows.num_computed for rows in computed)
        # The shift for MTP ends each sequence with a label 0.
        assert most <= loss_mask.sum() + megatron_world.BATCH * mtp_layers if skip else most == labels.numel()
    with pytest.warns(UserWarning, match="no token was ignored: GPTModel was called with labels and without loss_mask"):
        unmasked = model(*tensors, labels=labels)
    assert torch.equal(unmasked == 0, labels < 0)  # without a mask all count
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ignore_masked")
        model(*tensors, labels=labels)  # told once


def test_masked_tokens_stay_megatrons_unless_asked_for(untied, device):
    tensors, labels = megatron_world.inputs(device)
    loss_mask = torch.zeros_like(labels)
    handle = enable(untied, ignore_masked=True)
    assert repr(handle).endswith("workspace_bytes=536870912, ignore_masked=True)")
    assert not untied(*tensors, labels=labels, loss_mask=loss_mask).any()
    with pytest.raises(ValueError, match=r"loss_mask must have labels' shape, \(3, 23\), got \(69,\)"):
        untied(*tensors, labels=labels, loss_mask=loss_mask.flatten())
    assert untied(*tensors, loss_mask=loss_mask).shape[-1] == VOCAB_SIZE
    for remove in (handle.remove, lambda: enable(untied)):
        remove()
        assert not untied._forward_pre_hooks
        assert untied(*tensors, labels=labels, loss_mask=loss_mask).all()


def test_all_rows_are_computed_while_a_cuda_graph_is_captured(untied, device, monkeypatch):
    tensors, labels = megatron_world.inputs(device)
    labels = labels.where(labels % 3 != 0, -100)
    enable(untied, skip_ignored=True)
    expected = untied(*tensors, labels=labels)
    counted = []
    monkeypatch.setattr(tokens, "rows_that_count", lambda *given: counted.append(given))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    torch.testing.assert_close(untied(*tensors, labels=labels), expected)
    assert not counted


@pytest.mark.gpu
def test_a_cuda_graph_of_the_loss_is_of_all_rows(untied, device):
    _, labels = megatron_world.inputs(device)
    labels = labels.where(labels % 3 != 0, -100)
    hidden = torch.randn(megatron_world.SEQUENCE, megatron_world.BATCH, 32, device=device)
    enable_fused_linear_ce(untied, skip_ignored=True)

    @torch.no_grad()
    def run():
        logits, _ = untied.output_layer(hidden)
        return untied.compute_language_model_loss(labels, logits)

    expected, graph = run(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run()
    graph.replay()
    assert torch.equal(loss, expected)


def test_int32_labels_work_as_in_megatron(untied, device):
    tensors, labels = megatron_world.inputs(device)
    expected = untied(*tensors, labels=labels.int())
    enable(untied)
    torch.testing.assert_close(untied(*tensors, labels=labels.int()), expected)
    with pytest.raises(TypeError, match=r"labels must be int64, got torch.float32"):
        untied(*tensors, labels=labels.float())


def test_vocab_size_leaves_padding_out(untied, device):
    tensors, labels = megatron_world.inputs(device)
    enable(untied, vocab_size=VOCAB_SIZE - 8)
    labels = labels % (VOCAB_SIZE - 8)
    loss = untied(*tensors, labels=labels)
    with torch.no_grad():
        logits = untied(*tensors)[..., : VOCAB_SIZE - 8]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


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
    off = enable_fused_linear_ce(model, use_fused_linear_ce=False)
    assert (third.enabled, off.enabled, off.reasons) == (False, False, ("use_fused_linear_ce is False",))
    assert state(model) == before


def test_the_flag_off_asks_nothing_of_the_model(untied):
    before = state(untied)
    handle = enable(untied)
    for model in (nn.Linear(2, 2), [untied, untied]):
        off = enable_fused_linear_ce(model, use_fused_linear_ce=False, on_unsupported="raise")
        assert (off.enabled, off.reasons) == (False, ("use_fused_linear_ce is False",))
    assert not handle.enabled
    assert state(untied) == before


def test_an_adapter_put_around_an_enabled_head_is_right_and_told(untied, device):
    tensors, labels = megatron_world.inputs(device)
    enable(untied)
    lora(untied)
    untied.output_layer.to(device)
    with pytest.warns(UserWarning, match="enabled but was not used: the logits were computed before the loss"):
        loss = untied(*tensors, labels=labels)
    untied.output_layer.to_wrap.__dict__.pop("forward")
    torch.testing.assert_close(loss, untied(*tensors, labels=labels))


def test_a_stage_without_a_head_is_not_enabled_silently(untied):
    untied.post_process = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = enable(untied, on_unsupported="raise")
    assert not handle.enabled
    assert handle.reasons == ("this pipeline stage has no LM head",)
    handle.remove()


def test_errors(untied):
    with pytest.raises(ValueError, match="on_unsupported must be 'fallback' or 'raise', got 'ignore'"):
        enable(untied, on_unsupported="ignore")
    with pytest.raises(TypeError, match="model must be or hold a megatron-core language model, got Linear"):
        enable(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model must be or hold a megatron-core language model, got an empty list"):
        enable([])
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module or a list of them, got NoneType"):
        enable(None)
    with pytest.raises(ValueError, match="model must hold one LM head, got 2"):
        enable([untied, untied])
    with pytest.raises(TypeError, match="temperature"):
        enable(untied, temperature=2.0)
    for option, value, message in (
        ("softcap", -3.0, "softcap must be positive and finite, got -3.0"),
        ("workspace_bytes", -1, "workspace_bytes must be at least 0, got -1"),
        ("logits_cache_bytes", "2GiB", "logits_cache_bytes must be an int, got str"),
        ("vocab_size", 0, "vocab_size must be at least 1, got 0"),
        ("skip_ignored", 7, "skip_ignored must be True or False: the microbatches of a model differ .*; got 7"),
        ("ignore_masked", 1, "ignore_masked must be a bool, got int"),
        ("use_fused_linear_ce", "False", "use_fused_linear_ce must be a bool, got str"),
        ("backend", "tritom", "backend must be 'auto', 'triton', 'torch' or 'reference', got 'tritom'"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            enable_fused_linear_ce(untied, **{option: value})


def test_a_call_that_is_refused_leaves_the_loss_as_it_was(untied):
    handle = enable(untied)
    before = state(untied)
    untied.output_layer.bias = nn.Parameter(torch.zeros(VOCAB_SIZE))
    with pytest.raises(ValueError, match="output_layer has a bias"):
        enable(untied, on_unsupported="raise")
    assert state(untied) == before
    assert handle.enabled


def test_what_a_handle_says_of_itself(untied):
    handle = enable(untied, vocab_size=96)
    assert repr(handle) == (
        "FusedLinearCE(enabled, backend: torch, logits_cache_bytes=0, workspace_bytes=536870912, vocab_size=96)"
    )
    with capture_lm_head(untied):
        assert repr(handle) == "FusedLinearCE(not enabled: a capture of the model is open)"
    assert repr(enable(untied, use_fused_linear_ce=False)) == "FusedLinearCE(not enabled: use_fused_linear_ce is False)"
    untied.output_layer.bias = nn.Parameter(torch.zeros(VOCAB_SIZE))
    with pytest.warns(UserWarning, match="not used"):
        assert repr(enable(untied)) == "FusedLinearCE(not enabled: output_layer has a bias)"


def test_a_capture_is_closed_first_and_removing_is_always_possible(untied, device):
    tensors, labels = megatron_world.inputs(device)
    before = state(untied)
    expected = untied(*tensors, labels=labels)
    with capture_lm_head(untied) as head:
        inside = state(untied)
        with pytest.raises(RuntimeError, match="capture_lm_head is open on this model: enable before or after it"):
            enable(untied)
        assert state(untied) == inside
    assert state(untied) == before
    for remove in (lambda handle: handle.remove(), lambda handle: enable(untied, use_fused_linear_ce=False)):
        handle = enable(untied)
        with capture_lm_head(untied) as head:
            remove(handle)
            assert untied(*tensors, labels=labels).numel() == 0
        assert head.hidden is not None
        assert not handle.enabled
        assert state(untied) == before
    assert torch.equal(untied(*tensors, labels=labels), expected)


def test_a_copy_of_an_enabled_model_is_enabled_and_disabled_for_itself(untied, device):
    """A shallow copy shares the head: without its own loss the logits are computed, and right."""
    tensors, labels = megatron_world.inputs(device)
    expected = untied(*tensors, labels=labels)
    expected_gradients = megatron_world.gradients(untied, expected.sum())
    before = state(untied)
    handle = enable(untied)
    shallow = copy.copy(untied)
    enable(shallow, use_fused_linear_ce=False)
    assert handle.enabled
    with pytest.warns(UserWarning, match="enabled but was not used: the logits were computed"):
        loss = shallow(*tensors, labels=labels)
    torch.testing.assert_close(loss, expected)
    megatron_world.assert_same_gradients(megatron_world.gradients(shallow, loss.sum()), expected_gradients)
    own = enable(shallow)
    assert (own.enabled, handle.enabled) == (True, False)
    torch.testing.assert_close(untied(*tensors, labels=labels), expected)
    own.remove()
    assert handle.enabled
    handle.remove()
    assert state(untied) == before


def test_a_weight_that_is_a_dtensor_is_refused(untied, device):
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(untied.output_layer.tp_group, device.type)
    weight = torch.distributed.tensor.distribute_tensor(untied.output_layer.weight.data, mesh, [Shard(0)])
    untied.output_layer.weight = nn.Parameter(weight)
    reason = "the head's weight is a DTensor of torch.float32, not a plain fp32, bf16 or fp16"
    with pytest.raises(ValueError, match=f"not used: {reason}"):
        enable(untied, on_unsupported="raise")
    with pytest.raises(ValueError, match=f"cannot be captured: {reason}"):
        capture_lm_head(untied).__enter__()


def test_a_head_wrapped_by_fsdp_after_enabling_is_megatrons_and_told(untied, device):
    tensors, labels = megatron_world.inputs(device)
    expected = untied(*tensors, labels=labels)
    enable(untied)
    untied.output_layer.weight.__fsdp_param__ = True
    with pytest.warns(UserWarning, match="enabled but was not used: the head's weight is managed by FSDP"):
        loss = untied(*tensors, labels=labels)
    torch.testing.assert_close(loss, expected)


def test_a_loss_replaced_after_enabling_leaves_nothing_behind(untied):
    before = state(untied)
    handle = enable(untied)
    untied.compute_language_model_loss = own = lambda labels, logits: logits
    replaced = ("the head's forward or the model's loss was replaced by other code",)
    assert (handle.enabled, handle.reasons) == (False, replaced)
    handle.remove()
    assert untied.compute_language_model_loss is own
    del untied.compute_language_model_loss
    assert state(untied) == before
