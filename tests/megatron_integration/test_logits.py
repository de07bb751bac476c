"""Code of a user's that meets an enabled model: with labels there are no logits to read; compiled models, autocast."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("megatron.core")

from megatron.core import tensor_parallel

from megatron_lce import capture_lm_head
from tests import megatron_world
from tests.megatron_world import REFUSED, assert_refused, cross_entropy, enable, with_loss


def masked(logits):
    with torch.no_grad():
        logits[..., 100:] = -5.0


# What a user's code may do with the logits between head and loss.
USES = {
    "read": lambda logits, labels: logits.square().sum(),
    "read through data": lambda logits, labels: logits.data.sum(),
    "read by Python": lambda logits, labels: logits.tolist(),
    "read by numpy": lambda logits, labels: logits.detach().numpy(),
    "asked for their memory": lambda logits, labels: logits.data_ptr(),
    "copied": lambda logits, labels: copy.deepcopy(logits),
    "kept by their clone": lambda logits, labels: logits.clone(),
    "divided": lambda logits, labels: torch.div(input=logits, other=2),
    "scaled by a tensor": lambda logits, labels: logits * torch.ones(()),
    "asked for the largest": lambda logits, labels: logits.max(dim=-1),
    "changed in place": lambda logits, labels: logits.div_(2.0),
    "augmented": lambda logits, labels: logits.__itruediv__(2),
    "changed through a slice": lambda logits, labels: logits[..., 100:].fill_(-5.0),
    "changed through a view": lambda logits, labels: logits.transpose(0, 1).div_(0.5),
    "changed without gradient": lambda logits, labels: masked(logits),
    "written to": lambda logits, labels: torch.mul(torch.ones_like(logits), 2, out=logits),
    "hooked": lambda logits, labels: logits.register_hook(lambda grad: 3 * grad),
    "kept with their gradient": lambda logits, labels: logits.retain_grad(),
    # What takes logits past `__torch_function__`: a custom autograd function computes without gradient.
    "vocab-parallel loss": lambda logits, labels: tensor_parallel.vocab_parallel_cross_entropy(logits, labels.T),
    "gathered": lambda logits, labels: tensor_parallel.gather_from_tensor_model_parallel_region(logits).sum(),
    "checkpointed": lambda logits, labels: checkpoint(cross_entropy, logits, labels, use_reentrant=True),
    "recomputed": lambda logits, labels: checkpoint(cross_entropy, logits, labels, use_reentrant=False),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the checkpoint
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("use", USES)
def test_logits_of_a_model_that_is_given_labels_are_refused(untied, use, mode, tensors, labels):
    enable(untied)
    with_loss(untied, lambda own, logits, labels: (USES[use](logits, labels), own(labels, logits))[1])
    with mode(), pytest.raises(RuntimeError, match=REFUSED):
        untied(*tensors, labels=labels)


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_put_on_an_enabled_head_is_refused(untied, hook, tensors, labels):
    enable(untied)
    getattr(untied.output_layer, hook)(lambda module, *gradients: None)
    assert_refused(RuntimeError, REFUSED, untied, *tensors, labels=labels)


def test_logits_of_ones_own_have_megatrons_loss_and_are_told(untied, tensors, labels):
    logits = untied(*tensors).transpose(0, 1).contiguous() / 2
    expected = untied.compute_language_model_loss(labels, logits.clone())
    enable(untied)
    with_loss(untied, lambda own, _, labels: own(labels, logits.clone()))
    with pytest.warns(UserWarning, match="not used: the logits were not made by the output_layer during the model's"):
        torch.testing.assert_close(untied(*tensors, labels=labels), expected)


def test_what_a_tensor_is_can_be_asked(untied, device, tensors, labels):
    enable(untied, workspace_bytes=megatron_world.SMALL_WORKSPACE)
    asked = []
    properties = ("shape", "ndim", "dtype", "device", "is_cuda", "layout")
    methods = ("size", "dim", "numel", "is_floating_point")

    def ask(module, args, output):
        logits = output[0]
        asked.append([getattr(logits, name) for name in properties] + [getattr(logits, name)() for name in methods])

    model_hook = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: ask(module, args, output) if module is untied.output_layer else None
    )
    try:
        with megatron_world.LogitsSpy() as spy:
            untied(*tensors, labels=labels).sum().backward()
    finally:
        model_hook.remove()
    assert spy.seen == []
    size = torch.Size((megatron_world.SEQUENCE, megatron_world.BATCH, megatron_world.VOCAB_SIZE))
    assert asked == [
        [size, 3, torch.float32, device, device.type == "cuda", torch.strided, size, 3, size.numel(), True]
    ]


LARGEST = {
    "max(dim=-1)": lambda logits: logits.max(dim=-1),
    "torch.max(dim=-1)": lambda logits: torch.max(logits, dim=-1),
    "argmax(dim=-1)": lambda logits: (logits.argmax(dim=-1),),
    "torch.argmax(dim=-1)": lambda logits: (torch.argmax(logits, dim=-1),),
}
OTHER_QUESTIONS = {
    "max(0)": lambda logits: logits.max(0),
    "max()": lambda logits: logits.max(),
    "max with another": lambda logits: torch.max(logits, torch.zeros(())),
    "argmax()": lambda logits: logits.argmax(),
    "argmax(dim=-1, keepdim)": lambda logits: logits.argmax(dim=-1, keepdim=True),
}


@pytest.mark.filterwarnings("ignore:fused linear cross-entropy is enabled")
def test_mtp_logits_tell_the_largest_after_their_loss_and_nothing_else(device, tensors, labels):
    """Megatron's acceptance metrics get the largest logit from the loss; other questions must not get it instead."""
    model = megatron_world.build(device, mtp_layers=1)
    largest = []
    with_loss(model, lambda own, logits, labels: (largest.append(logits.max(dim=-1)), own(labels, logits))[1])
    model(*tensors, labels=labels)
    del model.compute_language_model_loss
    enable(model)

    def ask(own, logits, labels):
        loss, expected = own(labels, logits), largest.pop(0)
        for name, question in LARGEST.items():
            for answer, wanted in zip(question(logits), expected[-len(question(logits)) :], strict=True):
                torch.testing.assert_close(answer, wanted, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: n + text)
        for question in OTHER_QUESTIONS.values():
            assert_refused(RuntimeError, REFUSED, question, logits)
        return loss

    with_loss(model, ask)
    model(*tensors, labels=labels)
    assert not largest  # MTP's head and the main one


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
