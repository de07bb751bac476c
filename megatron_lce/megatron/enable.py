"""`enable_fused_linear_ce`: a Megatron model's own loss, computed by the fused head."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from megatron_lce.backends.choice import describe_backend, triton_obstacle
from megatron_lce.checks import validation
from megatron_lce.core.options import WORKSPACE_BYTES, BackendName, Options
from megatron_lce.megatron.capture import CapturingHead
from megatron_lce.megatron.heads import own_softcap
from megatron_lce.megatron.loss import FusedLoss, not_applied, terms_of
from megatron_lce.megatron.reasons import (
    NO_HEAD,
    find_language_model,
    fusing_reasons,
    modules_of,
    reasons_of_group,
    warn_on_one_rank,
)
from megatron_lce.megatron.replace import close_all, owners_on

_OFF = "use_fused_linear_ce is False"
# What the fused loss is computed with.
_OPTIONS = "logits_cache_bytes", "workspace_bytes", "vocab_size", "softcap", "backend", "z_loss", "label_smoothing"


class FusedLinearCE:
    """The handle of `enable_fused_linear_ce`.

    Attributes:
        enabled: whether the model's loss is fused now.
        reasons: why it is not; empty when it is.
    """

    def __init__(self, reasons: tuple[str, ...], fused: FusedLoss | None = None):
        self._reasons, self._fused = reasons, fused

    def __repr__(self) -> str:
        if self._fused is None or not self.enabled:
            return f"FusedLinearCE(not enabled: {'; '.join(self.reasons)})"
        fused = self._fused
        options = dict(fused.options, skip_masked=fused.skip_masked, known_loss=fused.known_loss)
        device = next(fused.language_model.parameters()).device
        backend = describe_backend(options.pop("backend"), device)
        asked = {name: value for name, value in options.items() if value or name.endswith("_bytes")}
        given = "".join(f", {name}={value}" for name, value in asked.items())
        return f"FusedLinearCE(enabled, backend: {backend}{given})"

    @property
    def reasons(self) -> tuple[str, ...]:
        fused = self._fused
        if fused is None:
            return self._reasons
        if not fused.is_open:
            return ("it was removed, or the model was enabled once more",)
        if fused.language_model.output_layer is not fused.head:
            return ("the model's output_layer was replaced",)
        if fused.is_in_place():
            return ()
        if any(isinstance(owner, CapturingHead) for owner in owners_on(fused.language_model, fused.head)):
            return ("a capture of the model is open",)
        return ("the head's forward or the model's loss was replaced by other code",)

    @property
    def enabled(self) -> bool:
        return not self.reasons

    def remove(self) -> None:
        """Restore the model's own loss. A second call has no effect.

        Raises RuntimeError if a capture of the model is open, or if other code has replaced the loss or the head's
        forward since: undo that first.
        """
        if self._fused is not None:
            self._fused.close()


@validation.renamed("skip_masked", "skip_ignored")
def enable_fused_linear_ce(
    model: nn.Module | Sequence[nn.Module],
    use_fused_linear_ce: bool = True,
    on_unsupported: Literal["fallback", "raise"] = "fallback",
    *,
    logits_cache_bytes: int | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    vocab_size: int | None = None,
    softcap: float | None = None,
    skip_masked: bool = False,
    known_loss: bool | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    backend: BackendName = "auto",
) -> FusedLinearCE:
    """Make `model(..., labels=labels)` compute its loss, and its MTP losses, without logits.

    The loss is fp32 [b, s] per token, as Megatron returns it, in training, in eval and under no_grad. Negative labels,
    which Megatron lets pass under a loss mask, are ignored rows: loss 0, no gradient. Without labels the model returns
    Megatron's logits with their graph. With labels there are none: code between head and loss that reads them raises.
    With `gradient_accumulation_fusion` the head's weight gradient goes straight into `main_grad`. A second call
    replaces the first.

    Args:
        model: a megatron-core GPTModel, MambaModel or HybridModel in any nesting of DistributedDataParallel,
            Float16Module and VLM wrappers, or the list of virtual pipeline chunks that Megatron's schedules take.
        use_fused_linear_ce: the flag; False restores the model's own loss.
        on_unsupported: what to do with a head that cannot be fused, or not with this `vocab_size` and `backend`:
            "fallback" keeps Megatron's own path, with one warning on one rank; "raise" raises. A pipeline stage without
            a head does neither.
        logits_cache_bytes, workspace_bytes, vocab_size, softcap, backend: as in `megatron_lce.linear_cross_entropy`.
            `vocab_size` and `softcap` apply to the fused loss only: not to logits returned without labels, and not if
            the head is left to Megatron, which the warning says.
        skip_masked: ignore tokens whose `loss_mask`, [b, s], is 0, and leave all ignored rows out of the head. Pass the
            mask to the language model's own forward (LLaVA does not pass it on); a call with labels and no mask warns
            once. MTP losses take it as Megatron shifts it. The host waits once in each pass for the number of rows.
            While a CUDA graph is captured, all rows are computed.
        known_loss: whether the losses of all unmasked tokens get one upstream gradient, as a plain masked mean or sum
            gives them. It matters where not all logits are kept: both gradients are then computed in forward, for an
            upstream of 1, in three matmuls instead of four. From forward to backward each microbatch in flight, and
            each MTP loss, holds the hidden-state gradient (2 N H bytes) and the weight gradient, or its fp32 sum (4 V H
            bytes for the V columns of a rank). `None`: the first backward pass finds it out, with one wait of the host;
            so do later ones while all gradients are 0 or infinite. In a non-reentrant checkpoint gradients are then
            computed in backward. True: it raises if it is not so. False: gradients are computed in backward. If a later
            upstream gradient is not one number, the gradients of its pass are NaN, and the next forward pass raises.
            Pass the `loss_mask`, if the loss has one, to the model.
        z_loss, label_smoothing: z >= 0 and e in [0, 1] of the per-token loss, MTP's included,

                (1 - e) (-log p(label)) + e (lse - mean_logit) + z lse^2

            where lse - mean_logit is the mean of -log p over the vocabulary: pass `vocab_size` to leave padding columns
            out. If the loss cannot be fused, which Megatron's has neither of, both raise, under "fallback" too.

    Returns:
        A handle: `enabled`, `reasons`, `remove()`. The decision is made here, once: all ranks of the head's
        tensor-parallel group must make this call together.

    Raises:
        ModuleNotFoundError: megatron-core is not installed.
        TypeError: `model` neither is nor holds a megatron-core language model, or an option has the wrong type.
        ValueError: an option is out of its range, `softcap` is given to a head that has its own, `model` holds several
            heads, the head is unsupported ("raise", or `z_loss` or `label_smoothing` is not 0), or another rank of the
            head's group has other arguments or refuses its own.
        RuntimeError: a capture of the model is open, and the flag is on.

    The model's forward then raises ValueError for a `loss_mask` of another shape than labels' (`skip_masked`), and
    for what `megatron_lce.linear_cross_entropy` raises it; RuntimeError where code between head and loss reads logits,
    where the loss is left to Megatron although `z_loss` or `label_smoothing` is not 0, or after a backward pass whose
    upstream gradient was not the one number that `known_loss` says.
    """
    settings = {name: value for name, value in locals().items() if name != "model"}
    options = {name: settings[name] for name in _OPTIONS}
    modules = modules_of(model)
    error = _refusal(settings, modules)
    language_model = find_language_model(model) if use_fused_linear_ce else _head_of_any_model(model)
    reasons: tuple[str, ...] = (NO_HEAD,) if use_fused_linear_ce else (_OFF,)
    if language_model is not None:
        if use_fused_linear_ce:
            reasons = fusing_reasons(language_model, modules)
            if not reasons and error is None:
                reasons = _reasons_of_options(language_model, vocab_size, backend)
        reasons = reasons_of_group(language_model, reasons, settings, error)
    elif error is not None:
        raise error
    message = f"fused linear cross-entropy is not used: {'; '.join(reasons)}"
    falls_back = bool(reasons) and use_fused_linear_ce and language_model is not None
    if falls_back and terms_of(options):
        raise ValueError(f"{terms_of(options)} cannot be applied: {message}")
    if falls_back and on_unsupported == "raise":
        raise ValueError(message)
    if not reasons:
        assert language_model is not None
        own_softcap(language_model.output_layer, softcap)
    close_all(modules, FusedLoss)  # after all checks: a refused call leaves the loss unchanged
    if reasons:
        if falls_back:
            warn_on_one_rank(message + not_applied(options))
        return FusedLinearCE(reasons)
    fused = FusedLoss(language_model, options, skip_masked, known_loss)
    fused.open()
    return FusedLinearCE((), fused)


def _reasons_of_options(language_model: Any, vocab_size: int | None, backend: BackendName) -> tuple[str, ...]:
    """Return which options this head cannot be fused with, where it is."""
    num_outputs, device = language_model.output_layer.output_size, next(language_model.parameters()).device
    if vocab_size is not None and vocab_size > num_outputs:
        return (f"vocab_size is {vocab_size}, but output_layer has {num_outputs} outputs",)
    obstacle = None if device.type == "meta" or backend != "triton" else triton_obstacle(backend, device)
    return () if obstacle is None else (f"backend is 'triton', which cannot run: {obstacle}",)


def _head_of_any_model(model: nn.Module | Sequence[nn.Module]) -> Any:
    """Return the language model whose head other ranks may fuse, or None: where the flag is off, any model will do."""
    try:
        return find_language_model(model)
    except (ImportError, TypeError, ValueError):
        return None


def _refusal(settings: dict[str, Any], modules: list[nn.Module]) -> Exception | None:
    """Return the error that this rank's arguments call for."""
    options = {name: value for name, value in settings.items() if name in Options.__dataclass_fields__}
    try:
        validation.check_choice("on_unsupported", settings["on_unsupported"], ("fallback", "raise"))
        validation.check_options(Options(**options))
        for name in ("use_fused_linear_ce", "skip_masked", "known_loss"):
            validation.check_scalar(name, settings[name], bool, optional=name == "known_loss")
        validation.check_scalar("softcap", settings["softcap"], positive=True, optional=True)
        validation.check_scalar("z_loss", settings["z_loss"])
        validation.require(settings["z_loss"] >= 0, "z_loss", "be at least 0", settings["z_loss"])
        validation.check_fraction("label_smoothing", settings["label_smoothing"])
        if terms_of(settings) and not settings["use_fused_linear_ce"]:
            raise ValueError(f"{terms_of(settings)} must be 0 where {_OFF}: Megatron's own loss does not have it")
        is_captured = any(isinstance(owner, CapturingHead) for owner in owners_on(*modules))
        if settings["use_fused_linear_ce"] and is_captured:
            raise RuntimeError("capture_lm_head is open on this model: enable before or after it")
    except (TypeError, ValueError, RuntimeError) as error:
        return error
    return None
