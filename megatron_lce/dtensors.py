"""DTensor arguments of a head: what their placements say of its group, shard and sequence parallelism."""

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lce.core.collectives import waited
from megatron_lce.core.options import Options
from megatron_lce.core.plan import ceil_div


def localised(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor, Options, int | None]:
    """Return the call with this rank's local tensors and the options that placements imply; and the largest shard.

    The last result is the number of columns of the group's largest shard. Plain tensors are returned unchanged, with
    None.

    Raises:
        TypeError, ValueError: the placements are not those of a head over one mesh dimension.
    """
    if not isinstance(weight, DTensor) and not isinstance(hidden, DTensor):
        return hidden, weight, labels, options, None
    if not isinstance(weight, DTensor) or not isinstance(hidden, DTensor):
        kinds = " and ".join("a DTensor" if isinstance(t, DTensor) else "a plain tensor" for t in (hidden, weight))
        raise TypeError(
            f"hidden and weight must both be DTensors or neither, got {kinds}. Tensor parallel: say that hidden is the "
            "same on every rank, DTensor.from_local(hidden, mesh, [Replicate()]). FSDP: its ranks have other tokens, "
            "and the weight is whole inside its module's call only, as in megatron_lce.FusedLinearHead"
        )
    mesh = weight.device_mesh
    if mesh.ndim != 1 or hidden.device_mesh != mesh:
        raise ValueError(
            f"weight must lie on a mesh of one dimension and hidden on the same, got {mesh} and {hidden.device_mesh}"
        )
    (rows,), (tokens,) = weight.placements, hidden.placements
    if not rows.is_shard(0):
        raise ValueError(f"weight must be placed as Shard(0), its vocabulary over the ranks, got {rows}")
    if not (tokens.is_replicate() or tokens.is_shard(0)):
        raise ValueError(
            "hidden must be placed as Replicate(), or Shard(0) for sequence parallelism over its first dimension, "
            f"got {tokens}: redistribute it"
        )
    for name in ("tp_group", "vocab_start"):
        if getattr(options, name) is not None:
            raise ValueError(f"{name} must be None beside DTensors, which tell it, got {getattr(options, name)}")
    if options.sequence_parallel:
        raise ValueError("sequence_parallel must be False beside DTensors: hidden's placement tells it, got True")
    if not options.reduce_grad_hidden:
        raise ValueError("reduce_grad_hidden must be True beside DTensors: a placement says whole, got False")
    largest = ceil_div(weight.shape[0], mesh.size())  # rows of the first shards; the last ones may have fewer
    if weight.shape[0] <= largest * (mesh.size() - 1):
        raise ValueError(f"weight must have rows for all {mesh.size()} ranks, got {tuple(weight.shape)}")
    options = replace(
        options,
        temperature=_replicated("temperature", options.temperature),
        candidates=_replicated("candidates", options.candidates),
        tp_group=mesh.get_group(),
        vocab_start=min(mesh.get_local_rank() * largest, weight.shape[0]),
        sequence_parallel=tokens.is_shard(0),
    )
    return waited(hidden.to_local()), waited(weight.to_local()), _replicated("labels", labels), options, largest


def _replicated(name: str, value: Any) -> Any:
    """A tensor that every rank has whole, as a plain one."""
    if not isinstance(value, DTensor):
        return value
    if not all(placement.is_replicate() for placement in value.placements):
        raise ValueError(f"{name} must be a plain tensor or placed as Replicate(), got {value.placements}")
    return waited(value.to_local())
