"""The engine of AReaL's pull request 1322, with the diff of docs/recipes, against the same engine's logits.

    torchrun --nproc-per-node 2 tests/frameworks/run.py areal_pull FOLDER      # FOLDER/areal: with the diff applied

Run are its forward step with the capture of hidden, its packed forward, and its logprobs and entropy. Stand-ins:
logging, tracing, what tells images from tensors, and the answer to "is there a GPU", without which it takes the logits.
"""

import contextlib
import dataclasses
import functools
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from comparing import TEMPERATURE, VOCABULARY, cases, compare
from stand_ins import definitions, packages_without_their_init, stand_in
from torch import Tensor, nn
from torch.nn.functional import pad

LENGTHS, PADDED = (5, 9, 6), (6, 10, 6)
NO_GPU = 'hidden.device.type != "cuda"'


def fused_wrapper(folder: Path) -> ModuleType:
    """areal.models.lce.functional, which answers an error of the fused call by computing logits: here it is one."""

    def fail(*message: object) -> None:
        raise AssertionError(message)

    stand_in("areal.utils.logging", getLogger=lambda name: SimpleNamespace(warning=fail))
    source = (folder / "areal/models/lce/functional.py").read_text()
    assert source.count(NO_GPU) == 1
    module = ModuleType("areal.models.lce.functional")
    exec(source.replace(NO_GPU, "False"), module.__dict__)
    module._kernel_available = lambda: True
    return module


def import_engine(folder: Path) -> Any:
    """What of MegatronEngine stands between a microbatch and its logprobs, as functions of `self`."""
    packages_without_their_init(folder, "areal.engine.megatron_utils", "areal.infra", "areal.utils.functional")
    wrapper = fused_wrapper(folder)
    stand_in("areal.infra.platforms", is_npu_available=False)
    stand_in("areal.utils.data", is_multi_modal_key=lambda key: False)
    from areal.engine.megatron_utils import fused_lce_capture, packed_context_parallel
    from areal.utils.functional import vocab_parallel

    (unpad_logits,) = definitions(folder / "areal/utils/data.py", "areal.utils.data", "unpad_logits")
    names = "forward_backward_batch", "_compute_packed_logprobs_entropy"
    known = {**vars(fused_lce_capture), **vars(packed_context_parallel), **vars(vocab_parallel), **vars(wrapper)}
    known |= {"trace_scope": lambda name: contextlib.nullcontext(), "unpad_logits": unpad_logits}
    return definitions(folder / "areal/engine/megatron_engine.py", "areal.engine.megatron_engine", *names, **known)


def microbatch(sequences: list[Tensor]) -> SimpleNamespace:
    """Packed, and packed again with every sequence padded as the tensor-parallel size wants it."""
    padded = [pad(sequence, (0, length - len(sequence))) for sequence, length in zip(sequences, PADDED, strict=True)]
    ends, own_ends = (torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32) for lengths in (PADDED, LENGTHS))
    return SimpleNamespace(
        padded_mb={"input_ids": torch.cat(padded), "cu_seqlens": ends},
        orig_mb={"input_ids": torch.cat(sequences)},
        padding_length=0,
        old_cu_seqlens=own_ends,
    )


class MicroBatches(list):
    max_seqlen = max(PADDED)


def program(folder: Path) -> None:
    forward_backward_batch, logprobs_entropy = import_engine(folder)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]

    def run(model: nn.Module, fused: bool) -> dict[str, Tensor]:
        megatron = SimpleNamespace(use_fused_linear_ce=fused)
        config = SimpleNamespace(megatron=megatron, is_critic=False, temperature=TEMPERATURE)
        off = dict.fromkeys(("enable_tree_training", "is_vision_model", "use_padded_seq"), False)
        engine = SimpleNamespace(config=config, model=[model], _ensure_ready=lambda: None, **off)
        outputs: list[Any] = []

        def process(output: Tensor, inputs: dict[str, Any]) -> None:
            assert inputs.get("_fused_lce_active", False) == fused
            outputs.extend(logprobs_entropy(engine, output, inputs))

        forward_backward_batch(engine, MicroBatches([microbatch(sequences)]), process, forward_only=True)
        logprobs, entropy, _, largest, _ = outputs
        if not fused:
            dist.all_reduce(largest, dist.ReduceOp.MAX)  # with logits the engine reports that of the rank's own columns
        return {"logprobs": logprobs, "entropy": entropy, "largest logit": largest}

    for case in cases():
        case = dataclasses.replace(case, hidden_size=128)  # the engine's capture refuses smaller ones
        fused, unfused = (functools.partial(run, fused=fused) for fused in (True, False))
        compare(f"AReaL's pull request 1322, {case.name}", case, fused, unfused)
