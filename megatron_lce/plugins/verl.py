"""verl's Megatron engine: logprobs, entropy and the sum of squared probabilities of unmasked tokens, without logits.

actor_rollout_ref.model.external_lib=megatron_lce.plugins.verl  # or VERL_USE_EXTERNAL_MODULES=...
"""

import functools
from typing import Any

from torch import Tensor

import megatron_lce
from megatron_lce.compat import verl_linear_cross_entropy
from megatron_lce.plugins.functions import version_of
from megatron_lce.plugins.replacing import Plugin

MCORE = "verl.models.mcore"
MASK = "_build_mtp_loss_mask_nested"
ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
SETTINGS = ["calculate_sum_pi_squared", "calculate_entropy", "distillation_use_topk", "distillation_only"]
SETTINGS += ["logits_processor_func", "batch", "data_format"]  # keywords of the engine's `logits_processor`


def engine_forward(own: Any, model: Any, *inputs: Any, logits_processor: Any = None, **keywords: Any) -> Any:
    """verl's forward pass, whose `logits_processor` gets a captured head."""
    settings = getattr(logits_processor, "keywords", {})
    if logits_processor is None or settings.get("distillation_use_topk") or settings.get("distillation_only"):
        return own(model, *inputs, logits_processor=logits_processor, **keywords)
    if settings.keys() != {*SETTINGS}:
        named = f"{version_of('verl')} has {sorted(settings)}"
        raise RuntimeError(f"megatron_lce knows a logits_processor with {sorted(SETTINGS)}, {named}")
    given = {**keywords.pop("logits_processor_args")}
    given["label"] = label = given["label"].clone()
    lengths = label.offsets().diff().tolist()
    mask = own.__globals__[MASK](given["loss_mask"], lengths, given["response_attention_mask"])  # [b, j], as the labels
    label.values().masked_fill_(mask.values() == 0, -100)
    with megatron_lce.capture_lm_head(model) as head:
        processor = functools.partial(outputs, head, settings)
        return own(model, *inputs, logits_processor=processor, logits_processor_args=given, **keywords)


def outputs(head: megatron_lce.CapturedHead, settings: dict, logits: Any, label: Tensor, temperature: Tensor) -> dict:
    wanted = {"entropy": settings["calculate_entropy"], "telemetry": settings["calculate_sum_pi_squared"]}
    temperature = temperature.where(temperature > 0, 1.0)  # 0 in padding
    out = head.linear_cross_entropy(label, temperature, skip_ignored=True, **wanted)
    values = {"log_probs": out.logprobs, "entropy": out.entropy, "sum_pi_squared": out.sum_pi_squared}
    return {name: of_tokens for name, of_tokens in values.items() if of_tokens is not None}


def kernel(own: Any, *inputs: Any, **keywords: Any) -> Any:
    return verl_linear_cross_entropy(*inputs, **keywords)


FORWARD = "gptmodel_forward_model_engine(model, logits_processor, logits_processor_args, ...)"
replacements = {f"{MCORE}.model_forward:{FORWARD}": engine_forward}
replacements |= {f"{MCORE}.model_forward_{way}:linear_cross_entropy": kernel for way in ("fused", "1f1b_overlap")}
needs = [f"{MCORE}.model_forward:{MASK}(response_mask, input_ids_lengths, response_attention_mask)"]
needs += [f"{ENGINE}._lm_head_logits_processor(self, logits, label, temperature, {', '.join(SETTINGS)})"]
plugin = Plugin("verl", replacements, *needs)
install, uninstall = plugin.install, plugin.uninstall
install()
