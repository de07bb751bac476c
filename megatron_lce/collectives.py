"""The only torch.distributed calls. Every rank of the group makes the same ones in the same order."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work


def group_size(group: ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def stack_over_group(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """[...] on each rank -> [tp, ...], ranks in order, the same bits on every rank."""
    return gather_rows(tensor, group).view(group_size(group), *tensor.shape)  # gloo gathers along dim 0 only


def gather_rows(shard: Tensor, group: ProcessGroup) -> Tensor:
    """[n / tp, H] on each rank -> [n, H], ranks in order."""
    out = shard.new_empty(shard.shape[0] * group_size(group), *shard.shape[1:])
    dist.all_gather_into_tensor(out, shard.contiguous(), group=group)
    return out


def start_all_reduce(tensor: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """Sum over the group in place; read the tensor after `wait()`."""
    return tensor, dist.all_reduce(tensor, group=group, async_op=True)


def start_reduce_scatter(tensor: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """[n, H] -> this rank's rows [n / tp, H] of the sum over the group; read them after `wait()`."""
    out = tensor.new_empty(tensor.shape[0] // group_size(group), *tensor.shape[1:])
    return out, dist.reduce_scatter_tensor(out, tensor, group=group, async_op=True)
