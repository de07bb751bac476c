"""Which heads are not fused, and that each is told."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import nn

from tests.megatron_world import VOCAB_SIZE, enable, lora, state


def critic(model):
    model.output_layer = nn.Linear(32, 1)


def parallel_critic(model):
    model.output_layer = ColumnParallelLinear(
        32, 1, config=model.config, init_method=model.config.init_method, bias=False
    )


def gather_output(model):
    model.output_layer.gather_output = True


def bias(model):
    model.output_layer.bias = nn.Parameter(torch.zeros(VOCAB_SIZE))


def fp8_weight(model):
    model.output_layer.weight.data = model.output_layer.weight.data.to(torch.float8_e4m3fn)


def quantized_weight(model):
    class QuantizedTensor(torch.Tensor):
        pass

    model.output_layer.weight = nn.Parameter(model.output_layer.weight.data.as_subclass(QuantizedTensor))


def deferred_weight_gradient(model):
    model.config.defer_embedding_wgrad_compute = True


def config_logger(model):
    model.config.config_logger_dir = "somewhere"


def output_hook(model):
    model.output_layer.register_forward_hook(lambda *_: None)


def foreign_forward(model):
    model.output_layer.forward = lambda *_, **__: None


def foreign_loss(model):
    model.compute_language_model_loss = lambda *_: None


def patched_loss_of_every_model(model):
    def smoothed(self, labels, logits):
        return 0.0 * logits.sum()

    patch = pytest.MonkeyPatch()
    patch.setattr(LanguageModule, "compute_language_model_loss", smoothed)
    return patch.undo


def own_product(model):
    model.output_layer._forward_impl = lambda **keywords: keywords["input"] @ keywords["weight"].T / 2


def patched_product_of_every_head(model):
    patch = pytest.MonkeyPatch()
    patch.setattr(ColumnParallelLinear, "_forward_impl", lambda self, **_: None)
    return patch.undo


def no_grad_reduce(model):
    model.output_layer.disable_grad_reduce = True


def generalized_tensor_parallel(model):
    model.output_layer.gtp_remat_size = 2


def own_loss(model):
    class Smoothed(type(model)):
        def compute_language_model_loss(self, labels, logits):
            return logits.mean(-1)

    model.__class__ = Smoothed


UNSUPPORTED = {
    lora: "output_layer is a LoraLinear, which is no ColumnParallelLinear of megatron-core",
    critic: "output_layer is a Linear, which is no ColumnParallelLinear of megatron-core",
    parallel_critic: "output_layer has 1 outputs, not the vocabulary's 104: a critic's or classifier's head",
    gather_output: r"output_layer gathers its output \(parallel_output=False\)",
    bias: "output_layer has a bias",
    fp8_weight: "the head's weight is a Tensor of torch.float8_e4m3fn, not a plain fp32, bf16 or fp16",
    quantized_weight: "the head's weight is a QuantizedTensor of torch.float32, not a plain",
    deferred_weight_gradient: "defer_embedding_wgrad_compute is set",
    config_logger: "config_logger_dir is set",
    output_hook: "output_layer has forward or backward hooks, which expect logits",
    foreign_forward: "output_layer.forward was replaced by another library",
    foreign_loss: "compute_language_model_loss was replaced by another library",
    no_grad_reduce: "output_layer has disable_grad_reduce set",
    generalized_tensor_parallel: "output_layer is sharded by generalized tensor parallelism",
    own_loss: "Smoothed has its own compute_language_model_loss",
    patched_loss_of_every_model: "LanguageModule.compute_language_model_loss was replaced by another library",
    own_product: "output_layer's _forward_impl was replaced",
    patched_product_of_every_head: "ColumnParallelLinear._forward_impl was replaced by another library",
}


@pytest.mark.parametrize(("change", "reason"), UNSUPPORTED.items(), ids=[change.__name__ for change in UNSUPPORTED])
def test_what_cannot_be_fused_is_told(untied, change, reason):
    undo = change(untied)
    before = state(untied)
    try:
        with pytest.warns(UserWarning, match=f"fused linear cross-entropy is not used: {reason}") as told:
            handle = enable(untied)
        assert len(told) == 1
        assert not handle.enabled
        assert len(handle.reasons) == 1
        assert state(untied) == before
        with pytest.raises(ValueError, match=f"fused linear cross-entropy is not used: {reason}"):
            enable(untied, on_unsupported="raise")
    finally:
        if undo is not None:
            undo()


def test_fallback_is_megatrons_own_path(untied, device, tensors, labels):
    lora(untied)
    untied.output_layer.to(device)
    expected = untied(*tensors, labels=labels)
    with pytest.warns(UserWarning, match="not used"):
        enable(untied)
    assert torch.equal(untied(*tensors, labels=labels), expected)


def test_a_fallback_tells_which_options_are_lost(untied):
    bias(untied)
    with pytest.warns(UserWarning, match="not used: output_layer has a bias; not applied: softcap, vocab_size"):
        enable(untied, vocab_size=96, softcap=30.0)
