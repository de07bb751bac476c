"""Candidates and `topk_divergence` against verl's forward_kl_topk, which takes the logits of a head.

    torchrun --nproc-per-node 2 tests/frameworks/run.py verl_topk FOLDER     # FOLDER/verl

The head is alone: its hidden states are a parameter, for their gradient. Stand-ins beside those of run_verl.py: types
that only annotate, and Ulysses' sizes for verl's FSDP form, which one rank runs too.
"""

import itertools
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comparing import COLUMNS, VOCABULARY, Case, cases, clear_padding, compare
from megatron.core import tensor_parallel
from run_verl import LENGTHS, batch, import_verl
from stand_ins import packages_without_their_init, stand_in
from torch import Tensor, nn

import megatron_lce

K = 8


@dataclass(frozen=True)
class HeadCase(Case):
    rows: int = 0

    def build(self) -> nn.Module:
        """A head's hidden states and weight, this rank's part of them."""
        generator = torch.Generator().manual_seed(2)
        hidden = torch.randn(self.rows, self.hidden_size, generator=generator)
        weight = torch.randn(COLUMNS, self.hidden_size, generator=generator) * 0.4
        ranks, rank = dist.get_world_size(), dist.get_rank()
        head = nn.Module()
        head.hidden = nn.Parameter(hidden.chunk(ranks)[rank] if self.sequence_parallel else hidden)
        head.weight = nn.Parameter(weight.chunk(ranks)[rank].clone())
        clear_padding(head.weight)
        return head

    def logits(self, head: nn.Module) -> Tensor:
        """This rank's columns [1, rows, V / tp], as Megatron-core makes them."""
        if self.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(head.hidden)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(head.hidden)
        return (hidden @ head.weight.T)[None]

    def keywords(self) -> dict[str, Any]:
        return {"tp_group": dist.group.WORLD, "sequence_parallel": self.sequence_parallel}


def import_topk(folder: Path) -> tuple[dict[str, Callable[..., dict[str, Tensor]]], Callable[..., Any]]:
    """verl's `compute_forward_kl_topk` of either engine, and what packs sequences as its Megatron engine does."""
    import_verl(folder)
    packages_without_their_init(folder, *(f"verl.trainer.distillation.{engine}" for engine in ("megatron", "fsdp")))
    stand_in("verl.workers.config", DistillationConfig=None, DistillationLossConfig=None)
    stand_in("verl.utils.ulysses", get_ulysses_sequence_parallel_world_size=lambda: 1, slice_input_tensor=None)
    from verl.models.mcore.util import preprocess_thd_engine
    from verl.trainer.distillation.fsdp import losses as fsdp
    from verl.trainer.distillation.megatron import losses as megatron

    engines = {"Megatron": megatron.compute_forward_kl_topk}
    if dist.get_world_size() == 1:
        engines["FSDP"] = fsdp.compute_forward_kl_topk
    return engines, preprocess_thd_engine


def program(folder: Path) -> None:
    engines, pack = import_topk(folder)
    tokens = batch()
    teacher = torch.randn(sum(LENGTHS), VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
    top = teacher.log_softmax(-1).topk(K)
    jagged = [torch.nested.nested_tensor_from_jagged(values, tokens.offsets()) for values in top]
    numbers = torch.nested.nested_tensor_from_jagged(torch.arange(1, sum(LENGTHS) + 1), tokens.offsets())
    places = pack(numbers)[0][0]  # [rows]: which token, from 1; 0: alignment
    counted = places > 0
    ids = torch.where(counted[:, None], top.indices[places - 1], -1)

    def fused(case: HeadCase, least: float | None, head: nn.Module) -> dict[str, Tensor]:
        labels = torch.where(counted, 0, -100)
        out = megatron_lce.linear_cross_entropy(head.hidden, head.weight, labels, candidates=ids, **case.keywords())
        student, target = out.candidate_logprobs[counted], top.values
        if least is not None:
            assert (student < least).any()
            student, target = student.clamp_min(least), target.clamp_min(least)
        own = megatron_lce.linear_topk(head.hidden, head.weight, K, **case.keywords()).ids[counted]
        return {
            "distillation_losses": megatron_lce.topk_divergence(student, target, "forward", tail="drop"),
            "overlap_count": (top.indices[..., None] == own[:, None]).any(-1).sum(-1),
        }

    def unfused(engine: str, case: HeadCase, least: float | None, head: nn.Module) -> dict[str, Tensor]:
        config = Namespace(distillation_loss=Namespace(log_prob_min_clamp=least))
        found = engines[engine](case.logits(head), *jagged, config, "thd")
        return {name: values[0][counted] for name, values in found.items()}

    heads = [HeadCase(False, case.sequence_parallel, rows=len(places)) for case in cases() if not case.tied]
    for case, least, engine in itertools.product(heads, (None, -5.0), engines):
        name = f"verl, forward_kl_topk of {engine}, clamp {least}, {case.name}"
        compare(name, case, partial(fused, case, least), partial(unfused, engine, case, least))
