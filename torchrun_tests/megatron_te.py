"""Models of Megatron's layers over TransformerEngine: flag, capture and told losses beside the unfused model.

All in bf16, against the same model in fp32, whose products TransformerEngine makes in TF32. A body in fp8 is beside the
same in fp32, too: its own error is allowed.
"""

import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Callable
from unittest import mock

import harness
import megatron_cases as cases
import megatron_training
import torch
from harness import relative_error, worst_of_all_ranks
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.module import Float16Module
from megatron_heads import check_logits
from megatron_training import check_errors
from torch import Tensor, nn

from megatron_lce import LinearCrossEntropyOutput, capture_lm_head, enable_fused_linear_ce
from megatron_lce.megatron.reasons import find_language_model
from scripts import megatron_runtime

ALLOWED_LOSSES = 1e-2  # relative, where both have the same hidden states: Megatron's loss is that of bf16 logits
FP8_STEPS = 3  # delayed scaling knows its scales from the second step on
RECOMPUTED = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
SELECTED = (("recompute_granularity", "selective"),)  # the core attention's
DELAYED = (("fp8", "hybrid"), ("fp8_recipe", "delayed"), ("fp8_amax_compute_algo", "max"), ("fp8_amax_history_len", 16))
CURRENT = (("fp8", "hybrid"), ("fp8_recipe", "tensorwise"))
ITS_LOSS = (("cross_entropy_loss_fusion", True), ("cross_entropy_fusion_impl", "te"))
FP8_HEAD = (("fp8", "e4m3"), ("fp8_recipe", "mxfp8"), ("fp8_output_proj", True))


def in_te(**settings: object) -> cases.Case:
    case = cases.Case(transformer_impl="transformer_engine", **settings)  # type: ignore[arg-type]
    return cases.in_16_bit(case)


GPT = [
    in_te(),
    in_te(tied=True, mtp=True),
    in_te(masked=True),
    in_te(mtp=True, config=ITS_LOSS),
    in_te(tied=True, known=True),
    in_te(mtp=True, masked=True, known=True),
    in_te(config=RECOMPUTED),
    in_te(tied=True, known=True, config=SELECTED),
    in_te(main_grad=True),
    in_te(sequence_parallel=True, main_grad=True, overlap=True),
    in_te(tied=True, mtp=True, main_grad=True, overlap=True, known=True),
    in_te(sequence_parallel=True, masked=True, known=True, config=DELAYED),
    in_te(tied=True, main_grad=True, config=DELAYED),
    in_te(main_grad=True, known=True, config=(*CURRENT, *RECOMPUTED)),
    in_te(tied=True, mtp=True, config=CURRENT),
    in_te(tensor_parallel=4, sequence_parallel=True, known=True),
    in_te(tensor_parallel=4, tied=True, mtp=True, main_grad=True, overlap=True),
    in_te(tensor_parallel=4, sequence_parallel=True, masked=True, known=True, config=DELAYED),
    in_te(tensor_parallel=4, tied=True, sequence_parallel=True, config=CURRENT),
]
HYBRID = [in_te(), in_te(tied=True, mtp=True, known=True), in_te(main_grad=True, config=DELAYED)]


def checks() -> list[tuple[Callable, cases.Case]]:
    hybrid = HYBRID if importlib.util.find_spec("megatron.core.models.hybrid") is not None else []  # from 0.18
    groups = (
        (check_te, GPT),
        (functools.partial(check_te, build=hybrid_model), hybrid),
        (check_logits, [dataclasses.replace(GPT[0], dtype=torch.float32)]),
        (check_fp8_head, [in_te(config=FP8_HEAD)]),
    )
    return [(check, case) for check, chosen in groups for case in chosen]


def hybrid_model(case: cases.Case, device: torch.device, layers: str = "*-") -> list[nn.Module]:
    """Attention and MLPs by turns, as HybridModel's own spec has them; Mamba's layers, M, need another extension."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    model = megatron_training.hybrid_model(cases.gpt_options(case), hybrid_stack_spec, layers).to(device)
    config = model.config
    if config.bf16:
        model = Float16Module(config, model)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    config.finalize_model_grads_func = finalize_model_grads
    return [model]


def token_loss_step(data_iterator, model: nn.Module):
    """The loss of `cases.captured_forward_step`, told in forward."""
    batch = next(data_iterator)
    with capture_lm_head(model) as head:
        output = model(batch["tokens"], batch["positions"], None)

    def masked(out: LinearCrossEntropyOutput, mask: Tensor) -> Tensor:
        return -out.logprobs * mask

    def loss(_: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mask = batch["loss_mask"]
        result = head.linear_token_loss(batch["labels"].clamp(min=0), masked, mask, entropy=False)
        return result.loss / mask.sum(), {"losses": masked(result.outputs, mask)}

    return output, loss


def train(
    case: cases.Case, device: torch.device, way: str, build: Callable, like: list[nn.Module] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[nn.Module]]:
    """Losses and gradients of one step, native or in one of our ways, and the model; fp8's of a later step."""
    fp8 = "fp8" in dict(case.config)
    settings = (("gradient_accumulation_fusion", True),) if case.main_grad else ()
    # Megatron asks for Apex when it builds a head with this setting; TransformerEngine's layers need none.
    with mock.patch.object(layers, "_grad_accum_fusion_available", True):
        chunks = build(dataclasses.replace(case, config=(*case.config, *settings)), device)
    if like is not None:
        cases.copy_weights(like, chunks)
    cases.enable(chunks, case, way == "flag")
    find_language_model(chunks).output_layer.gradient_accumulation_fusion = case.main_grad and way != "native"
    ways = {"capture": cases.captured_forward_step, "told": token_loss_step}
    forward_step = ways.get(way) or functools.partial(cases.forward_step, masked=case.masked)
    batches = cases.microbatches(case, device)
    with cases.counted_additions() as additions:
        for _ in range(FP8_STEPS if fp8 else 1):
            losses = cases.train_step(chunks, forward_step, batches)
    assert additions.called == (case.main_grad and way != "native"), case
    return losses, cases.gradients(chunks), chunks


def check_te(case: cases.Case, device: torch.device, report: harness.Report, build: Callable = cases.build) -> None:
    """Every way's losses beside native ones, and its errors of all gradients beside native's."""
    name = f"{'hybrid ' if build is hybrid_model else ''}{case.name}"
    losses, native, chunks = train(case, device, "native", build)
    exact_config = tuple(pair for pair in case.config if not pair[0].startswith("fp8"))
    exact_case = dataclasses.replace(cases.in_fp32(case), config=exact_config, main_grad=False, overlap=False)
    _, exact, _ = train(exact_case, device, "native", build, like=chunks)
    plain = not (case.masked or case.known or case.overlap)
    ways = ["flag", *(["capture"] if plain else []), *(["told"] if plain and not case.mtp else [])]
    for way in ways:
        found_losses, found, chunks = train(case, device, way, build)
        errors = {key: relative_error(found_losses[key], losses[key]) for key in losses if "micro" in key}
        count, _, error = worst_of_all_ranks(errors)
        report.check(f"{name}: {way}, losses", error <= ALLOWED_LOSSES, f"{count} microbatches, worst {error:.1e}")
        check_errors(f"{name}: {way}, gradients", found, [native], exact, report)
        if case.overlap:
            check_step(f"{name}: {way}", case, device, chunks, report)


def check_step(
    name: str, case: cases.Case, device: torch.device, chunks: list[nn.Module], report: harness.Report
) -> None:
    """A step of the distributed optimizer over bf16 parameters and fp32 `main_grad`, and the losses behind it."""
    optimizer = megatron_runtime.build_optimizer(chunks, case.dtype, use_distributed_optimizer=True)
    stepped, *_ = optimizer.step()
    forward_step = functools.partial(cases.forward_step, masked=case.masked)
    losses = cases.train_step(chunks, forward_step, cases.microbatches(case, device))
    finite = all(bool(loss.isfinite().all()) for loss in losses.values())
    dtypes = {parameter.main_grad.dtype for chunk in chunks for parameter in chunk.parameters()}
    report.check(f"{name}, optimizer's step", stepped and finite and dtypes == {torch.float32}, f"{dtypes}")


def check_fp8_head(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """A head in MXFP8 is refused by flag and capture, with its reason."""
    chunks = cases.build(case, device)
    expected = "output_layer is a TELMHeadColumnParallelLinear, which is no ColumnParallelLinear of megatron-core"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        handle = enable_fused_linear_ce(chunks)
    report.check(f"{case.name}: fallback", handle.reasons == (expected,), str(handle.reasons))
    refused = f"the LM head cannot be captured: {expected}"
    report.refused(f"{case.name}: capture", capture_lm_head(chunks).__enter__, refused)
