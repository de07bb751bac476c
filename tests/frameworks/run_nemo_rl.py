"""NeMo-RL's logprobs from hidden states with the plugin, and its distillation, against those of logits.

    torchrun --nproc-per-node 2 tests/frameworks/run.py nemo_rl FOLDER     # FOLDER/nemo_rl

Distillation needs no plugin: its losses over a teacher's whole vocabulary and over its top-k are computed from captured
heads, the teacher's being its hidden states and this rank's shard of its weight.
"""

import contextlib
import dataclasses
import functools
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from comparing import (
    COLUMNS,
    MASK,
    POSITIONS,
    TEMPERATURE,
    TOKENS,
    Case,
    cases,
    compare,
    compare_with_plugin,
    sharpened,
)
from megatron.core import tensor_parallel
from stand_ins import definitions, module_with, packages_without_their_init
from torch import Tensor, nn

import megatron_lce
from megatron_lce import capture_lm_head

K = 8
FUSED = "use_fused_linear_logprobs", "use_linear_ce_fusion_loss"  # of main, and of 0.7.0


class Configuration(SimpleNamespace):
    """With items too, as 0.7.0 reads it; what is not set is None."""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __getattr__(self, name: str) -> None:
        return None


def losses_of(folder: Path, model_utils: Any) -> tuple[Any, type]:
    """The class whose `_direct_full_vocab_kl` is the divergence over the vocabulary, and DistillationLossFn."""
    (mean,) = definitions(folder / "nemo_rl/algorithms/utils.py", "nemo_rl.algorithms.utils", "masked_mean")
    known = {**vars(model_utils), "masked_mean": mean, "LossFunction": object}
    known["to_local_if_dtensor"] = lambda tensor: tensor
    known |= dict.fromkeys(("LossType", "LossInputType"), SimpleNamespace(TOKEN_LEVEL=None, DISTILLATION=None))
    methods = "_direct_full_vocab_kl", "_same_vocab_masked_kl"
    file, module = folder / "nemo_rl/algorithms/loss/loss_functions.py", "nemo_rl.algorithms.loss.loss_functions"
    found = definitions(file, module, "DistillationLossFn", *methods, **known)
    return type("FullVocabulary", (), dict(zip(methods, found[1:], strict=True))), found[0]


@dataclasses.dataclass
class Sampling:
    """In place of TrainingSamplingParams."""

    temperature: float


def forward_step(folder: Path) -> Any:
    """NeMo-RL's forward step of a microbatch, called with a model and a temperature; it returns the model's output."""
    file, module = folder / "nemo_rl/models/megatron/train.py", "nemo_rl.models.megatron.train"
    names = "LossPostProcessor", "LogprobsPostProcessor", "TopkLogitsPostProcessor"
    known = {name: type(name, (), {"__call__": lambda self, **_: None}) for name in names}
    known["get_capture_context"] = lambda *_: (contextlib.nullcontext(), None)
    functions = "forward_with_post_processing_fn", "model_forward", "apply_temperature_scaling"
    train = module_with(file, module, *functions, **known)
    data = SimpleNamespace(get_multimodal_dict=lambda **_: {})
    microbatch = Configuration(data_dict=data, input_ids_cp_sharded=TOKENS)

    def step(model: Any, temperature: float) -> Tensor:
        given = {"post_processing_fn": known["LossPostProcessor"](), "sampling_params": Sampling(temperature)}
        fused = {name: True for name in FUSED if name in inspect.signature(train.model_forward).parameters}
        return train.forward_with_post_processing_fn(iter([microbatch]), model, **given, **fused)[0]

    return step


def captured(model: nn.Module) -> megatron_lce.CapturedHead:
    with capture_lm_head(model) as head:
        model(TOKENS, POSITIONS, None)
    return head


def distil(case: Case, folder: Path, model_utils: Any) -> None:
    full, topk = losses_of(folder, model_utils)
    group, rank = dist.group.WORLD, dist.get_rank()
    weights = nn.functional.pad(MASK[:, 1:], (0, 1))  # of the tokens in front of those that count
    number = weights.sum()
    teacher = sharpened(dataclasses.replace(case, hidden_size=64).build())
    with torch.no_grad():
        teacher_head = captured(teacher)
        logits = tensor_parallel.gather_from_tensor_model_parallel_region(teacher(TOKENS, POSITIONS, None))
    top = logits.topk(K)

    def over_vocabulary(model: nn.Module, reverse: bool) -> dict[str, Tensor]:
        losses = captured(model).linear_jsd(teacher_head, beta=float(reverse), temperature=TEMPERATURE)
        return {"loss": (losses * weights / number).sum()[None] * TEMPERATURE**2}

    def own_over_vocabulary(model: nn.Module, reverse: bool) -> dict[str, Tensor]:
        own = full()
        own.temperature, own.reverse_kl = TEMPERATURE, reverse
        align = SimpleNamespace(student_token_mask=MASK, sample_mask=torch.ones(len(TOKENS)))
        student = model(TOKENS, POSITIONS, None)
        return {"loss": own._direct_full_vocab_kl(student, logits, align, number, tp_group=group, cp_group=None)[None]}

    def over_topk(model: nn.Module, kind: str, zero: bool) -> dict[str, Tensor]:
        labels = TOKENS.masked_fill(weights == 0, -100)
        out = captured(model).linear_cross_entropy(labels, candidates=top.indices, entropy=False, skip_ignored=True)
        target = top.values.log_softmax(-1)
        tail = "drop" if zero else "renormalise"
        losses = megatron_lce.topk_divergence(out.candidate_logprobs, target, kind, tail=tail)
        return {"loss": ((losses * weights).sum() / number)[None]}

    def own_over_topk(model: nn.Module, kind: str, zero: bool) -> dict[str, Tensor]:
        own = topk(Configuration(kl_type=kind, mixed_kl_weight=0.5, zero_outside_topk=zero))
        student = model(TOKENS, POSITIONS, None)
        found = model_utils.get_distillation_topk_logprobs_from_logits(
            student, top.values, top.indices, zero, False, vocab_parallel_rank=rank, vocab_parallel_group=group
        )
        data = {"token_mask": MASK, "sample_mask": torch.ones(len(TOKENS)), "input_ids": TOKENS}
        return {"loss": own(*found, data, None, number)[0][None]}

    for reverse in (False, True):
        ways = (functools.partial(way, reverse=reverse) for way in (over_vocabulary, own_over_vocabulary))
        compare(f"NeMo-RL, KL over the vocabulary{', reverse' * reverse}, {case.name}", case, *ways)
    for kind, zero in (("forward", False), ("reverse", False), ("forward", True)):
        ways = (functools.partial(way, kind=kind, zero=zero) for way in (over_topk, own_over_topk))
        compare(f"NeMo-RL, top-k, {kind}{', zero outside' * zero}, {case.name}", case, *ways)


def program(folder: Path) -> None:
    packages_without_their_init(folder, "nemo_rl.distributed", "nemo_rl.algorithms", "nemo_rl.models.megatron")
    from nemo_rl.distributed import model_utils

    from megatron_lce.plugins import nemo_rl

    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    shard = {"vocab_start_index": COLUMNS // ranks * rank, "vocab_end_index": COLUMNS // ranks * (rank + 1)}

    def fused(model: nn.Module) -> dict[str, Tensor]:
        """NeMo-RL's own forward of GPTModel gives the function these; of which Megatron it is, is another matter."""
        head = captured(model)
        logprobs = model_utils.from_parallel_hidden_states_to_logprobs(
            head.hidden, head.weight, None, TOKENS, tp_group=group, chunk_size=4, **shard
        )
        return {"logprobs": logprobs}

    def unfused(model: nn.Module) -> dict[str, Tensor]:
        logits = model(TOKENS, POSITIONS, None)
        return {"logprobs": model_utils.from_parallel_logits_to_logprobs(logits, TOKENS, tp_group=group, **shard)}

    def scaled_unfused(model: nn.Module) -> dict[str, Tensor]:
        logits = model(TOKENS, POSITIONS, None) / TEMPERATURE
        return {"logprobs": model_utils.from_parallel_logits_to_logprobs(logits, TOKENS, tp_group=group, **shard)}

    step = forward_step(folder)

    def scaled(model: nn.Module) -> dict[str, Tensor]:
        return {"logprobs": step(lambda **_: fused(model)["logprobs"], TEMPERATURE)}

    for case in cases():
        compare_with_plugin(f"NeMo-RL, {case.name}", case, nemo_rl, fused, unfused)
        compare_with_plugin(f"NeMo-RL, forward step, {case.name}", case, nemo_rl, scaled, scaled_unfused)
        distil(case, folder, model_utils)
