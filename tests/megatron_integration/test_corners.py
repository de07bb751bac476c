"""Models that are compiled, run under autocast, or share their output layer with another."""

import warnings

import pytest
import torch

from megatron_lce import capture_lm_head
from tests import megatron_world
from tests.megatron_world import enable


@pytest.fixture
def compiled_model(device):
    """Compiled but for its layers, which are Megatron's alone and take seconds at every compilation."""
    torch._dynamo.reset()
    model = megatron_world.build(device, num_layers=1)
    model.decoder.forward = torch.compiler.disable(model.decoder.forward)
    yield model
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_gives_logits_and_loss(compiled_model, tensors, labels):
    logits, loss = compiled_model(*tensors).detach(), compiled_model(*tensors, labels=labels).detach()
    enable(compiled_model)
    compiled = torch.compile(compiled_model, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors).detach(), logits)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            torch.testing.assert_close(compiled(*tensors, labels=labels).detach(), loss)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_can_be_captured(compiled_model, tensors, labels):
    weight = compiled_model.output_layer.weight
    loss = compiled_model(*tensors, labels=labels)
    expected = torch.autograd.grad(loss.sum(), weight)[0]
    compiled = torch.compile(compiled_model, backend="aot_eager")
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            with capture_lm_head(compiled) as head:
                assert compiled(*tensors).numel() == 0
            losses = -head.linear_cross_entropy(labels, backend="torch").logprobs
            torch.testing.assert_close(losses.detach(), loss.detach())
            if torch.is_grad_enabled():
                torch.testing.assert_close(torch.autograd.grad(losses.sum(), weight)[0], expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False])
def test_logits_under_autocast_have_megatrons_dtype(untied, device, training, tensors, labels):
    untied.train(training)

    def run():
        dtypes = megatron_world.dtypes_of_logits(untied)
        with torch.autocast(device.type, torch.bfloat16):
            logits = untied(*tensors)
            untied(*tensors, labels=labels)
        assert [logits.dtype, *dtypes] == [torch.bfloat16, torch.bfloat16]
        return logits

    expected = run()
    del untied.compute_language_model_loss
    assert enable(untied).enabled
    actual = run()
    assert torch.equal(actual, expected)


def test_a_pass_of_another_model_with_the_same_output_layer_is_not_captured(untied, device, tensors, labels):
    other = megatron_world.build(device, seed=7)
    other.output_layer = untied.output_layer
    expected = other(*tensors), other(*tensors, labels=labels)
    for enabled in (False, True):
        enable(untied, use_fused_linear_ce=enabled)
        with capture_lm_head(untied) as head, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            untied(*tensors)
            hidden = head.hidden
            for actual, wanted in zip((other(*tensors), other(*tensors, labels=labels)), expected, strict=True):
                torch.testing.assert_close(actual, wanted)
        assert head.hidden is hidden


@pytest.mark.parametrize("kind", ["LoraLinear", "ColumnParallelLinear"])
def test_an_output_layer_put_in_another_place_is_right_and_told(untied, kind, device, tensors, labels):
    """Around the enabled head, as an adapter is, or another."""
    own, other = untied.output_layer, megatron_world.build(device, seed=7).output_layer
    new = other if kind == "ColumnParallelLinear" else megatron_world.LoraLinear(own).to(device)
    untied.output_layer = new
    expected = untied(*tensors, labels=labels)
    untied.output_layer = own
    handle = enable(untied)
    untied.output_layer = new
    assert (handle.enabled, handle.reasons) == (False, ("the model's output_layer was replaced",))
    told = f"enabled but was not used: the model's output_layer was replaced by a {type(new).__name__}"
    with pytest.warns(UserWarning, match=told):
        torch.testing.assert_close(untied(*tensors, labels=labels), expected)
    untied.output_layer = own
    assert handle.enabled
