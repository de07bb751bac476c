"""What `run_parity.py` runs of torch around the operation: CUDA graphs, DTensors, FSDP2 and the end of a group."""

import copy
import functools
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from harness import Report
from parity_of_errors import check_refusal
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import megatron_lce
from megatron_lce.core.options import DIFFERENTIABLE_SCALARS
from tests.cases import BF16, Case, Ranks, Share, case
from tests.oracle import differentiable

HIDDEN_SIZE = 24


def run_cuda_graph(group: ProcessGroup, device: torch.device, report: Report) -> None:
    """A replay of a captured step, its collectives included, has the bits of the step without a graph."""
    for one in (case("CUDA graph"), case("CUDA graph, bf16, SP", dtype=BF16, sequence_parallel=True)):
        for cache in (0, 2**20):
            step, inputs = step_of(one, "triton", group, device, logits_cache_bytes=cache)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                with_gradients(step, inputs)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog is another thread
                captured = with_gradients(step, inputs)
            with torch.no_grad():
                inputs[0].mul_(1.5)
            graph.replay()
            report.check(f"{one.name}, {cache} bytes kept", same_bits(captured, with_gradients(step, inputs)))
            del graph, captured


def step_of(
    case: Case, backend: str, group: ProcessGroup, device: torch.device, **keywords: Any
) -> tuple[Callable[..., list[Tensor]], tuple[Tensor, ...]]:
    """A function of this rank's inputs that gives a loss and the outputs it is made of, and these inputs."""
    share = Share(case, Ranks(backend, group, device))
    hidden, weight = (tensor.clone().requires_grad_() for tensor in share.heads)
    return fused_step(share, **share.keywords, **keywords), (hidden, weight, share.labels)


def fused_step(problem: Share, **keywords: Any) -> Callable[..., list[Tensor]]:
    def step(hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
        out = megatron_lce.linear_cross_entropy(hidden, weight, labels, telemetry=True, **keywords)
        outputs, upstream = differentiable(out, problem.upstream)
        loss = sum((output * grad).sum() for output, grad in zip(outputs, upstream, strict=True))
        return [loss, *(output.detach() for output in outputs)]

    return step


def with_gradients(step: Callable[..., list[Tensor]], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    loss, *outputs = step(*inputs)
    return [loss.detach(), *outputs, *torch.autograd.grad(loss, inputs[:2])]


def same_bits(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def run_dtensors(backend: str, group: ProcessGroup, device: torch.device, report: Report) -> None:
    """Placements give the group, the shard's start and sequence parallelism; gradients have the same placements."""
    mesh = DeviceMesh.from_group(group, device.type)
    ranks = dist.get_world_size(group)
    for placement in (Replicate(), Shard(0)):
        title = f"{backend}: DTensor, hidden {placement}"
        smaller = Case(shards=lambda n: [20] * (n - 1) + [19])  # one rank's shard is
        problem = Share(smaller, Ranks(backend, group, device))
        hidden, weight = (t.clone().requires_grad_() for t in (problem.hidden, problem.weight))
        step = fused_step(problem, backend=backend)
        expected = with_gradients(step, (hidden, weight, problem.labels))
        placed = (hidden, placement), (weight, Shard(0))
        sharded = [distribute_tensor(t.detach(), mesh, [where]).requires_grad_() for t, where in placed]
        actual = with_gradients(step, (*sharded, problem.labels))
        names = ("loss", *DIFFERENTIABLE_SCALARS, "grad_hidden", "grad_weight")
        for name, one, other in zip(names, actual, expected, strict=True):
            whole = one.full_tensor() if isinstance(one, DTensor) else one
            report.compare(f"{title}: {name}", whole, other, 1e-5)
        for name, gradient, tensor in zip(names[-2:], actual[-2:], sharded, strict=True):
            report.check(f"{title}: placement of {name}", gradient.placements == tensor.placements)
        sharded[1] = distribute_tensor(weight[: ranks - 1].detach(), mesh, [Shard(0)])
        call = dict(zip(("hidden", "weight", "labels"), (*sharded, problem.labels), strict=True))
        check_refusal(megatron_lce.linear_cross_entropy, call, f"weight must have rows for all {ranks} ranks", report)


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, HIDDEN_SIZE)
        self.body = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)
        self.head = megatron_lce.FusedLinearHead(HIDDEN_SIZE, 50)

    def forward(self, tokens: Tensor, labels: Tensor, fused: bool) -> Tensor:
        """The mean loss, from the head's fused result or from its logits."""
        hidden = torch.tanh(self.body(self.embedding(tokens)))
        if fused:
            return -self.head(hidden, labels, entropy=False).logprobs.mean()
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def run_fsdp(group: ProcessGroup, device: torch.device, report: Report) -> None:
    """FSDP2 around `FusedLinearHead`: every gradient is that of the whole batch on one rank, and the head's weight is
    gathered as often as an `nn.Linear`'s."""
    from torch.distributed.tensor.debug import CommDebugMode  # imports Triton: not before it is told to interpret

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, device.type)
    torch.manual_seed(0)
    alone = TinyModel().to(device)
    tokens, labels = torch.randint(50, (2, 4 * ranks, 6), generator=torch.Generator().manual_seed(1)).to(device)
    alone(tokens, labels, fused=False).backward()
    gathers = []
    for fused in (False, True):
        model = copy.deepcopy(alone)
        for module in (*model.children(), model):
            fully_shard(module, mesh=mesh)
        rows = slice(4 * rank, 4 * (rank + 1))
        with CommDebugMode() as communication:
            model(tokens[rows], labels[rows], fused).backward()
        gathers.append(communication.get_comm_counts()[torch.ops.c10d._allgather_base_])
        for (name, parameter), reference in zip(model.named_parameters(), alone.parameters(), strict=True):
            whole = parameter.grad.full_tensor()
            report.compare(f"FSDP2, fused {fused}: gradient of {name}", whole, reference.grad, 1e-5)
    check_fsdp_temperature(mesh, device, report)
    report.check("FSDP2: gathers, of logits and fused", gathers[0] == gathers[1] > 0, f"{gathers}")


def check_fsdp_temperature(mesh: DeviceMesh, device: torch.device, report: Report) -> None:
    """A policy that casts a module's inputs rounds no temperature, and one that is rounded already is refused."""
    head = megatron_lce.FusedLinearHead(HIDDEN_SIZE, 50, device=device, dtype=torch.float32)
    hidden, labels = torch.ones(9, HIDDEN_SIZE, device=device), torch.arange(9, device=device)
    temperature = 0.5 + torch.arange(9, dtype=torch.float32, device=device) / 7
    with torch.no_grad():
        weight = head.weight.bfloat16()
        call = functools.partial(megatron_lce.linear_cross_entropy, hidden.bfloat16(), weight, labels)
        expected = call(temperature=temperature).logprobs
        fully_shard(head, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        actual = head(hidden, labels, temperature=temperature).logprobs
        report.check("FSDP2: a temperature keeps its bits", torch.equal(actual, expected))
        call = {"hidden": hidden, "labels": labels, "temperature": temperature.bfloat16()}
        check_refusal(head, call, "temperature must be a float, float32", report)


def run_destroyed_group(device: torch.device, report: Report) -> None:
    """No live output keeps a group: gloo's threads would live on, and may abort the process while Python ends."""
    ranks = dist.get_world_size()
    hidden, weight = (torch.ones(n, 8, device=device, requires_grad=True) for n in (4 * ranks, 20))
    labels = torch.arange(4 * ranks, device=device)
    operations: dict[str, Callable[..., Tensor]] = {
        "cross-entropy": lambda *head, **sp: megatron_lce.linear_cross_entropy(*head, labels, **sp).logprobs,
        "token loss": lambda *head, **sp: megatron_lce.linear_token_loss(*head, labels, lambda o: -o.lse, **sp).loss,
        "divergence": lambda *head, **sp: megatron_lce.linear_jsd(*head, *(t.detach() for t in head), **sp),
        "logits at ids": lambda *head, **sp: megatron_lce.linear_logits_at(*head, labels[:, None], **sp),
    }
    for name, operation in operations.items():
        for rows in (4 * ranks, 4):
            group = dist.new_group()
            out = operation(hidden[:rows], weight, tp_group=group, sequence_parallel=rows == 4, backend="torch")
            out.sum().backward(retain_graph=True)
            dist.barrier()
            dist.destroy_process_group(group)
            kept = ref(group)
            del group
            report.check(f"{name} of {rows} rows: a live output keeps no group", kept() is None)
            if ranks > 1 and name != "token loss":  # whose backward has no collectives
                expected = "backward needs tp_group, which was destroyed"
                report.refused(f"{name} of {rows} rows: backward without its group", out.sum().backward, expected)
