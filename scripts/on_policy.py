"""On-policy distillation: the student samples, and teachers, each of its own domain, score what it sampled.

A teacher hands back hidden states, and its LM head stays beside the student. Its rows among the samples are compared
with it, all others are skipped.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

import megatron_lce
from scripts import rollout
from scripts.sft_data import Example

IGNORED = -100


@dataclass
class Prompts:
    tokens: Tensor  # [B, prompt_length] int64
    domain: Tensor  # [B] int64, the number of its teacher


def domains(examples: list[Example], number: int) -> list[list[Example]]:
    """The examples of each domain: by the length of the prompt, as there are no others here."""
    ranked = sorted(examples, key=lambda example: example.prompt_length)
    return [ranked[len(ranked) * i // number : len(ranked) * (i + 1) // number] for i in range(number)]


def prompts(of_domains: list[list[Example]], args: argparse.Namespace) -> Iterator[Prompts]:
    """Endless batches of as many prompts of each domain, cut to one length."""
    position = parallel_state.get_data_parallel_rank() * args.prompts
    while True:
        rows = []
        for number, examples in enumerate(of_domains):
            fitting = [example for example in examples if len(example.token_ids) >= args.prompt_length]
            for i in range(args.prompts // len(of_domains)):
                example = fitting[(position + i) % len(fitting)]
                rows.append((example.token_ids[: args.prompt_length], number))
        position += args.prompts * parallel_state.get_data_parallel_world_size()
        yield Prompts(*(torch.tensor(column) for column in zip(*rows, strict=True)))


def step(
    batches: Iterator[Prompts],
    student: nn.Module,
    *,
    teachers: list[nn.Module],
    args: argparse.Namespace,
    device: torch.device,
    generator: torch.Generator,
):
    """Megatron's forward step: the student samples, then learns at each token from that token's own teacher."""
    batch = next(batches)
    given, domain = batch.tokens.to(device), batch.domain.to(device)
    sampling = {"temperature": args.temperature, "vocab_size": args.vocab_size, "eos": -1, "pad": 0}
    sampled, _, _ = rollout.sample(student, given, args.sampled_tokens, **sampling, generator=generator)
    inputs = torch.cat([given, sampled], dim=1)
    labels = inputs.roll(-1, dims=1)
    labels[:, : args.prompt_length - 1] = labels[:, -1] = IGNORED
    positions = torch.arange(inputs.shape[1], device=device).expand_as(inputs)
    heads = [teacher_head(teacher, inputs, positions, domain == number) for number, teacher in enumerate(teachers)]
    with megatron_lce.capture_lm_head(student) as head:
        student(inputs, positions, None)
    total = torch.zeros((), device=device)
    for number, teacher in enumerate(heads):
        result = head.linear_divergence_loss(
            teacher,
            labels.masked_fill((domain != number)[:, None], IGNORED),
            lambda out: out.jsd,
            kinds=("jsd",),
            beta=args.beta,
            temperature=args.temperature,
            skip_ignored=True,
            workspace_bytes=int(args.workspace_mib * 2**20),
        )
        total = total + args.temperature**2 * result.loss
    count = (labels != IGNORED).sum()
    return total, lambda _: (total, count.int(), (total.detach(), count))


@torch.no_grad()
def teacher_head(teacher: nn.Module, inputs: Tensor, positions: Tensor, rows: Tensor) -> megatron_lce.StoredHead:
    """What a teacher hands back: hidden states of its own rows [B] of the samples, 0 elsewhere."""
    with megatron_lce.capture_lm_head(teacher) as head:
        teacher(inputs[rows], positions[rows], None)
    hidden = head.hidden  # [s, b, H]
    if head.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)
    stored = hidden.new_zeros(*inputs.shape, hidden.shape[-1])
    stored[rows] = hidden.transpose(0, 1)
    return megatron_lce.StoredHead(stored, head.weight)
