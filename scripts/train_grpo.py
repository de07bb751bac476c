"""GRPO of a small Megatron GPT on a task with a verifiable reward, with the fused head on or off.

    torchrun --nproc-per-node 2 -m scripts.train_grpo --tp 2 --sequence-parallel

The model sorts digits character by character. A short supervised warm-up teaches it the format; from then on it learns
from nothing but the rewards of what it samples. The two heads meet in `policy_outputs`, and the fused one's shorter way
to a loss of single tokens is `token_loss_step`: everything else is the same.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import parallel_state
from torch import Tensor

import megatron_lce
from scripts import arguments, materialised_head, megatron_runtime, rl_losses, training
from scripts.rollout import sample
from scripts.sorting_task import EOS, PAD, VOCAB_SIZE, SortingTask

IGNORED = -100


def build_parser() -> argparse.ArgumentParser:
    own = ("digits", "padded_vocab_size", "warm_up_steps", "warm_up_lr", "prompts", "samples", "updates", "temperature")
    own += ("level", "loss", "clip_low", "clip_high", "kl_weight", "entropy_weight")
    common = {"steps": 80, "hidden_size": 64, "lr": 5e-4, "temperature": 0.8, "padded_vocab_size": 64}
    return arguments.parser(__doc__, own, report="grpo.json", loss=("token", "outputs"), **common)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.samples < 2:
        parser.error(f"--samples must be at least 2, as advantages compare a prompt's samples, got {args.samples}")
    parts, batch = args.updates * args.num_microbatches, args.prompts * args.samples
    if parts < 1 or parts > batch:
        parser.error(
            f"--updates times --num-microbatches must be from 1 to {batch}, --prompts times --samples, got {parts}"
        )
    return args


@dataclass
class Batch:
    """Whole sequences of S = prompt + completion tokens, shifted: position t predicts token t + 1. All [B, S]."""

    tokens: Tensor  # int64
    labels: Tensor  # int64, IGNORED where the policy chose nothing
    mask: Tensor  # float32
    advantages: Tensor | None = None  # [B] float32
    old_logprobs: Tensor | None = None  # float32
    reference_logprobs: Tensor | None = None  # float32

    @classmethod
    def of(cls, prompts: Tensor, completions: Tensor, completion_mask: Tensor, **further: Tensor) -> "Batch":
        tokens = torch.cat([prompts, completions], dim=1)
        mask = shifted(completion_mask, tokens.shape[1])
        labels = torch.where(mask > 0, tokens.roll(-1, 1), IGNORED)
        return cls(tokens, labels, mask, **further)

    def split(self, parts: int) -> list["Batch"]:
        """So many parts along B, as equal as can be."""
        columns = {name: tensor.tensor_split(parts) for name, tensor in vars(self).items() if tensor is not None}
        return [Batch(**{name: chunks[part] for name, chunks in columns.items()}) for part in range(parts)]


def shifted(completion_values: Tensor, length: int) -> Tensor:
    """[B, completion] to [B, length]: each value at the position that predicts its token, 0 elsewhere."""
    before = length - completion_values.shape[1] - 1
    return torch.nn.functional.pad(completion_values, (before, 1))


def policy_outputs(model: torch.nn.Module, batch: Batch, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) [B, S] fp32 of the labels at the policy's temperature, by the fused head or without it."""
    if not args.use_fused_linear_ce:
        logits = model(batch.tokens, positions(batch), None)  # [B, S, V / tp]
        return materialised_head.logprobs_and_entropy(logits, batch.labels, args.temperature, VOCAB_SIZE, IGNORED)
    with megatron_lce.capture_lm_head(model) as head:
        model(batch.tokens, positions(batch), None)
    out = head.linear_cross_entropy(batch.labels, **head_options(args))
    return out.logprobs, out.entropy


def positions(batch: Batch) -> Tensor:
    return torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)


def head_options(args: argparse.Namespace) -> dict:
    return {
        "temperature": args.temperature,
        "ignore_index": IGNORED,
        "vocab_size": VOCAB_SIZE,
        "skip_ignored": True,  # prompts and padding; their number is the sampler's, on the device
        "workspace_bytes": int(args.workspace_mib * 2**20),
    }


def loss_options(args: argparse.Namespace) -> dict:
    return {name: getattr(args, name) for name in ("clip_low", "clip_high", "kl_weight", "entropy_weight")}


@torch.no_grad()
def fixed_logprobs(model: torch.nn.Module, batch: Batch, args: argparse.Namespace) -> Tensor:
    """Old or reference logprobs [B, S], a microbatch at a time so that memory is that of a training microbatch."""
    parts = batch.split(args.updates * args.num_microbatches)
    return torch.cat([policy_outputs(model, part, args)[0] for part in parts])


def warm_up_step(batches: Iterator[Batch], model: torch.nn.Module, args: argparse.Namespace):
    """Megatron's forward step for the supervised warm-up: minus the answer's logprobs."""
    batch = next(batches)
    logprobs, _ = policy_outputs(model, batch, args)

    def loss(logprobs: Tensor):
        total, count = -(logprobs * batch.mask).sum(), batch.mask.sum()
        return total, count.int(), (total.detach(), count)

    return logprobs, loss


def grpo_step(batches: Iterator[Batch], model: torch.nn.Module, args: argparse.Namespace):
    """Megatron's forward step for GRPO: Megatron sums `total` and `count` over microbatches and ranks and divides."""
    batch = next(batches)
    logprobs, entropy = policy_outputs(model, batch, args)

    def loss(logprobs: Tensor):
        result = rl_losses.policy_loss(
            logprobs,
            entropy,
            batch.old_logprobs,
            batch.reference_logprobs,
            batch.advantages,
            batch.mask,
            level=args.level,
            **loss_options(args),
        )
        return reported(result)

    return logprobs, loss


def token_loss_step(batches: Iterator[Batch], model: torch.nn.Module, args: argparse.Namespace):
    """The same where each token has a loss of its own, which the head is told before its backward."""
    batch = next(batches)
    with megatron_lce.capture_lm_head(model) as head:
        output = model(batch.tokens, positions(batch), None)

    def token_loss(out: megatron_lce.LinearCrossEntropyOutput, *per_token: Tensor):
        return rl_losses.token_policy_loss(out.logprobs, out.entropy, *per_token, **loss_options(args))

    def loss(_: Tensor):
        advantages = batch.advantages[:, None].expand_as(batch.mask)
        per_token = (batch.old_logprobs, batch.reference_logprobs, advantages)
        result = head.linear_token_loss(batch.labels, token_loss, *per_token, **head_options(args))
        sums = {name: measure.sum() for name, measure in result.metrics.items()}
        return reported(rl_losses.PolicyLoss(result.loss, batch.mask.sum(), **sums, tokens=batch.mask.sum()))

    return output, loss


def reported(result: rl_losses.PolicyLoss) -> tuple[Tensor, Tensor, Tensor]:
    """(sum, count, what to report), as Megatron's schedule takes them."""
    report = [
        result.total.detach(),
        result.count,
        result.clipped,
        result.ratio,
        result.kl,
        result.entropy,
        result.tokens,
    ]
    return result.total, result.count.int(), torch.stack(report)


class Trainer:
    """Policy, frozen reference, optimizer and the generators that make a run repeatable."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device
        self.task = SortingTask(args.digits)
        options = training.gpt_options(args, vocab_size=training.padded_vocab_size(args.padded_vocab_size, VOCAB_SIZE))
        self.policy = megatron_runtime.build_gpt(options, device=device, ddp=True)
        self.reference = megatron_runtime.build_gpt(options, device=device).requires_grad_(False)
        self.dtype = options.dtype
        seed = args.seed + 1000 * parallel_state.get_data_parallel_rank()
        self.prompt_generator = torch.Generator().manual_seed(seed)
        self.sampling_generator = torch.Generator(device).manual_seed(seed)

    def warm_up(self) -> list[float]:
        """Supervised steps on right answers; leaves the reference equal to the policy. Returns the losses."""
        args, losses = self.args, []
        optimizer = megatron_runtime.build_optimizer([self.policy], self.dtype, args.warm_up_lr)
        bar = training.progress(args.warm_up_steps, "supervised warm-up")
        for _ in bar:
            prompts = self.task.prompts(args.prompts * args.samples, self.prompt_generator).to(self.device)
            answers = self.task.answers(prompts)
            batches = Batch.of(prompts, answers, torch.ones_like(answers, dtype=torch.float32))
            parts = batches.split(args.num_microbatches)
            reports = training.train_step(
                self.policy, optimizer, partial(warm_up_step, args=args), iter(parts), len(parts)
            )
            total, count = (torch.stack(column).sum() for column in zip(*reports, strict=True))
            losses.append(training.data_parallel_mean(total, count))
            bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
        for frozen, trained in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
            frozen.data.copy_(trained.data)
        return losses

    def roll_out(self) -> tuple[Batch, dict[str, float]]:
        """Samples, rewards and the logprobs that stay fixed while this step's updates run."""
        args, task = self.args, self.task
        prompts = task.prompts(args.prompts, self.prompt_generator).to(self.device)
        prompts = prompts.repeat_interleave(args.samples, dim=0)
        completions, sampler_logprobs, mask = sample(
            self.policy,
            prompts,
            task.answer_length,
            temperature=args.temperature,
            vocab_size=VOCAB_SIZE,
            eos=EOS,
            pad=PAD,
            generator=self.sampling_generator,
        )
        rewards = task.rewards(prompts, completions)
        advantages = rl_losses.group_advantages(rewards.view(args.prompts, args.samples)).flatten()
        batch = Batch.of(prompts, completions, mask, advantages=advantages)
        batch.old_logprobs = fixed_logprobs(self.policy, batch, args)
        batch.reference_logprobs = fixed_logprobs(self.reference, batch, args)
        gap = rl_losses.logprob_gap(batch.old_logprobs, shifted(sampler_logprobs, batch.tokens.shape[1]), batch.mask)
        return batch, self._measures(rewards, gap)

    def _measures(self, rewards: Tensor, gap: dict[str, Tensor]) -> dict[str, float]:
        count = torch.tensor(float(len(rewards)), device=self.device)
        largest = gap["largest"].clone()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return {
            "reward": training.data_parallel_mean(rewards.sum(), count),
            "all_right": training.data_parallel_mean((rewards == 1).sum(), count),
            "trainer_sampler_mean_difference": training.data_parallel_mean(gap["absolute"], gap["tokens"]),
            "trainer_sampler_largest_difference": float(largest),
            "trainer_sampler_kl": training.data_parallel_mean(gap["kl"], gap["tokens"]),
        }

    def update(self, optimizer, batch: Batch) -> dict[str, float]:
        """The step's optimizer updates, each on its share of the samples."""
        args, reports = self.args, []
        told = args.use_fused_linear_ce and args.loss == args.level == "token"
        step = partial(token_loss_step if told else grpo_step, args=args)
        order = torch.randperm(len(batch.tokens), generator=self.prompt_generator).to(self.device)
        batch = Batch(**{name: tensor[order] for name, tensor in vars(batch).items()})
        for share in batch.split(args.updates):
            parts = share.split(args.num_microbatches)
            reports += training.train_step(self.policy, optimizer, step, iter(parts), len(parts))
        _, first_count, _, first_ratio, *_ = torch.stack(reports[: args.num_microbatches]).sum(0)
        total, count, clipped, _, kl, entropy, tokens = torch.stack(reports).sum(0)
        return {
            "first_ratio": training.data_parallel_mean(first_ratio, first_count),
            "loss": training.data_parallel_mean(total, count),
            "clipped": training.data_parallel_mean(clipped, count),
            "kl": training.data_parallel_mean(kl, tokens),
            "entropy": training.data_parallel_mean(entropy, tokens),
            "share_of_rows_computed": float(tokens) / batch.tokens.numel() if args.use_fused_linear_ce else 1.0,
        }


def work(args: argparse.Namespace, device: torch.device) -> None:
    trainer = Trainer(args, device)
    warm_up_losses = trainer.warm_up()
    optimizer = megatron_runtime.build_optimizer([trainer.policy], trainer.dtype, args.lr)
    peak_before = training.peak_mib(device)
    timer = training.StepTimer(device)
    steps = []
    bar = training.progress(args.steps, f"GRPO, fused head {'on' if args.use_fused_linear_ce else 'off'}")
    for _ in bar:
        with timer:
            batch, measures = trainer.roll_out()
            steps.append({**measures, **trainer.update(optimizer, batch)})
        bar.set_postfix(reward=f"{steps[-1]['reward']:.3f}", refresh=False)
    training.write_report(
        args.out / args.report, args, device, timer, peak_before, warm_up_losses=warm_up_losses, steps=steps
    )


if __name__ == "__main__":
    training.run(work, parse_arguments())
