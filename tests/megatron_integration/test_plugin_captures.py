"""`plugins.capturing`: functions that call a model themselves, with its forward pass ended at a captured head."""

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core")

from megatron_lce.plugins.capturing import called_through, captured_if, rows_of
from tests import megatron_world


class Wrapper(nn.Module):
    """In place of DDP."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)


def step(args, model, inputs):
    return model[0](*inputs)


@pytest.mark.parametrize("wrap", [Wrapper, lambda model: model], ids=["wrapped", "bare"])
def test_a_step_gets_the_head_instead_of_logits(wrap, model, device):
    inputs, labels = megatron_world.inputs(device)
    chunk, kind = wrap(model), type(wrap(model))
    logits = step(None, [chunk], inputs)
    run = captured_if(lambda given: given["args"])(step)
    output = run(True, [chunk], inputs=inputs)
    head = output.lm_head
    assert output.shape == head.hidden.shape
    assert rows_of(head).tolist() == torch.arange(labels.numel()).view_as(labels).tolist()
    expected = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    found = head.linear_cross_entropy(labels, backend="torch").logprobs
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert type(chunk) is kind
    torch.testing.assert_close(run(False, [chunk], inputs), logits)


def test_a_failing_step_leaves_the_model_as_it_was(untied, device):
    kind = type(untied)
    with pytest.raises(ZeroDivisionError), called_through(lambda *_: 1 / 0, [untied]):
        untied()
    assert type(untied) is kind
    assert isinstance(untied(*megatron_world.inputs(device)[0]), torch.Tensor)
