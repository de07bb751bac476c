"""`fused_output_processor`, as GPTModel calls it: through the model where it can be, else with the same arguments."""

import inspect
import re

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.models.gpt import GPTModel

from megatron_lce import FusedOutputContext, fused_output_processor
from tests import megatron_world
from tests.megatron_world import assert_refused, captured

IN_MODEL = "output_processor" in inspect.signature(GPTModel.forward).parameters  # from 0.18


def process(model, tensors, labels, context, scale=1.0):
    """What the model returns with this processor and context."""
    keywords = {"output_processor": fused_output_processor, "output_processor_context": context}
    if IN_MODEL and scale == 1.0:
        return model(*tensors, labels=labels, **keywords)
    return process_hidden(model, captured(model, tensors).hidden, labels, context, scale)


def process_hidden(model, hidden, labels, context, scale=1.0):
    return fused_output_processor(
        hidden_states=hidden,
        output_layer=model.output_layer,
        output_weight=model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None,
        labels=labels,
        context=context,
        scale_logits=lambda logits: logits if scale == 1.0 else logits * scale,
        config=model.config,
        runtime_gather_output=None,  # and other arguments of the model's that it does not need
    )


def torch_backend(**settings):
    keywords = {"backend": "torch", "workspace_bytes": megatron_world.SMALL_WORKSPACE}
    return FusedOutputContext(**settings, keywords=keywords)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_outputs_and_gradients_are_those_of_logits_that_are_not_made(scale, model, device, tensors, labels):
    temperature = torch.linspace(0.5, 2.0, labels.numel(), device=device).view_as(labels)
    distribution = torch.distributions.Categorical(logits=model(*tensors) * scale / temperature[..., None])
    expected = torch.stack([distribution.log_prob(labels), distribution.entropy()])
    expected_gradients = megatron_world.gradients(model, (expected[0] - 0.1 * expected[1]).sum())
    with megatron_world.LogitsSpy() as spy:
        out = process(model, tensors, labels.int(), torch_backend(temperature=temperature), scale)
        megatron_world.assert_gradients(model, (out.logprobs - 0.1 * out.entropy).sum(), expected_gradients)
    assert spy.seen == []
    torch.testing.assert_close(torch.stack(out[:2]), expected, rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_count(model, device, tensors, labels):
    """By a negative label or by the mask: outputs 0, whatever their temperature."""
    whole = process(model, tensors, labels, torch_backend())
    counted = torch.arange(labels.numel(), device=device).view_as(labels) % 3 != 0
    temperature = counted.float()
    labels[0, 1] = -1
    out = process(model, tensors, labels, torch_backend(counted=counted, temperature=temperature))
    kept = counted & (labels >= 0)
    assert torch.equal(out.logprobs, whole.logprobs.where(kept, 0.0))
    assert torch.equal(out.entropy, whole.entropy.where(kept, 0.0))


def test_the_models_return_is_what_result_makes(model, tensors, labels):
    context = torch_backend(
        entropy=False, labels=labels.flip(1), result=lambda out: {"logprobs": out.logprobs, "out": out}
    )
    returned = process(model, tensors, labels, context)
    assert returned["out"].entropy is None
    expected = process(model, tensors, labels.flip(1), torch_backend())
    # The model runs once for each: its own results need not be the same bits on a GPU.
    torch.testing.assert_close(returned["logprobs"], expected.logprobs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(process(model, tensors, labels, None).lse, expected.lse, rtol=1e-5, atol=1e-6)


def test_errors(model, device, tensors, labels):
    message = "labels must be given to the model or in the FusedOutputContext, got None"
    assert_refused(ValueError, message, process, model, tensors, None, torch_backend())
    floats, counted = torch.ones_like(labels).float(), "counted must be bool of labels' shape, (3, 23), got torch"
    temperature = torch.ones(3, device=device)
    shape = "temperature must be [b, s], (3, 23) for this hidden, got (3,)"
    for context, error, message in (
        (torch_backend(counted=floats), ValueError, f"{counted}.float32"),
        (torch_backend(counted=floats[0] > 0), ValueError, f"{counted}.b"),
        (torch_backend(temperature=temperature), ValueError, shape),
        (torch_backend(labels=[1]), TypeError, "labels must be a torch.Tensor, got list"),
        ({"temperature": 1.0}, TypeError, "output_processor_context must be a FusedOutputContext, got dict"),
        (FusedOutputContext(keywords={"reduce_grad_hidden": False}), TypeError, "the captured head fixes them"),
        (FusedOutputContext(keywords={"entropy": False}), TypeError, "entropy must not be among"),
        (FusedOutputContext(keywords={"logits_scale": None}), TypeError, "logits_scale must be a float, got NoneType"),
    ):
        assert_refused(error, re.escape(message), process, model, tensors, labels, context)
    hidden = torch.zeros(2, 1, 32, device=device)
    model.output_layer.bias = torch.nn.Parameter(torch.zeros(megatron_world.VOCAB_SIZE, device=device))
    message = "the LM head cannot be fused: output_layer has a bias"
    assert_refused(ValueError, message, process_hidden, model, hidden, labels, None)
