"""Distilling the supervised demo's model into a smaller one: generalised Jensen-Shannon divergence at TP=2.

    torchrun --nproc-per-node 2 -m scripts.train_distill --tp 2 --sequence-parallel

First the teacher is trained as train_sft trains it, then it is frozen and a student of fewer layers and a smaller
hidden size learns its next-token distributions, through Megatron's schedule. With the flag, both models' heads are
captured and `linear_jsd` takes them; without it, both models' logits are materialised. Everything else is the same.
With --topk the student learns from the teacher's most probable ids, which are computed once for each row and stored.
With --on-policy the student samples, and several teachers, a domain each, hand back hidden states of what it sampled.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor

import megatron_lce
from scripts import arguments, megatron_runtime, on_policy, pictures, sft_data, train_sft, training
from scripts.materialised_head import vocab_parallel_log_softmax
from scripts.sft_data import PackedBatch

IGNORED = -100


def build_parser() -> argparse.ArgumentParser:
    own = ("vocab_size", "row_length", "teacher_steps", "teacher_lr", "student_num_layers", "student_hidden_size")
    own += ("beta", "temperature", "topk", "tail", "held_out_rows")
    own += ("on_policy", "teachers", "prompts", "prompt_length", "sampled_tokens")
    return arguments.parser(__doc__, own, steps=150, lr=3e-3, report="distill.json")


def divergence(
    student: torch.nn.Module, teacher: torch.nn.Module, batch: PackedBatch, args: argparse.Namespace
) -> Tensor:
    """fp32 divergence of each token's next-token distributions, [1, T]; 0 where the loss mask is."""
    inputs = (batch.tokens, batch.position_ids, None)
    packed = batch.packed_seq_params()
    if not args.use_fused_linear_ce:
        with torch.no_grad():
            teacher_logits = teacher(*inputs, packed_seq_params=packed)
        student_logits = student(*inputs, packed_seq_params=packed)  # [1, T, V / tp]
        return materialised_jsd(student_logits, teacher_logits, args.beta, args.temperature) * batch.loss_mask
    labels = torch.where(batch.loss_mask > 0, batch.labels, IGNORED)
    keywords = {
        "temperature": args.temperature,
        "ignore_index": IGNORED,
        "workspace_bytes": int(args.workspace_mib * 2**20),
    }
    top = teachers_topk(teacher, batch, args) if args.topk else None
    if top is None:
        with torch.no_grad(), megatron_lce.capture_lm_head(teacher) as teacher_head:
            teacher(*inputs, packed_seq_params=packed)
    with megatron_lce.capture_lm_head(student) as student_head:
        student(*inputs, packed_seq_params=packed)
    if top is None:
        return student_head.linear_jsd(teacher_head, labels=labels, beta=args.beta, **keywords)
    out = student_head.linear_cross_entropy(labels, candidates=top.ids, entropy=False, **keywords)
    losses = megatron_lce.topk_divergence(out.candidate_logprobs, top.logprobs, "jsd", tail=args.tail, beta=args.beta)
    return losses * (batch.loss_mask > 0)


_stored: dict[bytes, megatron_lce.TopK] = {}  # of each packed row that has come, on the host


def teachers_topk(teacher: torch.nn.Module, batch: PackedBatch, args: argparse.Namespace) -> megatron_lce.TopK:
    """The teacher's most probable ids of a packed row, [1, T, K]; the teacher sees a row once."""
    row = batch.tokens.cpu().numpy().tobytes()
    if row not in _stored:
        with torch.no_grad(), megatron_lce.capture_lm_head(teacher) as head:
            teacher(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params())
        found = head.linear_topk(args.topk, temperature=args.temperature)
        _stored[row] = megatron_lce.TopK(*(part.cpu() for part in found))
    return megatron_lce.TopK(*(part.to(batch.tokens.device) for part in _stored[row]))


def materialised_jsd(student_logits: Tensor, teacher_logits: Tensor, beta: float, temperature: float) -> Tensor:
    """The same from vocab-parallel logits [..., V / tp], as a training program does it without `linear_jsd`: [...]."""
    log_s, log_t = (vocab_parallel_log_softmax(z.float() / temperature) for z in (student_logits, teacher_logits))

    def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    if beta == 0:
        local = kl(log_t, log_s)
    elif beta == 1:
        local = kl(log_s, log_t)
    else:
        weights = torch.tensor([beta, 1 - beta], device=log_s.device).log()
        log_m = torch.logaddexp(log_t + weights[0], log_s + weights[1])
        local = beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)
    return reduce_from_tensor_model_parallel_region(local)


def distill_step(
    batches: Iterator[PackedBatch],
    student: torch.nn.Module,
    teacher: torch.nn.Module,
    args: argparse.Namespace,
    device: torch.device,
):
    """Megatron's forward step for distillation; the factor makes up for gradients that shrink with temperature**2."""
    batch = next(batches).to(device)
    loss = args.temperature**2 * divergence(student, teacher, batch, args)
    return loss, partial(train_sft.masked_loss, batch.loss_mask)


class Trainer:
    """One model, its optimizer and what its steps measured."""

    def __init__(self, title: str, model: torch.nn.Module, lr: float, steps: int, args: argparse.Namespace):
        self.model, self.steps, self.args = model, steps, args
        self.optimizer = megatron_runtime.build_optimizer([model], training.dtype(args), lr)
        self.timer = training.StepTimer(next(model.parameters()).device)
        self.losses: list[float] = []
        self.measured: list[tuple[int, Any]] = []  # (steps done, what was measured on held-out rows)
        self.bar = training.progress(steps, title)

    def run(
        self,
        forward_step: Callable,
        batches: Iterator[Any],
        held_out: list[PackedBatch],
        measure: Callable[[torch.nn.Module, list[PackedBatch]], Any] | None = None,
    ) -> None:
        """All steps through Megatron's schedule; at the start and ten times on the way it measures: cross-entropy."""
        measure = measure or cross_entropy
        every = max(1, self.steps // 10)
        for step in self.bar:
            if step % every == 0:
                self.measured.append((step, measure(self.model, held_out)))
            with self.timer:
                reports = training.train_step(
                    self.model, self.optimizer, forward_step, batches, self.args.num_microbatches
                )
            total, count = (torch.stack(column).sum() for column in zip(*reports, strict=True))
            self.losses.append(training.data_parallel_mean(total, count))
            self.bar.set_postfix(loss=f"{self.losses[-1]:.4f}", refresh=False)
        self.measured.append((self.steps, measure(self.model, held_out)))


@torch.no_grad()
def cross_entropy(model: torch.nn.Module, rows: list[PackedBatch]) -> float:
    """Mean over the rows' completion tokens, in nats."""
    totals = []
    for row in rows:
        given = {"labels": row.labels, "loss_mask": row.loss_mask, "packed_seq_params": row.packed_seq_params()}
        loss = model(row.tokens, row.position_ids, None, **given)
        totals.append(torch.stack([(loss.float() * row.loss_mask).sum(), row.loss_mask.sum()]))
    return training.data_parallel_mean(*torch.stack(totals).sum(0))


def load_batches(args: argparse.Namespace, device: torch.device) -> tuple[Iterator[PackedBatch], list[PackedBatch]]:
    """Endless packed rows for this data-parallel rank, and the rows that no step sees."""
    examples, pad_id = training.load_examples(args)
    tenth = len(examples) // 10
    held_out = sft_data.packed_batches(examples[:tenth], pad_id, args.row_length)
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    batches = sft_data.packed_batches(examples[tenth + replica :: replicas], pad_id, args.row_length)
    return batches, [row.to(device) for row in islice(held_out, args.held_out_rows)]


def work(args: argparse.Namespace, device: torch.device) -> None:
    if args.topk and not args.use_fused_linear_ce:
        raise SystemExit("--topk needs --use-fused-linear-ce")
    if args.on_policy and (args.topk or not args.use_fused_linear_ce):
        raise SystemExit("--on-policy needs --use-fused-linear-ce and no --topk")
    batches, held_out = load_batches(args, device)
    of_teachers: list[Iterator[Any]] = [batches]
    if args.on_policy:
        examples, pad_id = training.load_examples(args)
        of_domains = on_policy.domains(examples[len(examples) // 10 :], args.teachers)
        of_teachers = [sft_data.packed_batches(domain, pad_id, args.row_length) for domain in of_domains]
    options = training.gpt_options(args, vocab_size=args.vocab_size)
    teachers = [megatron_runtime.build_gpt(options, device=device, ddp=True) for _ in of_teachers]
    teacher = teachers[0]
    student_options = replace(options, num_layers=args.student_num_layers, hidden_size=args.student_hidden_size)
    student = megatron_runtime.build_gpt(student_options, device=device, ddp=True)
    flag = {"use_fused_linear_ce": args.use_fused_linear_ce, "skip_masked": True}
    handles = [megatron_lce.enable_fused_linear_ce(model, **flag) for model in (*teachers, student)]

    for model, rows in zip(teachers, of_teachers, strict=True):
        taught = Trainer("teacher, supervised", model, args.teacher_lr, args.teacher_steps, args)
        taught.run(partial(train_sft.forward_step, device=device), rows, held_out)
        model.requires_grad_(False)
    peak_before = training.peak_mib(device)
    distilled = Trainer("student, distilled", student, args.lr, args.steps, args)
    forward_step = partial(distill_step, teacher=teacher, args=args, device=device)
    if args.on_policy:
        generator = torch.Generator(device).manual_seed(args.seed + parallel_state.get_data_parallel_rank())
        forward_step = partial(on_policy.step, teachers=teachers, args=args, device=device, generator=generator)
        batches = on_policy.prompts(of_domains, args)
    distilled.run(forward_step, batches, held_out)

    sizes = {"teacher": parameters(teacher), "student": parameters(student)}
    if torch.distributed.get_rank() == 0:
        picture = (args.out / args.report).with_suffix(".png")
        pictures.draw_distill(picture, distilled.losses, distilled.measured, taught.measured[-1][1])
        Console().print(summary(taught, distilled, sizes, args))
        print(f"Picture: {picture}")
    training.write_report(
        args.out / args.report,
        args,
        device,
        distilled.timer,
        peak_before,
        parameters_per_rank=sizes,
        losses=distilled.losses,
        student_cross_entropies=distilled.measured,
        teacher_losses=taught.losses,
        teacher_cross_entropies=taught.measured,
        fused={
            "enabled": all(handle.enabled for handle in handles),
            "reasons": list(dict.fromkeys(reason for handle in handles for reason in handle.reasons)),
        },
    )


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def summary(taught: Trainer, distilled: Trainer, sizes: dict[str, int], args: argparse.Namespace) -> Table:
    head = "linear_jsd" if args.use_fused_linear_ce else "materialised logits"
    head += ", on-policy" * args.on_policy
    table = Table(title=f"Distillation by {head}: beta {args.beta}, temperature {args.temperature}, TP={args.tp}")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    tenth = max(1, len(distilled.losses) // 10)
    ends = (sum(part) / tenth for part in (distilled.losses[:tenth], distilled.losses[-tenth:]))
    table.add_row("divergence, first and last tenth of the steps", *(f"{loss:.4f}" for loss in ends))
    for name, trainer in (("student", distilled), ("teacher", taught)):
        values = (trainer.measured[0][1], trainer.measured[-1][1])
        table.add_row(f"held-out cross-entropy, {name}", *(f"{value:.4f}" for value in values))
    table.add_section()
    for name, size in sizes.items():
        table.add_row(f"parameters of a rank, {name}", "", f"{size:,}")
    table.add_row("ms per step", "", f"{distilled.timer.median_ms() or float('nan'):.0f}")
    return table


if __name__ == "__main__":
    training.run(work, build_parser().parse_args())
