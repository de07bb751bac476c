"""Heads that are more than megatron-core's own: those known by name, and those that `accept_head` is told of."""

import functools

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.tensor_parallel import ColumnParallelLinear

from megatron_lce import accept_head, capture_lm_head
from megatron_lce.megatron import heads
from tests import megatron_world
from tests.megatron_world import (
    BATCH,
    SEQUENCE,
    VOCAB_SIZE,
    assert_refused,
    assert_same_gradients,
    captured,
    dtypes_of_logits,
)

enable = functools.partial(megatron_world.enable, on_unsupported="raise")
FUSED = pytest.mark.filterwarnings("error:fused linear cross-entropy")  # of a loss that is not fused

CAP = 0.25  # of logits that are about 0.3: it bends them
TWO_SOFTCAPS = r"softcap must not be given: the head has its own, 0\.25; got 30\.0"


class Softcapped(torch.nn.Module):
    def forward(self, *args, **kwargs):
        logits, bias = super().forward(*args, **kwargs)
        return self.cap * torch.tanh(logits / self.cap), bias


class Fp32Logits:
    def _forward_impl(self, input, weight, *args, **kwargs):
        return super()._forward_impl(input.float(), weight.float(), *args, **kwargs)


class LinearCrossEntropyModule(ColumnParallelLinear):
    """Megatron dev's, without its kernel."""

    __module__ = "megatron.core.transformer.linear_cross_entropy"

    def forward(self, input_, weight=None, runtime_gather_output=None, output_cross_entropy_loss=False, **_):
        assert not output_cross_entropy_loss, "unsupported architecture"
        return super().forward(input_, weight, runtime_gather_output)


def put_in_front(model, *mixins):
    """As Megatron-Bridge and AReaL promote a head that is built."""
    head = model.output_layer
    head.__class__ = type(type(head).__name__, (*mixins, type(head)), {})
    head.cap = CAP


@pytest.fixture
def hidden(device):
    """[s, b, H]."""
    return torch.randn(SEQUENCE, BATCH, 32, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()


@pytest.fixture(autouse=True)
def accepted(monkeypatch):
    monkeypatch.setattr(heads, "_accepted", {**heads._accepted})
    accept_head(Softcapped, softcap=lambda head: head.cap)
    accept_head(Fp32Logits, logits_dtype=torch.float32)


def loss_of(model, hidden, labels, scale=1.0):
    """In a pass of the model, whose head gets this hidden."""
    model.forward = lambda labels: model.compute_language_model_loss(labels, model.output_layer(hidden)[0] * scale)
    return model(labels=labels)


def gradients_of(loss, hidden, model):
    found = torch.autograd.grad(loss.sum(), [hidden, model.output_layer.weight])
    return dict(zip(("hidden", "weight"), found, strict=True))


@FUSED
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("mixins", [(Softcapped,), (Fp32Logits,), (Fp32Logits, Softcapped)])
def test_the_loss_of_an_accepted_head_is_its_own(mixins, scale, untied, hidden, labels):
    """With a factor between head and loss, as MuP has it: after the softcap."""
    put_in_front(untied, *mixins)
    expected = loss_of(untied, hidden, labels, scale)
    expected_gradients = gradients_of(expected, hidden, untied)
    enable(untied)
    actual = loss_of(untied, hidden, labels, scale)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients_of(actual, hidden, untied), expected_gradients)


def test_capture_of_a_softcapped_head(untied, tensors, labels):
    put_in_front(untied, Softcapped)
    expected = torch.log_softmax(untied(*tensors) / 0.5, -1).gather(-1, labels[..., None])[..., 0]
    head = captured(untied, tensors)
    out = head.linear_cross_entropy(labels, temperature=0.5, backend="torch")
    torch.testing.assert_close(out.logprobs, expected, rtol=1e-5, atol=1e-5)
    assert_refused(ValueError, TWO_SOFTCAPS, head.linear_cross_entropy, labels, softcap=30.0)


def test_a_16_bit_temperature_is_not_rounded_by_the_factor_behind_a_softcap(untied, device, tensors, labels):
    put_in_front(untied, Softcapped)
    temperature = torch.linspace(0.01, 0.05, labels.numel(), device=device).view_as(labels).bfloat16()
    head = captured(untied, tensors, scale=0.3)
    rounded, exact = (
        head.linear_cross_entropy(labels, temperature=given, backend="torch")
        for given in (temperature, temperature.float())
    )
    assert torch.equal(rounded.logprobs, exact.logprobs)


def test_what_a_softcapped_head_divides_is_checked_first(untied, tensors, labels):
    put_in_front(untied, Softcapped)
    head = captured(untied, tensors)
    for keywords, error, message in (
        ({"logits_scale": 0.0}, ValueError, "logits_scale must be positive and finite, got 0.0"),
        ({"logits_scale": -1.0}, ValueError, "logits_scale must be positive and finite, got -1.0"),
        ({"temperature": "a"}, TypeError, "temperature must be a float, got str"),
        ({"temperature": True}, TypeError, "temperature must be a float, got bool"),
        ({"temperature": 10**400}, ValueError, "temperature must be a number that fp32 holds"),
        ({"temperature": torch.ones_like(labels)}, TypeError, "temperature must be a float or a floating"),
    ):
        assert_refused(error, message, head.linear_cross_entropy, labels, **{"logits_scale": 2.0} | keywords)


def test_a_softcap_beside_the_heads_own_is_refused(untied):
    put_in_front(untied, Softcapped)
    assert_refused(ValueError, TWO_SOFTCAPS, enable, untied, softcap=30.0)
    untied.output_layer.cap = None
    assert enable(untied, softcap=30.0).enabled


def test_logits_of_an_fp32_head_have_its_dtype(device, tensors, labels):
    model = megatron_world.build(device, dtype=torch.bfloat16).module
    put_in_front(model, Fp32Logits)
    expected = model(*tensors)
    enable(model)
    dtypes = dtypes_of_logits(model)
    logits, losses = model.eval()(*tensors), model(*tensors, labels=labels)
    assert [logits.dtype, *dtypes] == [torch.float32, torch.float32]
    assert torch.equal(logits, expected)
    # Nothing is rounded on the way: what fp32 logits are for.
    picked = torch.log_softmax(expected.double(), -1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(losses, -picked.float(), rtol=1e-5, atol=1e-5)


def test_logit_dtype_of_megatron_0_20(device, tensors, labels):
    model = megatron_world.build(device, dtype=torch.bfloat16).module
    model.output_layer.output_dtype = torch.float32  # for which Megatron itself needs TransformerEngine
    enable(model)
    dtypes = dtypes_of_logits(model)
    model(*tensors, labels=labels)
    assert dtypes == [torch.float32]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_a_head_that_is_asked_for_the_loss(reduction, untied, hidden, labels):
    """As Megatron dev calls LinearCrossEntropyModule, for the main loss and for MTP's."""
    labels[0, :4] = torch.tensor([-1, -100, 7, 7])
    counted = (labels >= 0) & (labels != 7)
    logits, _ = untied.output_layer(hidden)
    targets = labels.where(counted, -100).T.flatten()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction=reduction)
    expected_gradients = gradients_of(expected, hidden, untied)
    untied.output_layer.__class__ = LinearCrossEntropyModule
    enable(untied)
    of_loss = {"output_cross_entropy_loss": True, "labels": labels, "reduction": reduction, "ignore_index": 7}
    loss = untied.output_layer(input_=hidden, weight=None, runtime_gather_output=None, **of_loss)
    expected = expected.view(SEQUENCE, BATCH).T if reduction == "none" else expected
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients_of(loss, hidden, untied), expected_gradients)
    logits, _ = untied.output_layer(hidden)
    assert logits.shape == (SEQUENCE, BATCH, VOCAB_SIZE)


def test_capture_of_a_head_that_is_asked_for_the_loss(untied, hidden, labels):
    """MTP's losses, which come first, are computed, the main one is left to the caller."""
    untied.output_layer.__class__ = LinearCrossEntropyModule
    untied.config.mtp_num_layers = 1
    logits, _ = untied.output_layer(2 * hidden)
    expected = untied.compute_language_model_loss(labels, logits)
    untied.forward = lambda labels: [
        untied.output_layer(scale * hidden, output_cross_entropy_loss=True, labels=labels) for scale in (2, 1)
    ]
    with capture_lm_head(untied) as head:
        loss, main = untied(labels=labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert main.shape == (BATCH, SEQUENCE, 0)
    assert torch.equal(head.hidden, hidden)


@FUSED
def test_a_function_in_place_of_the_product(untied, hidden, labels):
    def product(input, weight, **_):
        return input @ weight.T

    untied.output_layer._forward_impl = product
    assert_refused(ValueError, "not used: output_layer's _forward_impl was replaced", enable, untied)
    accept_head(product)
    expected = loss_of(untied, hidden, labels)
    enable(untied)
    loss = loss_of(untied, hidden, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


class ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits

    @staticmethod
    def backward(ctx, grad_logits):
        return grad_logits.contiguous()


def as_of_mcore_adapter(model):
    """What mcore_adapter (ROLL, LLaMA-Factory) makes of a model: a hook, whose calls are returned, and its own loss."""
    seen = []

    def mca_lora_logits_postprocess_hook(module, args, output):
        seen.append(type(output[0]))
        return ContiguousGradient.apply(output[0]), output[1]

    class McaGPTModel(type(model)):
        def compute_language_model_loss(self, labels, logits):
            return super().compute_language_model_loss(labels, logits)

    mca_lora_logits_postprocess_hook.__module__ = "mcore_adapter.models.model_utils"
    mca_lora_logits_postprocess_hook.__qualname__ = "mca_lora_logits_postprocess_hook"
    McaGPTModel.compute_language_model_loss.__module__ = "mcore_adapter.models.model_factory"
    McaGPTModel.compute_language_model_loss.__qualname__ = "McaGPTModel.compute_language_model_loss"
    model.__class__ = McaGPTModel
    model.output_layer.register_forward_hook(mca_lora_logits_postprocess_hook)
    return seen


def test_the_hook_and_the_loss_of_mcore_adapter(untied, tensors, labels):
    expected_logits, expected = untied(*tensors), untied(*tensors, labels=labels)
    gradients = megatron_world.gradients(untied, expected.sum())
    # Behind the expected: Megatron changes fp32 logits in place, which such a hook forbids.
    seen = as_of_mcore_adapter(untied)
    before = megatron_world.state(untied)
    handle = enable(untied)
    loss = untied(*tensors, labels=labels)
    actual = megatron_world.gradients(untied, loss.sum())
    head = captured(untied, tensors)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(actual, gradients)
    torch.testing.assert_close(-head.linear_cross_entropy(labels).logprobs, expected, rtol=1e-5, atol=1e-6)
    assert not seen, "the hook saw logits that nobody computes"
    assert torch.equal(untied.eval()(*tensors), expected_logits)
    handle.remove()
    assert torch.equal(untied.train()(*tensors, labels=labels), expected)
    assert seen == [torch.Tensor, torch.Tensor]
    assert megatron_world.state(untied) == before, "the hook is what it was"


def test_reasons(untied):
    class Doubled(ColumnParallelLinear):
        def forward(self, *args, **kwargs):
            logits, bias = super().forward(*args, **kwargs)
            return 2 * logits, bias

    class Twice(Doubled):
        pass

    untied.output_layer.__class__ = Doubled
    assert_refused(ValueError, "output_layer is a Doubled with its own forward, which", enable, untied)
    untied.output_layer.__class__ = Twice
    assert_refused(ValueError, "output_layer is a Twice with Doubled's forward, which", enable, untied)
    untied.output_layer.__class__ = ColumnParallelLinear
    accept_head(Doubled, softcap=30.0)
    put_in_front(untied, Softcapped, Doubled)
    assert_refused(ValueError, "output_layer is a ColumnParallelLinear with several softcaps", enable, untied)


def test_errors():
    kinds, forwards = "head must be a class or a function, got", "head must define forward or _forward_impl"
    assert_refused(TypeError, f"{kinds} str", accept_head, "ColumnParallelLinear's name")
    assert_refused(TypeError, f"{kinds} Linear", accept_head, torch.nn.Linear(2, 2))
    plain = type("Plain", (ColumnParallelLinear,), {})
    assert_refused(ValueError, f"{forwards}, Plain defines neither", accept_head, plain)
    for softcap, error, message in (("30", TypeError, "a float, got str"), (-30.0, ValueError, "finite, got -30.0")):
        assert_refused(error, f"softcap must be .*{message}", accept_head, lambda head, *_: None, softcap=softcap)
