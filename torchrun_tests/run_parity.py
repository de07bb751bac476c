"""Every operation over any number of ranks against the single-rank fp64 oracle.

    torchrun --nproc-per-node 2 torchrun_tests/run_parity.py --device cuda|cpu

Every rank builds the same whole problem, keeps its own part, and compares outputs and both gradients with the oracle's
for the whole. Allowed errors are multiples of what eager PyTorch makes on the same inputs (`tests/oracle.py`).
"""

import functools
import math
import warnings

import harness
import torch
import torch.distributed as dist
from harness import Report, available_backends
from parity_cases import BITS, CASES, OF_IDS, OF_JSD, OF_TOKEN_LOSS
from parity_of_budgets import run_planted_errors
from parity_of_errors import run_calls, run_disagreements, run_disagreements_of_compat, run_errors, run_torchs_call
from parity_of_known_losses import run_known_losses
from parity_of_torch import run_cuda_graph, run_destroyed_group, run_dtensors, run_fsdp
from torch.distributed import ProcessGroup

import megatron_lce
from scripts.ranks import device_of_rank
from tests.cases import BF16, Ranks, case
from tests.checks import check_case
from tests.live_bytes import peak_live_bytes


def run_two_heads(backend: str, group: ProcessGroup, device: torch.device, report: Report) -> None:
    """Heads whose shards differ on the last rank alone, one after the other: the first ranks see nothing new."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    hidden, labels = torch.ones(4, 8, dtype=BF16, device=device), torch.tensor([0, 1, 2, -100], device=device)
    keywords = {"tp_group": group, "vocab_start": 4 * rank, "skip_ignored": True, "logits_cache_bytes": 2**20}
    for last_rows in (304, 3, 520):
        weight = torch.ones(last_rows if rank == ranks - 1 else 4, 8, dtype=BF16, device=device).requires_grad_()
        out = megatron_lce.linear_cross_entropy(hidden, weight, labels, backend=backend, **keywords)
        expected = torch.tensor([1.0, 1.0, 1.0, 0.0], device=device) * -math.log(4 * (ranks - 1) + last_rows)
        report.compare(f"{backend}: two heads, the last shard of {last_rows}", out.logprobs.detach(), expected, 2e-6)


def run_large_ids(backend: str, group: ProcessGroup, device: torch.device, report: Report) -> None:
    """The last ids of the largest vocabulary keep every digit."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    generator, first = torch.Generator().manual_seed(0), 2**31 - 20 * ranks
    hidden, weight = (torch.randn(rows, 8, generator=generator).to(device) for rows in (9, 20 * ranks))
    expected = (hidden @ weight.T).argmax(dim=1) + first
    inputs = hidden, weight[20 * rank :][:20]
    keywords = {"tp_group": group, "vocab_start": first + 20 * rank, "backend": backend}
    argmax = megatron_lce.linear_cross_entropy(*inputs, expected, telemetry=True, **keywords).argmax
    best = megatron_lce.linear_topk(*inputs, 1, **keywords).ids[:, 0]
    for name, ids in (("argmax", argmax), ("top-k", best)):
        report.check(f"{backend}: {name} of large ids", torch.equal(ids, expected), f"{ids.tolist()}")


def run_memory_of_a_second_head(group: ProcessGroup, device: torch.device, report: Report) -> None:
    """A head behind a small one of the same group and keywords stays within its workspace, too."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    hidden = torch.ones(512, 8, dtype=BF16, device=device, requires_grad=True)
    labels = torch.arange(512, device=device)
    keywords = {"tp_group": group, "workspace_bytes": 700_000, "backend": "triton"}
    for last_rows in (64, 2048):
        weight = torch.ones(last_rows if rank == ranks - 1 else 64, 8, dtype=BF16, device=device, requires_grad=True)
        call = functools.partial(megatron_lce.linear_token_loss, hidden, weight, labels, lambda out: -out.logprobs)
        peak, _ = peak_live_bytes(functools.partial(call, vocab_start=64 * rank, **keywords))
        allowed = 700_000 + 4 * weight.numel() + 8 * hidden.numel() + 64 * labels.numel()
        allowed += 4 * 128 * weight.shape[0]  # a CPU's products have a block's gradients in fp32, too
        title = f"memory of a head whose last shard has {last_rows} columns"
        report.check(title, peak <= allowed, f"{peak} of {allowed} bytes")


def subgroup_of_this_rank() -> ProcessGroup:
    """This rank's group when the world is cut into pairs (a last odd rank, or a world of 2, into groups of one)."""
    world = dist.get_world_size()
    size = 2 if world > 2 else 1
    members = [list(range(first, min(first + size, world))) for first in range(0, world, size)]
    groups = [dist.new_group(ranks) for ranks in members]
    return groups[dist.get_rank() // size]


def main() -> None:
    device = device_of_rank(harness.argument_parser(__doc__).parse_args().device)
    harness.start(device)
    # No one else, such as Megatron, calls collectives here: torch's warning names no caller.
    warnings.filterwarnings("error", r"`torch\.distributed\.", FutureWarning)
    report = Report()
    world = dist.group.WORLD
    subgroup = subgroup_of_this_rank()
    if dist.get_world_size() > 1:
        run_errors(world, device, report)
    if dist.get_world_size() > 1 and device.type == "cpu":
        run_disagreements(world, report)
        run_disagreements_of_compat(world, report)
    if dist.get_world_size() > 1:
        run_planted_errors(world, device, report)
    if "triton" in available_backends():
        run_known_losses(world, device, report)
        run_destroyed_group(device, report)
    run_calls(world, device, report)
    run_calls(subgroup, device, report)
    run_torchs_call(world, device, report)
    if device.type == "cuda":
        run_cuda_graph(world, device, report)
    if dist.get_world_size() == 2:
        run_fsdp(world, device, report)
    # Ranks share the cores of a CPU: three of them run everything there, others a part of it.
    everything = device.type == "cuda" or dist.get_world_size() in (1, 3)
    cases = [*CASES, *OF_TOKEN_LOSS, *OF_IDS, *OF_JSD, *BITS] if everything else CASES[::12]
    of_subgroup = [case("a part of the world"), case("a part of the world, bf16", dtype=BF16)]
    of_subgroup += BITS if everything else []
    if device.type == "cpu" and everything and "triton" in available_backends():
        run_memory_of_a_second_head(world, device, report)
    for backend in reversed(available_backends()):  # the kernels first, whatever stops the rest
        for one in cases:
            check_case(one, Ranks(backend, world, device), report)
        for one in of_subgroup:
            check_case(one, Ranks(backend, subgroup, device), report)
        if everything or backend == "torch":
            run_two_heads(backend, world, device, report)
            run_large_ids(backend, world, device, report)
            run_dtensors(backend, world, device, report)
    harness.end(report.conclude())


if __name__ == "__main__":
    main()
