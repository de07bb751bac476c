"""`known_loss`, `z_loss` and `label_smoothing` of the flag on one rank; run_megatron.py has them at TP=2."""

import inspect

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core")

from megatron.core.transformer import multi_token_prediction

import megatron_lce
from megatron_lce import capture_lm_head, enable_fused_linear_ce
from megatron_lce.megatron import logits as uncomputed_logits
from tests import megatron_world
from tests.megatron_integration.test_heads import LinearCrossEntropyModule
from tests.megatron_world import BATCH, SEQUENCE, VOCAB_SIZE, assert_refused, enable
from tests.oracle import TIMES_EAGER_FP32, largest_error, relative_error


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


TERMS = {
    "z-loss": {"z_loss": 0.3},
    "label smoothing": {"label_smoothing": 0.1},
    "both": {"z_loss": 1e-3, "label_smoothing": 0.7},
}
TRUE_SIZE = VOCAB_SIZE - 5  # the rest is padding


def loss_of_logits(logits, labels, z_loss=0.0, label_smoothing=0.0):
    """Per token [b, s], of whole logits [s, b, V]; written as a mean of -log p, without lse - mean_logit."""
    logprobs = logits.log_softmax(-1)
    picked = logprobs.gather(-1, labels.T.clamp(min=0)[..., None])[..., 0]
    losses = -(1 - label_smoothing) * picked - label_smoothing * logprobs.mean(-1)
    return (losses + z_loss * logits.logsumexp(-1) ** 2).T.masked_fill(labels < 0, 0.0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("known_loss", [False, True])
@pytest.mark.parametrize("terms", TERMS)
def test_loss_and_gradients_are_those_of_fp64(untied, device, terms, known_loss, backend, labels):
    """Over the true vocabulary, with masked and ignored tokens, within a multiple of eager fp32's error."""
    labels = labels % TRUE_SIZE
    labels[1, ::3] = -1
    mask = torch.ones_like(labels)
    mask[0, 5:11] = 0
    counted = (mask > 0) & (labels >= 0)
    hidden = torch.randn(SEQUENCE, BATCH, 32, generator=torch.Generator().manual_seed(1)).to(device)
    weight = untied.output_layer.weight
    weight.data.mul_(20)  # else all logits are about as large, and the mean hides its errors

    def expected(dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
        losses = loss_of_logits(leaves[0] @ leaves[1][:TRUE_SIZE].T, labels, **TERMS[terms]).where(counted, 0.0)
        (losses.sum() / 7).backward()
        return losses.detach(), leaves[0].grad, leaves[1].grad

    leaf = hidden.clone().requires_grad_()
    untied.forward = lambda labels, loss_mask: untied.compute_language_model_loss(labels, untied.output_layer(leaf)[0])
    options = {"vocab_size": TRUE_SIZE, "skip_masked": True, "known_loss": known_loss, **TERMS[terms]}
    enable_fused_linear_ce(untied, backend=backend, on_unsupported="raise", **options)
    losses = untied(labels=labels, loss_mask=mask)
    (losses.sum() / 7).backward()
    exact, eager = expected(torch.float64), expected(torch.float32)
    found, measures = (losses.detach(), leaf.grad, weight.grad), (largest_error, relative_error, relative_error)
    for error_of, actual, right, like in zip(measures, found, exact, eager, strict=True):
        floor = torch.finfo(torch.float32).eps * max(1.0, float(right.abs().max()))
        assert error_of(actual, right) <= TIMES_EAGER_FP32 * max(error_of(like, right), floor)


@pytest.mark.parametrize("known_loss", [False, True])
def test_mtp_losses_have_the_terms_too(device, known_loss, tensors, labels):
    """In the model's own pass, and beside a captured main head of an enabled model."""
    model, terms = megatron_world.build(device, mtp_layers=2), TERMS["both"]
    model.compute_language_model_loss = lambda labels, logits: loss_of_logits(logits, labels, **terms)
    expected_loss = model(*tensors, labels=labels)
    expected = megatron_world.gradients(model, expected_loss.sum())
    del model.compute_language_model_loss
    enable(model, known_loss=known_loss, **terms)
    loss = model(*tensors, labels=labels)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    megatron_world.assert_gradients(model, loss.sum(), expected)
    with capture_lm_head(model) as head:
        model(*tensors, labels=labels)
    out = head.linear_cross_entropy(labels, telemetry=True, backend="torch")
    z, e = terms["z_loss"], terms["label_smoothing"]
    loss = (1 - e) * -out.logprobs + e * (out.lse - out.mean_logit) + z * out.lse.square()
    megatron_world.assert_gradients(model, loss.sum(), expected)


def test_without_a_fused_loss_they_raise(untied, tensors, labels):
    """Megatron's own loss has neither: nothing falls back, at once or later."""
    for name, terms in (("z_loss", {"z_loss": 1e-4}), ("z_loss and label_smoothing", TERMS["both"])):
        off = f"{name} must be 0 where use_fused_linear_ce is False"
        assert_refused(ValueError, off, enable, untied, use_fused_linear_ce=False, **terms)
        untied.output_layer.bias = nn.Parameter(torch.zeros(VOCAB_SIZE))
        unfused = f"{name} cannot be applied: fused linear cross-entropy is not used: output_layer has a bias"
        assert_refused(ValueError, unfused, enable, untied, **terms)
        untied.output_layer.bias = None
        handle = enable(untied, **terms)
        assert repr(handle).endswith("".join(f", {key}={value}" for key, value in terms.items()) + ")")
        head, untied.output_layer = (
            untied.output_layer,
            LinearCrossEntropyModule(
                32, VOCAB_SIZE, config=untied.config, init_method=untied.config.init_method, bias=False
            ).to(labels.device),
        )
        later = f"{name} cannot be applied, because the loss is not fused: the model's output_layer was replaced"
        assert_refused(RuntimeError, later, untied, *tensors, labels=labels)
        untied.output_layer = head
        untied.eval()
        assert untied(*tensors).shape[-1] == VOCAB_SIZE  # logits have no loss
        untied.train()
        handle.remove()


def test_errors(untied):
    for option, value, message in (
        ("z_loss", -1e-4, "z_loss must be at least 0, got -0.0001"),
        ("z_loss", True, "z_loss must be a float, got bool"),
        ("label_smoothing", 1.5, r"label_smoothing must lie in \[0, 1\], got 1.5"),
        ("label_smoothing", float("nan"), "label_smoothing must be finite, got nan"),
    ):
        assert_refused((TypeError, ValueError), message, enable, untied, **{option: value})


@pytest.mark.filterwarnings("error:fused linear cross-entropy")
def test_a_stage_without_a_head_raises_nothing(untied):
    untied.post_process = False
    del untied.output_layer
    assert enable(untied, **TERMS["both"]).reasons == ("this pipeline stage has no LM head",)
