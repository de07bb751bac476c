"""What `run_parity.py` runs of `megatron_lce.compat`: the calls of other packages, and who refuses them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Report, message_of
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron_lce import compat
from megatron_lce.core.options import LinearCrossEntropyOutput
from tests.cases import Case, Ranks, Share, case
from tests.findings import check_error
from tests.oracle import Upstream, comparisons, evaluate, oracle


def run_calls(group: ProcessGroup, device: torch.device, report: Report) -> None:
    """The call of verl and AReaL, which sums hidden's gradient. What stands in front of it is run_megatron.py's."""

    def verls(*inputs: Tensor) -> LinearCrossEntropyOutput:
        outputs = compat.linear_cross_entropy(*inputs, dist_process_group=group)
        return LinearCrossEntropyOutput(*(output.view_as(inputs[2]) for output in outputs), None)

    share = Share(case(), Ranks("auto", group, device))
    upstream = Upstream(share.upstream.logprobs, share.upstream.entropy)
    inputs = (share.hidden, share.weight, share.labels, upstream)
    actual = evaluate(verls, *share.heads, share.labels, upstream)
    for result in comparisons(actual, oracle(*inputs), *inputs, **share.parts):
        check_error(share, f"verl's call: {result.name}", result.error, result.allowed, report)


def run_torchs_call(group: ProcessGroup, device: torch.device, report: Report) -> None:
    """`compat.torch_linear_cross_entropy` over a group: class weights, label smoothing, DTensors."""
    problem = Share(Case(), Ranks("auto", group, device))
    shard = problem.columns
    factors = torch.linspace(0.5, 2.0, len(problem.weight), device=device)

    def evaluated(function: Any, part: slice, **keywords: Any) -> list[Tensor]:
        hidden, weight = (t.clone().requires_grad_() for t in (problem.hidden, problem.weight[part]))
        loss = function(hidden, weight, problem.labels, **keywords)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    def materialised(hidden: Tensor, head: Tensor, target: Tensor, **others: Any) -> Tensor:
        return torch.nn.functional.cross_entropy((hidden @ head.T).flatten(0, 1), target.flatten(), **others)

    for keyword, value in (("label_smoothing", 0.2), ("weight", factors)):
        actual = evaluated(compat.torch_linear_cross_entropy, shard, tp_group=group, **{keyword: value})
        expected = evaluated(materialised, slice(None), **{keyword: value})
        for name, one, other in zip(("loss", "grad_hidden", "grad_weight"), actual, expected, strict=True):
            other = other[shard] if name == "grad_weight" else other
            report.compare(f"torch's call with {keyword}: {name}", one, other, 1e-5)
    mesh = DeviceMesh.from_group(group, device.type)
    placed = distribute_tensor(problem.hidden, mesh, [Replicate()]), distribute_tensor(problem.weight, mesh, [Shard(0)])
    loss = compat.torch_linear_cross_entropy(*placed, problem.labels, label_smoothing=0.2)
    expected_loss = materialised(problem.hidden, problem.weight, problem.labels, label_smoothing=0.2)
    report.compare("torch's call with DTensors and label_smoothing: loss", loss, expected_loss, 1e-5)


def run_disagreements_of_compat(group: ProcessGroup, report: Report) -> None:
    """The same of the other projects' calls, whose own checks come before those of the operation."""
    ranks = dist.get_world_size(group)
    hidden, weight, labels = torch.ones(6, 8), torch.ones(20, 8), torch.zeros(6, dtype=torch.int64)
    head = {"hidden": hidden, "weight": weight, "labels": labels}
    torchs_head = {"input": hidden, "linear_weight": weight, "target": labels}
    of_a_head = {  # what the last rank does otherwise
        "refuses its arguments: reduction must be": {"reduction": "avg"},
        "reduction must be the same on every rank": {"reduction": "sum"},
        "refuses its arguments: labels must be int64": {"labels": labels.float()},
        "refuses its arguments: labels must have hidden's order": {"labels": labels[1:]},
        "refuses its arguments: hidden must be a torch.Tensor": {"hidden": None},
        "rows of weight must be the same on every rank": {"weight": torch.ones(21, 8)},
    }
    whole = hidden.clone().requires_grad_()
    partly = torch.cat([_CopyToModelParallelRegion.apply(whole[:3], group), whole[3:]])
    of_graphs = {"of dist_process_group refuses its arguments: hidden must come out of": {"hidden": partly}}
    of_max = {"return_max_logits must be the same on every rank of dist_process_group": {"return_max_logits": True}}
    of_torchs = {
        "refuses its arguments: reduction must be": {"reduction": "avg"},
        "refuses its arguments: linear_bias must be None": {"linear_bias": weight[:, 0]},
        "refuses its arguments: target must be class ids": {"target": hidden},
        "refuses its arguments: target must be int64": {"target": labels.int()},
        "refuses its arguments: linear_weight must have input's dtype": {"linear_weight": weight.half()},
        "refuses its arguments: label_smoothing must lie in [0, 1]": {"label_smoothing": 2.0},
        "refuses its arguments: weight must be floating [": {"weight": torch.ones(3)},
        "label_smoothing must be the same on every rank": {"label_smoothing": 0.1},
        "weight must be the same on every rank": {"weight": torch.ones(20 * ranks)},
    }
    verls = functools.partial(compat.linear_cross_entropy, dist_process_group=group)
    areals = functools.partial(compat.areal_linear_cross_entropy, dist_process_group=group)
    torchs = functools.partial(compat.torch_linear_cross_entropy, tp_group=group)
    check_disagreements(verls, head, of_a_head, group, report)
    check_disagreements(verls, head | {"hidden": whole}, of_graphs, group, report)
    check_disagreements(areals, head, of_max, group, report)
    check_disagreements(torchs, torchs_head, of_torchs, group, report)


class _CopyToModelParallelRegion(torch.autograd.Function):
    """Named as Megatron's, whose backward sums over the group: a graph is as much as the calls look at."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise AssertionError("the call is refused")


def check_disagreements(
    operation: Callable[..., Any], call: dict[str, Any], odd: dict[str, Any], group: ProcessGroup, report: Report
) -> None:
    """For each message the arguments that the last rank calls with; what is its own error it tells as such."""
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    for expected, arguments in odd.items():
        said = expected.split(": ")[-1] if last else expected
        check_refusal(operation, call | (arguments if last else {}), said, report)


def check_refusal(operation: Callable[..., Any], call: dict[str, Any], expected: str, report: Report) -> None:
    message = message_of(lambda: operation(**call))
    report.check(f"refused together: {expected}", expected in message, message)
