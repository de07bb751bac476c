"""All torch.distributed calls of the package. Every rank of a group makes the same ones in the same order."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from megatron_lce.core.eager import trace_range


class Pending(NamedTuple):
    """A tensor that a collective may still be filling: call `wait()` before every read."""

    tensor: Tensor
    work: Work | None = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        return tensor.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def wait_if_async(value: Any) -> Any:
    """Wait for a tensor that a functional collective is still filling; return any other value unchanged."""
    if not isinstance(value, AsyncCollectiveTensor):
        return value
    return _Waited.apply(value) if value.requires_grad else value.wait()


# From torch 2.13 on; the older names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_size(group: ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def same_ranks(one: ProcessGroup | None, other: ProcessGroup | None) -> bool:
    if one is None or other is None:
        return one is other
    return dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)


def gather_objects(value: Any, group: ProcessGroup) -> list[Any]:
    """Return the small picklable values of all ranks, in order. The host waits: not for the hot path."""
    gathered = [None] * group_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def all_reduce_max(value: int, group: ProcessGroup, device: torch.device | None) -> int:
    """Return the largest number of any rank. The host waits for it."""
    max_value = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(max_value, dist.ReduceOp.MAX, group=group)
    return int(max_value)


def is_cuda_graph_capturing() -> bool:
    """Return whether this stream is captured as a CUDA graph, so that the host cannot wait for it."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def all_reduce_any(mask: Tensor, group: ProcessGroup) -> Tensor:
    """Return the union of all ranks' masks."""
    any_rank = mask.to(torch.uint8)
    with trace_range("any over the group"):
        dist.all_reduce(any_rank, dist.ReduceOp.MAX, group=group)
    return any_rank.bool()


def all_reduce_sum(tensor: Tensor, group: ProcessGroup) -> None:
    """Sum the tensor over the group, in place."""
    with trace_range("sums over the group"):
        dist.all_reduce(tensor, group=group)


def all_gather_stack(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Stack the tensors [...] of all ranks to [tp, ...], in order, with the same bits on every rank."""
    gathered = all_gather_async(tensor, group).wait()  # gloo gathers along dim 0 only
    return gathered.view(group_size(group), *tensor.shape)


def all_gather_async(shard: Tensor, group: ProcessGroup) -> Pending:
    """Start gathering rows [n / tp, H] of every rank to [n, H], in the order of ranks."""
    out = shard.new_empty(shard.shape[0] * group_size(group), *shard.shape[1:])
    with trace_range("gather over the group"):
        return Pending(out, _all_gather(out, shard.contiguous(), group=group, async_op=True))


def all_reduce_async(tensor: Tensor, group: ProcessGroup) -> Pending:
    """Start summing the tensor over the group, in place."""
    with trace_range("sum of hidden's gradient over the group"):
        return Pending(tensor, dist.all_reduce(tensor, group=group, async_op=True))


def reduce_scatter_async(tensor: Tensor, group: ProcessGroup) -> Pending:
    """Start summing [n, H] over the group; the result is this rank's rows [n / tp, H] of the sum."""
    out = tensor.new_empty(tensor.shape[0] // group_size(group), *tensor.shape[1:])
    with trace_range("sum of hidden's gradient over the group, scattered"):
        return Pending(out, _reduce_scatter(out, tensor, group=group, async_op=True))
