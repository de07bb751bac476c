"""What ranks refuse alike: what cannot be over several of them, and what one of them alone calls otherwise."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from harness import Report
from parity_of_compat import check_disagreements, check_refusal
from torch.distributed import ProcessGroup

import megatron_lce
from tests.cases import SEQUENCE, Case, Ranks, Share


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
        "softcap must be the same on every rank": {"softcap": 2.0},
        "gradients must be the same on every rank": {"weight": torch.ones(20, 8, requires_grad=True)},
        "weight_grad_sink must be the same on every rank": {"weight_grad_sink": object()},
        "refuses its arguments: labels must be int64": {"labels": labels.int()},
        "vocab_start must be given on every rank where shards differ": {"weight": uneven},
        "hidden must be the same on every rank": {"hidden": hidden.half(), "weight": torch.ones(20, 8).half()},
        "skip_ignored must be the same on every rank": {"skip_ignored": True},
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
