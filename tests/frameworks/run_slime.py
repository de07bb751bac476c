"""slime's forward steps and losses, with the diff of docs/recipes, against slime's own of logits.

    torchrun --nproc-per-node 2 tests/frameworks/run_slime.py OWN FUSED  # OWN/slime: as it is, FUSED/slime: with diffs

Under `--context` the ranks are those of context parallelism, whose attention sees a rank's own tokens only, on both
sides. The forward steps are those inside of model.py's `forward_only` and `train_one_step`. Stand-ins: the schedule,
the batch, an optimizer, a whitening of advantages, a loader of functions by name, and a type that only annotates.
"""

import contextlib
import gc
import itertools
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from comparing import COLUMNS, VOCABULARY, cases, compare, main
from megatron.core import parallel_state
from stand_ins import definitions, packages_without_their_init, stand_in
from torch import Tensor, nn

LENGTHS, RESPONSES = [7, 4, 9], [3, 2, 5]  # of the sequences, and of the answers that they end with
ARGUMENTS = {"rollout_temperature": 0.7, "log_probs_chunk_size": -1, "allgather_cp": False, "entropy_coef": 0.1}
OFF = (
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
    "enable_mtp_training",
)
OFF += ("save_debug_train_data", "recompute_loss_function", "ci_test", "use_tis")
Step = Callable[[None, nn.Module], tuple[Tensor, Callable[[Tensor], Any]]]


class Reached(Exception):
    """The schedule was called."""


def own_loss(args: Namespace, batch: dict, logits: Tensor, mean: Any) -> tuple[Tensor, dict]:
    """What a user's `custom_loss` may be: it reads logits."""
    assert logits.shape[-1] * parallel_state.get_tensor_model_parallel_world_size() == COLUMNS
    return logits.square().sum(), {}


def import_slime(folder: Path) -> tuple[ModuleType, Callable[..., Step]]:
    """The module with the losses, and what gives a forward step of model.py."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        del sys.modules[name]
    packages_without_their_init(folder, "slime", "slime.utils", "slime.backends", "slime.backends.megatron_utils")
    stand_in("slime.utils.distributed_utils", distributed_masked_whiten=None)
    stand_in("slime.utils.misc", load_function=lambda path: own_loss)
    stand_in("slime.utils.types", RolloutBatch=dict)
    from slime.backends.megatron_utils import cp_utils, loss

    loss.mpu = cp_utils.mpu = parallel_state_of_slime()
    loss.slice_with_cp = cp_utils.slice_with_cp

    def step(function: str, args: Namespace, batch: dict, *arguments: Any) -> Step:
        found: list[Step] = []

        def schedule(forward_step_func: Step, **_: Any) -> None:
            found.append(forward_step_func)
            raise Reached

        known = {name: value for name, value in vars(loss).items() if not name.startswith("__")}
        known |= {
            "_disable_tqdm_for_non_main_rank": lambda: True,
            "_with_rollout_top_p_token_keys": lambda args, keys: keys,
            "_wrap_forward_step_with_microbatch_pbar": lambda step, bar: step,
            "get_args": lambda: args,
            "get_batch": lambda *_: batch,
            "get_forward_backward_func": lambda: schedule,
            "get_model_config": lambda model: Namespace(),
            "os": Namespace(environ={}),
            "partial": partial,
            "tqdm": lambda **_: None,
        }
        file = folder / "slime/backends/megatron_utils/model.py"
        with contextlib.suppress(Reached):
            definitions(file, "slime.backends.megatron_utils.model", function, **known)[0](*arguments)
        return found[0]

    return loss, step


def parallel_state_of_slime() -> Namespace:
    """Megatron's, and under `--context` ranks of context that the model's attention does not know."""
    if "--context" not in sys.argv:
        return Namespace(**vars(parallel_state))
    ranks = {"get_context_parallel_world_size": dist.get_world_size, "get_context_parallel_rank": dist.get_rank}
    return Namespace(**vars(parallel_state) | ranks | {"get_context_parallel_group": lambda: dist.group.WORLD})


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
    return {
        "unconcat_tokens": list(tokens),
        "tokens": torch.cat([slice_with_cp(sequence, 0) for sequence in tokens])[None],
        "rollout_top_p_token_ids": kept,
        "rollout_top_p_token_offsets": offsets,
        "packed_seq_params": None,
        "total_lengths": LENGTHS,
        "response_lengths": RESPONSES,
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "full_loss_masks": None,
        "multimodal_train_inputs": None,
    }


class Positions(nn.Module):
    """The model, given the positions that its kind of embedding wants and slime's models do not."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: Tensor, position_ids: None, **keywords: Any) -> Tensor:
        return self.module(input_ids, torch.arange(input_ids.shape[1])[None], **keywords)


def steps(loss: ModuleType, step: Callable[..., Step]) -> dict[str, Callable[[nn.Module], dict[str, Tensor]]]:
    batch, stub = make_batch(loss.slice_with_cp), mock.MagicMock()
    sizes = {
        "seq_length": 1,
        "micro_batch_size": 1,
        "decoder_seq_length": 1,
        "data_pad_size_multiplier": 1,
        "use_rollout_entropy": True,
    }
    more = {"custom_loss_function_path": "own", "calculate_per_token_loss": True, "rollout_top_p": 0.9}

    def logprobs(model: nn.Module, replay: bool) -> dict[str, Tensor]:
        args = Namespace(**ARGUMENTS, **sizes, **more, **dict.fromkeys(OFF))
        forward = step("forward_only", args, batch, loss.get_log_probs_and_entropy, args, [stub], [], [1], "", replay)
        output, function = forward(None, Positions(model))
        _, found = function(output)
        return {name: torch.cat(parts) for name, parts in found.items()}

    def trained(model: nn.Module, loss_type: str) -> dict[str, Tensor]:
        args = Namespace(**ARGUMENTS, **sizes, **more, **dict.fromkeys(OFF), loss_type=loss_type)
        forward = step("train_one_step", args, batch, args, 0, 0, [], [stub], stub, stub, 1, 1)
        output, function = forward(None, Positions(model))
        return {"loss": function(output)[0][None]}

    losses = {f"loss ({kind})": partial(trained, loss_type=kind) for kind in ("sft_loss", "custom_loss")}
    ways = {"logprobs and entropy": False, "replay of top-p": True}
    return {name: partial(logprobs, replay=replay) for name, replay in ways.items()} | losses


def program() -> None:
    context = "--context" in sys.argv
    own, fused = (import_slime(Path(folder)) for folder in sys.argv[1:3])
    inputs = {"input_ids": make_batch()["tokens"], "position_ids": None, "attention_mask": None}
    model = Positions(cases()[0].build())
    gc.disable()  # what a microbatch leaves behind must go without the collector
    output = fused[0].call_model(model, inputs, True)
    hidden = weakref.ref(output.lm_head.hidden)
    del output
    assert hidden() is None, "the captured hidden states outlive the microbatch"
    gc.enable()
    del model

    with_logits = steps(*own)
    for case in cases():
        for name, with_head in steps(*fused).items():
            compare(f"slime{', context-parallel' * context}, {name}, {case.name}", case, with_head, with_logits[name])


if __name__ == "__main__":
    main(program, tensor_parallel=1 if "--context" in sys.argv else None)
