"""`plugins.captured_steps`: functions that call a model themselves get the captured head instead of logits."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron_lce.plugins.captured_steps import Responses, captured_if
from megatron_lce.plugins.functions import called_with
from tests import megatron_world


def step(args, model, inputs):
    return model[-1](*inputs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ddp", [False, True])
def test_a_step_gets_the_head_instead_of_logits(ddp, tied, device, tensors, labels):
    """Of each microbatch, from the chunk that has it; the chunks' classes, which compiled code knows, stay."""
    chunk, without_head = megatron_world.build(device, ddp=ddp, tied=tied), torch.nn.Identity()
    kind, logits = type(chunk), step(None, [chunk], tensors)
    flipped = (tensors[0].flip(0), *tensors[1:])

    def two_microbatches(args, model, inputs):
        assert type(model[1]) is kind
        assert model[0](7) == 7
        return [model[1](*given) for given in (inputs, flipped)]

    run = called_with(two_microbatches, captured_if(lambda call: call.args))
    outputs = run(True, [without_head, chunk], inputs=tensors)
    for output, expected in zip(outputs, (logits, step(None, [chunk], flipped)), strict=True):
        head = output.lm_head
        assert output.shape == head.hidden.shape
        expected = expected.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        found = head.linear_cross_entropy(labels, backend="torch").logprobs
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not chunk._forward_hooks
    torch.testing.assert_close(run(False, [without_head, chunk], tensors)[0], logits)


def test_a_failing_step_leaves_the_model_as_it_was(untied, tensors):
    def failing(model, inputs):
        model(*inputs)
        raise ZeroDivisionError

    before = megatron_world.state(untied)
    with pytest.raises(ZeroDivisionError):
        called_with(failing, captured_if(lambda call: True))(untied, tensors)
    assert megatron_world.state(untied) == before
    assert untied(*tensors).shape[-1] > 0


def test_hidden_goes_with_the_output(untied, tensors):
    """Without the collector, which may come some microbatches later."""
    gc.disable()
    try:
        output = called_with(step, captured_if(lambda call: True))(None, [untied], tensors)
        hidden = weakref.ref(output.lm_head.hidden)
        del output
        assert hidden() is None
    finally:
        gc.enable()


def get_responses(logits, *, unconcat_tokens, response_lengths, **rest):
    """As slime's and miles', of sequences one after another."""
    ends = torch.tensor([len(tokens) for tokens in unconcat_tokens]).cumsum(0).tolist()
    for tokens, end, length in zip(unconcat_tokens, ends, response_lengths, strict=True):
        yield logits.flatten(0, 1)[end - length - 1 : end - 1], tokens[-length:]


def test_responses_have_their_logprobs_and_entropy(model, tensors):
    batch = {"unconcat_tokens": list(tensors[0]), "response_lengths": [4, 0, 22]}
    logits = step(None, [model], tensors)
    output = called_with(step, captured_if(lambda call: True))(None, [model], tensors)
    call = SimpleNamespace(logits=output, args=None, total_lengths=None, original=get_responses, **batch)
    found = Responses(call).log_probs_and_entropy(0.7, entropy=True, entropy_grad=False)
    for sample, (rows, tokens) in enumerate(get_responses(logits / 0.7, **batch)):
        logprobs = rows.log_softmax(-1)
        expected = logprobs.gather(-1, tokens[: len(rows), None])[:, 0]
        torch.testing.assert_close(found["log_probs"][sample], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["entropy"][sample], -(logprobs.exp() * logprobs).sum(-1), rtol=1e-5, atol=1e-5)
    assert found["log_probs"][0].requires_grad
    assert not found["entropy"][0].requires_grad
