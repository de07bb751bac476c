"""The forward step of verl's Megatron engine with the plugin, against the same step without.

    torchrun --nproc-per-node 2 tests/frameworks/run.py verl_engine FOLDER      # FOLDER/verl

With a temperature for each sample, sum_pi_squared, MTP, top-k distillation, and tokens in prompts and answers that do
not count: what verl's fused path refuses, or computes. Stand-ins: those of run_verl.py, TensorDict, configurations,
router replay.
"""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from comparing import VOCABULARY, cases, compare_with_plugin
from megatron.core.utils import unwrap_model
from run_verl import import_verl, jagged
from stand_ins import NO_REPLAY, definitions, packages_without_their_init, stand_in
from torch import Tensor, nn

PROMPTS, LENGTHS, K = (4, 2, 3), (9, 6, 12), 8
TEMPERATURES = (0.7, 1.0, 1.3)
PAD_MODE = SimpleNamespace(NO_PADDING="no padding")


class Batch(dict):
    """In place of TensorDict."""

    def to(self, device: object) -> "Batch":
        return self


def batch(**distillation: bool) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    answers = [torch.ones(length - prompt, dtype=torch.int64) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    answers[0][2] = 0  # a tool's
    settings = {"pad_mode": PAD_MODE.NO_PADDING, "calculate_entropy": True, "calculate_sum_pi_squared": True}
    top = [torch.randn(length, VOCABULARY, generator=generator).mul(2).log_softmax(-1).topk(K) for length in LENGTHS]
    teacher = {"teacher_logprobs": jagged([x.values for x in top]), "teacher_ids": jagged([x.indices for x in top])}
    own = {"input_ids": jagged(tokens), "loss_mask": jagged(answers), "temperature": torch.tensor(TEMPERATURES)}
    return Batch(**own, **teacher, **settings, **distillation)


def counted() -> Tensor:
    """Of all tokens one after another, those whose next is a token of an answer that counts."""
    answers = zip(PROMPTS, batch()["loss_mask"].unbind(), strict=True)
    return torch.cat([nn.functional.pad(answer, (prompt - 1, 1)) for prompt, answer in answers]).bool()


def engine(folder: Path, verl: SimpleNamespace, mtp: bool) -> Any:
    """MegatronEngineWithLMHead without what its base class sets up."""
    file = folder / "verl/utils/torch_functional.py"
    (expand,) = definitions(file, "verl.utils.torch_functional", "expand_as_nested")
    known = {
        **vars(verl.parallel),
        "DatasetPadMode": PAD_MODE,
        "EngineRegistry": SimpleNamespace(register=lambda **_: lambda engine: engine),
        "MegatronEngine": object,
        "RouterReplayHelper": NO_REPLAY,
        "extract_multi_modal_inputs": lambda inputs: {},
        "get_device_id": lambda: "cpu",
        "tu": SimpleNamespace(get_non_tensor_data=lambda data, key, default: data.get(key, default)),
        "unwrap_model": unwrap_model,
        "verl_F": SimpleNamespace(expand_as_nested=expand),
    }
    file = folder / "verl/workers/engine/megatron/transformer_impl.py"
    (kind,) = definitions(file, "verl.engine", "MegatronEngineWithLMHead", **known)
    own = kind()
    flags = "use_fused_kernels", "pad_to_length", "dynamic_context_parallel", "entropy_from_logits_with_chunking"
    own.engine_config = SimpleNamespace(**dict.fromkeys(flags, False), use_remove_padding=True)
    of_mtp = SimpleNamespace(enable=mtp, enable_train=mtp)
    hf_config, tokenizer = SimpleNamespace(architectures=[None]), SimpleNamespace(pad_token_id=0)
    own.model_config = SimpleNamespace(hf_config=hf_config, mtp=of_mtp, tokenizer=tokenizer)
    own.tf_config = SimpleNamespace(calculate_per_token_loss=False)
    own.enable_routing_replay = False
    own._get_context_parallel_layout = lambda model: "zigzag"
    return own


def top_k_loss(folder: Path, clamp: float | None) -> Any:
    """What verl gives its engine as `logits_processor_func`, without the policy loss."""
    packages_without_their_init(folder, "verl.trainer.distillation.megatron")
    stand_in("verl.workers.config", DistillationConfig=None, DistillationLossConfig=None, MtpConfig=None)
    file = folder / "verl/trainer/distillation/losses.py"
    (loss,) = definitions(file, "verl.trainer.distillation.losses", "compute_topk_loss")
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=clamp))
    return functools.partial(loss, SimpleNamespace(strategy="megatron"), config)


def program(folder: Path) -> None:
    topk = [{"distillation_use_topk": True, "distillation_only": only} for only in (False, True)]
    variants = [("before", False, {}, None), ("after", False, {}, None), ("after", True, {}, None)]
    variants += [("before", False, topk[0], None), ("after", False, topk[0], -4.5), ("after", False, topk[1], None)]
    for order, mtp, distillation, clamp in variants:
        verl = import_verl(folder, order)
        from verl.models.mcore import mtp_patch

        own, loss = engine(folder, verl, mtp), top_k_loss(folder, clamp)

        def outputs(
            model: nn.Module,
            mtp: bool = mtp,
            step: Any = own.forward_step,
            mtp_patch: Any = mtp_patch,
            distillation: Any = distillation,
            loss: Any = loss,
        ) -> dict[str, Tensor]:
            if mtp:
                mtp_patch.patch_postprocess(model)
            found, _ = step(iter([batch(**distillation)]), model, loss, lambda **_: None)
            found["sum_pi_squared"] = found["sum_pi_squared"].detach()
            return {name: values.values()[counted()] for name, values in found.items()}

        for case in cases() if order == "after" else cases()[:1]:
            case = dataclasses.replace(case, mtp_layers=int(mtp))
            what = "".join(f", {setting}" for setting, on in distillation.items() if on)
            name = f"verl's engine, plugin {order}{what}, clamp {clamp}, {case.name}"
            compare_with_plugin(name, case, verl.plugin, outputs, outputs)
        verl.plugin.uninstall()
