"""Megatron models under torch's FSDP2, around the model and around its head: the fused head on and off."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from unittest import mock

import harness
import megatron_cases as cases
import torch
from harness import compare_step, message_of
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerLayer
from megatron.core.transformer.module import Float16Module
from megatron_training import check_errors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_lce import capture_lm_head, enable_fused_linear_ce
from megatron_lce.megatron.reasons import find_language_model
from scripts import megatron_runtime

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How FSDP2 is put around a model."""

    name: str
    head: bool = True  # the output layer is a unit, as in TorchFullyShardedDataParallel; else the model has its weight
    reshard: bool = True
    policy: MixedPrecisionPolicy = dataclasses.field(default_factory=MixedPrecisionPolicy)
    megatrons: bool = False  # by Megatron's own wrapper


HEAD, MODEL = Sharding("FSDP2 head"), Sharding("FSDP2 model", head=False)
KEPT = Sharding("FSDP2 head without reshard", reshard=False)
MIXED = Sharding("FSDP2 head bfloat16", policy=BF16)
MEGATRONS = Sharding("Megatron's FSDP2 head", megatrons=True)
ALONE = cases.Case(tensor_parallel=1)
FSDP2_CASES = [
    (HEAD, ALONE),
    (KEPT, dataclasses.replace(ALONE, masked=True, known=True)),
    (MIXED, dataclasses.replace(ALONE, hidden_size=128)),
    (MODEL, dataclasses.replace(ALONE, tied=True, mtp=True)),
    (MEGATRONS, dataclasses.replace(ALONE, known=True)),
]


def mesh_of(device: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(parallel_state.get_data_parallel_group(with_context_parallel=True), device.type)


def build(case: cases.Case, sharding: Sharding, device: torch.device) -> nn.Module:
    return shard(megatron_runtime.build_gpt(cases.gpt_options(case), device=device), sharding, device)


def shard(model: nn.Module, sharding: Sharding, device: torch.device) -> nn.Module:
    """The model over its data-parallel ranks."""
    if sharding.megatrons:
        return in_megatrons_wrapper(model, device)
    language_model = model.module if isinstance(model, Float16Module) else model
    arguments = {"mesh": mesh_of(device), "reshard_after_forward": sharding.reshard, "mp_policy": sharding.policy}
    for module in (*language_model.decoder.layers, *([language_model.output_layer] if sharding.head else [])):
        fully_shard(module, **arguments)
    return fully_shard(model, **arguments)


class OutputLayer(ColumnParallelLinear):
    """A class of its own, as with TransformerEngine, whose layers hold no ColumnParallelLinear that were units too."""


def in_megatrons_wrapper(model: nn.Module, device: torch.device) -> nn.Module:
    model.output_layer.__class__ = OutputLayer
    from_group = DeviceMesh.from_group
    with mock.patch.object(DeviceMesh, "from_group", lambda group, _: from_group(group, device.type)):  # else "cuda"
        return TorchFullyShardedDataParallel(
            model.config,
            DistributedDataParallelConfig(),
            model,
            sub_modules_to_wrap={TransformerLayer, LanguageModelEmbedding, OutputLayer},
        )


def train(model: nn.Module, batches: list[dict[str, Tensor]], masked: bool) -> tuple[dict, dict]:
    """Accumulate gradients over the microbatches: (losses, gradients of whole parameters)."""
    losses = {}
    for i, batch in enumerate(batches):
        output, loss_of = cases.forward_step(iter([batch]), model, masked=masked)
        loss, kept = loss_of(output)
        (loss / len(batches)).backward()
        losses[f"microbatch {i}"] = kept["losses"]
    gradients = {
        name: (parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return losses, gradients


def check_fsdp(sharding: Sharding, case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """The flag on against off: losses and the accumulated gradient of every parameter, twice, and off again."""
    name = f"{sharding.name}, {case.name}"
    batches = cases.microbatches(case, device)
    model = build(case, sharding, device)
    native = train(model, batches, case.masked)
    exact = None
    if sharding.policy.param_dtype is not None:
        precise = dataclasses.replace(sharding, policy=MixedPrecisionPolicy())
        _, exact = train(build(case, precise, device), batches, case.masked)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of a loss that is not fused
        check_flag(name, model, case, native, exact, lambda: train(model, batches, case.masked), report)
    _, again = train(model, batches, case.masked)
    same = all(torch.equal(again[key], gradient) for key, gradient in native[1].items())
    report.check(f"{name}: removed, Megatron's bits", same)


def check_flag(
    name: str,
    model: nn.Module,
    case: cases.Case,
    native: tuple[dict, dict],
    exact: dict | None,
    train: Callable[[], tuple[dict, dict]],
    report: harness.Report,
) -> None:
    """The flag on in two steps; `exact`: what gradients that are rounded are compared with, as Megatron's own are."""
    handle = cases.enable([model], case, fused=True)
    report.check(f"{name}: enabled", handle.enabled, repr(handle))
    for step in ("first", "second"):
        found = train()
        if exact is None:
            compare_step(report, f"{name}: {step} step", found, native)
        else:
            check_errors(f"{name}: {step} step, gradients", found[1], [native[1]], exact, report)
    handle.remove()


def check_fsdp_errors(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """What is refused says so, and leaves FSDP as it was: the next step is right."""
    batches = cases.microbatches(case, device)
    batch = batches[0]
    inputs, labels = (batch["tokens"], batch["positions"], None), batch["labels"]
    model = build(case, HEAD, device)
    native = train(model, batches, False)

    message = message_of(lambda: capture_lm_head(model).__enter__())
    right = "the LM head cannot be captured: the head's weight is managed by FSDP" in message
    report.check("FSDP2: a capture is refused", right and "use enable_fused_linear_ce" in message, message)

    handle = enable_fused_linear_ce(model, skip_masked=True)
    language_model = find_language_model(model)
    call = functools.partial(model, *inputs, labels=labels)
    narrow = functools.partial(call, loss_mask=batch["loss_mask"][:, 1:])
    report.refused("FSDP2: an error in front of the head", narrow, "loss_mask must have")
    wrong = functools.partial(call, labels=labels[:, 1:].clone())
    report.refused("FSDP2: an error in the head's call", wrong, "labels must be [b, s]")

    fused = language_model.compute_language_model_loss
    language_model.compute_language_model_loss = lambda labels, logits: fused(labels, logits * 2)
    report.refused("FSDP2: logits are not computed", call, "the logits of an enabled model are not computed")
    language_model.compute_language_model_loss = lambda labels, logits: fused(labels.clone(), logits)
    report.refused("FSDP2: other labels", call, "labels must be the tensor that")
    del language_model.compute_language_model_loss
    handle.remove()

    enable_fused_linear_ce(model, on_unsupported="raise")
    compare_step(report, "FSDP2, after errors", train(model, batches, False), native)
    with torch.no_grad():
        logits = model(*inputs)
    report.check("FSDP2: logits without labels", logits.shape == (*labels.shape, cases.VOCAB_SIZE), str(logits.shape))
