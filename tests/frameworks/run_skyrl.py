"""SkyRL's forward passes with its fused head switched on and the plugin, against its logits.

    PYTHONPATH=MEGATRON torchrun --nproc-per-node 2 tests/frameworks/run.py skyrl FOLDER      # FOLDER/skyrl

Run are both forward passes of MegatronModelWrapper, for training and for inference, with the padding kept and removed.
megatron-core must be 0.18 or newer. Stand-ins: the policy loss, which notes its logprobs, MTP, routing replay, metrics.
"""

import contextlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from comparing import TEMPERATURE, VOCABULARY, cases, compare_with_plugin
from stand_ins import definitions, mocks, packages_without_their_init, stand_in
from torch import Tensor, nn

LENGTHS, ACTIONS = (7, 12, 9), 5
ROOT = "skyrl.backends.skyrl_train"


def import_wrapper(folder: Path) -> tuple[type, ModuleType]:
    """MegatronModelWrapper, and the plugin."""
    packages = "distributed.megatron", "mtp", "utils", "workers.megatron"
    packages_without_their_init(folder, *(f"{ROOT}.{name}" for name in packages), "skyrl.train")
    mocks(*(f"megatron.bridge{name}" for name in ("", ".peft", ".peft.utils")))  # of 0.4.0
    mocks("loguru", "omegaconf", "skyrl.train.config", f"{ROOT}.distributed.megatron.token_metadata")
    mocks(*(f"{ROOT}.{name}" for name in ("mtp.adapter", "mtp.soft_ce", "utils.ppo_utils", "utils.replay_utils")))
    contexts = dict.fromkeys(("maybe_capture_mtp_hidden", "native_mtp_disabled"), lambda *_: contextlib.nullcontext())
    stand_in(f"{ROOT}.mtp.hidden_capture", **contexts)
    stand_in(f"{ROOT}.training_batch", TensorList=tuple)
    file = folder / "skyrl/backends/skyrl_train/utils/torch_utils.py"
    (masked_mean,) = definitions(file, f"{ROOT}.utils.torch_utils", "masked_mean")
    stand_in(f"{ROOT}.utils.torch_utils", masked_mean=masked_mean)
    stand_in(f"{ROOT}.workers.worker_utils", compute_minibatch_rollout_logprob_diff_metrics=lambda *_: {})
    from skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper import MegatronModelWrapper

    from megatron_lce.plugins import skyrl

    return MegatronModelWrapper, skyrl


def configuration(fused: bool, packed: bool) -> Any:
    off = {"entropy_loss_coef": 0.0, "kl_loss_coef": 0.0}
    off |= dict.fromkeys(("use_entropy_loss", "use_kl_loss", "enable_sample_support_replay"), False)
    of_mtp = SimpleNamespace(mtp_loss_weight=0.0, mtp_loss_chunk_size=None, mtp_loss_topk=None)
    chunks = {"logprobs_chunk_size": 4, "vocab_entropy_chunk_size": None, "vocab_entropy_chunk_memory_mb": None}
    policy, algorithm = SimpleNamespace(megatron_config=of_mtp), SimpleNamespace(policy_loss_type="noted", **off)
    own = {"fused_lm_head_logprob": fused, "remove_microbatch_padding": packed}
    return SimpleNamespace(**own, **chunks, policy=policy, algorithm=algorithm)


def microbatch() -> dict[str, Any]:
    """Sequences padded on the left; the loss is about the last tokens of each."""
    generator = torch.Generator().manual_seed(0)
    longest = max(LENGTHS)
    mask = torch.arange(longest) >= longest - torch.tensor(LENGTHS)[:, None]
    names = "old_action_log_probs", "base_action_log_probs", "advantages", "rollout_action_logprobs"
    return {
        "sequences": torch.randint(VOCABULARY, mask.shape, generator=generator).where(mask, 0),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "num_actions": ACTIONS,
        "loss_mask": torch.ones(len(LENGTHS), ACTIONS),
        "num_microbatches": 1,
        **dict.fromkeys((*names, "rollout_expert_indices")),
    }


def program(folder: Path) -> None:
    wrapper_class, plugin = import_wrapper(folder)

    def outputs(fused: bool, packed: bool) -> Any:
        def run(model: nn.Module) -> dict[str, Tensor]:
            noted: list[Tensor] = []

            def policy_loss(logprobs: Tensor, *_: Any, **__: Any) -> tuple[Tensor, dict]:
                noted.append(logprobs)
                return logprobs.sum(), {}

            wrapper = wrapper_class(configuration(fused, packed), [model], policy_loss_fn=policy_loss)
            sizes = {"seq_len": max(LENGTHS), "micro_batch_size": len(LENGTHS), "temperature": TEMPERATURE}
            call = plugin.linear_cross_entropy
            with mock.patch.object(plugin, "linear_cross_entropy", side_effect=call) as ours:
                wrapper.forward_backward_mini_batch([microbatch()], **sizes, forward_only=True)
                with torch.no_grad():
                    inference = wrapper.forward([microbatch()], **sizes)
            assert ours.call_count == 2 * fused
            return {"logprobs": noted[0], "logprobs of inference": inference}

        return run

    for case in cases():
        for packed in (True, False):
            padding = "removed" if packed else "kept"
            ways = (outputs(fused, packed) for fused in (True, False))
            compare_with_plugin(f"SkyRL, padding {padding}, {case.name}", case, plugin, *ways)
