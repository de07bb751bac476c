"""`capture_lm_head`: a forward pass that records the head's inputs instead of computing logits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn

from megatron_lce.checks import validation
from megatron_lce.core.eager import eager
from megatron_lce.megatron.captured_head import CapturedHead
from megatron_lce.megatron.captured_mtp import discard_metrics, restore_metrics, sequence_ends
from megatron_lce.megatron.head_call import HeadCall
from megatron_lce.megatron.logits import NoLogits, UncomputedLogits
from megatron_lce.megatron.loss import FusedLoss
from megatron_lce.megatron.reasons import NO_HEAD, capturing_reasons, find_language_model, reasons_of_group
from megatron_lce.megatron.replace import ReplacedHead, owners_on

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule

_capturable: WeakSet[nn.Module] = WeakSet()  # heads that all ranks of their group have agreed on


class CapturingHead(ReplacedHead):
    """A model's head and loss while a capture is open: they record the inputs of the logits."""

    opened_by = "capture_lm_head"

    def __init__(self, language_model: LanguageModule, captures_mtp: bool):
        self.captured, self._captures_mtp = CapturedHead(), captures_mtp
        super().__init__(language_model)

    def start_pass(self, given: dict[str, Any], takes_labels: bool) -> Tensor | None:
        """Give the model labels if it has none and no MTP would use them: with labels it never reads its logits.

        torch.compile needs this, because it cannot trace a read of uncomputed logits.
        """
        hooks = self.language_model._forward_pre_hooks.values()
        captures = [hook.__self__ for hook in hooks if isinstance(getattr(hook, "__self__", None), CapturingHead)]
        if captures[-1] is not self:  # which records this pass, and would see the labels
            return None
        self.captured._start_pass()
        self._packed = given.get("packed_seq_params")
        if self._captures_mtp:
            discard_metrics()
        if given.get("labels") is not None or not takes_labels:
            return None
        if self._captures_mtp and given.get("input_ids") is not None:
            return torch.zeros_like(given["input_ids"])
        return None if self.mtp_layers else torch.empty((0, 0), dtype=torch.int64)

    def _end_pass(self, *_: Any) -> None:
        super()._end_pass()
        restore_metrics()

    def close(self) -> None:
        restore_metrics()  # an interrupt leaves the end of a pass out
        super().close()

    @eager
    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **loss_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        if not self.in_pass:  # another model shares the output layer
            return self.previous_method("forward")(input_, weight, runtime_gather_output, **loss_kwargs)
        call = HeadCall(self.head, input_, weight)
        self._record(self.captured, call)
        logits = UncomputedLogits(call, self._capture)
        wants_loss = loss_kwargs.pop("output_cross_entropy_loss", False)
        return self._loss(logits, **loss_kwargs) if wants_loss else (logits, None)

    @eager
    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        if not isinstance(logits, UncomputedLogits):  # the head was called outside a pass
            return self.previous_method("compute_language_model_loss")(labels, logits)
        return self._loss(logits, labels, telemetry=self.language_model.training)

    def _loss(self, logits: UncomputedLogits, labels: Tensor, **arguments: Any) -> Tensor:
        """Return the fused loss of MTP heads, which come first, and an empty one, [b, s, 0], of the main head."""
        if self.mtp_losses_left == 0:
            return self._capture(logits.call).transpose(0, 1)
        self.mtp_losses_left -= 1
        if self._captures_mtp:
            return self._capture_mtp(logits)
        enabled = [owner for owner in owners_on(self.language_model) if isinstance(owner, FusedLoss)]
        options = enabled[0].options_now() if enabled else {}  # the MTP losses keep the softcap, say
        return logits.compute_loss(labels, **arguments, **options)

    def _capture_mtp(self, logits: UncomputedLogits) -> Tensor:
        """Record the inputs of an MTP head's logits; return losses [b, s] of 0, and largest logits for metrics."""
        call, head = logits.call, CapturedHead()
        nothing = torch.zeros(call.batch_and_sequence, dtype=torch.float32, device=call.hidden.device)
        logits.max_and_argmax = nothing.T, nothing.T.long()
        call.depth = len(self.captured._mtp_heads) + 1
        self._record(head, call)
        self.captured._mtp_heads += (head,)
        return nothing

    def _record(self, head: CapturedHead, call: HeadCall) -> None:
        if self._captures_mtp:
            call.ends = sequence_ends(self._packed, call.batch_and_sequence[1], call.hidden.device)
        head._record(call)

    def _capture(self, call: HeadCall) -> Tensor:
        """Record the inputs of the main head's logits, and return [s, b, 0] in their place, which takes no memory."""
        self._record(self.captured, call)
        self.captured._is_used = False
        self.mtp_losses_left = self.mtp_layers
        batch, sequence = call.batch_and_sequence
        return call.hidden.new_empty((sequence, batch, 0)).as_subclass(NoLogits)


class capture_lm_head(contextlib.AbstractContextManager[CapturedHead, None]):
    """While open, the model's forward pass skips the output projection and records its inputs.

        with capture_lm_head(model) as head:
            model(input_ids, position_ids, attention_mask)
        out = head.linear_cross_entropy(labels, temperature=0.7)

    The model returns an empty [b, s, 0] tensor; reading it as logits raises. With MTP, pass the labels: the MTP losses
    are computed, fused, and take effect on the hidden states as in Megatron; the main loss is left to the caller. Each
    forward pass replaces the one before, with a warning if that was not used. The result stays valid after the context;
    it keeps hidden and its graph alive. All ranks of the head's tensor-parallel group must open its first capture
    together.

    Args:
        model: as in `enable_fused_linear_ce`.
        mtp: "capture": the MTP heads are captured as well (`CapturedHead.mtp_heads`), and the model's own MTP loss adds
            nothing, neither to gradients nor to its metrics. Labels need not be passed.

    Raises:
        ModuleNotFoundError: megatron-core is not installed.
        TypeError: `model` neither is nor holds a megatron-core language model.
        ValueError: hidden and weight do not determine the logits, for the reasons listed; or there are several heads.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], mtp: Literal["loss", "capture"] = "loss"):
        validation.check_choice("mtp", mtp, ("loss", "capture"))
        self._model, self._captures_mtp = model, mtp == "capture"
        self._open: list[CapturingHead | None] = []  # one for each `with`; None: the model has no head

    def __enter__(self) -> CapturedHead:
        language_model = find_language_model(self._model)
        if language_model is None:
            self._open.append(None)
            return CapturedHead(NO_HEAD)
        # Ranks agree at a head's first capture only: the host waits for the answer.
        output_layer, reasons = language_model.output_layer, capturing_reasons(language_model)
        if self._captures_mtp and language_model.config.context_parallel_size > 1:
            reasons += ("with mtp='capture' rows of one sequence must not lie on several ranks of context parallelism",)
        if output_layer not in _capturable:
            reasons = reasons_of_group(language_model, reasons)
        if reasons:
            raise ValueError(f"the LM head cannot be captured: {'; '.join(reasons)}")
        _capturable.add(output_layer)
        head = CapturingHead(language_model, self._captures_mtp)
        head.open()
        self._open.append(head)
        return head.captured

    def __exit__(self, *raised: Any) -> None:
        if (head := self._open[-1]) is not None:
            head.close()
        self._open.pop()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a capture has no {name} before it is opened: `with capture_lm_head(model) as head:`")
