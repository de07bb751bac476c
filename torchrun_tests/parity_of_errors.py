"""What ranks refuse alike: what cannot be over several of them, and what one of them alone calls otherwise."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from harness import Report
from parity_of_compat import check_refusal
from torch.distributed import ProcessGroup

import megatron_lce
from tests.cases import SEQUENCE, Case, Ranks, Share


def run_errors(group: ProcessGroup, device: torch.device, report: Report) -> None:
    """What cannot be over several ranks is refused, on all of them alike, before any of them communicates."""
    if dist.get_world_size(group) == 1:
        return
    problem = Share(Case(), Ranks("auto", group, device))
    shard = problem.hidden[: SEQUENCE // dist.get_world_size(group)]
    refused = [
        ({"backend": "reference"}, "tp_group must have one rank for backend='reference', got a larger group"),
        (
            {"sequence_parallel": True, "reduce_grad_hidden": False},
            "reduce_grad_hidden must be True with sequence_parallel, got False",
        ),
        ({"sequence_parallel": True, "hidden": problem.hidden}, "labels must have hidden's shape without H gathered"),
        ({"workspace_bytes": 8}, "workspace_bytes must be at least "),
    ]
    for keywords, expected in refused:
        hidden = shard if keywords.get("sequence_parallel") else problem.hidden
        inputs = {"hidden": hidden, "weight": problem.weight[:20], "labels": problem.labels}
        operation = functools.partial(megatron_lce.linear_cross_entropy, tp_group=group)
        check_refusal(operation, inputs | keywords, expected, report)


def run_disagreements(group: ProcessGroup, report: Report) -> None:
    """What one rank alone calls otherwise is an error on all of them, and names the difference."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks == 1:
        return
    last = rank == ranks - 1
    hidden, labels = torch.ones(6, 8), torch.zeros(6, dtype=torch.int64)
    rows = 300 if last else 20  # of the kernels' tiles: statistics that take workspace
    odd = {  # what the last rank does otherwise
        "softcap must be the same on every rank": {"softcap": 2.0},
        "gradients must be the same on every rank": {"weight": torch.ones(20, 8, requires_grad=True)},
        "weight_grad_sink must be the same on every rank": {"weight_grad_sink": object()},
        "refuses its arguments: labels must be int64": {"labels": labels.int()},
        "vocab_start must be given on every rank where shards differ": {"weight": torch.ones(rows, 8)},
        "hidden must be the same on every rank": {"hidden": hidden.half(), "weight": torch.ones(20, 8).half()},
        "skip_ignored must be the same on every rank": {"skip_ignored": True},
        "the shape of hidden must be the same on every rank": {"hidden": hidden[1:], "labels": labels[1:]},
    }
    for expected, arguments in odd.items():
        call = {"hidden": hidden, "weight": torch.ones(20, 8), "labels": labels, **(arguments if last else {})}
        check_refused(call, expected.split(": ")[-1] if last else expected, group, report)
    # What is known of another operation is nothing of this one.
    megatron_lce.linear_cross_entropy(hidden, torch.ones(20, 8), labels, tp_group=group, backend="torch")
    odd = {
        "has no keyword logits_cache_bytes": {"logits_cache_bytes": 1},
        "loss must be a function of the outputs": {"loss": None},
        "per_token[0] must have labels' shape first": {"per_token": torch.ones(5)},
    }
    for expected, arguments in odd.items():
        given = {"loss": lambda out, _: -out.logprobs, "per_token": torch.ones(6), **(arguments if last else {})}
        own = given.pop("loss"), given.pop("per_token")
        inputs = hidden, torch.ones(20, 8), labels, *own
        operation = functools.partial(megatron_lce.linear_token_loss, *inputs, tp_group=group, backend="torch")
        check_refusal(operation, given, expected, report)
    uneven_call = {"hidden": hidden, "weight": torch.ones(rows, 8), "labels": labels, "vocab_start": 20 * rank}
    check_refused({**uneven_call, "workspace_bytes": 200}, "workspace_bytes must be at least", group, report)
    of_heads = {  # the betas of two kinds, and what only some ranks call with
        "beta must be the same on every rank": {"beta": 0.0 if last else 0.5},
        "skip_ignored must be the same on every rank": {"skip_ignored": last},
        "vocab_start must be given on every rank where shards differ": {"vocab_start": None},
        "workspace_bytes must be at least": {"workspace_bytes": 1},
    }
    heads = hidden, torch.ones(rows, 8), hidden, torch.ones(rows, 8)
    operation = functools.partial(megatron_lce.linear_jsd, *heads, tp_group=group, backend="torch")
    for expected, arguments in of_heads.items():
        check_refusal(operation, {"vocab_start": 20 * rank, **arguments}, expected, report)


def check_refused(call: dict[str, Any], expected: str, group: ProcessGroup, report: Report) -> None:
    operation = functools.partial(megatron_lce.linear_cross_entropy, tp_group=group, backend="torch")
    check_refusal(operation, call, expected, report)
