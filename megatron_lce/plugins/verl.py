"""verl's Megatron engine, of unmasked tokens and without logits: logprobs, entropy, sum of squared probabilities, top-k
distillation. Where verl's fused kernel is on, in any engine: that kernel."""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

import megatron_lce
from megatron_lce.compat import verl_linear_cross_entropy
from megatron_lce.plugins.functions import version_of
from megatron_lce.plugins.patching import Table, installed

UTIL = "verl.models.mcore.util"
MASK = "_build_mtp_loss_mask_nested"
SETTINGS = ["calculate_sum_pi_squared", "calculate_entropy", "distillation_use_topk", "distillation_only"]
SETTINGS += ["logits_processor_func", "batch", "data_format"]  # keywords of the engine's `logits_processor`


def engine_forward(call: Any) -> Any:
    """verl's forward pass, whose `logits_processor` gets a captured head."""
    if call.logits_processor is None:
        return call.run()
    settings = getattr(call.logits_processor, "keywords", {})
    if settings.keys() != {*SETTINGS}:
        named = f"{version_of('verl')} has {sorted(settings)}"
        raise RuntimeError(f"megatron_lce knows a logits_processor with {sorted(SETTINGS)}, {named}")
    given, nested_mask = {**call.logits_processor_args}, call.original.__globals__[MASK]
    given["label"] = label = given["label"].clone()
    lengths = label.offsets().diff().tolist()
    mask = nested_mask(given["loss_mask"], lengths, given["response_attention_mask"])  # [b, j], as the labels
    label.values().masked_fill_(mask.values() == 0, -100)
    with megatron_lce.capture_lm_head(call.model) as head:
        return call.run(logits_processor=functools.partial(outputs, head, settings), logits_processor_args=given)


class Student:
    """A head in place of a student's logits. A teacher's top-k loss, if there is one, runs it on the teacher's ids."""

    def __init__(self, head: megatron_lce.CapturedHead, labels: Tensor, **options: Any) -> None:
        self.shape = *labels.shape, 0  # of logits, as verl looks at it
        self.head, self.labels, self.options = head, labels, options

    def run(self, candidates: Tensor | None = None) -> Any:
        self.out = self.head.linear_cross_entropy(self.labels, candidates=candidates, skip_ignored=True, **self.options)
        return self.out


def outputs(head: megatron_lce.CapturedHead, settings: dict, logits: Any, label: Tensor, temperature: Tensor) -> dict:
    requested = {"entropy": settings["calculate_entropy"], "telemetry": settings["calculate_sum_pi_squared"]}
    student = Student(head, label, temperature=temperature.where(temperature > 0, 1.0), **requested)  # 0 in padding
    values = {}
    if settings["distillation_use_topk"]:
        given = {"data": settings["batch"], "data_format": settings["data_format"]}
        values = settings["logits_processor_func"](student_logits=student, **given)
    out = student.out if values else student.run()
    values |= {"entropy": out.entropy, "sum_pi_squared": out.sum_pi_squared}
    values |= {} if settings["distillation_only"] else {"log_probs": out.logprobs}
    return {name: of_tokens for name, of_tokens in values.items() if of_tokens is not None}


def forward_kl_topk(call: Any) -> dict[str, Tensor]:
    """verl's divergence at a teacher's ids, and its metrics; 0 in ignored rows."""
    if not isinstance(call.student_logits, Student):
        return call.run()
    pack = getattr(importlib.import_module(UTIL), f"preprocess_{call.data_format}_engine")
    target, ids = (pack(x, pre_process=True)[0] for x in (call.teacher_topk_log_probs, call.teacher_topk_ids))
    target, student = target.float(), call.student_logits.run(ids.long()).candidate_logprobs  # [b, s, K]
    if (least := call.config.distillation_loss.log_prob_min_clamp) is not None:
        student, target = student.clamp_min(least), target.clamp_min(least)
    values = {"distillation_losses": megatron_lce.topk_divergence(student, target, "forward", tail="drop")}
    with torch.no_grad():
        values |= {"student_mass": student.exp().sum(-1), "teacher_mass": target.exp().sum(-1)}
        shared = (ids[..., None] == call.student_logits.head.linear_topk(ids.shape[-1]).ids[..., None, :]).any(-1)
        advantage = (target.exp() * (student - target) * shared).sum(-1)
        values |= {"overlap_count": shared.sum(-1), "overlap_token_advantage": advantage / shared.sum(-1).clamp_min(1)}
    return {name: value.where(call.student_logits.labels >= 0, 0) for name, value in values.items()}


FORWARD = "verl.models.mcore.model_forward"
KERNEL = "verl.utils.kernel.linear_cross_entropy"
ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
OF_KERNEL = "ctx, hidden, weight, labels, temperature, reduction, dist_process_group"
TOP_K = "student_logits, teacher_topk_log_probs, teacher_topk_ids, config, data_format"
functions: Table = {
    f"{FORWARD}:gptmodel_forward_model_engine(model, logits_processor, logits_processor_args, ...)": engine_forward,
    f"verl.trainer.distillation.megatron.losses:compute_forward_kl_topk({TOP_K})": forward_kl_topk,
    f"{KERNEL}:linear_cross_entropy": lambda call: verl_linear_cross_entropy(*call.args, **call.kwargs),
    f"{FORWARD}:{MASK}(response_mask, input_ids_lengths, response_attention_mask)": None,
    f"{ENGINE}._lm_head_logits_processor(self, logits, label, temperature, {', '.join(SETTINGS)})": None,
    f"{UTIL}:preprocess_thd_engine(input_ids, pre_process, ...)": None,
    f"{UTIL}:preprocess_bshd_engine(input_ids, pre_process, ...)": None,
    f"{KERNEL}:LinearCrossEntropy.forward({OF_KERNEL})": None,
}
plugin, install, uninstall = installed("verl", "0.9.0, 0.9.1, main", functions)
