"""`enable_fused_linear_ce` on one rank; what needs several is in torchrun_tests/run_megatron.py."""

import warnings

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import nn

from megatron_lce import capture_lm_head, enable_fused_linear_ce
from scripts import megatron_runtime
from tests import megatron_world
from tests.megatron_world import VOCAB_SIZE


@pytest.fixture(scope="module")
def device():
    with megatron_world.world() as device:
        yield device


@pytest.fixture(params=["untied", "tied"])
def model(request, device):
    return megatron_runtime.build_gpt(megatron_world.options(tied=request.param == "tied"), device=device)


@pytest.fixture
def untied(device):
    return megatron_runtime.build_gpt(megatron_world.options(), device=device)


def enable(model, **settings):
    return enable_fused_linear_ce(model, backend="torch", **settings)


NOT_IN_FORCE = ("its methods are not in place: it was removed, replaced, or a capture is open",)


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
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (actual[name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{name}: {error}"


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
    with pytest.warns(UserWarning, match="not used: the logits were computed in training"):
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
    assert (first.reasons, second.reasons) == (NOT_IN_FORCE, ())
    first.remove()
    assert second.enabled
    second.remove()
    second.remove()
    assert (second.enabled, second.reasons) == (False, NOT_IN_FORCE)
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


class LoraLinear(nn.Module):
    """An adapter as PEFT libraries put it around a Megatron linear layer."""

    def __init__(self, to_wrap):
        super().__init__()
        self.to_wrap = to_wrap
        self.delta = nn.Parameter(torch.full_like(to_wrap.weight, 0.1))

    def forward(self, input_, weight=None, runtime_gather_output=None):
        output, bias = self.to_wrap(input_, weight, runtime_gather_output)
        return output + input_ @ self.delta.T, bias


def lora(model):
    model.output_layer = LoraLinear(model.output_layer)


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


def fsdp_weight(model):
    model.output_layer.weight.__fsdp_param__ = True


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
    lora: "output_layer is a LoraLinear, not megatron-core's ColumnParallelLinear",
    critic: "output_layer is a Linear, not megatron-core's ColumnParallelLinear: an adapter, a critic's head or an fp8",
    parallel_critic: "output_layer has 1 outputs, not the vocabulary's 104: a critic's or classifier's head",
    gather_output: r"output_layer gathers its output \(parallel_output=False\)",
    bias: "output_layer has a bias",
    fp8_weight: "the head's weight is a Tensor of torch.float8_e4m3fn, not a plain fp32, bf16 or fp16",
    quantized_weight: "the head's weight is a QuantizedTensor of torch.float32, not a plain",
    fsdp_weight: "the head's weight is managed by FSDP",
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


def test_fallback_is_megatrons_own_path(untied, device):
    tensors, labels = megatron_world.inputs(device)
    lora(untied)
    untied.output_layer.to(device)
    expected = untied(*tensors, labels=labels)
    with pytest.warns(UserWarning, match="not used"):
        enable(untied)
    assert torch.equal(untied(*tensors, labels=labels), expected)


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
    with pytest.raises(ValueError, match="model must hold one LM head, got 2"):
        enable([untied, untied])
    with pytest.raises(TypeError, match="temperature"):
        enable(untied, temperature=2.0)
    for option, value, message in (
        ("softcap", -3.0, "softcap must be positive and finite, got -3.0"),
        ("workspace_bytes", -1, "workspace_bytes must be at least 0, got -1"),
        ("logits_cache_bytes", "2GiB", "logits_cache_bytes must be an int, got str"),
        ("vocab_size", 0, "vocab_size must be at least 1, got 0"),
        ("backend", "tritom", "backend must be 'auto', 'triton', 'torch' or 'reference', got 'tritom'"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            enable_fused_linear_ce(untied, **{option: value})


def test_not_while_a_capture_is_open(untied):
    handle = enable(untied)
    with capture_lm_head(untied):
        for change in (handle.remove, lambda: enable(untied), lambda: enable(untied, use_fused_linear_ce=False)):
            with pytest.raises(RuntimeError, match="capture_lm_head is open on this model"):
                change()
    assert handle.enabled


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
    assert (handle.enabled, handle.reasons) == (False, NOT_IN_FORCE)
    handle.remove()
    assert untied.compute_language_model_loss is own
    del untied.compute_language_model_loss
    assert state(untied) == before


def test_a_fallback_tells_which_options_are_lost(untied):
    bias(untied)
    with pytest.warns(UserWarning, match="not used: output_layer has a bias; not applied: softcap, vocab_size"):
        enable(untied, vocab_size=96, softcap=30.0)
