"""Calls of other packages over ranks, and what ranks refuse alike: what one of them alone calls otherwise."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import Report, message_of
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import megatron_lce
from megatron_lce import compat
from megatron_lce.core.options import LinearCrossEntropyOutput
from tests.cases import SEQUENCE, Case, Ranks, Share, case
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


def run_errors(group: ProcessGroup, device: torch.device, report: Report) -> None:
    """What cannot be over several ranks is refused, on all of them alike, before any of them communicates."""
    problem = Share(Case(), Ranks("auto", group, device))
    shard = problem.hidden[: SEQUENCE // dist.get_world_size(group)]
    alone = {"sequence_parallel": True, "reduce_grad_hidden": False}
    refused = {
        "reduce_grad_hidden must be True with sequence_parallel, got False": alone | {"hidden": shard},
        "labels must have hidden's shape without H gathered": {"sequence_parallel": True},
        "workspace_bytes must be at least ": {"workspace_bytes": 8},
    }
    inputs = {"hidden": problem.hidden, "weight": problem.weight[:20], "labels": problem.labels}
    operation = functools.partial(megatron_lce.linear_cross_entropy, tp_group=group)
    for expected, keywords in refused.items():
        check_refusal(operation, inputs | keywords, expected, report)


def run_disagreements(group: ProcessGroup, report: Report) -> None:
    """What one rank alone calls otherwise is an error on all of them, and names the difference."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    hidden, weight, labels = torch.ones(6, 8), torch.ones(20, 8), torch.zeros(6, dtype=torch.int64)
    uneven = torch.ones(300 if rank == ranks - 1 else 20, 8)  # of the kernels' tiles: statistics that take workspace
    head = {"hidden": hidden, "weight": weight, "labels": labels}
    cross_entropy = functools.partial(megatron_lce.linear_cross_entropy, tp_group=group, backend="torch")
    odd = {  # what the last rank does otherwise
        "temperature must be the same on every rank": {"temperature": 2.0},
        "gradients must be the same on every rank": {"weight": torch.ones(20, 8, requires_grad=True)},
        "weight_grad_sink must be the same on every rank": {"weight_grad_sink": object()},
        "refuses its arguments: labels must be int64": {"labels": labels.int()},
        "vocab_start must be given on every rank where shards differ": {"weight": uneven},
        "hidden must be the same on every rank": {"hidden": hidden.half(), "weight": torch.ones(20, 8).half()},
        "the shape of hidden must be the same on every rank": {"hidden": hidden[1:], "labels": labels[1:]},
    }
    check_disagreements(cross_entropy, head, odd, group, report)
    # What is known of another operation is nothing of this one.
    cross_entropy(**head)

    def token_loss(loss: Any, per_token: Any, **keywords: Any) -> None:
        megatron_lce.linear_token_loss(
            hidden, weight, labels, loss, per_token, tp_group=group, backend="torch", **keywords
        )

    odd = {
        "has no keyword logits_cache_bytes": {"logits_cache_bytes": 1},
        "loss must be a function of the outputs": {"loss": None},
        "per_token[0] must have labels' shape first": {"per_token": torch.ones(5)},
    }
    given = {"loss": lambda out, _: -out.logprobs, "per_token": torch.ones(6)}
    check_disagreements(token_loss, given, odd, group, report)
    support = functools.partial(megatron_lce.support_logprobs, tp_group=group, backend="torch")
    given = head | {"ids": torch.zeros(12, dtype=torch.int64), "offsets": 2 * torch.arange(7)}
    odd = {
        "ids must be the same on every rank": {"ids": torch.zeros(13, dtype=torch.int64)},
        "ids must be a torch.Tensor": {"ids": None},
    }
    check_disagreements(support, given, odd, group, report)
    run_losses(group, report)
    start, too_small = {"vocab_start": 20 * rank}, "workspace_bytes must be at least"
    check_refusal(cross_entropy, head | start | {"weight": uneven, "workspace_bytes": 200}, too_small, report)
    odd = {  # the betas of two kinds, and what only some ranks call with
        "beta must be the same on every rank": {"beta": 0.0},
        "skip_ignored must be the same on every rank": {"skip_ignored": True},
    }
    jsd = functools.partial(megatron_lce.linear_jsd, hidden, uneven, hidden, uneven, tp_group=group, backend="torch")
    check_disagreements(jsd, start, odd, group, report)
    check_refusal(jsd, {}, "vocab_start must be given on every rank where shards differ", report)
    check_refusal(jsd, start | {"workspace_bytes": 1}, too_small, report)
    run_exchanges(group, report)


def loss_that(way: str) -> Callable[..., Any]:
    """A loss of one name, whatever it does: returns the losses, or fails."""

    def loss(out: Any, factor: Tensor) -> Any:
        if way == "raises":
            raise KeyError("advantages")
        per_token = out[0] * factor
        if way == "centres":
            per_token = per_token - out[0].detach().mean()
        return {"detaches": per_token.detach(), "sums": per_token.sum()}.get(way, per_token)

    return loss


def run_losses(group: ProcessGroup, report: Report) -> None:
    """What a caller's loss raises on one rank is raised on all, until a call of the kind has been right on all."""
    generator, labels, last = torch.Generator().manual_seed(0), torch.arange(300) % 20, group.size() - 1
    hidden, weight = (torch.randn(rows, 8, generator=generator).requires_grad_() for rows in (300, 20))
    keywords = {"tp_group": group, "backend": "torch"}
    faults = {
        "raises": f"rank {last} of tp_group raises KeyError in its loss: 'advantages'",
        "sums": f"rank {last} of tp_group raises ValueError in its loss: loss must return one number for each of its",
        "detaches": f"rank {last} of tp_group raises ValueError in its loss: loss must return losses that depend on",
        "centres": f"rank {last} of tp_group raises ValueError in its loss: loss must treat each token for itself",
    }
    operations = {
        "token loss": functools.partial(megatron_lce.linear_token_loss, hidden, weight, labels),
        "divergence loss": functools.partial(
            megatron_lce.linear_divergence_loss, hidden, weight, hidden.detach() + 1, weight.detach(), labels
        ),
    }
    for name, operation in operations.items():
        for way, message in faults.items():
            if way == "centres" and name != "token loss":  # its code has passed, and is not looked at again
                continue
            loss = loss_that(way if group.rank() == last else "works")
            said = message.split(" in its loss: ")[1] if group.rank() == last else message
            try:
                told = str(operation(loss, torch.ones(300), **keywords))
            except (KeyError, ValueError) as error:
                told = str(error)
            report.check(f"a {name} that {way} on one rank", told.startswith(said), told)
        counts = []
        for _ in range(2):
            with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as exchange:
                operation(loss_that("works"), torch.ones(300), **keywords).loss.backward()
            counts.append(exchange.call_count)
        report.check(f"a {name} is exchanged once", counts[0] > 1 and counts[1] == 0, f"{counts} exchanges")


def run_exchanges(group: ProcessGroup, report: Report) -> None:
    """Ranks exchange what they call with at the first call of a kind; what training changes makes no new kind."""
    hidden, weight, labels = torch.ones(6, 4), torch.ones(20, 4), torch.zeros(6, dtype=torch.int64)
    keywords = {"tp_group": group, "backend": "torch"}
    cross_entropy = functools.partial(megatron_lce.linear_cross_entropy, hidden, weight, labels, **keywords)
    jsd = functools.partial(megatron_lce.linear_jsd, hidden, weight, hidden, weight, **keywords)
    at = functools.partial(megatron_lce.linear_logits_at, hidden, weight, **keywords)
    torchs = functools.partial(compat.torch_linear_cross_entropy, hidden, weight, labels, tp_group=group)

    def ids(width: int) -> Tensor:
        return torch.zeros(6, width, dtype=torch.int64)

    annealed = {  # a first call, and later ones
        "temperature": (cross_entropy, [0.9, 0.8]),
        "candidates": (cross_entropy, [ids(3), ids(2)]),
        "skip_ignored": (cross_entropy, [6, 5]),
        "teacher_temperature": (jsd, [0.9, 0.8]),
        "beta": (jsd, [0.9, 0.8]),
        "ids": (at, [ids(3), ids(2)]),
        "label_smoothing": (torchs, [0.2, 0.1]),
    }
    for name, (operation, values) in annealed.items():
        with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as exchange:
            counts = []
            for value in values:
                operation(**{name: value})
                counts.append(exchange.call_count)
        report.check(f"another value of {name} is not exchanged", counts[1] == counts[0], f"{counts} exchanges")
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as exchange:
        jsd(beta=0.0)
    report.check("a beta of another kind is exchanged", exchange.call_count == 1, f"{exchange.call_count} exchanges")
