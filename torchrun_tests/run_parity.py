"""The operation over any number of ranks against the single-rank fp64 oracle.

    torchrun --nproc-per-node 2 torchrun_tests/run_parity.py --device cuda|cpu

Every rank builds the same whole problem, keeps its own part, and compares outputs and both gradients with the oracle's
for the whole. Allowed errors are multiples of what eager PyTorch makes on the same inputs (`tests/oracle.py`).
"""

import dataclasses
import functools
import math
from unittest import mock

import torch
import torch.distributed as dist
from harness import Report, available_backends, main, refuse_deprecated_collectives
from parity_cases import (
    BF16,
    CASES,
    Case,
    Problem,
    hidden_in_bf16,
    ignore_some,
    sequence_shard,
    uneven,
    verdict,
)
from parity_of_compat import run_compat, run_disagreements_of_compat, run_megatrons_call, run_torchs_call
from parity_of_errors import run_disagreements, run_errors
from parity_of_ids import run_ids
from parity_of_torch import run_async_tensors, run_compiled, run_cuda_graph, run_dtensors, run_fsdp
from torch import Tensor
from torch.distributed import ProcessGroup

import megatron_lce
from megatron_lce.core import plan
from megatron_lce.core.options import DIFFERENTIABLE, LinearCrossEntropyOutput
from tests.live_bytes import peak_live_bytes
from tests.oracle import Result, comparisons, evaluate, oracle


def run_case(case: Case, backend: str, group: ProcessGroup, device: torch.device, report: Report) -> None:
    """Outputs and gradients of this rank's part against the oracle's for the whole."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    problem = Problem(case, ranks, device)
    keywords = {**case.keywords, **problem.keywords}
    shard = slice(problem.starts[rank], problem.starts[rank + 1])
    rows = sequence_shard(case, rank, ranks)
    counted = int((problem.labels != -100).sum())
    if case.wide_block is not None:
        mock.patch.object(plan, "WIDE_BLOCK", case.wide_block).start()
    torch.set_default_dtype(case.default_dtype)
    actual = evaluate(
        megatron_lce.linear_cross_entropy,
        problem.hidden[rows],
        problem.weight[shard],
        problem.labels,
        problem.upstream,
        tp_group=group,
        sequence_parallel=case.sequence_parallel,
        vocab_start=shard.start if case.pass_vocab_start else None,
        vocab_size=problem.vocab_size,
        backend=backend,
        workspace_bytes=case.workspace_bytes,
        logits_cache_bytes=case.logits_cache_bytes,
        skip_ignored=counted if case.skip_ignored == "count" else case.skip_ignored,
        **keywords,
    )
    mock.patch.stopall()
    torch.set_default_dtype(torch.float32)
    inputs = (problem.hidden, problem.weight, problem.labels, problem.upstream)
    options = {"vocab_size": problem.vocab_size, **keywords}
    name = f"{backend}: {case.name}"
    results = comparisons(
        actual,
        oracle(*inputs, **options),
        *inputs,
        hidden_rows=rows,
        weight_rows=shard,
        **options,
    )
    for result in results:
        report.check(f"{name}: {result.name}", *verdict(result.error, result.allowed))
    check_same_bits(name, actual, case, group, report)


def check_same_bits(name: str, actual: Result, case: Case, group: ProcessGroup, report: Report) -> None:
    """Every rank of the group holds the same outputs, and hidden gradient where that is whole."""
    if actual.outputs.logprobs.numel() == 0:
        return
    tensors = [t.double() for t in actual.outputs if t is not None]
    if not case.sequence_parallel:
        tensors.append(actual.grad_hidden.double())
    mine = torch.cat([t.reshape(-1).nan_to_num(nan=12345.0) for t in tensors])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    different = sum(int((other != mine).sum()) for other in everyone)
    report.check(f"{name}: same bits on every rank", different == 0, f"{different} numbers differ")


def run_partial_gradients(backend: str, group: ProcessGroup, device: torch.device, report: Report) -> None:
    """With reduce_grad_hidden=False each rank's hidden gradient is a partial sum; the caller's sum is the gradient."""
    case = Case("reduce_grad_hidden=False")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    problem = Problem(case, ranks, device)
    shard = slice(problem.starts[rank], problem.starts[rank + 1])
    inputs = (problem.hidden, problem.weight, problem.labels, problem.upstream)
    actual = evaluate(
        megatron_lce.linear_cross_entropy,
        problem.hidden,
        problem.weight[shard],
        problem.labels,
        problem.upstream,
        tp_group=group,
        reduce_grad_hidden=False,
        backend=backend,
    )
    dist.all_reduce(actual.grad_hidden, group=group)
    for result in comparisons(actual, oracle(*inputs), *inputs, weight_rows=shard):
        report.check(f"{backend}: {case.name}: {result.name}", *verdict(result.error, result.allowed))


def run_two_heads(backend: str, group: ProcessGroup, device: torch.device, report: Report) -> None:
    """Heads whose shards differ on the last rank alone, one after the other: the first ranks see nothing new."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    hidden, labels = torch.ones(4, 8, dtype=BF16, device=device), torch.tensor([0, 1, 2, -100], device=device)
    for last_rows in (304, 3, 520):
        weight = torch.ones(last_rows if rank == ranks - 1 else 4, 8, dtype=BF16, device=device).requires_grad_()
        out = megatron_lce.linear_cross_entropy(
            hidden,
            weight,
            labels,
            tp_group=group,
            vocab_start=4 * rank,
            skip_ignored=True,
            logits_cache_bytes=2**20,
            backend=backend,
        )
        expected = torch.tensor([1.0, 1.0, 1.0, 0.0], device=device) * -math.log(4 * (ranks - 1) + last_rows)
        report.compare(f"{backend}: two heads, the last shard of {last_rows}", out.logprobs.detach(), expected, 2e-6)


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


def run_bits_of_all_sizes(backend: str, group: ProcessGroup, device: torch.device, report: Report) -> None:
    """Outputs are those of one rank to the last bit, where shards are cut at multiples of 128 columns."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    kinds = ((torch.float32, None, None), (BF16, None, None), (BF16, BF16, None), (torch.float32, None, hidden_in_bf16))
    for dtype, logits_dtype, change in kinds:
        case = Case("", shards=lambda n: [128 * (1 + r % 2) for r in range(n - 1)] + [77], dtype=dtype)
        problem = Problem(dataclasses.replace(case, change=change), ranks, device)
        shard = slice(problem.starts[rank], problem.starts[rank + 1])
        ids = (
            torch.arange(problem.labels.numel() * 5, device=device).view(*problem.labels.shape, 5) % problem.starts[-1]
        )
        call = functools.partial(megatron_lce.linear_cross_entropy, telemetry=True, candidates=ids, backend=backend)
        call = functools.partial(call, logits_dtype=logits_dtype)
        with torch.no_grad():
            alone = call(problem.hidden, problem.weight, problem.labels)
            together = call(
                problem.hidden, problem.weight[shard], problem.labels, tp_group=group, vocab_start=shard.start
            )
        for name, one, other in zip(alone._fields, alone, together, strict=True):
            different = int((one != other).sum())
            kind = f"{problem.hidden.dtype} x {dtype}, logits {logits_dtype}"
            title = f"{backend}: {kind}: bits of {name} on {ranks} and on one"
            report.check(title, different == 0, f"{different} differ")


def run_token_loss(backend: str, group: ProcessGroup, device: torch.device, report: Report) -> None:
    """`linear_token_loss` of a loss of every differentiable output, in blocks, against the oracle's of the same."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    cases = [
        Case("token loss", (144,), shards=uneven),
        Case("token loss, sequence parallel", (144, 2), dtype=BF16, shards=uneven, sequence_parallel=True),
        Case("token loss, a shard of padding", (36,), vocab_size=lambda n: 5, sequence_parallel=True),
    ]
    for case, skip in ((cases[0], True), (cases[1], False), (cases[1], True), (cases[2], False)):
        problem = Problem(dataclasses.replace(case, change=ignore_some), ranks, device)
        shard = slice(problem.starts[rank], problem.starts[rank + 1])
        rows = sequence_shard(case, rank, ranks)
        hidden, weight = (t.clone().requires_grad_() for t in (problem.hidden[rows], problem.weight[shard]))
        weights = torch.stack(problem.upstream[:4], dim=-1)

        def loss(out: LinearCrossEntropyOutput, weights: Tensor) -> Tensor:
            return (torch.stack([getattr(out, name) for name in DIFFERENTIABLE], dim=-1) * weights).sum(-1)

        result = megatron_lce.linear_token_loss(
            hidden,
            weight,
            problem.labels,
            loss,
            weights,
            tp_group=group,
            sequence_parallel=case.sequence_parallel,
            vocab_start=shard.start,
            vocab_size=problem.vocab_size,
            telemetry=True,
            # Of triton blocks of 128 tokens' logits, which fp32 does not keep.
            workspace_bytes=26_000 if backend == "triton" and case.dtype == BF16 else 120_000,
            skip_ignored=skip,
            backend=backend,
        )
        result.loss.backward()
        inputs = (problem.hidden, problem.weight, problem.labels, problem.upstream)
        options = {"vocab_size": problem.vocab_size, "telemetry": True}
        parts = {"hidden_rows": rows, "weight_rows": shard}
        actual = Result(result.outputs, hidden.grad, weight.grad)
        for found in comparisons(actual, oracle(*inputs, **options), *inputs, **parts, **options):
            name = f"{backend}: {case.name}, skipped {skip}: {found.name}"
            report.check(name, *verdict(found.error, found.allowed))


def run_no_grad(backend: str, group: ProcessGroup, device: torch.device, report: Report) -> None:
    """A pass without gradient returns the bits of a pass with: a fresh policy's ratio is exactly 1."""
    rank = dist.get_rank(group)
    for dtype in (torch.float32, BF16):
        problem = Problem(Case("", dtype=dtype), dist.get_world_size(group), device)
        weight = problem.weight[problem.starts[rank] : problem.starts[rank + 1]].clone().requires_grad_()
        keywords = {"tp_group": group, "backend": backend}
        trained = megatron_lce.linear_cross_entropy(problem.hidden, weight, problem.labels, **keywords)
        with torch.no_grad():
            old = megatron_lce.linear_cross_entropy(problem.hidden, weight, problem.labels, entropy=False, **keywords)
        ratio = (trained.logprobs.detach() - old.logprobs).exp()
        report.check(f"{backend}: no_grad, {dtype}: ratio is 1", bool((ratio == 1).all()), f"{ratio.max():.9f} at most")


def subgroup_of_this_rank() -> ProcessGroup:
    """This rank's group when the world is cut into pairs (a last odd rank, or a world of 2, into groups of one)."""
    world = dist.get_world_size()
    size = 2 if world > 2 else 1
    members = [list(range(first, min(first + size, world))) for first in range(0, world, size)]
    groups = [dist.new_group(ranks) for ranks in members]
    return groups[dist.get_rank() // size]


def program(device: torch.device, report: Report) -> None:
    refuse_deprecated_collectives()
    world = dist.group.WORLD
    subgroup = subgroup_of_this_rank()
    run_errors(world, device, report)
    if device.type == "cpu":
        run_disagreements(world, report)
        run_disagreements_of_compat(world, report)
    run_compat(world, device, report)
    run_compat(subgroup, device, report)
    run_megatrons_call(world, device, report)
    run_torchs_call(world, device, report)
    if device.type == "cuda":
        run_cuda_graph(world, device, report)
    if dist.get_world_size() == 2:
        run_fsdp(world, device, report)
    # Ranks share the cores of a CPU: three of them run everything there, others a part of it.
    everything = device.type == "cuda" or dist.get_world_size() in (1, 3)
    cases = CASES if everything else CASES[::4]
    if device.type == "cpu" and everything and "triton" in available_backends():
        run_memory_of_a_second_head(world, device, report)
    for backend in reversed(available_backends()):  # the kernels first, whatever stops the rest
        run_two_heads(backend, world, device, report)
        for case in cases:
            run_case(case, backend, world, device, report)
        run_partial_gradients(backend, world, device, report)
        run_no_grad(backend, world, device, report)
        for group in (world, subgroup):
            run_bits_of_all_sizes(backend, group, device, report)
        if everything:
            run_token_loss(backend, world, device, report)
            run_ids(backend, world, device, report)
        run_dtensors(backend, world, device, report)
        run_async_tensors(backend, world, device, report)
        if dist.get_world_size() == 2:  # no more is to be learnt of more
            run_compiled(backend, world, device, report)
        for case in (Case("tp_group is a part of the world"), Case("a part of the world, bf16", dtype=BF16)):
            run_case(case, backend, subgroup, device, report)


if __name__ == "__main__":
    main(program)
