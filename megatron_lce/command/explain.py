"""`explain`: whether a model's head can be fused, why not, and what fusing saves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from megatron_lce.backends.choice import describe_backend
from megatron_lce.checks.validation import check_integer
from megatron_lce.command.estimate import estimate_table, format_estimates, saved_mib
from megatron_lce.command.head_memory import DTYPES, HeadStep
from megatron_lce.core.plan import ALIGNED_COLUMNS
from megatron_lce.megatron.heads import weight_of
from megatron_lce.megatron.main_grad import main_grad_sink
from megatron_lce.megatron.reasons import NO_HEAD, capturing_reasons, find_language_model, fusing_reasons, modules_of


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; print it.

    can_capture  whether `capture_lm_head` takes this head
    can_fuse     whether `enable_fused_linear_ce` takes this model
    reasons      all reasons why not; empty if `can_fuse`
    backend      what `backend="auto"` takes on the weight's device, and why not triton
    head         shapes and settings of this rank's head
    ways         memory and matmuls of a step, one row per implementation

    Without a head, or if its weight is not bf16, fp16 or fp32 with H a multiple of 8, there is no estimate: the last
    three are empty.
    """

    can_capture: bool
    can_fuse: bool
    reasons: tuple[str, ...]
    backend: str | None = None
    head: str | None = None
    ways: tuple[dict[str, Any], ...] = ()

    def __str__(self) -> str:
        verdict = "this head can be fused" if self.can_fuse else "this head cannot be fused:"
        if self.can_fuse and self.ways and saved_mib(self.ways) <= 0:
            verdict += ", but that saves no memory in a step of this size"
        lines = [verdict, *(f"- {reason}" for reason in self.reasons)]
        if not self.can_fuse and self.can_capture:
            lines.append("it can be captured: capture_lm_head works on this model")
        if self.can_fuse and not self.can_capture:
            lines.append("it cannot be captured: FSDP frees its weight after the output layer's call")
        if self.backend is not None:
            lines.append(f"backend: {self.backend}")
        if self.head is not None:
            lines += ["", format_estimates(self.head, list(self.ways))]
        return "\n".join(lines)


def explain(model: nn.Module | Sequence[nn.Module], tokens: int = 8192) -> Explanation:
    """Return whether this model's LM head can be fused, each reason why not, and a step's memory in both cases.

    Reads this rank alone and changes nothing. In `enable_fused_linear_ce`, a reason on one rank of the tensor-parallel
    group holds for all.

    Args:
        model: as in `enable_fused_linear_ce`.
        tokens: tokens of a microbatch for the estimates: b * s, divided by the context-parallel ranks.

    Raises:
        TypeError: `model` neither is nor holds a megatron-core language model, or `tokens` is not an int.
        ValueError: `model` holds several heads, or `tokens` is not positive.
    """
    check_integer("tokens", tokens, minimum=1)
    language_model = find_language_model(model)
    if language_model is None:
        return Explanation(can_capture=False, can_fuse=False, reasons=(NO_HEAD,))
    weight, reasons = weight_of(language_model), fusing_reasons(language_model, modules_of(model))
    found = Explanation(not capturing_reasons(language_model), not reasons, reasons)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.dtype not in DTYPES.values():
        return found
    columns, hidden = weight.shape
    if hidden % ALIGNED_COLUMNS:
        return found
    layer, tied = language_model.output_layer, bool(language_model.share_embeddings_and_output_weights)
    group = getattr(layer, "tp_group", None)
    backend = describe_backend("auto", weight.device)
    step = HeadStep(
        tokens,
        hidden,
        columns,
        tp=1 if group is None else group.size(),
        sequence_parallel=bool(getattr(layer, "sequence_parallel", False)),
        dtype=weight.dtype,
        main_grad=getattr(layer, "gradient_accumulation_fusion", False) and main_grad_sink(weight, layer) is not None,
        entropy=False,
        backend="triton" if backend == "triton" else "torch",
    )
    head = f"{step}{', main_grad fusion' * step.main_grad}{', tied' * tied}"
    return replace(found, backend=backend, head=head, ways=tuple(estimate_table(step)))
