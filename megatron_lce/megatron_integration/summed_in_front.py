"""Whether Megatron's operations in front of a head sum hidden's gradient, as autograd's graph shows."""

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.core import collectives

# Autograd's nodes that put a tensor together of parts.
_OF_PARTS = ("CatBackward0", "StackBackward0", "torch::autograd::CopySlices", "IndexPutBackward0")


def is_summed_in_front(hidden: Tensor, group: ProcessGroup | None) -> bool:
    """Whether hidden's gradient goes to an operation of Megatron's whose backward sums over the group.

    The search ends where nodes have several inputs with a gradient, as in the layers of a model, but for those that put
    hidden together of parts, all of which are looked at.
    """
    found: set[bool] = set()
    nodes: list[Any] = [] if hidden.grad_fn is None else [hidden.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        summing = node.name() == "_CopyToModelParallelRegionBackward" or (
            # else its backward takes this rank's part of a gradient that is whole already
            node.name() == "_GatherFromSequenceParallelRegionBackward" and node.tensor_parallel_output_grad
        )
        inputs = [function for function, _ in node.next_functions if function is not None]
        if summing and collectives.same_ranks(node.group, group):
            found.add(True)
        elif len(inputs) == 1 or (inputs and node.name() in _OF_PARTS):
            nodes += set(inputs) - seen
            seen.update(inputs)
        else:
            found.add(False)
    if len(found) > 1:
        raise ValueError(
            "hidden must come out of gather_from_sequence_parallel_region or copy_to_tensor_model_parallel_region as a "
            "whole or not at all: it has parts whose gradient is summed over the group there, and others"
        )
    return True in found
