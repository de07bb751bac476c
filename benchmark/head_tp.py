"""The head alone under tensor parallelism, communication included.

Each tensor-parallel size is measured in groups of that many processes, which run at the same time. Beside ours stand
verl's kernel and Megatron's native path (a column-parallel linear layer and its fused vocab-parallel cross-entropy),
and cuBLAS on one rank's shard. hidden is replicated; every head leaves its gradient summed over the group.
"""

import functools
from dataclasses import replace
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from benchmark import measure
from benchmark.providers import PROVIDERS, Head
from benchmark.results import Results
from benchmark.shapes import Inputs, Shape, make_inputs

HEADS = {  # and the kinds of a step that are measured
    **dict.fromkeys(("ours", "ours-cached", "ours-token-640"), ("rl", "logprob")),
    "verl": ("rl",),
    "megatron": ("logprob",),
}


def shard_inputs(shape: Shape, group: ProcessGroup, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Inputs of one rank: the same hidden, labels and upstream gradients on all, its own shard of the weight."""
    local = replace(shape, vocab=shape.vocab // group.size())
    inputs = make_inputs(local, dtype, device)
    generator = torch.Generator(device).manual_seed(1)
    labels = torch.randint(shape.vocab, (shape.tokens,), generator=generator, device=device)
    weight = make_inputs(replace(local, tokens=1), dtype, device, seed=2 + group.rank()).weight
    return replace(inputs, labels=labels, weight=weight)


def compare(head: Head, inputs: Inputs, mode: str, reference: dict) -> dict:
    """How far outputs and hidden's gradient are from the first head's of this mode."""
    (logprobs, *_), (grad_hidden, _) = measure.run_step(head, inputs, mode)
    first_logprobs, first_grad_hidden = reference.setdefault(mode, (logprobs.detach(), grad_hidden))
    return {
        "logprobs_difference": (logprobs - first_logprobs).abs().max().item(),
        "grad_hidden_difference": measure.relative_error(grad_hidden, first_grad_hidden),
    }


def measure_slowest_products(inputs: Inputs, group: ProcessGroup, device: torch.device, **calls: int) -> dict:
    """The products of the group's slowest rank: collectives make every head wait for that one."""
    gathered: list = [None] * group.size()
    dist.all_gather_object(gathered, measure.measure_products(inputs, device, **calls), group=group)
    return max(gathered, key=_sum_ms)


def _sum_ms(products: dict) -> float:
    return sum(median(times) for times in products.values())


def measure_heads(
    results: Results, shape: Shape, group: ProcessGroup, heads: dict[str, Head], budget_ms: float
) -> None:
    """All heads at one tensor-parallel size and one number of tokens: they take turns with the products."""
    device = results.device
    measure.free_memory(device)
    inputs = shard_inputs(shape, group, results.dtype, device)
    gradient = torch.zeros_like(inputs.hidden)
    all_reduce = functools.partial(dist.all_reduce, gradient, group=group)
    size = {"shape": f"tp{group.size()} {shape.name}", "tp": group.size()}
    once_ms = _sum_ms(measure_slowest_products(inputs, group, device, repeats=3))
    calls = measure.calls_of_a_turn(budget_ms, once_ms)

    def reduction() -> dict:
        return measure.slowest_rank(measure.measure_call(all_reduce, device, **calls), group)

    def products() -> None:
        dist.barrier()
        measured = functools.partial(measure_slowest_products, inputs, group, device, **calls)
        results.attempt("products", {"shape": size["shape"]}, measured)

    dist.barrier()
    results.attempt("all_reduce", size | {"mib": gradient.nbytes / measure.MIB}, reduction)
    turns = []
    for name, head in heads.items():
        for mode in HEADS[name]:
            record = size | {"tokens": shape.tokens, "mode": mode, "provider": name}
            record |= {"gradients_mib": measure.gradients_mib(inputs, mode)}
            turns.append((record, measure.Timed(functools.partial(measure.run_step, head, inputs, mode), device)))
    results.take_turns("times", turns, products, **calls)
    reference: dict = {}

    def compared(record: dict) -> dict:
        difference = compare(heads[record["provider"]], inputs, record["mode"], reference)
        return measure.slowest_rank(record, group) | difference

    for record, _ in turns:
        results.complete("times", record, functools.partial(compared, record))


def measure_case(results: Results, arguments: Any) -> None:
    dist.init_process_group("nccl" if results.device.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
    for tp in arguments.tp:
        group, _ = dist.new_subgroups(group_size=tp)
        heads = results.load((PROVIDERS[name] for name in arguments.heads), group, tp=tp)
        for tokens in arguments.tokens:
            shape = Shape(f"{tokens}x{arguments.hidden}x{arguments.vocab}", tokens, arguments.hidden, arguments.vocab)
            measure_heads(results, shape, group, heads, arguments.budget_ms)
        del heads
    dist.barrier()
