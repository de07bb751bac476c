"""The head alone under tensor parallelism, communication included: `torchrun --nproc-per-node 4 -m benchmark.head_tp`.

Each tensor-parallel size is measured in groups of that many processes, which run at the same time. Beside ours stand
verl's kernel and Megatron's native path (a column-parallel linear layer and its fused vocab-parallel cross-entropy),
and cuBLAS on one rank's shard. hidden is replicated; every head leaves its gradient summed over the group.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmark import measure, report
from benchmark.ours import MIB, Ours
from benchmark.providers import Head, load_verl_kernel
from benchmark.ratios import products_ms
from benchmark.results import Results
from benchmark.run import DTYPES
from benchmark.shapes import Inputs, Shape, choose, make_inputs
from scripts.arguments import HelpFormatter
from scripts.ranks import device_of_rank

SHORT_US = 10  # kernels that the printed profile leaves out


class _SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over the group: what verl's kernel leaves to its caller."""

    @staticmethod
    def forward(ctx, hidden: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad_hidden: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, None


def verl(group: ProcessGroup) -> Head:
    kernel = load_verl_kernel()

    def head(hidden: Tensor, weight: Tensor, labels: Tensor, mode: str) -> tuple[Tensor, ...]:
        outputs = kernel(_SumGradient.apply(hidden, group), weight, labels, 1.0, "none", group)
        return tuple(outputs) if mode == "rl" else tuple(outputs[:1])

    return head


def megatron(group: ProcessGroup) -> Head:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

    def head(hidden: Tensor, weight: Tensor, labels: Tensor, mode: str) -> tuple[Tensor, ...]:
        logits = linear_with_grad_accumulation_and_async_allreduce(
            input=hidden,
            weight=weight,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=group.size() > 1,
            sequence_parallel=False,
            tp_group=group,
        )
        return (-fused_vocab_parallel_cross_entropy(logits, labels, group),)

    return head


HEADS: dict[str, tuple[Callable[[ProcessGroup], Head], tuple[str, ...], str | None]] = {
    "ours": (lambda group: Ours(tp_group=group), ("rl", "logprob"), None),
    "ours-cached": (lambda group: Ours(cache_fraction=1, tp_group=group), ("rl", "logprob"), None),
    "ours-token-640": (
        lambda group: Ours(token_loss=True, workspace_bytes=640 * MIB, tp_group=group),
        ("rl", "logprob"),
        None,
    ),
    "verl": (verl, ("rl",), "verl"),
    "megatron": (megatron, ("logprob",), "megatron-core"),
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
        "grad_hidden_difference": ((grad_hidden - first_grad_hidden).norm() / first_grad_hidden.norm()).item(),
    }


def measure_slowest_products(inputs: Inputs, group: ProcessGroup, device: torch.device, **calls: int) -> dict:
    """The products of the group's slowest rank: collectives make every head wait for that one."""
    gathered: list = [None] * group.size()
    dist.all_gather_object(gathered, measure.measure_products(inputs, device, **calls), group=group)
    return max(gathered, key=_sum_ms)


def _sum_ms(products: dict) -> float:
    return sum(median(times) for times in products.values())


def load_heads(results: Results, names: list[str], group: ProcessGroup) -> dict[str, Head]:
    """The heads that are installed, bound to the group."""
    loaded = {}
    for name in names:
        load, _, package = HEADS[name]
        loaded[name] = results.load(name, functools.partial(load, group), package, tp=group.size())
    return {name: head for name, head in loaded.items() if head is not None}


def measure_heads(
    results: Results, shape: Shape, group: ProcessGroup, heads: dict[str, Head], dtype: torch.dtype, budget_ms: float
) -> None:
    """All heads at one tensor-parallel size and one number of tokens: they take turns with the products."""
    device = results.device
    measure.free_memory(device)
    inputs = shard_inputs(shape, group, dtype, device)
    name = f"tp{group.size()} {shape.name}"
    gradient = torch.zeros_like(inputs.hidden)
    all_reduce = functools.partial(dist.all_reduce, gradient, group=group)
    size = {"shape": name, "tp": group.size()}
    once_ms = _sum_ms(measure_slowest_products(inputs, group, device, repeats=3))
    calls = measure.calls_of_a_turn(budget_ms, once_ms)
    dist.barrier()
    results.attempt(
        "all_reduce",
        size | {"mib": gradient.nbytes / measure.MIB},
        lambda: measure.slowest_rank(measure.measure_call(all_reduce, device, **calls), group),
    )

    def products() -> None:
        dist.barrier()
        results.attempt("products", {"shape": name}, lambda: measure_slowest_products(inputs, group, device, **calls))

    turns = []
    for head_name, head in heads.items():
        for mode in HEADS[head_name][1]:
            record = size | {"tokens": shape.tokens, "mode": mode, "provider": head_name}
            record |= {"gradients_mib": measure.gradients_mib(inputs, mode)}
            turns.append((record, measure.Timed(functools.partial(measure.run_step, head, inputs, mode), device)))
    results.take_turns("times", turns, products, **calls)
    reference: dict = {}
    for record, _ in turns:
        results.complete(
            "times",
            record,
            lambda record=record: (
                measure.slowest_rank(record, group)
                | compare(heads[record["provider"]], inputs, record["mode"], reference)
            ),
        )
    for record, timed in turns:  # where a head that is over the limit spends its time
        if record["provider"].startswith("ours") and record["mode"] == "rl" and record["status"] == "ok":
            key = {"shape": name, "mode": "rl", "provider": record["provider"]}
            results.attempt("profiles", key, lambda timed=timed: {"kernels": measure.kernels(timed.call, device)})


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.head_tp", description=__doc__.splitlines()[0], formatter_class=HelpFormatter
    )
    add = parser.add_argument
    add("--tp", help="Comma-separated tensor-parallel sizes; None: the powers of two up to the number of processes.")
    add("--tokens", default="16384,8192", help="Comma-separated token counts.")
    add("--hidden", type=int, default=4096, help="Hidden size.")
    add("--vocab", type=int, default=151936, help="Vocabulary of all ranks together.")
    add("--heads", default="all", help=f"Comma-separated: all, {', '.join(HEADS)}.")
    add("--dtype", choices=DTYPES, default="bf16", help="Type of hidden and weight.")
    add("--device", choices=("cuda", "cpu"), help="Device of all ranks; None: cuda where every rank has a GPU.")
    add("--budget-ms", type=float, default=130.0, help="Time of a round of the three products, in ms.")
    add("--output", type=Path, default=Path("head_tp.json"), help="JSON file to write.")
    return parser


def parse_arguments(argv: list[str], ranks: int) -> argparse.Namespace:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        arguments.heads = choose("a head", arguments.heads, HEADS)
        powers = ",".join(str(2**i) for i in range(ranks.bit_length()))
        arguments.tp = [int(text) for text in (arguments.tp or powers).split(",")]
        arguments.tokens = [int(text) for text in arguments.tokens.split(",")]
    except ValueError as error:
        parser.error(str(error))
    for tp in arguments.tp:
        if tp < 1 or ranks % tp or arguments.vocab % tp:
            parser.error(f"--tp must divide {ranks} processes and {arguments.vocab} columns, got {tp}")
    return arguments


def main() -> None:
    arguments = parse_arguments(sys.argv[1:], int(os.environ.get("WORLD_SIZE", 1)))
    device = device_of_rank(arguments.device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
    path = arguments.output if dist.get_rank() == 0 else None
    results = Results(device, DTYPES[arguments.dtype], path, {"command": sys.argv[1:], "ranks": dist.get_world_size()})
    for tp in arguments.tp:
        group, _ = dist.new_subgroups(group_size=tp)
        heads = load_heads(results, arguments.heads, group)
        for tokens in arguments.tokens:
            shape = Shape(f"{tokens}x{arguments.hidden}x{arguments.vocab}", tokens, arguments.hidden, arguments.vocab)
            measure_heads(results, shape, group, heads, DTYPES[arguments.dtype], arguments.budget_ms)
        del heads
    if path:
        print_table(results.document)
        print(f"Report: {path}")
    dist.barrier()
    dist.destroy_process_group()


def print_table(document: dict) -> None:
    """Every head's times beside the products of one rank's shard, and the all-reduce of hidden's gradient."""
    console = Console(width=170)
    report.print_header(document, console)
    for record in document["all_reduce"]:
        if record["status"] == "ok" and (products := products_ms(document, record["shape"])):
            text = "F {:.2f}, dX {:.2f}, dW {:.2f}, all-reduce {:.2f} ms".format(*products, record["time_ms"])
            console.print(f"{record['shape']} on one rank: {text}")
    columns = ("time_ms", "over_products", "over_products_recomputed", "peak_mib", "gradients_mib")
    differences = ("logprobs_difference", "grad_hidden_difference")
    keys = ("shape", "mode", "provider")
    report.print_table(console, "head under tensor parallelism", keys, (*columns, *differences), document["times"])
    for record in document.get("profiles", []):
        title = f"{record['shape']}, {record['provider']}: rank 0's kernels of one {record['mode']} step"
        longest = [
            kernel | {"name": kernel["name"][:60], "status": "ok"}
            for kernel in record.get("kernels", [])
            if kernel["us"] >= SHORT_US
        ]
        report.print_table(console, title, ("name",), ("start_us", "us"), longest)


if __name__ == "__main__":
    main()
