"""Megatron-RL's logprobs with the plugin, against its own of gathered logits; context-parallel too.

    PYTHONPATH=FOLDER torchrun --nproc-per-node 2 tests/frameworks/run.py megatron_rl FOLDER  # FOLDER/megatron/rl

Stand-ins: arguments, timers, the precision wrapper, and the function of TransformerEngine that says which tokens a rank
has. Under context parallelism (`--context`) attention sees a rank's own tokens only, as it does on both sides.
"""

import contextlib
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from comparing import VOCABULARY, Wrapper, cases, compare_with_plugin
from megatron.core.packed_seq_params import PackedSeqParams
from stand_ins import module_with
from torch import Tensor, nn

LENGTH = 16


class Precision(Wrapper):
    """Takes `fp32_output` as Float16Module does; the attention of these tests knows no ranks of context."""

    def forward(self, *args: Any, fp32_output: bool, packed_seq_params: PackedSeqParams, **keywords: Any) -> Tensor:
        packed = None if packed_seq_params.cp_group is not None else packed_seq_params
        return self.module(*args, packed_seq_params=packed, **keywords)


def partitioned_indices(_: Tensor, length: int, ranks: int, rank: int) -> Tensor:
    """Of one sequence: chunk `rank` from the front and from the back."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def import_utils(folder: Path, context: bool) -> ModuleType:
    alone = dist.new_subgroups(group_size=1)[0]
    groups = SimpleNamespace(cp=dist.group.WORLD if context else alone, pp=alone)
    known = {
        "HAVE_TEX": True,
        "_CPScatterCache": SimpleNamespace,
        "get_args": lambda: Namespace(fp16=False, bf16=False),
        "get_attr_wrapped_model": lambda model, name: groups,
        "get_nvtx_range": lambda: lambda *_, **__: contextlib.nullcontext(),
        "is_batch_invariant_mode_enabled": lambda: False,
        "is_pp_last_stage": lambda group: True,
        "set_model_config_attribute": lambda model, name, value: setattr(model.config, name, value),
        "tex": SimpleNamespace(thd_get_partitioned_indices=partitioned_indices),
    }
    names = "selective_log_softmax", "_build_cp_scatter_cache", "_scatter_for_context_parallel", "get_logprobs"
    file, name = folder / "megatron/rl/rl_utils.py", "megatron.rl.rl_utils"
    return module_with(file, name, *names, "compute_logprobs_batch", **known)


def program(folder: Path) -> None:
    context = "--context" in sys.argv
    utils = import_utils(folder, context)
    from megatron_lce.plugins import megatron_rl

    tokens = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(0))

    def outputs(model: nn.Module) -> dict[str, Tensor]:
        precision = Precision(model)
        precision.config = model.config
        return {"logprobs": utils.get_logprobs(precision, tokens, torch.arange(LENGTH)[None])}

    for case in cases():
        name = f"Megatron-RL{', context-parallel' * context}, {case.name}"
        compare_with_plugin(name, case, megatron_rl, outputs, outputs)
