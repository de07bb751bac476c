"""Code of a user's between head and loss: it may read an enabled model's logits, and the loss is fused all the same."""

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


# Code of a user's between head and loss. What returns None has changed the logits themselves.
CHANGED = "the logits were changed in place, or through .data, in front of a fused loss"
ASKED = "the gradient of the logits was asked for, by register_hook or retain_grad, in front of a fused loss"
CHANGES = {
    "nothing": lambda logits: None,
    "out of place": lambda logits: torch.div(input=logits, other=2),
    "in place": lambda logits: (logits.div_(2.0), None)[1],
    "augmented": lambda logits: logits.__itruediv__(2),
    "through a slice": lambda logits: (logits[..., 100:].fill_(-5.0), None)[1],
    "through a view": lambda logits: (logits.transpose(0, 1).div_(0.5), None)[1],
    "assigned": lambda logits: logits.__setitem__((..., slice(100, None)), -5.0),
    "assigned without gradient": masked,
    "masked out": lambda logits: (logits[..., 100:].fill_(-torch.inf), None)[1],
    "through data": lambda logits: (logits.data.div_(2.0), None)[1],
    "data assigned": lambda logits: setattr(logits, "data", logits.data / 2),
    "hook": lambda logits: (logits.register_hook(lambda grad: 3 * grad), None)[1],
    "hook between": lambda logits: (
        logits.div_(4.0),
        logits.register_hook(lambda grad: 3 * grad),
        logits.mul_(2.0),
        None,
    )[3],
    "retained": lambda logits: (logits.retain_grad(), None)[1],
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


def changed_before(loss, change):
    """A model's `compute_language_model_loss`, behind code that changes the logits or puts others in their place."""

    def changed_loss(labels, logits):
        changed = CHANGES[change](logits)
        return loss(labels, logits if changed is None else changed)

    return changed_loss


@pytest.mark.parametrize("loss", ["vocab-parallel", "checkpointed"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_logits_give_another_loss_and_its_gradients_as_in_megatron(untied, device, change, loss):
    tensors, labels = megatron_world.inputs(device)

    def run():
        untied.compute_language_model_loss = changed_before(LOSSES[loss], change)
        found = untied(*tensors, labels=labels % 100)
        return found, megatron_world.gradients(untied, found.sum())

    expected, expected_gradients = run()
    del untied.compute_language_model_loss
    enable(untied)
    with pytest.warns(UserWarning, match=TOLD):
        actual, gradients = run()
    torch.testing.assert_close(actual, expected)
    megatron_world.assert_same_gradients(gradients, expected_gradients)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("change", CHANGES.keys() - {"nothing", "out of place"})
def test_the_fused_loss_refuses_logits_that_were_changed_or_have_a_hook(untied, device, change, grad):
    tensors, labels = megatron_world.inputs(device)
    enable(untied)
    if not grad and ("hook" in change or change == "retained"):
        pytest.skip("torch refuses the hook")
    untied.compute_language_model_loss = changed_before(untied.compute_language_model_loss, change)
    expected = ASKED if change in ("hook", "hook, then scaled", "retained") else CHANGED
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=f"{expected}.*call the model without labels"):
        untied(*tensors, labels=labels)


@pytest.mark.parametrize("factor", [None, 0.5])
def test_the_loss_stays_fused_behind_code_that_reads(model, device, factor):
    """And the penalty that the code adds has its gradient, with MuP's scaling in between or without."""
    tensors, labels = megatron_world.inputs(device)

    def penalised(loss):
        def run(labels, logits):
            penalty = logits.square().sum() / 1000 + logits.data.max() * torch.logsumexp(logits, -1).sum() / 1000
            return loss(labels, logits if factor is None else logits * factor) + penalty

        return run

    model.compute_language_model_loss = penalised(lambda labels, logits: cross_entropy(logits, labels).T)
    expected = model(*tensors, labels=labels)
    expected_gradients = megatron_world.gradients(model, expected.sum())
    del model.compute_language_model_loss
    enable(model)
    model.compute_language_model_loss = penalised(model.compute_language_model_loss)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        actual = model(*tensors, labels=labels)
    assert [str(one.message) for one in told if issubclass(one.category, UserWarning)] == [
        f"{TOLD}: by labels=None in training or by code beside the loss"
    ]
    torch.testing.assert_close(actual, expected)
    megatron_world.assert_same_gradients(megatron_world.gradients(model, actual.sum()), expected_gradients)


def test_double_backward_is_refused(untied, device):
    """A penalty on the gradient would train as if absent."""
    enable(untied)
    tensors, labels = megatron_world.inputs(device)
    loss = untied(*tensors, labels=labels).sum()
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        torch.autograd.grad(loss, list(untied.parameters()), create_graph=True, allow_unused=True)


def test_hooks_of_hidden_run_once(untied, device):
    """Also where a custom function's gradient goes back through the head."""
    tensors, labels = megatron_world.inputs(device)
    enable(untied)
    seen = []
    untied.output_layer.register_forward_pre_hook(lambda module, args: (args[0].register_hook(seen.append), None)[1])
    untied.compute_language_model_loss = LOSSES["vocab-parallel"]
    with pytest.warns(UserWarning, match=TOLD):
        untied(*tensors, labels=labels).sum().backward()
    assert len(seen) == 1


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
