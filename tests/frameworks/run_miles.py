"""miles' forward steps with the plugin, against the same without.

    torchrun --nproc-per-node 2 tests/frameworks/run.py miles FOLDER      # FOLDER/miles

The two forward steps are those inside of model.py's `forward_only` and `train_one_step`, the latter with the call that
miles' losses make; the plugin is switched on as in run_slime.py. Stand-ins: those of run_slime.py, process groups, and
Megatron's plain cross-entropy for its fused one, which rounds the gradient of fp32 logits to bf16.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from comparing import cases, compare_with_plugin
from megatron.core import tensor_parallel
from megatron.core.fusions import fused_cross_entropy
from run_slime import ARGUMENTS, MEGATRONS_TRAINING, Chunk, first_step, make_batch
from stand_ins import definitions, forget, mocks, packages_without_their_init, stand_in
from torch import Tensor, nn

MEGATRON, TRAINING = "miles.backends.megatron_utils", "miles.backends.training_utils"
IMPORTED = {
    MEGATRON: "ft ft.indep_dp ft.types local_weight_checksum bridge_lora_helpers checkpoint ci_utils initialize"
    " lora_utils model_provider",
    TRAINING: "ci_utils data log_utils loss",
    "miles.utils": "audit_utils audit_utils.witness audit_utils.witness.allocator audit_utils.witness.module misc"
    " tracking_utils tracking_utils.structured_log test_utils test_utils.ft_test_actions dumper_utils memory_utils",
    "megatron": "core.optimizer.muon",
}


def import_miles(folder: Path, plugin: str) -> SimpleNamespace:
    """miles' module with the steps, its function with the logprobs, and the plugin, imported "before" or "after"."""
    forget("miles")
    packages_without_their_init(folder, MEGATRON, f"{TRAINING}.loss_hub", "miles.utils")
    alone = SimpleNamespace(rank=0, size=1, group=None)
    groups = dict.fromkeys(("cp", "intra_dp", "intra_dp_cp", "indep_dp"), alone)
    state = SimpleNamespace(**groups, tp=SimpleNamespace(group=dist.group.WORLD), is_ulysses_cp=False)
    stand_in(f"{TRAINING}.parallel", get_parallel_state=lambda: state)
    stand_in(f"{MEGATRON}.parallel", get_packed_seq_params=lambda batch, args: None)
    stand_in("miles.utils.replay_base", all_replay_managers=[])
    stand_in("miles.utils.multi_lora", is_multi_lora_enabled=lambda args: False)
    mocks(*MEGATRONS_TRAINING, *(f"{package}.{name}" for package in IMPORTED for name in IMPORTED[package].split()))
    (load,) = definitions(folder / "miles/utils/misc.py", "miles.utils.misc", "load_function", function_registry={})
    path = "megatron_lce.plugins.miles.install"  # --custom-megatron-init-path
    if plugin == "before":
        load(path)
    from miles.backends.megatron_utils import model
    from miles.backends.training_utils.loss_hub import logit_processors

    functions = {"log_probs": logit_processors.get_log_probs_and_entropy, "forward_only": model.forward_only}
    by_name = stand_in(f"{MEGATRON}.actor", **functions)
    if plugin == "after":
        load(path)(Namespace())
    model.DumperMegatronUtil.return_value.wrap_forward_step = lambda step: step
    return SimpleNamespace(model=model, actor=by_name, plugin=sys.modules["megatron_lce.plugins.miles"])


def steps(miles: SimpleNamespace) -> dict[str, Callable[[nn.Module], dict[str, Tensor]]]:
    batch, stub = make_batch(), mock.MagicMock()
    off = dict.fromkeys(("true_on_policy_mode", "enable_witness", "debug_disable_optimizer"), False)
    args = Namespace(**ARGUMENTS, **off, qkv_format="thd", loss_type="sft_loss")
    of_batch = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}

    def forward_only(model: nn.Module) -> dict[str, Tensor]:
        run = partial(miles.actor.forward_only, miles.actor.log_probs, args, [Chunk(model)], [], [1], 0)
        return outputs(run)

    def trained(model: nn.Module) -> dict[str, Tensor]:
        """What miles' losses ask for: logprobs, and entropy as a metric."""

        def loss(args: Namespace, batch: dict, number: int, output: Tensor, **_: object) -> dict[str, list[Tensor]]:
            return miles.actor.log_probs(output, args=args, **of_batch, with_entropy=True, entropy_requires_grad=False)

        arguments = {"rollout_id": 0, "step_id": 0, "data_iterator": [], "model": [Chunk(model)]}
        arguments |= dict.fromkeys(("optimizer", "opt_param_scheduler", "witness_info"), stub)
        counts = dict.fromkeys(("num_microbatches", "num_rollouts", "attempt"), 1)
        miles.model.loss_function = loss
        run = partial(miles.model.train_one_step, args, **arguments, **counts)
        return outputs(run)

    def outputs(run: Callable[..., Any]) -> dict[str, Tensor]:
        output, function = first_step(miles.model, batch, args, run)
        return {name: torch.cat(parts) for name, parts in function(output).items()}

    return {"forward only": forward_only, "training": trained}


def program(folder: Path) -> None:
    plain = tensor_parallel.vocab_parallel_cross_entropy
    fused_cross_entropy.fused_vocab_parallel_cross_entropy = lambda logits, labels, group: plain(logits, labels)
    for order in ("after", "before"):
        miles = import_miles(folder, order)
        for case in cases() if order == "after" else cases()[:1]:
            for name, way in steps(miles).items():
                compare_with_plugin(f"miles, {name}, plugin {order}, {case.name}", case, miles.plugin, way, way)
        miles.plugin.uninstall()
