"""`capture_lm_head`: a Megatron model's hidden states and head weight, instead of its logits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from megatron_lce.megatron.captured_head import CapturedHead
from megatron_lce.megatron.head_call import HeadCall
from megatron_lce.megatron.logits import NoLogits, UncomputedLogits
from megatron_lce.megatron.loss import FusedLoss
from megatron_lce.megatron.reasons import NO_HEAD, find_language_model, head_reasons, reasons_of_group
from megatron_lce.megatron.replace import ReplacedHead

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule

_capturable: WeakSet[nn.Module] = WeakSet()  # heads that all ranks of their group have agreed on


class CapturingHead(ReplacedHead):
    """A model's head and loss while a capture is open: they note the inputs of the logits."""

    def __init__(self, language_model: LanguageModule):
        self.captured = CapturedHead()
        super().__init__(language_model)

    def start_pass(self, given: dict[str, Any], takes_labels: bool) -> Tensor | None:
        """Gives the model labels where it has none and no MTP would use them: then it makes nothing of the logits.

        So it does under torch.compile, which cannot trace what uncomputed logits are made into. A shallow copy of the
        model, which has its hooks, keeps its logits.
        """
        if self.in_pass is not self.language_model:
            return None
        if given.get("labels") is not None or not takes_labels or self.mtp_layers:
            return None
        return torch.empty(0, dtype=torch.int64)

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **of_loss: Any,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        if self.in_pass is not self.language_model:  # of two models that share the output layer
            return self.overrides[0].below(self)(input_, weight, runtime_gather_output, **of_loss)
        self.captured._call = call = HeadCall.of(self.head, input_, weight)
        logits = UncomputedLogits(call, self._capture)
        return self._loss(logits, **of_loss) if of_loss.pop("output_cross_entropy_loss", False) else (logits, None)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        if not isinstance(logits, UncomputedLogits):  # of a head that was called outside a pass
            return self.overrides[1].below(self)(labels, logits)
        return self._loss(logits, labels, telemetry=self.language_model.training)

    def _loss(self, logits: UncomputedLogits, labels: Tensor, **arguments: Any) -> Tensor:
        """The fused loss for MTP's heads, which come first, and none, [b, s, 0], for the main one."""
        if self.mtp_losses_left == 0:
            return self._capture(logits.call).transpose(0, 1)
        self.mtp_losses_left -= 1
        return logits.compute_loss(labels, **arguments, **self._enabled_options())

    def _capture(self, call: HeadCall) -> Tensor:
        """The main head's logits are wanted: note what they are made of and give [s, b, 0], which is no memory."""
        self.captured._call = call
        self.mtp_losses_left = self.mtp_layers
        batch, sequence = call.tokens
        return call.hidden.new_empty((sequence, batch, 0)).as_subclass(NoLogits)

    def _enabled_options(self) -> dict[str, Any]:
        """Those of the enabled loss that the capture is open on: its softcap, say, is the MTP losses' too."""
        fused = [owner for owner in self.overrides[0].owners if isinstance(owner, FusedLoss)]
        return fused[-1].options_now() if fused else {}


class Capture(contextlib.AbstractContextManager["CapturedHead", None]):
    """What `capture_lm_head` returns, to be opened by `with`."""

    def __init__(self, model: nn.Module | Sequence[nn.Module]):
        self._model = model
        self._open: list[CapturingHead | None] = []  # of each `with` of it; None: the model has no head

    def __enter__(self) -> CapturedHead:
        language_model = find_language_model(self._model)
        if language_model is None:
            self._open.append(None)
            return CapturedHead(NO_HEAD)
        _check_capturable(language_model)
        head = CapturingHead(language_model)
        self._open.append(head)
        return head.captured

    def __exit__(self, *raised: Any) -> None:
        head = self._open.pop()
        if head is not None:
            head.close()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a capture has no {name} before it is opened: `with capture_lm_head(model) as head:`")


def capture_lm_head(model: nn.Module | Sequence[nn.Module]) -> Capture:
    """While open, the model's forward pass stops before the logits and leaves what they are made of in the result.

        with capture_lm_head(model) as head:
            model(input_ids, position_ids, attention_mask)
        out = head.linear_cross_entropy(labels, temperature=0.7)

    The model returns an empty [b, s, 0] tensor; to read it as logits raises. With MTP, pass the labels: the MTP losses
    are computed, fused, and take effect on the hidden states as in Megatron; the main loss is left to the caller. Of
    several forward passes the last is kept. The result stays valid after the context; it holds hidden and its graph
    alive.

    All ranks of the head's tensor-parallel group must open its first capture: they agree there on whether it can be.

    Args:
        model: a megatron-core GPTModel, MambaModel or HybridModel in any nesting of DistributedDataParallel,
            Float16Module and VLM wrappers, or the list of virtual pipeline chunks that Megatron's schedules take.

    Raises:
        TypeError: `model` is not and holds no megatron-core language model.
        ValueError: the head is one that hidden and weight do not describe, and the message lists the reasons; or
            `model` holds several heads.
    """
    return Capture(model)


def _check_capturable(language_model: LanguageModule) -> None:
    """Raises on all ranks alike at a head's first capture; asking the others each time would wait for the device."""
    output_layer = language_model.output_layer
    reasons = head_reasons(language_model)
    if output_layer not in _capturable:
        reasons = reasons_of_group(language_model, reasons)
    if reasons:
        raise ValueError(f"the LM head cannot be captured: {'; '.join(reasons)}")
    _capturable.add(output_layer)
