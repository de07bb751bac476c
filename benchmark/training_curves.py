"""One GPT is trained again and again from one seed on the same real text, with its loss made in different ways.

It has Megatron's modules, schedule, DDP with fp32 gradients and distributed optimizer with fp32 Adam. A run records the
loss of each step, that of held-out text at its end, the median step time and the peak memory over the resting state
(weights, gradients, optimizer). `native-again` is the native run with each MLP's neurons in another order, and with a
step's sequences in another order: sums are taken otherwise, and nothing else differs. Its distance from the native run
is the noise that the other ways are held against.
"""

import argparse
import functools
import gc
import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from benchmark import measure, megatron_step, training_text
from benchmark.results import Results
from benchmark.run import RUNS, Run
from scripts import megatron_runtime, training

WARM_UP = 0.05  # of the steps: the learning rate rises in them, and falls to a tenth in the others
HELD_OUT = 4  # microbatches
PROGRESS = 250  # steps from one line to the next


class Text:
    """Sequences of the token file, in its order: first those that are held out, then each step's; again from their end.

    Raises:
        ValueError: the file has too few tokens for a step, or tokens that the model does not know.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.header, tokens = training_text.load(args.text)
        self.microbatches, self.device, length = args.microbatches, device, args.sequence_length
        if int(tokens.max()) >= args.vocab:
            raise ValueError(f"vocab: must be more than {int(tokens.max())}, a token of {args.text}, got {args.vocab}")
        self.sequences = tokens[: (len(tokens) - 1) // length * length + 1].unfold(0, length + 1, length)
        self.together = args.tokens // length  # sequences of a microbatch
        self.trained = len(self.sequences) - HELD_OUT * self.together
        if self.trained < self.together * self.microbatches:
            raise ValueError(f"tokens: a step and the held-out text have more than the {len(tokens):,} of {args.text}")

    def held_out(self) -> list[dict[str, Tensor]]:
        return [self._batch(chosen) for chosen in torch.arange(HELD_OUT * self.together).view(HELD_OUT, self.together)]

    def step(self, step: int, run: Run) -> list[dict[str, Tensor]]:
        """The microbatches of a step; their order and composition are the run's, their union is not."""
        count = self.together * self.microbatches
        indices = HELD_OUT * self.together + torch.arange(step * count, (step + 1) * count) % self.trained
        if run.order:
            indices = indices[torch.randperm(count, generator=torch.Generator().manual_seed(run.order))]
        return [self._batch(chosen) for chosen in indices.view(self.microbatches, self.together)]

    def _batch(self, indices: Tensor) -> dict[str, Tensor]:
        tokens, positions = self.sequences[indices], torch.arange(self.sequences.shape[1] - 1)
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": torch.ones(tokens[:, 1:].shape)}
        batch["position_ids"] = positions.expand(len(indices), -1)
        return {name: tensor.contiguous().to(self.device) for name, tensor in batch.items()}


def shuffle_neurons(model: nn.Module, order: int) -> None:
    """Puts the neurons between the two products of each MLP into another order; the function stays the same."""
    generator = torch.Generator().manual_seed(order)
    for mlp in (module for module in model.modules() if hasattr(module, "linear_fc2")):
        first, second = mlp.linear_fc1.weight.data, mlp.linear_fc2.weight.data
        neurons = torch.randperm(len(first), generator=generator).to(first.device)
        first.copy_(first[neurons])
        second.copy_(second[:, neurons])


def forward_step(batches: Any, model: nn.Module) -> tuple[Tensor, Any]:
    """Megatron's: the loss per token, and the function that masks and sums it."""
    batch = next(batches)
    return model(**batch, attention_mask=None), functools.partial(masked_sum, batch["loss_mask"])


def masked_sum(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """(summed loss, tokens that count, both to report); Megatron divides by the tokens of all microbatches."""
    total, count = (losses.float() * loss_mask).sum(), loss_mask.sum()
    return total, count.int(), (total.detach(), count)


def mean_loss(reports: list[tuple[Tensor, Tensor]]) -> Tensor:
    total, count = (torch.stack(column).double().sum() for column in zip(*reports, strict=True))
    return total / count


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    return float(mean_loss([masked_sum(x["loss_mask"], model(**x, attention_mask=None))[2] for x in batches]))


def learning_rate(args: argparse.Namespace, step: int) -> float:
    warm_up = max(1, round(WARM_UP * args.steps))
    if step < warm_up:
        return args.lr * (step + 1) / warm_up
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, args.steps - warm_up)))


def train(
    args: argparse.Namespace, name: str, text: Text, dtype: torch.dtype, quiet: bool
) -> tuple[nn.Module, dict[str, Any]]:
    """One run from the seed's weights: the model, and what is recorded of it."""
    run, device = RUNS[name], text.device
    sums = {"config": {"calculate_per_token_loss": True}, "ddp_config": {"use_distributed_optimizer": True}}
    model = megatron_step.build(args, dtype, device, **sums)
    if run.order:
        shuffle_neurons(model, run.order)
    settings = {"use_distributed_optimizer": True, "adam_eps": 1e-8, "adam_beta2": 0.95, "weight_decay": 0.1}
    optimizer = megatron_runtime.build_optimizer([model], dtype, args.lr, initial_loss_scale=2.0**16, **settings)
    timer, losses, resting = training.StepTimer(device), [], None
    with megatron_step.chosen(model, run.variant, args.tokens, args):
        for step in range(args.steps):
            if step == training.WARM_UP_STEPS and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                resting = torch.cuda.memory_allocated(device)
            batches = text.step(step, run)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, step)
            with timer:
                reports = training.train_step(model, optimizer, forward_step, iter(batches), len(batches))
            losses.append(mean_loss(reports))
            if not quiet and (step + 1) % PROGRESS == 0:
                print(f"{name}: step {step + 1} of {args.steps}, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
        record = {"time_ms": timer.median_ms(), "resting_mib": None, "peak_mib": None}
        if resting is not None:
            record |= {"resting_mib": resting / measure.MIB}
            record |= {"peak_mib": (torch.cuda.max_memory_allocated(device) - resting) / measure.MIB}
        record["held_out_loss"] = held_out_loss(model, text.held_out())
    record["parameters"] = sum(parameter.numel() for parameter in model.parameters())  # of this rank
    record["losses"] = [round(loss, 6) for loss in torch.stack(losses).tolist()]
    return model, record


@megatron_step.in_megatron
def measure_case(results: Results, args: argparse.Namespace, device: torch.device) -> None:
    """The runs one after another; what each builds is gone before the next begins."""
    text = Text(args, device)
    results.document["text"] = text.header
    for name in args.runs:
        record = {"run": name, "tp": args.tp, **RUNS[name]._asdict(), "step_tokens": args.tokens * args.microbatches}
        results.attempt("training", record, lambda name=name: train(args, name, text, results.dtype, results.quiet)[1])
        gc.collect()  # DDP's hooks make circles
        torch.cuda.empty_cache()  # nothing without a GPU
