"""How far a trainer's logprobs are from its sampler's on a GPT that has learnt real text: logits rounded, or not.

The GPT is trained in 16 bits as `training_curves` trains. The sampler then reads held-out text in that dtype,
materialises its logits and draws a label for each token from them, at temperature 1. The trainer gives the logprobs of
the same labels by `linear_cross_entropy`, with the same weights and hidden states of another program.
"""

import argparse
import functools

import torch
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

import megatron_lce
from benchmark import measure, megatron_step, training_curves
from benchmark.results import Results

COLUMNS = {  # what logits are rounded to: the sampler's, the trainer's
    "both_fp32": (None, None),
    "sampler_bf16": (torch.bfloat16, None),
    "both_bf16": (torch.bfloat16, torch.bfloat16),
}
States = list[Tensor]  # [b, s, H] of each batch, contiguous


@torch.no_grad()
def states(model: nn.Module, batches: list[dict[str, Tensor]]) -> States:
    """What stands in front of the head."""
    found = []
    for batch in batches:
        with megatron_lce.capture_lm_head(model) as head:
            model(batch["input_ids"], batch["position_ids"], None)
        found.append(head.hidden.transpose(0, 1).contiguous())
    return found


def states_in_halves(model: nn.Module, batches: list[dict[str, Tensor]]) -> States:
    """The same weights where each row-parallel product is two, rounded and then added, as at a TP size of 2."""

    def halves(module: nn.Module, inputs: tuple[Tensor, ...], output: tuple) -> tuple:
        pairs = zip(inputs[0].chunk(2, -1), module.weight.chunk(2, 1), strict=True)
        first, second = (x.contiguous() @ weight.contiguous().t() for x, weight in pairs)
        return first + second, *output[1:]

    handles = [x.register_forward_hook(halves) for x in model.modules() if isinstance(x, RowParallelLinear)]
    found = states(model, batches)
    for handle in handles:
        handle.remove()
    return found


def sampler_logits(hidden: Tensor, weight: Tensor, rounded: torch.dtype | None) -> Tensor:
    """Whole logits as a sampler makes them: rounded by the product itself, or in fp32 throughout; [b, s, V] fp32."""
    if rounded is None:
        hidden, weight = hidden.float(), weight.float()
    return (hidden @ weight.t()).to(rounded or torch.float32).float()


@torch.no_grad()
def differences(sampler: States, trainer: States, weight: Tensor) -> dict[str, float]:
    """How far hidden states are apart, relative to their norm, and mean |difference of logprobs| for each column."""
    record = {"hidden_difference": measure.relative_error(torch.cat(trainer).float(), torch.cat(sampler).float())}
    for name, (rounded, logits_dtype) in COLUMNS.items():
        generator, apart = torch.Generator(weight.device).manual_seed(0), []
        for ours, theirs in zip(trainer, sampler, strict=True):
            logprobs = sampler_logits(theirs, weight, rounded).log_softmax(-1)
            labels = torch.multinomial(logprobs.exp().flatten(0, 1), 1, generator=generator).view(theirs.shape[:2])
            out = megatron_lce.linear_cross_entropy(
                ours, weight.to(ours.dtype), labels, entropy=False, logits_dtype=logits_dtype
            )
            apart.append((out.logprobs - logprobs.gather(-1, labels[..., None])[..., 0]).abs())
        record[name] = torch.cat(apart).mean().item()
    return record


@megatron_step.in_megatron
def measure_case(results: Results, args: argparse.Namespace, device: torch.device) -> None:
    """Trains, then compares."""
    args.tp = 1
    text = training_curves.Text(args, device)
    model, trained = training_curves.train(args, "known", text, results.dtype, results.quiet)
    batches, weight = text.held_out(masked=False), unwrap_model(model).output_layer.weight.detach()
    sampler = states(model, batches)
    trained["losses"] = trained["losses"][:: training_curves.PROGRESS]
    trained["logits_std"] = torch.cat([sampler_logits(x, weight, None).flatten() for x in sampler]).std().item()
    results.document |= {"text": text.header, "model": trained, "tokens": args.tokens * len(batches)}
    programs = {
        "same": lambda: sampler,
        "halves": functools.partial(states_in_halves, model, batches),
        "fp32": lambda: states(megatron_step.build_exact(args, model, device), batches),
    }
    for name, run in programs.items():
        results.attempt("rounding", {"trainer": name}, lambda run=run: differences(sampler, run(), weight))
