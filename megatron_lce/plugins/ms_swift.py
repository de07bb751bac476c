"""ms-swift, of unmasked tokens and without logits: logprobs and entropy of GRPO, of old and of reference policies; GKD.

--external_plugins lce.py  # a file with the line `import megatron_lce.plugins.ms_swift`
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import megatron_lce
from megatron_lce.plugins.captured_steps import captured_if
from megatron_lce.plugins.patching import Plugin

TRAINERS = "swift.megatron.trainers"


def logps_and_entropy(original: Any, logits: Any, labels: Tensor, compute_entropy: bool = False, **rest: Any) -> Any:
    if not hasattr(logits, "lm_head"):
        return original(logits, labels, compute_entropy, **rest)
    temperature = 1 / float(logits)  # ms-swift divided the 1 below by it
    out = logits.lm_head.linear_cross_entropy(labels, temperature, entropy=compute_entropy, skip_ignored=True)
    return out.logprobs, out.entropy


def teacher_outputs(original: Any, trainer: Any, batches: list[dict[str, Any]], vp_stage: int | None = None) -> None:
    """ms-swift's outputs of the teacher. Those over its whole vocabulary hold its head instead of logits."""
    if trainer.gkd_logits_topk is not None:
        return original(trainer, batches, vp_stage)
    models = trainer.unwrapped_models if trainer._is_self_distillation else trainer.teacher_models
    for batch in batches:
        with megatron_lce.capture_lm_head(models[vp_stage or 0]) as head:
            original(trainer, [batch], vp_stage)
        batch["teacher_output"].lm_head = head


def gkd_step(original: Any, trainer: Any, data_iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    data = next(data_iterator)
    run = whole_step if hasattr(data["teacher_output"], "lm_head") else lambda original, *inputs: original(*inputs)
    return run(original, trainer, iter([data]), model)


def gkd_loss(
    original: Any, student: Tensor, teacher: Any, labels: Tensor, beta: float, temperature: float, **functions: Any
) -> Any:
    """The sum of JSD over unmasked tokens, and their number."""
    if not hasattr(student, "lm_head"):
        return original(student, teacher, labels, beta, temperature, **functions)
    counted = labels != -100
    if not torch.equal(counted, teacher.labels != -100):
        raise ValueError("megatron_lce needs a teacher that reads the student's tokens: their unmasked tokens differ")
    options: Any = {"labels": labels, "beta": beta, "temperature": temperature, "skip_ignored": True}
    return student.lm_head.linear_jsd(teacher.lm_head, **options).sum(), counted.sum()


def gkd_loss_func(original: Any, trainer: Any, output: Tensor, **given: Any) -> Any:
    """ms-swift's, whose SFT loss asks the model for the loss of logits."""
    if not hasattr(output, "lm_head"):
        return original(trainer, output, **given)
    model = getattr(trainer.unwrapped_models[0], "language_model", trainer.unwrapped_models[0])
    before = vars(model).get("compute_language_model_loss")

    def loss_of_head(labels: Tensor, _: Tensor) -> Tensor:
        return -output.lm_head.linear_cross_entropy(labels, entropy=False, skip_ignored=True).logprobs  # type: ignore[attr-defined]

    model.compute_language_model_loss = loss_of_head
    try:
        return original(trainer, output, **given)
    finally:
        del model.compute_language_model_loss
        vars(model).update({"compute_language_model_loss": before} if before else {})


step = captured_if(lambda given: True, make_output=lambda hidden: torch.ones((), dtype=torch.float64, device="cpu"))
whole_step = captured_if(lambda given: True)
LOGPS = "compute_logps_and_entropy_from_logits(logits, labels, compute_entropy, entropy_chunk_size)"
LOSS = "student_logits, teacher_output, labels, beta, temperature, gather_fn, log_softmax_fn, kl_div_fn, chunk_size"
GKD = f"{TRAINERS}.gkd_trainer:MegatronGKDTrainer"
replacements: dict[str, Any] = {
    f"{TRAINERS}.utils:compute_per_token_logps_fn(model, ...)": step,
    f"{TRAINERS}.grpo_trainer:MegatronGRPOTrainer.forward_step(self, data_iterator, model)": step,
    f"{TRAINERS}.vocab_parallel_utils:{LOGPS}": logps_and_entropy,
    f"swift.rlhf_trainers.gkd_loss:gkd_loss({LOSS})": gkd_loss,
    f"{GKD}._compute_teacher_logits_local(self, encoded_batches, vp_stage)": teacher_outputs,
    f"{GKD}.forward_step(self, data_iterator, model)": gkd_step,
    f"{GKD}.loss_func(self, output_tensor, labels, teacher_output, data_source)": gkd_loss_func,
}
plugin = Plugin("swift", replacements)
install, uninstall = plugin.install, plugin.uninstall
install()
