"""Which heads are not fused, and that each is told; a model that keeps the cross-entropy it chose when it was built."""

import functools

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core")

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy

from megatron_lce import capture_lm_head
from tests import megatron_world
from tests.megatron_world import VOCAB_SIZE, assert_refused, enable, lora, state


def parallel_critic(model):
    head, config = model.output_layer, model.config
    model.output_layer = type(head)(32, 1, config=config, init_method=config.init_method, bias=False)


def fp8_weight(model):
    model.output_layer.weight.data = model.output_layer.weight.data.to(torch.float8_e4m3fn)


def quantized_weight(model):
    class QuantizedTensor(torch.Tensor):
        pass

    model.output_layer.weight = nn.Parameter(model.output_layer.weight.data.as_subclass(QuantizedTensor))


def output_hook(model):
    model.output_layer.register_forward_hook(lambda *_: None)


def own_loss(model):
    class Smoothed(type(model)):
        def compute_language_model_loss(self, labels, logits):
            return logits.mean(-1)

    model.__class__ = Smoothed


CHANGES = {
    lora: "output_layer is a LoraLinear, which is no ColumnParallelLinear of megatron-core, but holds one: leave it "
    "out of the adapter's targets, or merge the adapter",
    parallel_critic: "output_layer has 1 outputs, not the vocabulary's 104: a critic's or classifier's head",
    fp8_weight: "the head's weight is a Tensor of torch.float8_e4m3fn, not a plain fp32, bf16 or fp16",
    quantized_weight: "the head's weight is a QuantizedTensor of torch.float32, not a plain",
    output_hook: "output_layer has forward or backward hooks, which expect logits",
    own_loss: "Smoothed has its own compute_language_model_loss",
}
REPLACED = "was replaced by another library"
SETTINGS = {  # by what is set: its value, and the reason
    "output_layer": (nn.Linear(32, 1), "output_layer is a Linear, which is no ColumnParallelLinear of megatron-core$"),
    "output_layer.gather_output": (True, r"output_layer gathers its output \(parallel_output=False\)"),
    "output_layer.bias": (nn.Parameter(torch.zeros(VOCAB_SIZE)), "output_layer has a bias"),
    "output_layer.disable_grad_reduce": (True, "output_layer has disable_grad_reduce set"),
    "output_layer.forward": (lambda *_, **__: None, f"output_layer.forward {REPLACED}"),
    "output_layer._forward_impl": (lambda **_: None, "output_layer's _forward_impl was replaced"),
    "ColumnParallelLinear._forward_impl": (lambda *_, **__: None, f"ColumnParallelLinear._forward_impl {REPLACED}"),
    "compute_language_model_loss": (lambda *_: None, f"compute_language_model_loss {REPLACED}"),
    "__class__.__base__.compute_language_model_loss": (
        lambda self, labels, logits: 0.0 * logits.sum(),
        f"LanguageModule.compute_language_model_loss {REPLACED}",
    ),
    "vocab_parallel_cross_entropy": (
        lambda logits, labels, group: 0.0 * logits.sum(),
        r"the model was built with another cross-entropy, tests\.\S*test_support.<lambda>",
    ),
    "config.defer_embedding_wgrad_compute": (True, "defer_embedding_wgrad_compute is set"),
    "config.config_logger_dir": ("somewhere", "config_logger_dir is set"),
}


@pytest.mark.parametrize("change", [*CHANGES, *SETTINGS])
def test_what_cannot_be_fused_is_told(untied, change, monkeypatch):
    if change in CHANGES:
        reason = CHANGES[change]
        change(untied)
    else:
        value, reason = SETTINGS[change]
        *owner, name = change.split(".")
        holder = ColumnParallelLinear if owner == ["ColumnParallelLinear"] else functools.reduce(getattr, owner, untied)
        monkeypatch.setattr(holder, name, value, raising=False)
    before = state(untied)
    message = f"fused linear cross-entropy is not used: {reason}"
    with pytest.warns(UserWarning, match=message) as told:
        handle = enable(untied)
    assert len(told) == 1
    assert not handle.enabled
    assert len(handle.reasons) == 1
    assert state(untied) == before
    assert_refused(ValueError, message, enable, untied, on_unsupported="raise")


def test_a_fallback_tells_which_options_are_lost(untied):
    untied.output_layer.bias = nn.Parameter(torch.zeros(VOCAB_SIZE))
    with pytest.warns(UserWarning, match="not used: output_layer has a bias; not applied: softcap, vocab_size"):
        enable(untied, vocab_size=96, softcap=30.0)


def loss_by_what_is_kept(self, labels, logits):
    return self.vocab_parallel_cross_entropy(logits, labels.T.contiguous(), self.output_layer.tp_group).T.contiguous()


@pytest.fixture(params=[0, 1], ids=["plain", "MTP"])
def kept(request, device, monkeypatch):
    """A model, and the list of the calls of the cross-entropy that it keeps."""
    model = megatron_world.build(device, mtp_layers=request.param)
    calls, own = (
        [],
        getattr(model, "vocab_parallel_cross_entropy", lambda *args: vocab_parallel_cross_entropy(*args[:2])),
    )
    if not hasattr(model, "vocab_parallel_cross_entropy"):
        loss_by_what_is_kept.__module__ = LanguageModule.__module__
        monkeypatch.setattr(LanguageModule, "compute_language_model_loss", loss_by_what_is_kept)

    def counted(logits, labels, group):
        calls.append(logits)
        return vocab_parallel_cross_entropy(logits, labels) if own is None else own(logits, labels, group)

    counted.__module__ = "megatron.core.tensor_parallel.cross_entropy"
    model.vocab_parallel_cross_entropy = functools.partial(counted)
    return model, calls


@pytest.mark.parametrize("known_loss", [False, True])
def test_the_flag_the_capture_and_removal(kept, known_loss, tensors, labels):
    model, calls = kept
    before = state(model)
    expected = model(*tensors, labels=labels)
    gradients = megatron_world.gradients(model, expected.sum())
    assert len(calls) == 1 + (model.config.mtp_num_layers or 0)
    calls.clear()
    handle = enable(model, known_loss=known_loss, on_unsupported="raise")
    loss = model(*tensors, labels=labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    megatron_world.assert_gradients(model, loss.sum(), gradients)
    with capture_lm_head(model) as head:
        assert model(*tensors, labels=labels).numel() == 0
    loss = -head.linear_cross_entropy(labels, backend="torch").logprobs
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    megatron_world.assert_gradients(model, loss.sum(), gradients)
    assert not calls
    handle.remove()
    assert state(model) == before
    assert torch.equal(model(*tensors, labels=labels), expected)
    assert calls
