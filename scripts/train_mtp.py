"""Training the MTP heads of a small Megatron GPT on three losses, and their acceptance rates in speculative decoding.

    torchrun --nproc-per-node 2 -m scripts.train_mtp --tp 2 --sequence-parallel

First the GPT is trained without MTP, as train_sft trains it. Then it is frozen, and from the same weights its MTP
layers learn from cross-entropy, from an LK loss (a mixture of forward KL and total variation) and from total variation.
The acceptance rate of a depth is one minus the total variation between its distribution and the main head's.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import megatron_lce
from scripts import arguments, megatron_runtime, pictures, sft_data, train_distill, train_sft, training

IGNORED = -100
KL_WEIGHT = 0.3  # of the LK loss; the rest is total variation's
LOSSES = {
    "cross-entropy": None,
    "LK": lambda out: KL_WEIGHT * out.forward_kl + (1 - KL_WEIGHT) * out.tv,
    "total variation": lambda out: out.tv,
}


def build_parser() -> argparse.ArgumentParser:
    own = ("vocab_size", "row_length", "teacher_steps", "teacher_lr", "held_out_rows", "mtp_layers")
    return arguments.parser(__doc__, own, steps=150, lr=3e-3, report="mtp.json")


def mtp_step(batches: Iterator[sft_data.PackedBatch], model: nn.Module, name: str, args: argparse.Namespace):
    """Megatron's forward step: the sum over depths of the loss of this name."""
    device = next(model.parameters()).device
    batch: sft_data.PackedBatch = next(batches).to(device)
    head = captured(model, batch)
    labels = torch.where(batch.loss_mask > 0, batch.labels, IGNORED)
    options = {"workspace_bytes": int(args.workspace_mib * 2**20), "skip_ignored": True}
    loss, total = LOSSES[name], torch.zeros((), device=device)
    for mtp_head in head.mtp_heads:
        if loss is None:
            result = mtp_head.linear_token_loss(labels, lambda out: -out.logprobs, entropy=False, **options)
        else:
            result = mtp_head.linear_divergence_loss(head, labels, loss, kinds=("forward_kl", "tv"), **options)
        total = total + result.loss
    count = batch.loss_mask.sum()
    return total, lambda _: (total, count.int(), (total.detach(), count))


def captured(model: nn.Module, batch: sft_data.PackedBatch) -> megatron_lce.CapturedHead:
    with megatron_lce.capture_lm_head(model, mtp="capture") as head:
        model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params())
    return head


@torch.no_grad()
def acceptance(model: nn.Module, rows: list[sft_data.PackedBatch]) -> list[float]:
    """Mean acceptance rate of each depth, over the completion tokens that have a whole chain."""
    sums = []
    for row in rows:
        head = captured(model, row)
        labels = torch.where(row.loss_mask > 0, row.labels, IGNORED)
        chain = head.chain_mask(labels)
        kept = [(1 - h.linear_divergence(head, kinds=("tv",), labels=labels).tv) * chain for h in head.mtp_heads]
        sums.append(torch.stack([*(rate.sum() for rate in kept), chain.sum().float()]))
    *rates, count = torch.stack(sums).sum(0)
    return [training.data_parallel_mean(rate, count) for rate in rates]


def frozen_but_mtp(options: megatron_runtime.GptOptions, trunk: dict[str, Tensor], device: torch.device) -> nn.Module:
    """The GPT with these weights, of which only the MTP layers are trained."""
    model = megatron_runtime.build_gpt(options, device=device)
    model.load_state_dict(trunk, strict=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mtp." in f".{name}")
    return megatron_runtime.with_ddp(model)


def work(args: argparse.Namespace, device: torch.device) -> None:
    batches, held_out = train_distill.load_batches(args, device)
    options = training.gpt_options(args, vocab_size=args.vocab_size)
    gpt = megatron_runtime.build_gpt(options, device=device, ddp=True)
    handle = megatron_lce.enable_fused_linear_ce(gpt, use_fused_linear_ce=args.use_fused_linear_ce, skip_masked=True)
    taught = train_distill.Trainer("GPT, supervised", gpt, args.teacher_lr, args.teacher_steps, args)
    taught.run(partial(train_sft.forward_step, device=device), batches, held_out)
    handle.remove()
    trunk = gpt.module.state_dict()
    peak_before = training.peak_mib(device)
    curves: dict[str, list[tuple[int, list[float]]]] = {}
    losses: dict[str, list[float]] = {}
    for name in LOSSES:
        model = frozen_but_mtp(replace(options, mtp_layers=args.mtp_layers), trunk, device)
        rows, _ = train_distill.load_batches(args, device)  # the same ones for each loss
        trainer = train_distill.Trainer(f"MTP on {name}", model, args.lr, args.steps, args)
        trainer.run(partial(mtp_step, name=name, args=args), rows, held_out, acceptance)
        curves[name], losses[name] = trainer.measured, trainer.losses
    if torch.distributed.get_rank() == 0:
        picture = (args.out / args.report).with_suffix(".png")
        pictures.draw_mtp(picture, curves)
        Console().print(summary(curves, args))
        print(f"Picture: {picture}")
    training.write_report(
        args.out / args.report, args, device, trainer.timer, peak_before, acceptance=curves, losses=losses
    )


def summary(curves: dict[str, list[tuple[int, list[float]]]], args: argparse.Namespace) -> Table:
    table = Table(title=f"Acceptance of MTP heads after {args.steps} steps, TP={args.tp}")
    for column in ("loss", *(f"depth {depth}" for depth in range(1, args.mtp_layers + 1))):
        table.add_column(column, justify="left" if column == "loss" else "right")
    for name, curve in curves.items():
        table.add_row(name, *(f"{rate:.1%}" for rate in curve[-1][1]))
    return table


if __name__ == "__main__":
    training.run(work, build_parser().parse_args())
