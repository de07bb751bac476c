"""ms-swift, without logits and masked tokens: logprobs and entropy of GRPO, of old and of reference policies; GKD."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import megatron_lce
from megatron_lce.plugins.captured_steps import captured_if
from megatron_lce.plugins.patching import Table, installed


def logps_and_entropy(call: Any) -> Any:
    if not hasattr(call.logits, "lm_head"):
        return call.run()
    options: Any = {"temperature": 1 / float(call.logits), "skip_ignored": True}  # ms-swift divided the 1 below by it
    out = call.logits.lm_head.linear_cross_entropy(call.labels, entropy=call.compute_entropy, **options)
    return out.logprobs, out.entropy


def teacher_outputs(call: Any) -> Any:
    """ms-swift's outputs of the teacher. Those over its whole vocabulary hold its head instead of logits."""
    trainer, batches = call.self, call.encoded_batches
    if trainer.gkd_logits_topk is not None:
        return call.run()
    models = trainer.unwrapped_models if trainer._is_self_distillation else trainer.teacher_models
    for batch in batches:
        with megatron_lce.capture_lm_head(models[call.vp_stage or 0]) as head:
            call.run(encoded_batches=[batch])
        batch["teacher_output"].lm_head = head


def gkd_step(call: Any) -> Any:
    data = next(call.data_iterator)
    run = functools.partial(whole_step, call) if hasattr(data["teacher_output"], "lm_head") else call.run
    return run(data_iterator=iter([data]))


def gkd_loss(call: Any) -> Any:
    """The sum of JSD over unmasked tokens, and their number."""
    student, teacher, labels = call.student_logits, call.teacher_output, call.labels
    if not hasattr(student, "lm_head"):
        return call.run()
    counted = labels != -100
    if not torch.equal(counted, teacher.labels != -100):
        raise ValueError("megatron_lce needs a teacher that reads the student's tokens: their unmasked tokens differ")
    options: Any = {"beta": call.beta, "temperature": call.temperature, "skip_ignored": True}
    return student.lm_head.linear_jsd(teacher.lm_head, labels=labels, **options).sum(), counted.sum()


def gkd_loss_func(call: Any) -> Any:
    """ms-swift's, whose SFT loss asks the model for the loss of logits."""
    if not hasattr(call.output_tensor, "lm_head"):
        return call.run()
    trainer, models = call.self, call.self.unwrapped_models

    def loss_of_head(labels: Tensor, _: Tensor) -> Tensor:
        return -call.output_tensor.lm_head.linear_cross_entropy(labels, entropy=False, skip_ignored=True).logprobs

    trainer.unwrapped_models = [SimpleNamespace(compute_language_model_loss=loss_of_head)]
    try:
        return call.run()
    finally:
        trainer.unwrapped_models = models


step = captured_if(lambda call: True, make_output=lambda hidden: torch.ones((), dtype=torch.float64, device="cpu"))
whole_step = captured_if(lambda call: True)
LOGPS = "logits, labels, compute_entropy, entropy_chunk_size"
LOSS = "student_logits, teacher_output, labels, beta, temperature, gather_fn, log_softmax_fn, kl_div_fn, chunk_size"
TRAINERS = "swift.megatron.trainers"
GKD = f"{TRAINERS}.gkd_trainer:MegatronGKDTrainer"
functions: Table = {
    f"{TRAINERS}.utils:compute_per_token_logps_fn(model, ...)": step,
    f"{TRAINERS}.grpo_trainer:MegatronGRPOTrainer.forward_step(self, data_iterator, model)": step,
    f"{TRAINERS}.vocab_parallel_utils:compute_logps_and_entropy_from_logits({LOGPS})": logps_and_entropy,
    f"swift.rlhf_trainers.gkd_loss:gkd_loss({LOSS})": gkd_loss,
    f"{GKD}._compute_teacher_logits_local(self, encoded_batches, vp_stage)": teacher_outputs,
    f"{GKD}.forward_step(self, data_iterator, model)": gkd_step,
    f"{GKD}.loss_func(self, output_tensor, labels, teacher_output, data_source)": gkd_loss_func,
}
plugin, install, uninstall = installed("swift", "4.6.0, main", functions)
