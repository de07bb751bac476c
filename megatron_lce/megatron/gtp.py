"""A head that generalized tensor parallelism (GTP, Megatron 0.19 and newer) shards further: whole for one operation.

Each rank of a GTP group holds a part of the rows of its tensor-parallel shard. Megatron gathers them in front of each
product, forward and backward, and starts the gather of the neighboring layer's weight at the same time. An operation
must therefore make Megatron's calls, once each and in Megatron's order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


def is_gtp_sharded(head: nn.Module) -> bool:
    return getattr(head, "gtp_remat_size", 1) > 1


class _WholeWeight(torch.autograd.Function):
    """The gathered weight [V/tp, H]; Megatron reduce-scatters its gradient and adds that to the shard's `main_grad`."""

    @staticmethod
    def forward(ctx: Any, shard: Any) -> Tensor:
        ctx.shard = shard
        return shard.all_gather_and_prefetch(fwd=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        return ctx.shard.wgrad_reduce_scatter(grad)


def with_whole_weight(shard: Any, operation: Callable[[Tensor], T]) -> T:
    """Run an operation on the gathered weight, which it gets anew in backward: the buffer is shared by layers."""
    weight = _WholeWeight.apply(shard)

    def pack(saved: Tensor) -> Tensor | None:
        return None if saved.data_ptr() == weight.data_ptr() and saved.shape == weight.shape else saved

    def unpack(saved: Tensor | None) -> Tensor:
        return shard.all_gather_and_prefetch_bwd() if saved is None else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return operation(weight)
