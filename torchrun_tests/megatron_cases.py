"""Megatron models in every layout, and one training step of each whose gradients can be compared."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor, nn

from megatron_lce import FusedLinearCE, capture_lm_head, enable_fused_linear_ce
from megatron_lce.megatron.main_grad import MainGradSink
from megatron_lce.megatron.reasons import find_language_model
from scripts import megatron_runtime

# A vocabulary so small that an untrained model's guess is right now and then.
VOCAB_SIZE, SEQUENCE, BATCH = 24, 16, 4
LOSS_SCALE = 2.0**12  # of fp16, by which Megatron's schedule multiplies the loss


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination of what a Megatron user may have switched on."""

    tensor_parallel: int = 2
    tied: bool = False
    sequence_parallel: bool = False
    mtp: bool = False
    pipeline: bool = False  # PP 2
    main_grad: bool = False  # gradient_accumulation_fusion on the head
    virtual_pipeline: bool = False
    overlap: bool = False  # overlapped gradient reduction and parameter gather, distributed optimizer's buffers
    masked: bool = False  # labels are valid and the model gets the mask; fused, masked rows are ignored and skipped
    known: bool = False  # the flag makes gradients in forward
    dtype: torch.dtype = torch.float32
    hidden_size: int = 32
    transformer_impl: str = "local"
    config: tuple[tuple[str, Any], ...] = ()  # further TransformerConfig fields
    context_parallel: int = 1
    expert_parallel: int = 1  # of data- and context-parallel ranks, and of tensor-parallel ones beside ETP 1
    expert_tensor_parallel: int | None = None  # None: as the rest
    gtp: int = 1  # generalized tensor parallelism: parts of each rank's shard
    packed: str = ""  # sequences in one row, "packed", and with padding between them, "padded"
    sequence: int = SEQUENCE  # tokens of a sequence, over all context-parallel ranks

    @property
    def name(self) -> str:
        flags = ("sequence_parallel", "mtp", "pipeline", "main_grad", "virtual_pipeline", "overlap", "masked", "known")
        words = [f"TP={self.tensor_parallel}"] if self.tensor_parallel != 2 else []
        words += [f"CP={self.context_parallel}"] if self.context_parallel > 1 else []
        words += [f"EP={self.expert_parallel}"] if self.expert_parallel > 1 else []
        words += [f"ETP={self.expert_tensor_parallel}"] if self.expert_tensor_parallel else []
        words += [f"GTP={self.gtp}"] if self.gtp > 1 else []
        words += [self.packed] if self.packed else []
        words += ["tied" if self.tied else "untied", *(flag for flag in flags if getattr(self, flag))]
        words += [self.transformer_impl] if self.transformer_impl != "local" else []
        words += [str(self.dtype).removeprefix("torch.")] if self.dtype != torch.float32 else []
        return " ".join([*words, *(f"{key}={value}" for key, value in self.config)])

    @property
    def stages(self) -> int:
        return 2 if self.pipeline else 1

    @property
    def layout(self) -> tuple[tuple[str, int | None], ...]:
        """The sizes that `initialize_model_parallel` takes, by name."""
        sizes = {
            "tensor_model_parallel_size": self.tensor_parallel,
            "pipeline_model_parallel_size": self.stages,
            "virtual_pipeline_model_parallel_size": 2 if self.virtual_pipeline else None,
            "context_parallel_size": self.context_parallel,
            "expert_model_parallel_size": self.expert_parallel,
            "expert_tensor_parallel_size": self.expert_tensor_parallel,
        }
        return (*sizes.items(), *([("gtp_remat_size", self.gtp)] if self.gtp > 1 else []))

    @property
    def ranks(self) -> int:
        of_experts = self.expert_parallel * (self.expert_tensor_parallel or self.tensor_parallel)
        return max(self.tensor_parallel * self.context_parallel * self.gtp, of_experts) * self.stages


FACTORS = ("tied", "sequence_parallel", "mtp", "pipeline", "main_grad")


def all_combinations() -> list[Case]:
    return [
        Case(**dict(zip(FACTORS, values, strict=True)))
        for values in itertools.product((False, True), repeat=len(FACTORS))
    ]


def pairwise_combinations() -> list[Case]:
    """Six cases in which each two factors meet in all four ways: none set, and all but one set for each one."""
    return [Case(), *(Case(**{factor: factor != left_out for factor in FACTORS}) for left_out in FACTORS)]


def gpt_options(case: Case) -> megatron_runtime.GptOptions:
    further: dict[str, Any] = {"mtp_loss_scaling_factor": 0.1} if case.mtp else {}
    if case.expert_parallel > 1:
        further["expert_model_parallel_size"] = case.expert_parallel
        further["expert_tensor_parallel_size"] = case.expert_tensor_parallel or case.tensor_parallel
    if case.gtp > 1:
        further["tensor_parallel_num_weight_shards"] = case.tensor_parallel * case.gtp
    return megatron_runtime.GptOptions(
        num_layers=case.stages * (2 if case.virtual_pipeline else 1),  # one on each stage
        hidden_size=case.hidden_size,
        num_heads=max(4, case.tensor_parallel),
        vocab_size=VOCAB_SIZE,
        tied=case.tied,
        mtp_layers=1 if case.mtp else 0,
        sequence_parallel=case.sequence_parallel,
        dtype=case.dtype,
        transformer_impl=case.transformer_impl,
        config={**further, **dict(case.config)},
    )


def build(case: Case, device: torch.device) -> list[nn.Module]:
    """The case's model chunks in DistributedDataParallel with fp32 gradients."""
    overlap = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer"), case.overlap)
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    chunks = [
        megatron_runtime.build_gpt(gpt_options(case), device=device, vp_stage=stage, ddp=True, ddp_config=overlap)
        for stage in ([None] if virtual is None else range(virtual))
    ]
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        if case.overlap:
            chunk.config.no_sync_func = chunk.no_sync
    return chunks


def has_head(chunks: list[nn.Module]) -> bool:
    return find_language_model(chunks) is not None


def set_main_grad_fusion(chunks: list[nn.Module]) -> None:
    """Megatron refuses the setting at construction for want of Apex; on the built head only our path reads it."""
    if has_head(chunks):
        find_language_model(chunks).output_layer.gradient_accumulation_fusion = True


def enable(chunks: list[nn.Module], case: Case, fused: bool) -> FusedLinearCE:
    """The flag as the case has it; refused on no stage with a head."""
    options = {"skip_masked": case.masked, "known_loss": case.known}
    handle = enable_fused_linear_ce(chunks, use_fused_linear_ce=fused, **options)
    assert handle.enabled == (fused and has_head(chunks)), handle.reasons
    if fused and case.main_grad:
        set_main_grad_fusion(chunks)
    return handle


@contextlib.contextmanager
def counted_additions() -> Iterator[mock.Mock]:
    """Counts the weight gradients that were added to `main_grad` on this rank."""
    with mock.patch.object(MainGradSink, "finish", autospec=True, side_effect=MainGradSink.finish) as finish:
        yield finish


def in_16_bit(case: Case, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Wider as well: the ratio of two rounding errors of 32 numbers is mostly noise."""
    return dataclasses.replace(case, dtype=dtype, hidden_size=128)


def in_fp32(case: Case) -> Case:
    return dataclasses.replace(case, dtype=torch.float32)


def copy_weights(source: list[nn.Module], target: list[nn.Module]) -> None:
    """Weights of the same model in another dtype, so with other wrappers around it."""
    for source_chunk, target_chunk in zip(source, target, strict=True):
        parameters = zip(source_chunk.parameters(), target_chunk.parameters(), strict=True)
        for source_parameter, target_parameter in parameters:
            target_parameter.data.copy_(source_parameter.data)


def microbatches(case: Case, device: torch.device) -> list[dict[str, Tensor]]:
    """Random tokens, different on each data-parallel rank; masked positions hold negative labels.

    Two of them add up a gradient. A virtual pipeline of two stages each goes back and forth with four.
    """
    number = 4 if case.virtual_pipeline else 2
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    shape = (number, BATCH, case.sequence)
    labels = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
    loss_mask = (torch.rand(shape, generator=generator) > 0.25).float()
    labels = torch.where(loss_mask.bool(), labels, torch.randint(-100, 0, shape, generator=generator))
    tokens = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
    positions = torch.arange(case.sequence).expand(shape)
    parts = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "positions": positions}
    return [{name: part[i].to(device) for name, part in parts.items()} for i in range(number)]


def train_step(chunks: list[nn.Module], forward_step: Any, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Megatron's forward-backward schedule over the microbatches; gradients are left in `main_grad`.

    Returns on the last stage each microbatch's losses per token and what Megatron logs of its MTP heads: their losses
    and, from 0.19, how often their first guess was right.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    MTPLossLoggingHelper.tracker.clear()
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=batches[0]["tokens"].shape[1] * parallel_state.get_context_parallel_world_size(),
        micro_batch_size=batches[0]["tokens"].shape[0],
        forward_only=False,
    )
    logged = {name: value.clone() for name, value in MTPLossLoggingHelper.tracker.items() if isinstance(value, Tensor)}
    assert logged.get("correct_values", torch.ones(1)).all(), "no guess was right: the comparison would be empty"
    return {f"microbatch {index}": result["losses"] for index, result in enumerate(results)} | logged


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module, masked: bool = False):
    """As in Megatron's pretrain_gpt: the model returns its loss per token, [b, s]."""
    batch = next(data_iterator)
    given = {"labels": batch["labels"], **_mtp_arguments(model, batch)}
    if masked:
        given |= {"labels": batch["labels"].clamp(min=0), "loss_mask": batch["loss_mask"]}
    output = model(batch["tokens"], batch["positions"], None, **given)
    return output, lambda losses: masked_mean(losses, batch["loss_mask"])


def captured_forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module):
    """The same loss from the captured head, as an RL step takes its logprobs; stages without a head capture nothing."""
    batch = next(data_iterator)
    with capture_lm_head(model) as head:
        output = model(batch["tokens"], batch["positions"], None, **_mtp_arguments(model, batch, labels=True))

    def loss(_: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        labels = batch["labels"].clamp(min=0)
        return masked_mean(-head.linear_cross_entropy(labels, entropy=False).logprobs, batch["loss_mask"])

    return output, loss


def _mtp_arguments(model: nn.Module, batch: dict[str, Tensor], labels: bool = False) -> dict[str, Tensor]:
    names = ("loss_mask", "labels") if labels else ("loss_mask",)
    return {name: batch[name] for name in names} if model.config.mtp_num_layers else {}


def masked_mean(losses: Tensor, loss_mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    # where, not a product: the native path's loss of a negative label is no matter, and ours is 0
    kept = torch.where(loss_mask.bool(), losses.float(), 0.0)
    return kept.sum() / loss_mask.sum(), {"losses": kept.detach()}


def gradients(chunks: list[nn.Module]) -> dict[str, Tensor]:
    """Every parameter's accumulated gradient, by name without wrappers; parameters of all chunks together."""
    return {
        f"{index}.{name.removeprefix('module.').removeprefix('module.')}": parameter.main_grad.detach().clone()
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
