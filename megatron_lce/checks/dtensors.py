"""DTensor arguments: their placements give the group, the shard and sequence parallelism."""

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lce.checks.validation import require
from megatron_lce.core.collectives import wait_if_async
from megatron_lce.core.options import Options
from megatron_lce.core.plan import ceil_div


def to_local_tensors(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor, Options, int]:
    """Return this rank's own tensors, options with what placements imply, and the columns of the largest shard."""
    if not isinstance(weight, DTensor) or not isinstance(hidden, DTensor):
        kinds = " and ".join("a DTensor" if isinstance(t, DTensor) else "a plain tensor" for t in (hidden, weight))
        raise TypeError(
            f"hidden and weight must both be DTensors or neither, got {kinds}. Tensor parallel: say that hidden is the "
            "same on every rank, DTensor.from_local(hidden, mesh, [Replicate()]). FSDP: its ranks have other tokens, "
            "and the weight is whole inside its module's call only, as in megatron_lce.FusedLinearHead"
        )
    mesh = weight.device_mesh
    if mesh.ndim != 1 or hidden.device_mesh != mesh:
        got = f"{mesh} and {hidden.device_mesh}"
        raise ValueError(f"weight must lie on a mesh of one dimension and hidden on the same, got {got}")
    (weight_placement,) = weight.placements
    (hidden_placement,) = hidden.placements
    require(
        weight_placement.is_shard(0), "weight", "be placed as Shard(0), its vocabulary over the ranks", weight_placement
    )
    requirement = "be placed as Replicate(), or Shard(0) for sequence parallelism over its first dimension"
    is_placed = hidden_placement.is_replicate() or hidden_placement.is_shard(0)
    require(is_placed, "hidden", requirement, f"{hidden_placement}: redistribute it")
    for name, value in (("tp_group", options.tp_group), ("vocab_start", options.vocab_start)):
        require(value is None, name, "be None beside DTensors, whose placements give it", value)
    is_false, is_true = "be False beside DTensors: hidden's placement gives it", "be True beside DTensors"
    require(not options.sequence_parallel, "sequence_parallel", is_false, True)
    require(options.reduce_grad_hidden, "reduce_grad_hidden", f"{is_true}: their gradients are whole", False)
    max_columns = ceil_div(weight.shape[0], mesh.size())  # rows of the first shards; the last ones may have fewer
    reaches_all = weight.shape[0] > max_columns * (mesh.size() - 1)
    require(reaches_all, "weight", f"have rows for all {mesh.size()} ranks", tuple(weight.shape))
    options = replace(
        options,
        temperature=_replicated("temperature", options.temperature),
        candidates=_replicated("candidates", options.candidates),
        tp_group=mesh.get_group(),
        vocab_start=min(mesh.get_local_rank() * max_columns, weight.shape[0]),
        sequence_parallel=hidden_placement.is_shard(0),
    )
    hidden, weight = wait_if_async(hidden.to_local()), wait_if_async(weight.to_local())
    return hidden, weight, _replicated("labels", labels), options, max_columns


def _replicated(name: str, value: Any) -> Any:
    """Return the plain tensor of a replicated DTensor, and other values unchanged."""
    if not isinstance(value, DTensor):
        return value
    is_whole = all(placement.is_replicate() for placement in value.placements)
    require(is_whole, name, "be a plain tensor or placed as Replicate()", value.placements)
    return wait_if_async(value.to_local())
