"""A model that chose its cross-entropy when it was built and keeps it: Megatron-LM's main from September 2026 on.

Its backend's spec provider chooses (pull request 6766). Older versions get a stand-in.
"""

import functools

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from megatron_lce import capture_lm_head
from tests import megatron_world
from tests.megatron_world import enable, state


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
