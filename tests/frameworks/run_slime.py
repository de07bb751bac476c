"""slime's forward steps and losses with the plugin, against the same without.

    torchrun --nproc-per-node 2 tests/frameworks/run.py slime FOLDER      # FOLDER/slime

Under `--context` the ranks are those of context parallelism, whose attention sees a rank's own tokens only, on both
sides. With `--allgather` as well, they have slime's `allgather_cp`. The forward steps are those inside of model.py's
`forward_only` and `train_one_step`. slime's own loader of functions switches the plugin on, behind slime's modules and
once more in front of them. Stand-ins: the schedule, the batch, and what needs an optimizer, checkpoints or logging.
"""

import contextlib
import itertools
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from comparing import COLUMNS, VOCABULARY, Wrapper, cases, compare_with_plugin
from megatron.core import parallel_state
from stand_ins import definitions, forget, mocks, packages_without_their_init, stand_in
from torch import Tensor, nn

CONTEXT, ALLGATHER = ("--context" in sys.argv), ("--allgather" in sys.argv)
LENGTHS, RESPONSES = [7, 4, 9], [3, 2, 5]  # of the sequences, and of the answers that they end with
ARGUMENTS = {"rollout_temperature": 0.7, "log_probs_chunk_size": -1, "allgather_cp": ALLGATHER, "entropy_coef": 0.1}
ARGUMENTS |= {"use_rollout_entropy": True}
ARGUMENTS |= dict.fromkeys(("seq_length", "micro_batch_size", "decoder_seq_length", "data_pad_size_multiplier"), 1)
ARGUMENTS |= dict.fromkeys(f"custom_megatron_before_{step}_hook_path" for step in ("log_prob", "train_step"))
OFF = "enable_mtp_training", "save_debug_train_data", "recompute_loss_function", "ci_test", "use_tis"
ARGUMENTS |= dict.fromkeys(OFF)
MEGATRONS_TRAINING = "megatron.training", "megatron.training.global_vars", "megatron.training.training"


class Reached(Exception):
    """The schedule was called."""


def own_loss(args: Namespace, batch: dict, logits: Tensor, mean: Any) -> tuple[Tensor, dict]:
    """What a user's `custom_loss` may be: it reads logits."""
    assert logits.shape[-1] * parallel_state.get_tensor_model_parallel_world_size() == COLUMNS
    return logits.square().sum(), {}


def import_slime(folder: Path, plugin: str) -> SimpleNamespace:
    """slime's modules with the losses and the steps, and the plugin, imported "before" or "after" them."""
    forget("slime")
    package = "slime.backends.megatron_utils"
    packages_without_their_init(folder, "slime.utils", package)
    mocks(*MEGATRONS_TRAINING, "tqdm", "slime.observability")
    mocks(*(f"slime.utils.{name}" for name in ("distributed_utils", "logging_utils", "memory_utils", "types")))
    mocks(*(f"{package}.{name}" for name in ("checkpoint", "data", "model_provider", "stateless_adam")))
    stand_in("slime.utils.misc", load_function=lambda path: own_loss)
    (load,) = definitions(folder / "slime/utils/misc.py", "slime.utils.misc", "load_function", function_registry={})
    path = "megatron_lce.plugins.slime.install"  # --custom-megatron-init-path
    if plugin == "before":
        load(path)
    from slime.backends.megatron_utils import cp_utils, loss, model

    loss.mpu = cp_utils.mpu = parallel_state_of_slime()
    loss.slice_with_cp = cp_utils.slice_with_cp
    by_name = stand_in(f"{package}.actor", log_probs=loss.get_log_probs_and_entropy, forward_only=model.forward_only)
    if plugin == "after":
        load(path)(Namespace())
    return SimpleNamespace(loss=loss, model=model, actor=by_name, plugin=sys.modules["megatron_lce.plugins.slime"])


def parallel_state_of_slime() -> Namespace:
    """Megatron's, and under `--context` ranks of context that the model's attention does not know."""
    ranks = {"get_context_parallel_world_size": dist.get_world_size, "get_context_parallel_rank": dist.get_rank}
    ranks["get_context_parallel_group"] = lambda: dist.group.WORLD
    return Namespace(**vars(parallel_state) | (ranks if CONTEXT else {}))


def kept_ids() -> tuple[list[list[int]], list[list[int]]]:
    """For each sample its answer's kept ids, and offsets: the last sample's stop early, some sets lack the label."""
    generator = torch.Generator().manual_seed(4)
    ids, offsets = [], []
    for length in RESPONSES:
        sizes = torch.randint(0, 12, (length,), generator=generator).tolist()
        sets = [torch.randperm(VOCABULARY, generator=generator)[:size].tolist() for size in sizes]
        ids.append(list(itertools.chain(*sets)))
        offsets.append([0, *torch.tensor(sizes).cumsum(0).tolist()])
    offsets[-1] = offsets[-1][:-2]  # two tokens of which no set was recorded: the whole vocabulary
    return ids, offsets


def make_batch(slice_with_cp: Callable[[Tensor, int], Tensor] = lambda tokens, padding: tokens) -> dict[str, Any]:
    tokens = torch.randint(VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0)).split(LENGTHS)
    masks = [torch.ones(length) for length in RESPONSES]
    masks[2][1] = 0.0
    kept, offsets = kept_ids()
    of_rank = torch.cat([slice_with_cp(sequence, 0) for sequence in tokens])[None]
    if ALLGATHER:  # an equal range of all tokens for each rank
        of_rank = torch.cat(tokens)[None].chunk(dist.get_world_size(), 1)[dist.get_rank()]
    return {
        "unconcat_tokens": list(tokens),
        "tokens": of_rank,
        "rollout_top_p_token_ids": kept,
        "rollout_top_p_token_offsets": offsets,
        "total_lengths": LENGTHS,
        "response_lengths": RESPONSES,
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        **dict.fromkeys(("packed_seq_params", "full_loss_masks", "multimodal_train_inputs")),
    }


class Chunk(Wrapper):
    """Gives the model the positions that its kind of embedding wants and slime's models do not."""

    def forward(self, input_ids: Tensor, position_ids: None, **keywords: Any) -> Tensor:
        return self.module(input_ids, torch.arange(input_ids.shape[1])[None], **keywords)

    def zero_grad_buffer(self) -> None:
        pass


def first_step(module: ModuleType, batch: dict, args: Namespace, run: Callable[..., Any]) -> tuple[Tensor, Any]:
    """What the forward step that `run` hands to the schedule returns for the first microbatch."""
    found: list[tuple[Tensor, Any]] = []

    def schedule(forward_step_func: Any, model: list[nn.Module], **_: Any) -> None:
        with torch.enable_grad():  # in `forward_only`, too, for the comparison
            found.append(forward_step_func(None, model[0]))
        raise Reached

    globals_ = {"get_batch": lambda *_, **__: batch, "get_forward_backward_func": lambda: schedule}
    globals_ |= {"get_args": lambda: args, "get_model_config": lambda model: Namespace()}
    with contextlib.suppress(Reached), mock.patch.multiple(module, **globals_):
        run()
    return found[0]


def steps(slime: SimpleNamespace) -> dict[str, Callable[[nn.Module], dict[str, Tensor]]]:
    batch, stub = make_batch(slime.loss.slice_with_cp), mock.MagicMock()
    more = {"custom_loss_function_path": "own", "calculate_per_token_loss": True, "rollout_top_p": 0.9}

    def logprobs(model: nn.Module, replay: bool) -> dict[str, Tensor]:
        args = Namespace(**ARGUMENTS, **more)
        run = partial(slime.actor.forward_only, slime.actor.log_probs, args, [Chunk(model)], [], [1], "", replay)
        output, function = first_step(slime.model, batch, args, run)
        _, found = function(output)
        return {name: torch.cat(parts) for name, parts in found.items()}

    def trained(model: nn.Module, loss_type: str) -> dict[str, Tensor]:
        args = Namespace(**ARGUMENTS, **more, loss_type=loss_type)
        run = partial(slime.model.train_one_step, args, 0, 0, [], [Chunk(model)], stub, stub, 1, 1)
        output, function = first_step(slime.model, batch, args, run)
        return {"loss": function(output)[0][None]}

    losses = {f"loss ({kind})": partial(trained, loss_type=kind) for kind in ("sft_loss", "custom_loss")}
    ways = {"logprobs and entropy": False, "replay of top-p": True}
    return {name: partial(logprobs, replay=replay) for name, replay in ways.items()} | losses


def program(folder: Path) -> None:
    for order in ("after", "before"):
        slime = import_slime(folder, order)
        for case in cases() if order == "after" else cases()[:1]:
            for name, way in steps(slime).items():
                context = ", context-parallel" * CONTEXT + ", allgather_cp" * ALLGATHER
                name = f"slime{context}, {name}, plugin {order}, {case.name}"
                compare_with_plugin(name, case, slime.plugin, way, way, logits="custom_loss" in name)
        slime.plugin.uninstall()
