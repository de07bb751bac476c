"""Megatron-SWIFT's DPO and KTO steps, policy and reference under the flag, against the same steps without it.

    torchrun --nproc-per-node 2 tests/frameworks/run.py ms_swift_preference OWN BRIDGE  # OWN/swift, BRIDGE/mcore_bridge

No file changes. Stand-ins: the batch's preparation, what reduces metrics, and TRL's two loss functions.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from comparing import Case, Wrapper, cases, compare, sharpened
from run_ms_swift import TRAINERS, batch, head_of_mcore_bridge
from stand_ins import definitions
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

import megatron_lce

BETA = 0.1


def dpo_loss(chosen: Tensor, rejected: Tensor, of_chosen: Tensor, of_rejected: Tensor) -> tuple[Tensor, ...]:
    """TRL's sigmoid loss, and both rewards."""
    rewards = BETA * (chosen - of_chosen), BETA * (rejected - of_rejected)
    return -logsigmoid(rewards[0] - rewards[1]), *(reward.detach() for reward in rewards)


def kto_loss(*logprobs: Tensor) -> tuple[Tensor, ...]:
    """TRL's: chosen, rejected and KL logprobs, the policy's and the reference's."""
    chosen, rejected, of_kl = (BETA * (x - y) for x, y in zip(logprobs[:3], logprobs[3:], strict=True))
    kl = of_kl.mean().detach().clamp(min=0) / BETA
    losses = torch.cat([1 - (chosen - BETA * kl).sigmoid(), 1 - (BETA * kl - rejected).sigmoid()])
    return losses, chosen.detach(), rejected.detach(), kl


def import_trainers(folder: Path) -> tuple[type, type]:
    trainers = folder / "swift/megatron/trainers"
    known = {"BaseMegatronTrainer": object, "ContextManagers": lambda contexts: contextlib.nullcontext()}

    def trainer(file: str, name: str) -> type:
        return definitions(trainers / f"{file}.py", f"{TRAINERS}.{file}", name, **known)[0]

    known["MegatronRLHFTrainer"] = trainer("rlhf_mixin", "MegatronRLHFTrainer")
    return trainer("dpo_trainer", "MegatronDPOTrainer"), trainer("kto_trainer", "MegatronKTOTrainer")


def made(kind: type, reference: nn.Module, data: Any, **losses: Any) -> Any:
    """A trainer without what its constructor sets up."""
    settings = {"context_parallel_size": 1, "padding_free": False, "tuner_type": "full", "rpo_alpha": 0.5}
    settings |= {"mcore_ref_adapter": None, "ref_adapters": [], "calculate_KL": True, "sequence_parallel": False}
    own = object.__new__(kind)
    own.args, own.ref_models = SimpleNamespace(**settings), [reference]
    own.get_batch = lambda *_: data
    own._all_reduce_metric = lambda metric, *_: metric
    for name, loss in losses.items():
        setattr(own, f"dummy_{name}_trainer", SimpleNamespace(**{f"{name}_loss": loss}))
    return own


def step(own: Any, model: nn.Module) -> dict[str, Tensor]:
    """The loss and the mean logprobs; rewards are small differences of such."""
    output, loss = own.forward_step(None, Wrapper(Wrapper(model)))
    value, metrics = loss(output)
    return {name: metrics[name].detach() for name in ("logps/chosen", "logps/rejected")} | {"loss": value[None]}


def pairs() -> dict[str, Any]:
    """Two chosen answers, then two rejected ones."""
    data = batch()
    doubled = {name: torch.cat([values, values.flip(-1)]) for name, values in data.items() if name != "attention_mask"}
    doubled["labels"] = torch.cat([data["labels"], data["labels"].roll(1, 0)])
    return doubled | {"attention_mask": None, "position_ids": data["position_ids"][:1]}


def answers() -> tuple[dict[str, Any], dict[str, Any]]:
    """A desired answer and another, and those whose KL is estimated."""
    return batch() | {"label": [True, False]}, batch() | {"labels": batch()["labels"].roll(1, 0)}


def program(folder: Path, folder_of_bridge: Path) -> None:
    dpo, kto = import_trainers(folder)
    as_bridge = head_of_mcore_bridge(folder_of_bridge)

    def bridged(model: nn.Module, fused: bool) -> nn.Module:
        model = as_bridge(model)
        if fused:
            megatron_lce.enable_fused_linear_ce(model, on_unsupported="raise")
        return model

    def outputs(case: Case, fused: bool, kind: type, data: Callable[[], Any], **losses: Any) -> Any:
        reference = bridged(sharpened(case.build()), fused)
        return lambda model: step(made(kind, reference, data(), **losses), bridged(model, fused))

    for case in cases():
        ways = {"DPO": partial(outputs, case, kind=dpo, data=pairs, dpo=dpo_loss)}
        ways["KTO"] = partial(outputs, case, kind=kto, data=answers, kto=kto_loss)
        for name, way in ways.items():
            compare(f"ms-swift, {name}, {case.name}", case, way(True), way(False))
