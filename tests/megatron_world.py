"""A Megatron world of one rank for the integration's tests, and what they ask of a model in it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lce import capture_lm_head, enable_fused_linear_ce
from scripts import megatron_runtime

# No other tensor of the model has as many elements as its logits, or this width and more than half as many.
VOCAB_SIZE, SEQUENCE, BATCH = 104, 23, 3
SMALL_WORKSPACE = 40_000  # bytes: nearly the least that this head takes, and room for less than half of its tokens
REFUSED = "the logits of an enabled model are not computed .* call the model without labels, or .* handle.remove"


def enable(model, **settings):
    """With the torch backend, which needs no interpreter."""
    return enable_fused_linear_ce(model, backend="torch", **settings)


def cross_entropy(logits, labels):
    """The loss of each token [s, b], of whole logits [s, b, V] and labels [b, s]."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.T.flatten(), reduction="none").view_as(labels.T)


def state(model):
    """What a patch of the model or its head would change, hooks among it."""
    attributes = [vars(module).items() for module in (model, model.output_layer)]
    return [{name: dict(x) if isinstance(x, dict) else x for name, x in module} for module in attributes]


def with_loss(model, loss):
    """The model with code of a user's, loss(own, logits, labels), in front of its own loss."""
    own = model.compute_language_model_loss
    model.compute_language_model_loss = lambda labels, logits: loss(own, logits, labels)


def dtypes_of_logits(model):
    """Of the logits that the model's loss gets from now on."""
    dtypes = []
    with_loss(model, lambda own, logits, labels: (dtypes.append(logits.dtype), own(labels, logits))[1])
    return dtypes


def captured(model, tensors, scale=1.0):
    """The head of one pass; `scale`: what MuP multiplies logits by between the head and its caller."""
    with capture_lm_head(model) as head:
        if scale != 1.0:
            forward = model.output_layer.forward
            model.output_layer.forward = lambda *args, **keywords: (forward(*args, **keywords)[0] * scale, None)
        model(*tensors)
        if scale != 1.0:
            model.output_layer.forward = forward
    return head


@contextlib.contextmanager
def world() -> Iterator[torch.device]:
    """Process groups of one rank; the device to build models on."""
    device = megatron_runtime.initialize(1)
    MTPLossLoggingHelper.tracker.clear()  # Megatron's, of the process: sized for the first model with MTP
    yield device
    megatron_runtime.teardown()


def options(**settings: Any) -> megatron_runtime.GptOptions:
    return megatron_runtime.GptOptions(**{"hidden_size": 32, "vocab_size": VOCAB_SIZE} | settings)


def build(device: torch.device, ddp: bool = False, **settings: Any) -> Any:
    """A model of these options, with a share of MTP's losses where it has any."""
    if settings.get("mtp_layers"):
        settings["config"] = {"mtp_loss_scaling_factor": 0.1}
    return megatron_runtime.build_gpt(options(**settings), device=device, ddp=ddp)


def inputs(device: torch.device) -> tuple[tuple[Tensor, Tensor, None], Tensor]:
    """((tokens, positions, no mask), labels), each [b, s]."""
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, VOCAB_SIZE, (2, BATCH, SEQUENCE), generator=generator).to(device)
    return (tokens, torch.arange(SEQUENCE, device=device).expand(BATCH, -1), None), labels


def gradients(model: nn.Module, loss: Tensor, retain_graph: bool = False) -> dict[str, Tensor]:
    """Every parameter's gradient of a loss; the model is left without gradients."""
    loss.backward(retain_graph=retain_graph)
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Norm over norm, in fp32."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        error, norm = float((actual[name] - gradient).norm()), float(gradient.norm())
        assert error <= 1e-5 * norm, f"{name}: {error} of {norm}"


def assert_gradients(model: nn.Module, loss: Tensor, expected: dict[str, Tensor]) -> None:
    assert_same_gradients(gradients(model, loss), expected)


def assert_refused(error, message, call, *arguments, **keywords):
    """`message` is a regular expression."""
    with pytest.raises(error, match=message):
        call(*arguments, **keywords)


class LogitsSpy(TorchDispatchMode):
    """Counts the operations, forward and backward, that give the logits of more than half of the tokens at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tokens, rows = BATCH * SEQUENCE, result.numel() / VOCAB_SIZE if isinstance(result, Tensor) else 0
        if rows == tokens or (tokens / 2 < rows < tokens and VOCAB_SIZE in result.shape):
            self.seen.append(f"{func} {tuple(result.shape)}")
        return result


class LoraLinear(nn.Module):
    """An adapter as PEFT libraries put it around a Megatron linear layer."""

    def __init__(self, to_wrap):
        super().__init__()
        self.to_wrap = to_wrap
        self.delta = nn.Parameter(torch.full_like(to_wrap.weight, 0.1))

    def forward(self, input_, weight=None, runtime_gather_output=None):
        output, bias = self.to_wrap(input_, weight, runtime_gather_output)
        return output + input_ @ self.delta.T, bias


def lora(model):
    model.output_layer = LoraLinear(model.output_layer)
