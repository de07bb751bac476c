"""An `output_processor` for GPTModel.forward of megatron-core 0.18 and newer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_lce.api.linear_cross_entropy import linear_cross_entropy
from megatron_lce.checks.together import laying_out, refusing
from megatron_lce.checks.validation import as_int64, check_tensor
from megatron_lce.core.options import IGNORE_INDEX, LinearCrossEntropyOutput
from megatron_lce.megatron.head_call import HeadCall
from megatron_lce.megatron.heads import product_reasons, reasons_after_call
from megatron_lce.megatron.logits import UncomputedLogits

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig


@dataclass
class FusedOutputContext:
    """Options of `fused_output_processor` for one forward pass, and what the model is to return.

    Attributes:
        temperature: a positive float, or a floating tensor [b, s]; at ignored tokens it may be anything.
        entropy: as in `linear_cross_entropy`.
        labels: [b, s], any integer dtype, in place of the model's own, which MTP uses too. Negative ones are ignored
            rows: every output 0, no gradient.
        counted: [b, s] bool; tokens at which it is False are ignored rows, too.
        result: function from the outputs, each [b, s], to what the model returns; by default the outputs themselves.
            In Megatron's schedules return a tensor, or what the loss function takes.
        keywords: further keywords of `CapturedHead.linear_cross_entropy`, such as telemetry, vocab_size or backend.
    """

    temperature: float | Tensor = 1.0
    entropy: bool = True
    labels: Tensor | None = None
    counted: Tensor | None = None
    result: Callable[[LinearCrossEntropyOutput], Any] = lambda outputs: outputs
    keywords: Mapping[str, Any] = field(default_factory=dict)


def fused_output_processor(
    *,
    hidden_states: Tensor,  # [s, b, H], under sequence parallel this rank's [s/tp, b, H]
    output_layer: ColumnParallelLinear,
    output_weight: Tensor | None,
    labels: Tensor | None,
    context: FusedOutputContext | None,
    scale_logits: Callable[[Tensor], Tensor],
    config: TransformerConfig,
    **_: Any,
) -> Any:
    """Return logprobs and entropy in place of the head and the loss, without logits.

        context = megatron_lce.FusedOutputContext(temperature=0.7, result=lambda outputs: outputs.logprobs)
        logprobs = model(tokens, positions, mask, labels=labels, output_processor_context=context,
                         output_processor=megatron_lce.fused_output_processor)

    Takes the arguments that GPTModel gives; a context of None is a `FusedOutputContext()`.

    Raises:
        ValueError: there are no labels, or hidden and weight do not determine the logits, for the reasons listed.
        TypeError, ValueError: as `megatron_lce.linear_cross_entropy`.
    """
    context = FusedOutputContext() if context is None else context
    if not isinstance(context, FusedOutputContext):
        raise TypeError(f"output_processor_context must be a FusedOutputContext, got {type(context).__name__}")
    if reserved := {"labels", "temperature", "ignore_index", "entropy"} & context.keywords.keys():
        raise TypeError(
            f"{', '.join(sorted(reserved))} must not be among a FusedOutputContext's keywords: see its attributes"
        )
    weight = output_layer.weight if output_weight is None else output_weight
    reasons = (*product_reasons(output_layer, config), *reasons_after_call(output_layer, weight))
    if reasons:
        raise ValueError(f"the LM head cannot be fused: {'; '.join(reasons)}")
    call = HeadCall(output_layer, hidden_states, weight)
    labels = labels if context.labels is None else context.labels
    # Uncomputed logits remember the factor that Megatron applies between head and loss (MuP).
    logits = scale_logits(UncomputedLogits(call))
    assert isinstance(logits, UncomputedLogits)
    with laying_out():
        with refusing():
            labels = _without_ignored(labels, context.counted)
        temperature = context.temperature
        if isinstance(temperature, Tensor) and isinstance(labels, Tensor) and temperature.shape == labels.shape:
            temperature = temperature.where(labels >= 0, 1.0)
        options = {"temperature": temperature, "ignore_index": IGNORE_INDEX, "entropy": context.entropy}
        return context.result(logits.call.run(linear_cross_entropy, labels, **options, **context.keywords))


def _without_ignored(labels: Any, counted: Tensor | None) -> Tensor:
    """Return labels as int64; IGNORE_INDEX where they are negative or not counted."""
    if labels is None:
        raise ValueError("labels must be given to the model or in the FusedOutputContext, got None")
    check_tensor("labels", labels)
    labels = as_int64(labels)
    valid_mask = labels >= 0
    if counted is not None:
        check_tensor("counted", counted)
        if counted.dtype != torch.bool or counted.shape != labels.shape:
            kind = f"{counted.dtype} {tuple(counted.shape)}"
            raise ValueError(f"counted must be bool of labels' shape, {tuple(labels.shape)}, got {kind}")
        valid_mask &= counted
    return labels.where(valid_mask, IGNORE_INDEX)
