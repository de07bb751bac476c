"""SkyRL's forward passes with its fused head switched on and the diff of docs/recipes, against its logits.

    PYTHONPATH=MEGATRON torchrun --nproc-per-node 2 tests/frameworks/run_skyrl.py FOLDER      # FOLDER/skyrl: adopted

Run are both forward passes of MegatronModelWrapper, for training and for inference, with the padding kept and removed.
megatron-core must be 0.18 or newer. Stand-ins: the policy loss, which notes the logprobs that it gets, what belongs to
MTP and to routing replay, logging, configuration classes, and metrics.
"""

import contextlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from comparing import VOCABULARY, cases, compare, main
from stand_ins import definitions, packages_without_their_init, stand_in
from torch import Tensor, nn

TEMPERATURE = 0.7
LENGTHS, ACTIONS = (7, 12, 9), 5
ROOT = "skyrl.backends.skyrl_train"


def import_wrapper(folder: Path) -> tuple[type, ModuleType]:
    """MegatronModelWrapper, and the module with its logprobs."""
    packages = "distributed", "distributed.megatron", "mtp", "utils", "workers", "workers.megatron"
    names = ["skyrl", "skyrl.backends", ROOT, *(f"{ROOT}.{name}" for name in packages), "skyrl.train"]
    packages_without_their_init(folder, *names)
    stand_in("loguru", logger=None)
    stand_in("omegaconf", OmegaConf=None)
    stand_in("skyrl.train.config", TrainerConfig=None)
    stand_in(f"{ROOT}.distributed.megatron.token_metadata", build_token_metadata_layout=None)
    stand_in(f"{ROOT}.mtp.adapter", project_mtp_hidden_to_logits=None)
    stand_in(f"{ROOT}.mtp.hidden_capture", maybe_capture_mtp_hidden=lambda *_: contextlib.nullcontext())
    of_mtp = "build_teacher_logits", "draft_soft_ce", "draft_soft_ce_topk", "shift_mask_for_mtp"
    stand_in(f"{ROOT}.mtp.soft_ce", **dict.fromkeys((*of_mtp, "unpadded_vocab_shard_width")))
    stand_in(f"{ROOT}.training_batch", TensorList=tuple)
    stand_in(f"{ROOT}.utils.ppo_utils", PolicyLossRegistry=None, compute_approx_kl=None)
    of_replay = dict.fromkeys(("setup_per_microbatch_replay_backward", "setup_per_microbatch_replay_forward"))
    stand_in(f"{ROOT}.utils.replay_utils", router_replay_schedule=lambda *_: contextlib.nullcontext(), **of_replay)
    file = folder / "skyrl/backends/skyrl_train/utils/torch_utils.py"
    (masked_mean,) = definitions(file, f"{ROOT}.utils.torch_utils", "masked_mean")
    stand_in(f"{ROOT}.utils.torch_utils", masked_mean=masked_mean)
    stand_in(f"{ROOT}.workers.worker_utils", compute_minibatch_rollout_logprob_diff_metrics=lambda *_: {})
    from skyrl.backends.skyrl_train.distributed.megatron import model_utils
    from skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper import MegatronModelWrapper

    return MegatronModelWrapper, model_utils


def configuration(fused: bool, packed: bool) -> Any:
    off = {"use_entropy_loss": False, "use_kl_loss": False, "entropy_loss_coef": 0.0, "kl_loss_coef": 0.0}
    of_mtp = SimpleNamespace(mtp_loss_weight=0.0, mtp_loss_chunk_size=None, mtp_loss_topk=None)
    chunks = {"logprobs_chunk_size": 4, "vocab_entropy_chunk_size": None, "vocab_entropy_chunk_memory_mb": None}
    return SimpleNamespace(
        fused_lm_head_logprob=fused,
        remove_microbatch_padding=packed,
        **chunks,
        policy=SimpleNamespace(megatron_config=of_mtp),
        algorithm=SimpleNamespace(policy_loss_type="noted", **off),
    )


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
        "rollout_expert_indices": None,
        **dict.fromkeys(names),
    }


def program() -> None:
    wrapper_class, model_utils = import_wrapper(Path(sys.argv[1]))

    def outputs(fused: bool, packed: bool) -> Any:
        def run(model: nn.Module) -> dict[str, Tensor]:
            noted: list[Tensor] = []

            def policy_loss(logprobs: Tensor, *_: Any, **__: Any) -> tuple[Tensor, dict]:
                noted.append(logprobs)
                return logprobs.sum(), {}

            wrapper = wrapper_class(configuration(fused, packed), [model], policy_loss_fn=policy_loss)
            sizes = {"seq_len": max(LENGTHS), "micro_batch_size": len(LENGTHS), "temperature": TEMPERATURE}
            call = model_utils.linear_cross_entropy
            with mock.patch.object(model_utils, "linear_cross_entropy", side_effect=call) as ours:
                wrapper.forward_backward_mini_batch([microbatch()], **sizes, forward_only=True)
                with torch.no_grad():
                    inference = wrapper.forward([microbatch()], **sizes)
            assert ours.call_count == 2 * fused
            return {"logprobs": noted[0], "logprobs of inference": inference}

        return run

    for case in cases():
        for packed in (True, False):
            padding = "removed" if packed else "kept"
            compare(f"SkyRL, padding {padding}, {case.name}", case, outputs(True, packed), outputs(False, packed))


if __name__ == "__main__":
    main(program)
