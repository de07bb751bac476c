"""That an error as large as what four ranks' 16-bit sums may add is found, wherever it comes from."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import Report
from torch import Tensor
from torch.distributed import ProcessGroup

import megatron_lce
from megatron_lce.core import collectives
from megatron_lce.core.collectives import Pending
from tests.cases import BF16, Ranks, case
from tests.checks import check_case
from tests.findings import Noted

PLANTED = 4.3e-3  # of hidden's gradient, norm over norm, as NCCL's sum over four ranks was seen to be off


def with_error(grad: Tensor) -> Tensor:
    noise = torch.randn(grad.shape, generator=torch.Generator().manual_seed(3)).to(grad)
    return grad + noise * (PLANTED * grad.norm() / noise.norm())


def in_the_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    def planted(hidden: Tensor, *others: Any, **keywords: Any) -> Any:
        hidden = hidden.view_as(hidden)
        if hidden.requires_grad:
            hidden.register_hook(with_error)
        return function(hidden, *others, **keywords)

    return planted


def in_the_sum(function: Callable[..., Pending]) -> Callable[..., Pending]:
    def planted(tensor: Tensor, group: ProcessGroup) -> Pending:
        total = function(tensor, group).wait()
        return Pending(total.copy_(with_error(total)))

    return planted


def run_planted_errors(group: ProcessGroup, device: torch.device, report: Report) -> None:
    """In the gradient, on each rank and after the sum alike, and in the sum alone."""
    names = "all_reduce_async", "reduce_scatter_async"
    places: dict[str, tuple[Any, dict[str, Any]]] = {
        "nowhere": (collectives, {"dist": dist}),
        "in the gradient": (megatron_lce, {"linear_cross_entropy": in_the_gradient(megatron_lce.linear_cross_entropy)}),
        "in the sum": (collectives, {name: in_the_sum(getattr(collectives, name)) for name in names}),
    }
    for place, (module, patches) in places.items():
        for keywords in ({}, {"sequence_parallel": True}):
            one = case("planted", shards=lambda ranks: [300] * ranks, dtype=BF16, fp32_weight=True, **keywords)
            noted = Noted()
            with mock.patch.multiple(module, **patches):
                check_case(one, Ranks("torch", group, device), noted)
            everywhere: list[list[str]] = [[]] * dist.get_world_size(group)
            dist.all_gather_object(everywhere, [*noted], group=group)
            found = sorted({name for of_rank in everywhere for name in of_rank})
            report.check(f"an error {place}, {keywords}", bool(found) == (place != "nowhere"), "; ".join(found))
