"""Every way of the flag, and captures, beside Megatron's own loss, in layouts beyond tensor and pipeline parallelism.

A case runs where the number of ranks is its own, if what it needs is there; else the output says what is missing. In
16 bits the yardstick is the same model with the head's product and its loss in fp32: the body's bits are the same.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import harness
import megatron_cases as cases
import megatron_te
import torch
import torch.distributed as dist
from harness import compare_all, relative_error, worst_of_all_ranks
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron_te import in_te
from megatron_training import check_errors, of_module
from torch import Tensor, nn

from megatron_lce import FusedOutputContext, capture_lm_head, enable_fused_linear_ce, fused_output_processor
from megatron_lce.megatron.reasons import find_language_model

ALLOWED_OF_NATIVE = 0.1  # Megatron's gradients in 16 bits against those of the exact head
# Of Megatron's losses, whose rounding in bf16 depends on where between two powers of two the numbers are: its error of
# the same gradient differs by up to 1.7.
LOSS_SCALES = 1.0, 1.25, 1.5, 1.75
FLAGS = {
    "flag": {},
    "known": {"known_loss": True},
    "skip": {"skip_masked": True},
    "known, skip": {"known_loss": True, "skip_masked": True},
}
MOE = (
    ("num_moe_experts", 4),
    ("moe_router_topk", 2),
    ("moe_token_dispatcher_type", "alltoall"),
    ("moe_router_load_balancing_type", "aux_loss"),
    ("moe_aux_loss_coeff", 0.01),
    ("moe_ffn_hidden_size", 128),
)
GROUPED = (*MOE, ("moe_grouped_gemm", True))
OVERLAPPED = (*GROUPED, ("overlap_moe_expert_parallel_comm", True))
A2A = (("cp_comm_type", "a2a"),)
MAMBA = (("mamba_head_dim", 32), ("mamba_num_groups", 2), ("use_mamba_mem_eff_path", False))
GTP = "megatron.core.tensor_parallel.gtp_api"
BOUNDS = 24, 64, 128, 160, 256  # ends of packed sequences, a quarter of each divisible by 2 context-parallel ranks
PADS = 3, 0, 5, 1, 7  # of their last tokens, where sequences are padded


def in_cp(*, tensor_parallel: int = 1, **settings: Any) -> cases.Case:
    sequence_parallel = tensor_parallel > 1
    return in_te(
        tensor_parallel=tensor_parallel,
        context_parallel=2,
        sequence_parallel=sequence_parallel,
        sequence=64,
        **settings,
    )


def of_experts(*, tensor_parallel: int = 1, config: tuple = GROUPED, **settings: Any) -> cases.Case:
    settings = {"expert_parallel": 2, "sequence_parallel": tensor_parallel > 1} | settings
    return in_te(tensor_parallel=tensor_parallel, config=config, **settings)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A case, what builds its model, and what it needs beside TransformerEngine, by the module that holds it."""

    case: cases.Case
    build: Callable = cases.build
    needs: str = ""
    ranks: int = 0  # 0: the case's own
    combined: bool = False  # forward and backward of two microbatches in one schedule


CONTEXT = [
    Topology(in_cp(tensor_parallel=size, **settings))
    for size in (1, 2)
    for settings in (
        {},
        {"config": A2A, "tied": True},
        {"mtp": True},
        {"packed": "packed", "mtp": True},
        {"packed": "packed", "config": A2A, "tied": True},
        {"packed": "padded"},
    )
]
EXPERTS = [
    Topology(of_experts(), ranks=2),
    Topology(of_experts(config=MOE, tied=True, mtp=True), ranks=2),
    Topology(of_experts(tensor_parallel=2, expert_tensor_parallel=1)),
    Topology(of_experts(tensor_parallel=2), ranks=4),
    Topology(of_experts(tensor_parallel=2, config=MOE, tied=True, mtp=True), ranks=4),
    Topology(of_experts(tensor_parallel=2, expert_tensor_parallel=1, main_grad=True, overlap=True), ranks=4),
    Topology(of_experts(tensor_parallel=2, expert_parallel=4, expert_tensor_parallel=1), ranks=4),
    Topology(of_experts(tensor_parallel=1, context_parallel=2, sequence=64), ranks=4),
]
COMBINED = [
    Topology(of_experts(config=OVERLAPPED), ranks=2, combined=True),
    Topology(of_experts(config=OVERLAPPED, pipeline=True, virtual_pipeline=True), ranks=4, combined=True),
]
PIPELINES = [
    Topology(in_te(sequence_parallel=True, pipeline=True)),
    Topology(in_te(tied=True, sequence_parallel=True, pipeline=True, mtp=True)),
    Topology(in_te(tied=True, pipeline=True, virtual_pipeline=True, main_grad=True)),
    Topology(in_te(sequence_parallel=True, mtp=True, pipeline=True, virtual_pipeline=True)),
    Topology(in_cp(pipeline=True, tied=True)),
    Topology(of_experts(pipeline=True), ranks=4),
]
HYBRIDS = [
    Topology(in_te(sequence_parallel=True), megatron_te.hybrid_model, "megatron.core.models.hybrid"),
    Topology(
        in_te(tied=True, sequence_parallel=True, config=MAMBA),
        functools.partial(megatron_te.hybrid_model, layers="M*-"),
        "mamba_ssm",
    ),
    Topology(in_te(config=MAMBA), functools.partial(megatron_te.hybrid_model, layers="M"), "mamba_ssm"),
]
DATA = [
    Topology(in_te(sequence_parallel=True, main_grad=True, overlap=True), ranks=4),
    Topology(in_te(tied=True, mtp=True, main_grad=True, overlap=True), ranks=4),
]
ON_GPU = (("use_cpu_initialization", False),)
SHARDED_FURTHER = [  # not with MTP: Megatron 0.19.2 loses the embedding's gradient between its two uses
    Topology(in_te(tensor_parallel=size, gtp=2, sequence_parallel=size > 1, config=ON_GPU), needs=GTP)
    for size in (1, 2)
]
TOPOLOGIES = [*CONTEXT, *EXPERTS, *COMBINED, *PIPELINES, *HYBRIDS, *DATA, *SHARDED_FURTHER]


def checks(ranks: int) -> list[tuple[Callable, cases.Case]]:
    """Those of this number of ranks."""
    chosen = [topology for topology in TOPOLOGIES if (topology.ranks or topology.case.ranks) == ranks]
    return [(functools.partial(check_topology, topology), topology.case) for topology in chosen]


def missing(topology: Topology) -> str:
    """What this installation lacks for the case."""
    if topology.needs and not found(topology.needs):
        return topology.needs
    if topology.case.packed and "is_hybrid_cp" not in inspect.signature(get_batch_on_this_cp_rank).parameters:
        return "a megatron-core that cuts packed sequences"
    if topology.combined and "output_processor" not in inspect.signature(GPTModel.forward).parameters:
        return "a megatron-core with output processors"
    return ""


def found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def microbatches(case: cases.Case, device: torch.device) -> list[dict[str, Any]]:
    """Those of the case, with valid labels, packed and cut as Megatron cuts them over context-parallel ranks."""
    batches = []
    for whole in cases.microbatches(case, device):
        batch = {"tokens": whole["tokens"], "labels": whole["labels"].clamp(min=0)}
        batch |= {"loss_mask": whole["loss_mask"], "position_ids": whole["positions"].contiguous()}
        parameters = None
        if case.packed:
            ends = torch.tensor((0, *BOUNDS), dtype=torch.int32, device=device)
            batch = {name: part.reshape(1, -1) for name, part in batch.items()}
            batch["position_ids"] = torch.cat([torch.arange(n, device=device) for n in ends.diff().tolist()])[None]
            padded, given = ends, {}
            if case.packed == "padded":
                pads = torch.tensor(PADS, dtype=torch.int32, device=device)
                ends = torch.cat([ends[:1], (ends.diff() - pads).cumsum(0).int()])
                given = {"pad_between_seqs": True}
                for end, pad in zip(BOUNDS, PADS, strict=True):
                    batch["loss_mask"][:, end - pad : end] = 0
            of_both = {f"cu_seqlens_{of}": ends for of in ("q", "kv")}
            of_both |= {f"cu_seqlens_{of}_padded": padded for of in ("q", "kv")}
            longest = int(padded.diff().max())
            parameters = PackedSeqParams("thd", **of_both, max_seqlen_q=longest, max_seqlen_kv=longest, **given)
            batch |= {"cu_seqlens": ends[None], "cu_seqlens_padded": padded[None]}
        if case.context_parallel > 1:
            group = parallel_state.get_context_parallel_group()
            given = {"is_hybrid_cp": False} if "is_hybrid_cp" in _parameters(get_batch_on_this_cp_rank) else {}
            batch = get_batch_on_this_cp_rank(batch, **given, **({"cp_group": group} if given else {}))
        batches.append({**batch, "packed": parameters})
    return batches


def _parameters(function: Callable) -> set[str]:
    return set(inspect.signature(function).parameters)


def policy_loss(losses: Tensor, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """A clipped ratio's, whose advantages are made of the labels; the old policy knew nothing."""
    advantages = (batch["labels"] % 5 - 2.0) / 2
    ratio = (math.log(cases.VOCAB_SIZE) - losses.float()).exp()
    gains = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return cases.masked_mean(-gains, batch["loss_mask"])


def forward_step(
    batches: Iterator[dict[str, Any]],
    model: nn.Module,
    return_schedule_plan: bool = False,
    *,
    policy: bool = False,
    captured: bool = False,
    processed: bool = False,
) -> tuple[Any, Callable]:
    """The model's losses, or the captured head's; mean, or a policy's loss of them."""
    batch = next(batches)
    call = model.build_schedule_plan if return_schedule_plan else model
    given = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    given |= {"packed_seq_params": batch["packed"]} if batch["packed"] is not None else {}
    if processed:
        context = FusedOutputContext(entropy=False, result=lambda outputs: -outputs.logprobs)
        given |= {"output_processor": fused_output_processor, "output_processor_context": context}
    loss = policy_loss if policy else lambda losses, batch: cases.masked_mean(losses, batch["loss_mask"])
    with capture_lm_head(model) if captured else contextlib.nullcontext() as head:
        output = call(batch["tokens"], batch["position_ids"], None, **given)
    if not captured:
        return output, lambda losses: loss(losses, batch)
    return output, lambda _: loss(-head.linear_cross_entropy(batch["labels"], entropy=False).logprobs, batch)


class _Gathered(torch.autograd.Function):
    """The whole of a weight of GTP, by the calls that Megatron makes in front of and behind its products, in fp32."""

    @staticmethod
    def forward(ctx: Any, shard: Any) -> Tensor:
        ctx.shard = shard
        return shard.all_gather_and_prefetch(fwd=True).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        ctx.shard.all_gather_and_prefetch_bwd()
        return ctx.shard.wgrad_reduce_scatter(grad.to(ctx.shard.dtype))


@contextlib.contextmanager
def exact_head(chunks: list[nn.Module]) -> Iterator[None]:
    """Products and loss of the head in fp32, of the same 16-bit tensors."""
    model = find_language_model(chunks)
    if model is None:
        yield
        return
    head = model.output_layer

    def forward(input_: Tensor, weight: Tensor | None = None, **others: Any) -> tuple[Tensor, None]:
        weight = head.weight if weight is None else weight
        product = functools.partial(type(head).forward, head, input_.float(), **others)
        if getattr(head, "gtp_remat_size", 1) == 1:
            return product(weight.float())
        with mock.patch.object(head, "gtp_remat_size", 1):
            return product(_Gathered.apply(weight))

    with mock.patch.object(head, "forward", forward):
        yield


def check_topology(topology: Topology, case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Losses of every way beside the exact head's; gradients' errors beside those of Megatron's own 16-bit loss."""
    if lacking := missing(topology):
        if dist.get_rank() == 0:
            print(f"not run {case.name}: needs {lacking}", flush=True)
        return
    with fresh_tracker():
        check_every_way(topology, case, device, report)


@contextlib.contextmanager
def fresh_tracker() -> Iterator[None]:
    """Megatron keeps the losses of a process's routers in a tensor as long as the first model that it had."""
    name = "megatron.core.transformer.moe.moe_logging"
    with mock.patch(f"{name}._MOE_METRICS_TRACKER", None) if found(name) else contextlib.nullcontext():
        yield


def check_every_way(topology: Topology, case: cases.Case, device: torch.device, report: harness.Report) -> None:
    settings = (("gradient_accumulation_fusion", True),) if case.main_grad else ()
    with mock.patch.object(megatron_te.layers, "_grad_accum_fusion_available", True):
        chunks = topology.build(dataclasses.replace(case, config=(*case.config, *settings)), device)
    if case.gtp > 1:
        from megatron.core.tensor_parallel.gtp_api import classify_gtp_remat_chains

        classify_gtp_remat_chains(chunks)  # as Megatron-LM does behind DDP
    batches, model = microbatches(case, device), find_language_model(chunks)

    def step(fused: bool = False, scale: float = 1.0, **ways: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if model is not None:
            model.output_layer.gradient_accumulation_fusion = case.main_grad and fused
        with mock.patch.object(chunks[0].config, "grad_scale_func", lambda loss: loss * scale):
            losses = cases.train_step(chunks, functools.partial(forward_step, **ways), batches)
        return losses, {key: gradient / scale for key, gradient in cases.gradients(chunks).items()}

    name = f"{'combined ' if topology.combined else ''}{case.name}"
    for policy in (False, True):
        loss = "policy" if policy else "mean"
        natives = [step(policy=policy, scale=scale)[1] for scale in LOSS_SCALES]
        with exact_head(chunks):
            exact = step(policy=policy)
        errors = {key: relative_error(*of_module(key, natives[0], exact[1])) for key in exact[1]}
        count, worst, error = worst_of_all_ranks(errors)
        detail = f"{count} tensors, worst {worst}: error {error:.1e}, allowed {ALLOWED_OF_NATIVE}"
        report.check(f"{name}: Megatron's, {loss}, gradients", error <= ALLOWED_OF_NATIVE, detail)
        ways = {}
        if topology.combined:
            ways["processed"] = step(fused=True, policy=policy, processed=True)
        elif policy and case.gtp == 1:  # else refused
            ways["captured"] = step(fused=True, policy=True, captured=True)
        for way, options in FLAGS.items() if not topology.combined else ():
            if policy and options.get("known_loss"):
                continue
            handle = enable_fused_linear_ce(chunks, **options)
            assert handle.enabled == (model is not None), handle.reasons
            ways[way] = step(fused=True, policy=policy)
            handle.remove()
        for way, (losses, gradients) in ways.items():
            compare_all(report, f"{name}: {way}, {loss}, losses", losses, {key: exact[0][key] for key in losses})
            check_errors(f"{name}: {way}, {loss}, gradients", gradients, natives, exact[1], report)
