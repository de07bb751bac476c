"""`enable_fused_linear_ce(known_loss=True)` on one rank: three products, a promise, and its check."""

import inspect

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer import multi_token_prediction

import megatron_lce
from megatron_lce.megatron import logits as uncomputed_logits
from tests import megatron_world
from tests.megatron_world import assert_refused, enable


def masked_mean(losses, mask):
    return (losses * mask).sum() / mask.sum().clamp(min=1)


@pytest.fixture
def mask(device):
    mask = torch.ones(megatron_world.BATCH, megatron_world.SEQUENCE, device=device)
    mask[0, :9] = mask[2, 3:] = 0
    return mask


@pytest.mark.parametrize("skip_masked", [False, True])
@pytest.mark.parametrize("kept", ["some", "all", "none"])
def test_losses_and_gradients_are_megatrons(model, mask, kept, skip_masked, tensors, labels):
    mask = {"some": mask, "all": torch.ones_like(mask), "none": torch.zeros_like(mask)}[kept]
    plain = model(*tensors, labels=labels)
    expected = megatron_world.gradients(model, masked_mean(plain, mask) * 3)
    enable(model, known_loss=True, skip_masked=skip_masked)
    losses = model(*tensors, labels=labels, loss_mask=mask)
    torch.testing.assert_close(losses * mask, plain * mask, rtol=1e-5, atol=1e-6)
    actual = megatron_world.gradients(model, masked_mean(losses, mask) * 3)
    megatron_world.assert_same_gradients(actual, expected)
    assert kept != "none" or not any(gradient.any() for gradient in actual.values())


def test_a_float_mask_raises(untied, mask, tensors, labels):
    enable(untied, known_loss=True)
    mask = mask * torch.linspace(0.5, 1, mask.numel(), device=mask.device).view_as(mask)
    with pytest.raises(RuntimeError, match="a loss_mask that is not 0 or 1"):
        masked_mean(untied(*tensors, labels=labels, loss_mask=mask), mask).backward()


def test_a_second_backward_raises_and_no_gradient_makes_nothing(untied, tensors, labels):
    enable(untied, known_loss=True)
    loss = untied(*tensors, labels=labels).sum()
    loss.backward(retain_graph=True)
    message = "a second backward through a known loss is not possible: .* enable with known_loss=False"
    assert_refused(RuntimeError, message, loss.backward)
    with torch.no_grad():
        assert not untied(*tensors, labels=labels).requires_grad


@pytest.mark.parametrize("rolled", ["a tensor", "a list"])
@pytest.mark.parametrize("kept", ["some", "all"])
def test_mtp_losses_are_known_too(device, mask, kept, rolled, monkeypatch, tensors, labels):
    """Megatron rolls labels and mask, and gives what it rolls in a weight of 0; on its dev branch it rolls lists."""
    own, lists = multi_token_prediction.roll_tensor, []

    def roll_tensor(tensors, **keywords):
        if not isinstance(tensors, list):  # Megatron's own calls
            return own(tensors, **keywords)
        lists.append(tensors)
        return [own(tensor, **keywords)[0] for tensor in tensors]

    if stand_in := rolled == "a list" and "tensors" not in inspect.signature(own).parameters:
        monkeypatch.setattr(multi_token_prediction, "roll_tensor", roll_tensor)
    model = megatron_world.build(device, mtp_layers=2)
    mask = mask if kept == "some" else torch.ones_like(mask)
    given = {"labels": labels, "loss_mask": mask}
    expected = megatron_world.gradients(model, masked_mean(model(*tensors, **given), mask) * 3)
    enable(model, known_loss=True)
    called = []
    run = uncomputed_logits.model_loss
    monkeypatch.setattr(uncomputed_logits, "model_loss", lambda *args, **given: called.append(1) or run(*args, **given))
    for _ in range(2):  # looked at by the host, then on the device
        megatron_world.assert_gradients(model, masked_mean(model(*tensors, **given), mask) * 3, expected)
    assert len(called) == 2 * 3
    assert len(lists) == 2 * 2 * stand_in


@pytest.mark.parametrize("skip_masked", [False, True])
@pytest.mark.parametrize(("mtp_layers", "weighted"), [(0, False), (2, False), (2, True)])
def test_losses_find_out_over_microbatches(device, mask, skip_masked, mtp_layers, weighted, tensors, labels):
    """The first one is all masked; not with MTP, whose own loss Megatron then makes NaN."""
    pytest.importorskip("triton")
    model = megatron_world.build(device, mtp_layers=mtp_layers).bfloat16()
    weights = torch.linspace(1, 2, mask.numel(), device=device).view_as(mask) if weighted else torch.ones_like(mask)
    masks = [torch.full_like(mask, mtp_layers > 0), mask, mask.flip(1), torch.ones_like(mask), mask]
    gradients, handles = [], []
    for known_loss in (None, False):
        options = {"known_loss": known_loss, "skip_masked": skip_masked, "logits_cache_bytes": 0, "backend": "triton"}
        handles.append(megatron_lce.enable_fused_linear_ce(model, **options))
        for mask_now in masks:
            losses = model(*tensors, labels=labels, loss_mask=mask_now)
            masked_mean(losses * weights, mask_now).backward()
        gradients.append({name: parameter.grad.float() for name, parameter in model.named_parameters()})
        model.zero_grad()
    assert [upstream.known for upstream in handles[0]._fused._upstream] == [not weighted] + [True] * mtp_layers
    for name, gradient in gradients[1].items():  # roundings of five sums in 16 bits
        assert float((gradients[0][name] - gradient).norm()) <= 5 * 2.0**-8 * float(gradient.norm()), name
