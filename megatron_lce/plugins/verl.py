"""verl's Megatron engine: logprobs, entropy and the sum of squared probabilities without logits.

    actor_rollout_ref.model.external_lib=megatron_lce.plugins.verl  # or VERL_USE_EXTERNAL_MODULES=...

Tokens that the engine's loss mask leaves out are not computed. Under `use_fused_kernels`, which passes no mask, verl's
kernel is replaced. Value models and distillation of top-k keep their logits.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

import megatron_lce
from megatron_lce.compat import verl_linear_cross_entropy
from megatron_lce.plugins.replacing import Plugin

MCORE = "verl.models.mcore"
RESPONSE_MASK = "_build_mtp_loss_mask_nested"
PROCESSOR = "_lm_head_logits_processor"  # of verl's engine, with these keywords
SETTINGS = {"calculate_sum_pi_squared", "calculate_entropy", "distillation_use_topk", "distillation_only"}
SETTINGS |= {"logits_processor_func", "batch", "data_format"}


def engine_forward(own: Callable[..., Any]) -> Callable[..., Any]:
    """verl's forward pass with a captured head for its `logits_processor`."""

    def forward(*inputs: Any, logits_processor: Any = None, logits_processor_args: Any = None, **keywords: Any) -> Any:
        settings = {} if logits_processor is None else settings_of(logits_processor)
        if not settings or settings["distillation_use_topk"] or settings["distillation_only"]:
            processor = {"logits_processor": logits_processor, "logits_processor_args": logits_processor_args}
            return own(*inputs, **processor, **keywords)
        given = {**logits_processor_args, "label": logits_processor_args["label"].clone()}
        label, of_padded = given["label"], given["response_attention_mask"]
        lengths = label.offsets().diff().tolist()
        mask = own.__globals__[RESPONSE_MASK](given["loss_mask"], lengths, of_padded)  # [b, j], as the labels
        label.values().masked_fill_(mask.values() == 0, -100)
        with megatron_lce.capture_lm_head(inputs[0]) as head:
            processor = {"logits_processor": functools.partial(outputs, head, settings), "logits_processor_args": given}
            return own(*inputs, **processor, **keywords)

    return forward


def settings_of(processor: Any) -> dict[str, Any]:
    name, keywords = getattr(getattr(processor, "func", processor), "__name__", ""), getattr(processor, "keywords", {})
    if name != PROCESSOR or keywords.keys() != SETTINGS:
        known = f"{PROCESSOR}({', '.join(sorted(SETTINGS))})"
        raise RuntimeError(f"megatron_lce knows verl's {known}, got {name}({', '.join(sorted(keywords))})")
    return keywords


def outputs(head: megatron_lce.CapturedHead, settings: dict, logits: Any, label: Tensor, temperature: Tensor) -> dict:
    out = head.linear_cross_entropy(
        label,
        temperature.where(temperature > 0, 1.0),  # 0 in padding
        entropy=settings["calculate_entropy"],
        telemetry=settings["calculate_sum_pi_squared"],
        skip_ignored=True,
    )
    computed = {"log_probs": out.logprobs, "entropy": out.entropy, "sum_pi_squared": out.sum_pi_squared}
    return {name: values for name, values in computed.items() if values is not None}


plugin = Plugin(
    "verl",
    {
        f"{MCORE}.model_forward:gptmodel_forward_model_engine": engine_forward,
        f"{MCORE}.model_forward_fused:linear_cross_entropy": lambda own: verl_linear_cross_entropy,
        f"{MCORE}.model_forward_1f1b_overlap:linear_cross_entropy": lambda own: verl_linear_cross_entropy,
    },
    f"{MCORE}.model_forward:{RESPONSE_MASK}",
)
install, uninstall = plugin.install, plugin.uninstall
install()
