"""miles' forward steps, with the diff of docs/recipes, against miles' own of logits.

    torchrun --nproc-per-node 2 tests/frameworks/run_miles.py OWN FUSED  # OWN/miles: as it is, FUSED/miles: with diffs

The two forward steps are those inside of model.py's `forward_only` and `train_one_step`, the latter with the call that
miles' losses make. Stand-ins: those of run_slime.py, process groups, dumps, what replays routes, and Megatron's plain
cross-entropy for its fused one, which rounds the gradient of fp32 logits to bf16.
"""

import contextlib
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
from comparing import cases, compare, main
from megatron.core import tensor_parallel
from megatron.core.fusions import fused_cross_entropy
from run_slime import ARGUMENTS, OFF, Positions, Reached, Step, make_batch
from stand_ins import definitions, packages_without_their_init, stand_in
from torch import Tensor, nn

SIZES = "seq_length", "micro_batch_size", "decoder_seq_length", "data_pad_size_multiplier"


def import_miles(folder: Path) -> Callable[..., Step]:
    """What gives a forward step of model.py, and the function with the logprobs."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "miles"]:
        del sys.modules[name]
    root = "miles.backends.training_utils"
    packages_without_their_init(folder, "miles", "miles.backends", root, f"{root}.loss_hub", "miles.utils")
    groups = {name: SimpleNamespace(rank=0, size=1, group=None) for name in ("cp", "intra_dp", "intra_dp_cp")}
    state = SimpleNamespace(**groups, tp=SimpleNamespace(group=dist.group.WORLD), is_ulysses_cp=False)
    stand_in(f"{root}.parallel", get_parallel_state=lambda: state)
    stand_in("miles.utils.replay_base", all_replay_managers=[])
    from miles.backends.training_utils.loss_hub import logit_processors

    def step(function: str, args: Namespace, batch: dict, loss: Any, *arguments: Any, **more: Any) -> Step:
        found: list[Step] = []

        def schedule(forward_step_func: Step, **_: Any) -> None:
            found.append(forward_step_func)
            raise Reached

        plain = mock.MagicMock()
        plain.return_value.wrap_forward_step = lambda step: step
        known = {name: value for name, value in vars(logit_processors).items() if not name.startswith("__")}
        known |= {
            "DumperMegatronUtil": plain,
            "DumperPhase": mock.MagicMock(),
            "get_args": lambda: args,
            "get_batch": lambda *_, **__: batch,
            "get_forward_backward_func": lambda: schedule,
            "get_model_config": lambda model: Namespace(),
            "get_packed_seq_params": lambda batch, args: None,
            "is_multi_lora_enabled": lambda args: False,
            "loss_function": loss,
            "partial": partial,
            "_zero_grads": lambda *_: None,
        }
        file = folder / "miles/backends/megatron_utils/model.py"
        (outer,) = definitions(file, "miles.backends.megatron_utils.model", function, **known)
        with contextlib.suppress(Reached):
            outer(*arguments, **more)
        return found[0]

    step.logprobs = logit_processors.get_log_probs_and_entropy
    return step


def steps(step: Any) -> dict[str, Callable[[nn.Module], dict[str, Tensor]]]:
    batch, stub = make_batch(), mock.MagicMock()
    args = Namespace(**ARGUMENTS, **dict.fromkeys(SIZES, 1), **dict.fromkeys(OFF), true_on_policy_mode=False)
    args.use_rollout_entropy, args.qkv_format, args.enable_witness, args.loss_type, args.debug_disable_optimizer = (
        True,
        "thd",
        False,
        "sft_loss",
        False,
    )
    of_batch = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}

    def forward_only(model: nn.Module) -> dict[str, Tensor]:
        forward = step("forward_only", args, batch, None, step.logprobs, args, [stub], [], [1], 0)
        output, function = forward(None, Positions(model))
        return {name: torch.cat(parts) for name, parts in function(output).items()}

    def trained(model: nn.Module) -> dict[str, Tensor]:
        """What miles' losses ask for: logprobs, and entropy as a metric."""

        def loss(args: Namespace, batch: dict, number: int, output: Tensor, **_: Any) -> dict[str, list[Tensor]]:
            return step.logprobs(output, args=args, **of_batch, with_entropy=True, entropy_requires_grad=False)

        arguments: dict[str, Any] = {"rollout_id": 0, "step_id": 0, "data_iterator": [], "model": [stub]}
        arguments |= dict.fromkeys(("optimizer", "opt_param_scheduler", "witness_info"), stub)
        counts = dict.fromkeys(("num_microbatches", "num_rollouts", "attempt"), 1)
        output, function = step("train_one_step", args, batch, loss, args, **arguments, **counts)(
            None, Positions(model)
        )
        return {name: torch.cat(parts) for name, parts in function(output).items()}

    return {"forward only": forward_only, "training": trained}


def plain_cross_entropy(logits: Tensor, labels: Tensor, group: object) -> Tensor:
    return tensor_parallel.vocab_parallel_cross_entropy(logits, labels)


def program() -> None:
    fused_cross_entropy.fused_vocab_parallel_cross_entropy = plain_cross_entropy
    fused, own = (steps(import_miles(Path(folder))) for folder in sys.argv[2:0:-1])
    for case in cases():
        for name, way in fused.items():
            compare(f"miles, {name}, {case.name}", case, way, own[name])


if __name__ == "__main__":
    main(program)
