"""`enable_fused_linear_ce`: a Megatron model's own loss, computed without its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from megatron_lce.core.options import Backend
from megatron_lce.core.validation import check_options
from megatron_lce.megatron_integration.capture import CapturedHead
from megatron_lce.megatron_integration.heads import check_softcap
from megatron_lce.megatron_integration.support import (
    NO_HEAD,
    find_language_model,
    head_reasons,
    loss_reasons,
    managed_weight_reason,
    modules_of,
    reasons_of_group,
    warn_on_one_rank,
)
from megatron_lce.megatron_integration.uncomputed_logits import HeadCall, UncomputedLogits

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import ColumnParallelLinear


class FusedLinearCE:
    """The handle of `enable_fused_linear_ce`.

    Attributes:
        enabled: whether the model's loss is computed fused now.
        reasons: why it is not; empty when it is.
    """

    def __init__(self, reasons: tuple[str, ...], fused: _FusedLoss | None = None):
        self._reasons = reasons
        self._fused = fused

    @property
    def reasons(self) -> tuple[str, ...]:
        if self._fused is None or self.enabled:
            return self._reasons
        return ("its methods are not in place: it was removed, replaced, or a capture is open",)

    @property
    def enabled(self) -> bool:
        return self._fused is not None and self._fused.is_in_place()

    def remove(self) -> None:
        """Gives the model its own loss back. Nothing happens where this handle is not, or no longer, in force.

        Raises:
            RuntimeError: a capture of the model is open.
        """
        if self._fused is not None:
            for module in (self._fused.language_model, self._fused.head):
                _uninstall(module, self._fused)


def enable_fused_linear_ce(
    model: nn.Module | Sequence[nn.Module],
    use_fused_linear_ce: bool = True,
    on_unsupported: Literal["fallback", "raise"] = "fallback",
    *,
    logits_cache_bytes: int = 0,
    workspace_bytes: int = 512 * 2**20,
    vocab_size: int | None = None,
    softcap: float | None = None,
    backend: Backend = "auto",
) -> FusedLinearCE:
    """From now on `model(..., labels=labels)` computes its loss, and its MTP losses, without logits.

    The loss is [b, s] per token, fp32, as Megatron returns it, in training, in eval and under no_grad. Negative
    labels, which Megatron lets pass under a loss mask, are ignored rows: loss 0, no gradient. Without labels the
    model returns Megatron's logits as before. With `gradient_accumulation_fusion` the head's weight gradient goes
    straight into `main_grad`. Of several calls on one model the last decides.

    Args:
        model: a megatron-core GPTModel, MambaModel or HybridModel in any nesting of DistributedDataParallel,
            Float16Module and VLM wrappers, or the list of virtual pipeline chunks that Megatron's schedules take.
        use_fused_linear_ce: the flag; False gives the model its own loss back.
        on_unsupported: what to do with a head that cannot be fused: "fallback" leaves Megatron's own path, with one
            warning on one rank; "raise" raises. A pipeline stage without a head does neither.
        logits_cache_bytes, workspace_bytes, vocab_size, softcap, backend: as in `megatron_lce.linear_cross_entropy`.
            `vocab_size` and `softcap` change the fused loss only: logits returned without labels have neither, and a
            head that is left to Megatron has neither, which the warning says.

    Returns:
        A handle: `enabled`, `reasons`, `remove()`. The decision is made here, once, and together: all ranks of the
        head's tensor-parallel group must make this call.

    Raises:
        TypeError: `model` is nothing of Megatron's, or an option is of the wrong type.
        ValueError: `on_unsupported` is neither, an option is out of its range, `softcap` is given to a head that has
            its own, `model` holds several heads, or the head is unsupported ("raise").
        RuntimeError: a capture of the model is open.
    """
    if on_unsupported not in ("fallback", "raise"):
        raise ValueError(f"on_unsupported must be 'fallback' or 'raise', got {on_unsupported!r}")
    options: dict[str, Any] = {
        "logits_cache_bytes": logits_cache_bytes,
        "workspace_bytes": workspace_bytes,
        "vocab_size": vocab_size,
        "softcap": softcap,
        "backend": backend,
    }
    check_options(**options)
    for module in modules_of(model):
        _uninstall(module)
    if not use_fused_linear_ce:
        return FusedLinearCE(("use_fused_linear_ce is False",))
    language_model = find_language_model(model)
    if language_model is None:
        return FusedLinearCE((NO_HEAD,))
    reasons = reasons_of_group(language_model, (*head_reasons(language_model), *loss_reasons(language_model)))
    if reasons:
        message = f"fused linear cross-entropy is not used: {'; '.join(reasons)}"
        if on_unsupported == "raise":
            raise ValueError(message)
        warn_on_one_rank(message + _not_applied(options))
        return FusedLinearCE(reasons)
    check_softcap(language_model.output_layer, softcap)
    fused = _FusedLoss(language_model, options)
    fused.install()
    return FusedLinearCE((), fused)


class _FusedLoss:
    """The two methods that an enabled model runs in place of its own."""

    def __init__(self, language_model: LanguageModule, options: dict[str, Any]):
        self.language_model = language_model
        self.head: ColumnParallelLinear = language_model.output_layer
        self._options = options
        self._warned: set[str] = set()

    def install(self) -> None:
        self.head.forward = self.forward
        self.language_model.compute_language_model_loss = self.compute_language_model_loss

    def is_in_place(self) -> bool:
        return (
            _owner(self.head, "forward") is self and _owner(self.language_model, "compute_language_model_loss") is self
        )

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        output_cross_entropy_loss: bool = False,
        **of_loss: Any,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """In place of the output layer's forward. Gathered logits are for sampling, never for a loss.

        With `output_cross_entropy_loss` it is LinearCrossEntropyModule's, of Megatron's dev branch: the loss at once,
        of the labels, the reduction and the ignore_index in `of_loss`.
        """
        head = self.head
        if output_cross_entropy_loss:
            of_loss["output_cross_entropy_loss"] = True
        elif runtime_gather_output:
            return type(head).forward(head, input_, weight, runtime_gather_output)
        reason = managed_weight_reason(head, head.weight if weight is None else weight)
        if reason is not None:  # FSDP was wrapped around the head since
            self._warn_once(reason)
            return type(head).forward(head, input_, weight, runtime_gather_output, **of_loss)
        call = HeadCall.of(head, input_, weight)
        if of_loss.pop("output_cross_entropy_loss", False):
            return UncomputedLogits(call, self._compute_logits).compute_loss(**of_loss, **self._options)
        return UncomputedLogits.in_graph(call, self._compute_logits), None

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """In place of LanguageModule's, for the main loss and for MTP's: labels [b, s] to loss [b, s]."""
        if isinstance(logits, UncomputedLogits):
            logits = logits.plain_if_changed()
        if not isinstance(logits, UncomputedLogits):
            reason = "the logits were computed before the loss, by runtime_gather_output or by code in between"
            self._warn_once(reason + _not_applied(self._options))
            return type(self.language_model).compute_language_model_loss(self.language_model, labels, logits)
        # MTP's acceptance metrics read the largest logit after the loss, in training.
        telemetry = self.language_model.training and bool(self.language_model.config.mtp_num_layers)
        return logits.compute_loss(labels, telemetry=telemetry, **self._options)

    def _compute_logits(self, logits: UncomputedLogits) -> Tensor:
        if self.language_model.training and logits.requires_grad:
            self._warn_once("the logits were computed in training, by labels=None or by code beside the loss")
        return logits.call.logits()

    def _warn_once(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warn_on_one_rank(f"fused linear cross-entropy is enabled but was not used: {reason}")


def _not_applied(options: dict[str, Any]) -> str:
    """The end of a warning: which options would have changed the loss itself."""
    lost = [name for name in ("softcap", "vocab_size") if options[name] is not None]
    return f"; not applied: {', '.join(lost)}" if lost else ""


def _owner(module: nn.Module, method: str) -> object:
    """What a method belongs to that was put on this instance in place of its class's."""
    return getattr(vars(module).get(method), "__self__", None)


def _uninstall(module: nn.Module, fused: _FusedLoss | None = None) -> None:
    """Takes off the module what `fused`, or if None any `_FusedLoss`, put on it."""
    for method in ("compute_language_model_loss", "forward"):
        owner = _owner(module, method)
        if isinstance(owner, CapturedHead):
            raise RuntimeError("capture_lm_head is open on this model: enable and remove before or after it")
        if isinstance(owner, _FusedLoss) and fused in (None, owner):
            delattr(module, method)
