"""The fused loss of an enabled model: what runs in place of the head's forward and the model's loss."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_lce.checks.together import laying_out, refuse
from megatron_lce.core.collectives import is_cuda_graph_capturing
from megatron_lce.core.eager import eager
from megatron_lce.core.known_loss import UpstreamCheck
from megatron_lce.core.options import IGNORE_INDEX
from megatron_lce.megatron.head_call import HeadCall, tensor_version
from megatron_lce.megatron.heads import freed_reasons, is_freed, weight_reasons
from megatron_lce.megatron.logits import UncomputedLogits
from megatron_lce.megatron.reasons import warn_on_one_rank
from megatron_lce.megatron.replace import ReplacedHead

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule

_NO_LABELS = "the model was called without labels"
_OTHER_LOGITS = "the logits were not made by the output_layer during the model's forward"


class FusedLoss(ReplacedHead):
    """A model's head and loss, fused with the options of `enable_fused_linear_ce` until `close`."""

    opened_by = "enable_fused_linear_ce"

    def __init__(
        self, language_model: LanguageModule, options: dict[str, Any], skip_masked: bool, known_loss: bool | None
    ):
        super().__init__(language_model)
        self.options, self.skip_masked, self.known_loss = options, skip_masked, known_loss
        num_losses = 0 if known_loss is False else 1 + self.mtp_layers
        self._upstream = [UpstreamCheck(known_loss) for _ in range(num_losses)]  # of the main loss, and MTP's
        self._mask: Tensor | None = None  # [b, s], 0 at tokens that the last loss left out; None: none, or not wanted
        self._mtp_mask: Tensor | None = None  # the same, as the last MTP loss rolled it
        self._packed: dict[str, Any] = {}  # Megatron's parameters of packed sequences
        self._warned: set[str] = set()
        self._wants_logits = False  # the pass has no labels
        self._labels: Tensor | None = None  # [b, s] of this pass
        self._labels_version = 0
        self._refused: ValueError | None = None  # what is wrong with this pass's mask: all ranks raise it with the loss
        self._fallback_reason: str | None = None  # why the head last gave Megatron's logits although there are labels

    def options_now(self) -> dict[str, Any]:
        """Return the loss's options; all rows while a CUDA graph is captured, which cannot wait for their number."""
        return self.options | {"skip_ignored": self.skip_masked and not is_cuda_graph_capturing()}

    @eager
    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **loss_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return uncomputed logits; the loss, if the call asks for it; or Megatron's own logits."""
        wants_loss = loss_kwargs.get("output_cross_entropy_loss", False)
        if not self.in_pass and not wants_loss:  # other models may share the head
            return self.previous_method("forward")(input_, weight, runtime_gather_output, **loss_kwargs)
        weight_used = self.head.weight if weight is None else weight
        self._fallback_reason = reason = self._fallback_reason_for(weight_used, wants_loss, runtime_gather_output)
        if reason is not None:
            if wants_loss:
                self._leave_to_megatron(reason)
            elif reason is _NO_LABELS and self.language_model.training and torch.is_grad_enabled():
                self._warn_once(reason)
            return type(self.head).forward(self.head, input_, weight, runtime_gather_output, **loss_kwargs)
        logits = UncomputedLogits(HeadCall(self.head, input_, weight))
        if loss_kwargs.pop("output_cross_entropy_loss", False):
            return self._loss(logits, **loss_kwargs)
        return self._with_loss(logits) if is_freed(self.head, weight_used) else (logits, None)

    def _fallback_reason_for(self, weight: Tensor, wants_loss: bool, gathers: bool | None) -> str | None:
        """Return why Megatron's own head serves this call; None: the loss is fused."""
        if self._wants_logits and not wants_loss:
            return _NO_LABELS
        if gathers and not wants_loss:  # for sampling, never for a loss
            return "runtime_gather_output asks for gathered logits"
        # FSDP may have been put around the head since it was enabled
        freed = is_freed(self.head, weight) and not wants_loss
        reasons = (*weight_reasons(weight), *(freed_reasons(self.language_model.config) if freed else ()))
        if freed and self._labels is None:
            reasons += ("FSDP frees the head's weight, and the model's forward takes no labels",)
        return self._why_replaced() or next(iter(reasons), None)

    def _with_loss(self, logits: UncomputedLogits) -> tuple[Tensor, Tensor]:
        """Return uncomputed logits that hold their loss, and the loss in place of the bias.

        FSDP's hooks need a tensor of the graph among the outputs: they gather the weight again before its backward.
        They may replace the tensor by a view.
        """
        assert self._labels is not None
        loss = self._loss(logits, self._labels).clone()  # a view's hooks may be lost
        logits = UncomputedLogits(logits.call, loss=loss)

        def take_loss(head: nn.Module, _: Any, output: tuple[Tensor, Tensor]) -> None:
            handle.remove()
            if output[1].dtype != loss.dtype:
                raise RuntimeError(
                    "the output_layer's MixedPrecisionPolicy must have an output_dtype of None or torch.float32, got "
                    f"{output[1].dtype}, which rounds the loss"
                )
            logits.loss = output[1]

        if self.head._forward_hooks:  # else the call would run none; this one comes last
            handle = self.head.register_forward_hook(take_loss)
        return logits, loss

    def _why_replaced(self) -> str | None:
        if self.language_model.output_layer is self.head:  # else the new one may call it
            return None
        return f"the model's output_layer was replaced by a {type(self.language_model.output_layer).__name__}"

    @eager
    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        if not isinstance(logits, UncomputedLogits):
            reason = self._fallback_reason or self._why_replaced() or _OTHER_LOGITS
            self._leave_to_megatron(reason)
            return type(self.language_model).compute_language_model_loss(self.language_model, labels, logits)
        if logits.loss is not None:
            if labels is not self._labels or tensor_version(labels) != self._labels_version:
                raise RuntimeError(
                    "labels must be the tensor that the model was called with, unchanged: under FSDP the loss is "
                    "computed in the output layer's call"
                )
            return logits.loss
        # MTP's acceptance metrics read the largest logit after the loss, in training.
        return self._loss(logits, labels, telemetry=self.language_model.training and self.mtp_layers > 0)

    def _loss(self, logits: UncomputedLogits, labels: Tensor, **arguments: Any) -> Tensor:
        with laying_out():
            if self._refused is not None:
                refuse(self._refused)
            depth = 0 if labels is self._labels else self.mtp_losses_left  # 0: the main loss; MTP's come before
            self.mtp_losses_left = max(0, depth - 1)
            mask = self._mask
            if depth > 0 and mask is not None:
                self._mtp_mask = mask = self._rolled(mask if self._mtp_mask is None else self._mtp_mask)
                if self.skip_masked:
                    labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
            if self._upstream:
                arguments |= {"upstream": self._upstream[depth], "counted": None if mask is None else mask != 0}
            return logits.compute_loss(labels, **arguments, **self.options_now())

    def _rolled(self, mask: Tensor) -> Tensor:
        """Return the mask [b, s] of the next MTP loss, as Megatron rolls it: tokens of weight 0 come in."""
        from megatron.core.transformer.multi_token_prediction import roll_tensor

        takes_lists = "tensors" in inspect.signature(roll_tensor).parameters  # Megatron's dev branch
        given: Any = [mask] if takes_lists else mask
        return roll_tensor(given, shifts=-1, dims=-1, cp_group=self.language_model.cp_group, **self._packed)[0]

    def start_pass(self, given: dict[str, Any], takes_labels: bool) -> Tensor | None:
        """Note whether the model wants logits, and return labels [b, s] in which tokens to skip are ignored.

        Megatron shifts labels and mask alike for its MTP losses.

        Raises:
            RuntimeError: the last backward pass had no one upstream gradient, though that was known.
        """
        for upstream in self._upstream:
            upstream.check_last_passes()
        self._fallback_reason = self._mask = self._mtp_mask = self._refused = None
        labels = self._masked_labels(given)
        self._wants_logits = labels is None and takes_labels
        self._labels, self._labels_version = labels, 0 if labels is None else tensor_version(labels)
        return labels if labels is not given.get("labels") else None

    def _masked_labels(self, given: dict[str, Any]) -> Tensor | None:
        labels, loss_mask = given.get("labels"), given.get("loss_mask")
        if labels is None or not (self.skip_masked or self._upstream):
            return labels
        if loss_mask is not None and loss_mask.shape != labels.shape:
            shapes = f"{tuple(labels.shape)}, got {tuple(loss_mask.shape)}"
            self._refused = ValueError(f"loss_mask must have labels' shape, {shapes}")
            return labels
        if loss_mask is not None or self.mtp_layers:  # Megatron's MTP losses leave out what is rolled in
            self._mask = torch.ones_like(labels) if loss_mask is None else (loss_mask != 0).long()
            packed = given.get("packed_seq_params")
            self._packed = {} if packed is None else {"packed_seq_params": packed}  # not in megatron-core 0.14
        if not self.skip_masked:
            return labels
        if loss_mask is None:
            called = f"{type(self.language_model).__name__} was called with labels and without loss_mask"
            self._warn_once(called, "skip_masked is True but only negative labels are skipped")
            return labels
        return labels.masked_fill(loss_mask == 0, IGNORE_INDEX)

    def _leave_to_megatron(self, reason: str) -> None:
        """Warn once that Megatron's own loss runs; raise if it is another one than was asked for."""
        if terms := terms_of(self.options):
            raise RuntimeError(f"{terms} cannot be applied, because the loss is not fused: {reason}")
        self._warn_once(reason + not_applied(self.options))

    def _warn_once(self, reason: str, what: str = "fused linear cross-entropy is enabled but was not used") -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warn_on_one_rank(f"{what}: {reason}")


def terms_of(options: dict[str, Any]) -> str:
    """Name the terms that the options add to Megatron's loss."""
    return " and ".join(name for name in ("z_loss", "label_smoothing") if options[name])


def not_applied(options: dict[str, Any]) -> str:
    """Name the options that change the loss and are lost, for the end of a warning."""
    lost = [name for name in ("softcap", "vocab_size") if options[name] is not None]
    return f"; not applied: {', '.join(lost)}" if lost else ""
