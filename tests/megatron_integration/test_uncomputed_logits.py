"""Code of a user's that meets an enabled model's logits: it must get their values and their gradients, and be told."""

import warnings

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import tensor_parallel
from torch import nn
from torch.utils.checkpoint import checkpoint

from scripts import megatron_runtime
from tests import megatron_world
from tests.megatron_world import TOLD, cross_entropy, enable


def masked(logits):
    with torch.no_grad():
        logits[..., 100:] = -5.0


# What a user's code may do to the logits between head and loss.
CHANGES = {
    "in place": lambda logits: logits.div_(2.0),
    "augmented": lambda logits: logits.__itruediv__(2),
    "through a slice": lambda logits: logits[..., 100:].fill_(-5.0),
    "through a view": lambda logits: logits.transpose(0, 1).div_(0.5),
    "assigned": lambda logits: logits.__setitem__((..., slice(100, None)), -5.0),
    "assigned without gradient": masked,
    "through data": lambda logits: logits.data.div_(2.0),
    "through a slice of data": lambda logits: logits.data[..., 100:].fill_(-5.0),
    "before it is scaled": lambda logits: (logits.div_(2.0), logits * 0.5)[1],
    "out of place, to itself": lambda logits: torch.mul(logits.detach(), 2, out=logits.detach()),
}
WANTS = {
    "hook": lambda logits: logits.register_hook(lambda grad: 3 * grad),
    "kept gradient": lambda logits: logits.retain_grad(),
    "hook, then scaled": lambda logits: (logits.register_hook(lambda grad: 3 * grad), logits * 0.5)[1],
}


# What takes logits past `__torch_function__`: a custom autograd function computes without gradient.
LOSSES = {
    "vocab-parallel": lambda labels, logits: tensor_parallel.vocab_parallel_cross_entropy(
        logits, labels.T.contiguous()
    ),
    "gathered": lambda labels, logits: cross_entropy(
        tensor_parallel.gather_from_tensor_model_parallel_region(logits), labels
    ),
    "checkpointed": lambda labels, logits: checkpoint(cross_entropy, logits, labels, use_reentrant=True),
    "recomputed": lambda labels, logits: checkpoint(cross_entropy, logits, labels, use_reentrant=False),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:the logits of an enabled model are computed")
def test_changed_logits_are_refused_at_the_loss(untied, device, change, mode):
    check_refused(untied, device, CHANGES[change], "were changed in place before their loss; .* make a clone", mode)


@pytest.mark.parametrize("want", WANTS)
def test_logits_whose_gradient_is_wanted_are_refused_at_the_loss(untied, device, want):
    check_refused(
        untied, device, WANTS[want], "have a hook or retain their gradient; .* make a clone", torch.enable_grad
    )


def check_refused(model, device, change, message, mode):
    tensors, labels = megatron_world.inputs(device)
    enable(model)
    fused = model.compute_language_model_loss

    def changed_loss(labels, logits):
        changed = change(logits)
        return fused(labels, changed if type(changed) is type(logits) else logits)

    model.compute_language_model_loss = changed_loss
    with mode(), pytest.raises(RuntimeError, match=message):
        model(*tensors, labels=labels)


@pytest.mark.parametrize(
    "read", [lambda x: x.square().sum(), lambda x: x.data.sum() + 2 * x.detach().clone().mul_(2).sum()]
)
@pytest.mark.parametrize("layers", [0, 1])
def test_read_logits_keep_the_loss_fused_and_have_their_gradient(device, read, layers):
    factor = {"mtp_loss_scaling_factor": 0.1}  # 0.14 has no default
    options = megatron_world.options(tied=bool(layers), mtp_layers=layers, config=factor)
    model = megatron_runtime.build_gpt(options, device=device)
    tensors, labels = megatron_world.inputs(device)

    def run():
        own, read_values = model.compute_language_model_loss, []

        def reading_loss(labels, logits):
            read_values.append(read(logits.clone() if type(logits) is torch.Tensor else logits))
            return own(labels, logits)

        model.compute_language_model_loss = reading_loss
        loss = model(*tensors, labels=labels).sum() + sum(read_values) / 100
        return loss.detach(), megatron_world.gradients(model, loss)

    expected, expected_gradients = run()
    del model.compute_language_model_loss
    enable(model)
    with pytest.warns(UserWarning, match=TOLD):
        actual, gradients = run()
    torch.testing.assert_close(actual, expected)
    megatron_world.assert_same_gradients(gradients, expected_gradients)


def test_another_tensor_made_of_the_logits_has_megatrons_loss_and_is_told(untied, device):
    tensors, labels = megatron_world.inputs(device)
    expected = untied.compute_language_model_loss(labels, untied(*tensors).transpose(0, 1).contiguous() / 2)
    enable(untied)
    fused = untied.compute_language_model_loss
    untied.compute_language_model_loss = lambda labels, logits: fused(labels, torch.div(input=logits, other=2))
    with pytest.warns(UserWarning, match="not used: code in front of the loss made another tensor of the logits"):
        torch.testing.assert_close(untied(*tensors, labels=labels), expected)


@pytest.mark.parametrize("change", [lambda logits: None, lambda logits: logits.sum()])
def test_double_backward_is_refused(untied, device, change):
    """Of the fused loss, also beside logits that were read: a penalty on the gradient would train as if absent."""
    enable(untied)
    tensors, labels = megatron_world.inputs(device)
    fused = untied.compute_language_model_loss
    untied.compute_language_model_loss = lambda labels, logits: (change(logits), fused(labels, logits))[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = untied(*tensors, labels=labels).sum()
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        torch.autograd.grad(loss, list(untied.parameters()), create_graph=True, allow_unused=True)


def test_double_backward_through_logits_of_ones_own_use_is_refused(untied, device):
    enable(untied)
    tensors, labels = megatron_world.inputs(device)
    untied.compute_language_model_loss = lambda labels, logits: logits.square().sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        largest = untied(*tensors, labels=labels)
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        torch.autograd.grad(largest, list(untied.parameters()), create_graph=True, allow_unused=True)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_of_ones_own_gets_every_gradient_and_is_told(model, device, loss, frozen):
    tensors, labels = megatron_world.inputs(device)
    if frozen and model.output_layer.weight is not None:
        model.output_layer.weight.requires_grad_(False)
    model.compute_language_model_loss = LOSSES[loss]
    expected = model(*tensors, labels=labels)
    expected_gradients = megatron_world.gradients(model, expected.sum())
    del model.compute_language_model_loss
    enable(model)
    model.compute_language_model_loss = LOSSES[loss]
    with pytest.warns(UserWarning, match=TOLD):
        actual = model(*tensors, labels=labels)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(megatron_world.gradients(model, actual.sum()), expected_gradients)


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_put_on_an_enabled_head_sees_the_gradient_of_logits(untied, device, hook):
    tensors, labels = megatron_world.inputs(device)
    untied.compute_language_model_loss = LOSSES["gathered"]  # Megatron's own changes logits in place: no hook bears it
    expected_gradients = megatron_world.gradients(untied, untied(*tensors, labels=labels).sum())
    del untied.compute_language_model_loss
    enable(untied)
    untied.compute_language_model_loss = LOSSES["gathered"]
    seen = []
    getattr(untied.output_layer, hook)(lambda module, *gradients: seen.append(gradients[-1][0]))
    with pytest.warns(UserWarning, match=TOLD):
        loss = untied(*tensors, labels=labels)
    torch.testing.assert_close(megatron_world.gradients(untied, loss.sum()), expected_gradients)
    assert seen[0].shape == (megatron_world.SEQUENCE, megatron_world.BATCH, megatron_world.VOCAB_SIZE)


def test_what_a_tensor_is_can_be_asked_without_computing_it(untied, device):
    tensors, labels = megatron_world.inputs(device)
    enable(untied, workspace_bytes=megatron_world.SMALL_WORKSPACE)
    asked = []
    properties = ("shape", "ndim", "dtype", "device", "requires_grad", "is_leaf", "is_cuda", "layout")
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
    kind = [torch.float32, device, True, False, device.type == "cuda", torch.strided]
    assert asked == [[size, 3, *kind, size, 3, size.numel(), True]]


@pytest.mark.parametrize("training", [True, False])
def test_without_gradient_the_logits_need_none(untied, device, training):
    tensors, labels = megatron_world.inputs(device)
    untied.train(training)
    enable(untied)
    untied.compute_language_model_loss = LOSSES["vocab-parallel"]
    with torch.no_grad():
        assert not untied(*tensors, labels=labels).requires_grad


QUESTIONS = {
    "max(dim=-1)": lambda logits: logits.max(dim=-1),
    "max(-1)": lambda logits: torch.max(logits, -1),
    "max(0)": lambda logits: logits.max(0),
    "max()": lambda logits: (logits.max(),),
    "max with another": lambda logits: (torch.max(logits, torch.zeros_like(logits)),),
    "max(other=)": lambda logits: (torch.max(logits, other=logits.new_zeros(())),),
    "argmax(-1)": lambda logits: (logits.argmax(-1),),
    "argmax()": lambda logits: (logits.argmax(),),
    "argmax(-1, keepdim)": lambda logits: (logits.argmax(-1, keepdim=True),),
    "difference": lambda logits: (logits - torch.ones_like(logits),),
}


@pytest.mark.filterwarnings("ignore:fused linear cross-entropy is enabled")
def test_mtp_logits_answer_any_question_after_their_loss(device):
    """Megatron's acceptance metrics get the largest logit from the loss; other questions must not get it instead."""
    options = megatron_world.options(mtp_layers=1, config={"mtp_loss_scaling_factor": 0.1})
    model = megatron_runtime.build_gpt(options, device=device)
    tensors, labels = megatron_world.inputs(device)
    enable(model)
    fused_loss, asked = model.compute_language_model_loss, []

    def ask(labels, logits):
        loss = fused_loss(labels, logits)
        expected = logits.clone()
        for name, question in QUESTIONS.items():
            for answer, wanted in zip(question(logits), question(expected), strict=True):
                torch.testing.assert_close(
                    answer, wanted, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: name + text
                )
            asked.append(name)
        return loss

    model.compute_language_model_loss = ask
    model(*tensors, labels=labels)
    assert len(asked) == 2 * len(QUESTIONS)  # MTP's head and the main one
