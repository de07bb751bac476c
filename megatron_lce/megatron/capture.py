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
from megatron_lce.megatron.reasons import NO_HEAD, capturing_reasons, find_language_model, reasons_of_group
from megatron_lce.megatron.replace import ReplacedHead

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule

_capturable: WeakSet[nn.Module] = WeakSet()  # heads that all ranks of their group have agreed on


class CapturingHead(ReplacedHead):
    """A model's head and loss while a capture is open: they record the inputs of the logits."""

    def __init__(self, language_model: LanguageModule):
        self.captured = CapturedHead()
        super().__init__(language_model)

    def start_pass(self, given: dict[str, Any], takes_labels: bool) -> Tensor | None:
        """Give the model labels if it has none and no MTP would use them: with labels it never reads its logits.

        torch.compile needs this, because it cannot trace a read of uncomputed logits.
        """
        if self.in_pass is not self.language_model:  # a shallow copy, which has the original's hooks
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
        if self.in_pass is not self.language_model:  # another model shares the output layer
            return self.overrides[0].below(self)(input_, weight, runtime_gather_output, **of_loss)
        self.captured._call = call = HeadCall.of(self.head, input_, weight)
        logits = UncomputedLogits(call, self._capture)
        return self._loss(logits, **of_loss) if of_loss.pop("output_cross_entropy_loss", False) else (logits, None)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        if not isinstance(logits, UncomputedLogits):  # the head was called outside a pass
            return self.overrides[1].below(self)(labels, logits)
        return self._loss(logits, labels, telemetry=self.language_model.training)

    def _loss(self, logits: UncomputedLogits, labels: Tensor, **arguments: Any) -> Tensor:
        """Return the fused loss of MTP heads, which come first, and an empty one, [b, s, 0], of the main head."""
        if self.mtp_losses_left == 0:
            return self._capture(logits.call).transpose(0, 1)
        self.mtp_losses_left -= 1
        enabled = [owner for owner in self.overrides[0].owners if isinstance(owner, FusedLoss)]
        options = enabled[-1].options_now() if enabled else {}  # the MTP losses keep the softcap, say
        return logits.compute_loss(labels, **arguments, **options)

    def _capture(self, call: HeadCall) -> Tensor:
        """Record the inputs of the main head's logits, and return [s, b, 0] in their place, which takes no memory."""
        self.captured._call = call
        self.mtp_losses_left = self.mtp_layers
        batch, sequence = call.tokens
        return call.hidden.new_empty((sequence, batch, 0)).as_subclass(NoLogits)


class Capture(contextlib.AbstractContextManager["CapturedHead", None]):
    """What `capture_lm_head` returns; `with` opens it."""

    def __init__(self, model: nn.Module | Sequence[nn.Module]):
        self._model = model
        self._open: list[CapturingHead | None] = []  # one for each `with`; None: the model has no head

    def __enter__(self) -> CapturedHead:
        language_model = find_language_model(self._model)
        if language_model is None:
            self._open.append(None)
            return CapturedHead(NO_HEAD)
        # Ranks agree at a head's first capture only: the host waits for the answer.
        output_layer, reasons = language_model.output_layer, capturing_reasons(language_model)
        if output_layer not in _capturable:
            reasons = reasons_of_group(language_model, reasons)
        if reasons:
            raise ValueError(f"the LM head cannot be captured: {'; '.join(reasons)}")
        _capturable.add(output_layer)
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
    """While open, the model's forward pass skips the output projection and records its inputs.

        with capture_lm_head(model) as head:
            model(input_ids, position_ids, attention_mask)
        out = head.linear_cross_entropy(labels, temperature=0.7)

    The model returns an empty [b, s, 0] tensor; reading it as logits raises. With MTP, pass the labels: the MTP losses
    are computed, fused, and take effect on the hidden states as in Megatron; the main loss is left to the caller. The
    last of several forward passes is kept. The result stays valid after the context; it keeps hidden and its graph
    alive. All ranks of the head's tensor-parallel group must open its first capture together.

    Args:
        model: as in `enable_fused_linear_ce`.

    Raises:
        TypeError: `model` neither is nor holds a megatron-core language model.
        ValueError: hidden and weight do not determine the logits, for the reasons listed; or `model` holds several
            heads.
    """
    return Capture(model)
