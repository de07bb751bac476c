"""A whole training step of a Megatron GPT with its own losses and with the flag.

Forward and backward by Megatron's schedule, DDP with fp32 gradients, no optimizer step: time, peak memory over the
resting state (weights, gradient buffers, data), losses, and every parameter's gradient against an fp32 run of the same
weights. One model serves all variants, so they share its weights to the bit. Masked tokens have valid labels and a
`loss_mask` of 0, as in Megatron's batches; `-skip` variants ignore and skip them. Megatron's losses are `native`, fused
`native-fused`, and TransformerEngine's `te` and `te-overwrite` (`overwrite_input=True`). Layers are local or
TransformerEngine's; those of the exact run are local.
"""

import argparse
import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.language_module import language_module
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn

import megatron_lce
from benchmark import measure, te_loss
from benchmark.providers import Provider
from benchmark.results import Results
from scripts import megatron_runtime

# In a round; see `measure.SETTLE_MS`. Every variant starts on an idle GPU, and in its first step `known_loss` has the
# host wait for the GPU once more. At TP=4 the host takes nearly as long for a step, so its lead grows over several.
CALLS = {"repeats": 2, "settle": 4}
WHOLE = 16384  # tokens that native and the exact run take at once; their logits do not fit beside more


def build(
    args: argparse.Namespace,
    dtype: torch.dtype,
    device: torch.device,
    config: dict[str, Any] | None = None,
    ddp_config: dict[str, Any] | None = None,
    transformer_impl: str | None = None,
) -> nn.Module:
    """The GPT, its matrices drawn on the device: filling V x H on every CPU rank takes minutes.

    `config` and `ddp_config` hold further fields of Megatron's configurations, by name. `transformer_impl` None: that
    of the arguments.
    """
    options = megatron_runtime.GptOptions(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_heads=args.heads,
        vocab_size=args.vocab,
        max_sequence_length=args.sequence_length,
        sequence_parallel=args.tp > 1,
        dtype=dtype,
        transformer_impl=transformer_impl or getattr(args, "transformer_impl", "local"),
        config={"use_cpu_initialization": False, "perform_initialization": False, **(config or {})},
    )
    model = megatron_runtime.build_gpt(options, device=device, ddp=True, ddp_config=ddp_config)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
    return model


def build_exact(args: argparse.Namespace, model: nn.Module, device: torch.device) -> nn.Module:
    """The same weights in fp32, in local layers: TransformerEngine multiplies fp32 in TF32."""
    exact = build(args, torch.float32, device, transformer_impl="local")
    weights = parameters(model)
    with torch.no_grad():
        for name, parameter in parameters(exact).items():
            parameter.copy_(weights[name])
    return exact


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By the names in local layers, sorted: TransformerEngine's matrices hold the norms in front of them."""
    moved = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }
    found = {}
    for name, parameter in unwrap_model(model).named_parameters():
        for there, here in moved.items():
            name = name.replace(there, here)
        found[name] = parameter
    return dict(sorted(found.items()))


def make_batches(args: argparse.Namespace, tokens: int, masked: float, device: torch.device) -> list[dict[str, Tensor]]:
    """One microbatch of `tokens` random tokens for every pipeline stage; the same on every rank.

    `masked` of them, scattered, do not count.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (tokens // args.sequence_length, args.sequence_length)
    batches = []
    for _ in range(args.pp):
        input_ids, labels = torch.randint(args.vocab, (2, *shape), generator=generator)
        loss_mask = (torch.randperm(tokens, generator=generator) >= masked * tokens).float().view(shape)
        position_ids = torch.arange(args.sequence_length).expand(shape)
        batch = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels, "loss_mask": loss_mask}
        batches.append({name: tensor.to(device) for name, tensor in batch.items()})
    return batches


def forward_step(batches: Any, model: nn.Module, pieces: int = 1) -> tuple[Tensor, Any]:
    batch, counted = next(batches)
    losses = model(**batch, attention_mask=None)

    def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses = losses.float() * batch["loss_mask"]
        return pieces * losses.sum() / counted, {"losses": losses.detach()}

    return losses, mean


def in_pieces(batches: list[dict[str, Tensor]], pieces: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Some sequences of a batch, and how many of the whole batch's tokens count."""
    for batch in batches:
        counted = batch["loss_mask"].sum()
        for tensors in zip(*(tensor.chunk(pieces) for tensor in batch.values()), strict=True):
            yield dict(zip(batch, tensors, strict=True)), counted


def step(model: nn.Module, batches: list[dict[str, Tensor]], pieces: int = 1) -> list[dict]:
    """Forward and backward of every microbatch; gradients are added to `main_grad`.

    In several pieces a batch has the same gradients in less memory.
    """
    batch_size, sequence_length = batches[0]["labels"].shape
    micro_batch_size = batch_size // pieces
    return get_forward_backward_func()(
        forward_step_func=partial(forward_step, pieces=pieces),
        data_iterator=in_pieces(batches, pieces),
        model=model,
        num_microbatches=len(batches) * pieces,
        seq_length=sequence_length,
        micro_batch_size=micro_batch_size,
        forward_only=False,
    )


def losses_and_gradients(
    model: nn.Module, batches: list[dict[str, Tensor]], pieces: int = 1
) -> tuple[Tensor | None, list[Tensor]]:
    """Per-token losses (None but on the last stage) and every parameter's fp32 gradient, from one step."""
    model.zero_grad_buffer()
    records = step(model, batches, pieces)
    losses = torch.cat([record["losses"] for record in records]) if records else None
    return losses, [parameter.main_grad.clone() for parameter in parameters(model).values()]


def te_losses(args: argparse.Namespace) -> list[Provider]:
    """TransformerEngine's losses, as variants."""
    found = {"te": partial(te_loss.load, args.te), "te-overwrite": partial(te_loss.load, args.te, overwrite_input=True)}
    return [Provider(name, load, holds_logits=True) for name, load in found.items() if name in args.variants]


@contextlib.contextmanager
def chosen(
    model: nn.Module, variant: str, tokens: int, args: argparse.Namespace, te: te_loss.Loss | None = None
) -> Iterator[None]:
    """The variant's loss is in force; `te` is TransformerEngine's, where the variant has it."""
    config = get_model_config(model)
    config.cross_entropy_loss_fusion = te is not None or variant == "native-fused"
    config.cross_entropy_fusion_impl = "native" if te is None else "te"
    handle = megatron_lce.enable_fused_linear_ce(
        model,
        use_fused_linear_ce=variant.startswith("ours"),
        on_unsupported="raise",
        skip_masked=variant.endswith("-skip"),
        known_loss=True if variant.startswith("ours-known") else None,
        logits_cache_bytes={"ours": None, "ours-skip": None, "ours-cached": 2**62}.get(variant, 0),
    )
    assert handle.enabled == (variant.startswith("ours") and parallel_state.is_pipeline_last_stage()), handle.reasons
    try:
        with mock.patch.object(language_module, "te_parallel_cross_entropy", te):
            yield
    finally:
        handle.remove()


def relative_errors(gradients: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [measure.relative_error(*pair) for pair in zip(gradients, exact, strict=True)]


def errors(
    model: nn.Module, batches: list[dict[str, Tensor]], exact: tuple, native_errors: list[float], record: dict
) -> dict:
    """The slowest rank's record, with errors against the fp32 run: the worst token, the worst parameter, and that over
    native's error.
    """
    losses, gradients = losses_and_gradients(model, batches)
    found = {"loss": 0.0, "loss_max_error": 0.0}  # of a stage without a head
    if losses is not None:
        counted = sum(batch["loss_mask"].sum() for batch in batches)
        found = {"loss": (losses.sum() / counted).item(), "loss_max_error": (losses - exact[0]).abs().max().item()}
    relative = relative_errors(gradients, exact[1])
    found["gradient_relative_error"] = max(relative)
    if all(native_errors):  # in fp32 native is the exact run itself
        found["over_native_error"] = max(error / native for error, native in zip(relative, native_errors, strict=True))
    return measure.slowest_rank(record | found)


def in_megatron(work: Callable[[Results, argparse.Namespace, torch.device], None]) -> Callable[..., None]:
    """A case that does this between Megatron's start and end. What it builds is gone when the groups end."""

    def measure_case(results: Results, args: argparse.Namespace) -> None:
        sizes = (getattr(args, name, 1) for name in ("tp", "pp"))
        work(results, args, megatron_runtime.initialize(*sizes, device=args.device))
        megatron_runtime.teardown()

    return measure_case


@in_megatron
def measure_case(results: Results, args: argparse.Namespace, device: torch.device) -> None:
    """All variants at every number of tokens. They share one model, so each is put in force when it is called."""
    te = results.load(te_losses(args))
    model = build(args, results.dtype, device)
    for tokens, masked in itertools.product(args.tokens, args.masked):
        batches = make_batches(args, tokens, masked, device)
        pieces = math.gcd(len(batches[0]["labels"]), math.ceil(tokens / WHOLE))
        exact = losses_and_gradients(build_exact(args, model, device), batches, pieces)
        measure.free_memory(device)
        with chosen(model, "native", tokens, args):
            native_errors = relative_errors(losses_and_gradients(model, batches, pieces)[1], exact[1])
        measure.free_memory(device)
        turns = []
        for name in args.variants:
            record = {"tp": args.tp, "pp": args.pp, "tokens": tokens, "masked": masked, "variant": name}
            if args.transformer_impl != "local":
                record["layers"] = args.transformer_impl
            if name.startswith("te") and name not in te:
                results.unsupported("steps", record, "TransformerEngine's files are not there")
                continue
            call, in_force = partial(step, model, batches), partial(chosen, model, name, tokens, args, te.get(name))
            after = partial(errors, model, batches, exact, native_errors)
            turns.append((record, measure.Timed(call, device, in_force, after)))
        results.take_turns("steps", turns, dist.barrier, **CALLS)
