"""Supervised fine-tuning of a small Megatron GPT on the standard library's functions, with the fused head on or off.

    torchrun --nproc-per-node 2 -m scripts.train_sft --tp 2 --sequence-parallel

The flag is the only difference between the two runs: `megatron_lce.enable_fused_linear_ce` below, which computes
gradients in forward, with three matmuls. With --loss token the fused head is captured and gets the loss as a function
(`linear_token_loss`), as a loss that weights its tokens needs it.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state

import megatron_lce
from scripts import arguments, megatron_runtime, sft_data, training

IGNORED = -100


def build_parser() -> argparse.ArgumentParser:
    own = ("vocab_size", "padded_vocab_size", "row_length", "loss", "transformer_impl")
    return arguments.parser(__doc__, own, report="sft.json", loss=("flag", "token"))


def forward_step(batches, model: torch.nn.Module, device: torch.device):
    """Megatron's forward step: the per-token loss and the function that masks and sums it."""
    batch: sft_data.PackedBatch = next(batches).to(device)
    loss = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,  # tells the enabled head which tokens to leave out
        packed_seq_params=batch.packed_seq_params(),
    )  # [1, T]
    return loss, partial(masked_loss, batch.loss_mask)


def token_loss_step(batches, model: torch.nn.Module, device: torch.device, workspace_bytes: int):
    """The same where the head knows the loss before its backward: `linear_token_loss`."""
    batch: sft_data.PackedBatch = next(batches)
    counted = int(batch.loss_mask.sum())  # on the host, as a data loader knows it: the head need not count
    batch = batch.to(device)
    with megatron_lce.capture_lm_head(model) as head:
        output = model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params())

    def loss(_: torch.Tensor):
        total = head.linear_token_loss(
            torch.where(batch.loss_mask > 0, batch.labels, IGNORED),
            lambda out: -out.logprobs,
            ignore_index=IGNORED,
            entropy=False,
            skip_ignored=counted,
            workspace_bytes=workspace_bytes,
        ).loss
        count = batch.loss_mask.sum()
        return total, count.int(), (total.detach(), count)

    return output, loss


def masked_loss(loss_mask: torch.Tensor, loss: torch.Tensor):
    """(summed loss, tokens that count, what to report); Megatron divides by the tokens of every rank."""
    total, count = (loss.float() * loss_mask).sum(), loss_mask.sum()
    return total, count.int(), (total.detach(), count)


def work(args: argparse.Namespace, device: torch.device) -> None:
    examples, pad_id = training.load_examples(args)
    replica = parallel_state.get_data_parallel_rank()
    replicas = parallel_state.get_data_parallel_world_size()
    batches = sft_data.packed_batches(examples[replica::replicas], pad_id, args.row_length)

    vocab_size = training.padded_vocab_size(args.padded_vocab_size, args.vocab_size)
    options = training.gpt_options(args, vocab_size=vocab_size, transformer_impl=args.transformer_impl)
    model = megatron_runtime.build_gpt(options, device=device, ddp=True)
    optimizer = megatron_runtime.build_optimizer([model], options.dtype, args.lr)
    workspace_bytes = int(args.workspace_mib * 2**20)
    handle = megatron_lce.enable_fused_linear_ce(
        model,
        use_fused_linear_ce=args.use_fused_linear_ce,
        workspace_bytes=workspace_bytes,
        skip_masked=True,
    )
    step = partial(forward_step, device=device)
    if args.use_fused_linear_ce and args.loss == "token":
        step = partial(token_loss_step, device=device, workspace_bytes=workspace_bytes)

    peak_before = training.peak_mib(device)
    timer = training.StepTimer(device)
    losses, computed = [], 0.0
    bar = training.progress(args.steps, f"SFT, fused head {'on' if handle.enabled else 'off'}")
    for _ in bar:
        with timer:
            reports = training.train_step(model, optimizer, step, batches, args.num_microbatches)
        total, count = (torch.stack(column).sum() for column in zip(*reports, strict=True))
        losses.append(training.data_parallel_mean(total, count))
        computed += float(count) if handle.enabled else args.num_microbatches * args.row_length
        bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
    training.write_report(
        Path(args.out) / args.report,
        args,
        device,
        timer,
        peak_before,
        losses=losses,
        fused={"enabled": handle.enabled, "reasons": list(handle.reasons)},
        share_of_rows_computed=computed / max(1, args.steps * args.num_microbatches * args.row_length),
    )


if __name__ == "__main__":
    training.run(work, build_parser().parse_args())
