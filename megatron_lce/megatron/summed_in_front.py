"""Whether one of Megatron's operations before the head sums the hidden-state gradient, read from autograd's graph."""

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.core import collectives

# Autograd nodes, without "Backward0", that do not mix elements: views, casts, copies, concatenations, and additions and
# multiplications of numbers. No layer consists of them, not even a frozen one.
_KEEP_ELEMENTS = {
    *("Alias", "AsStrided", "Expand", "MakeViewlessTensor", "Permute", "ReshapeAlias", "Select", "Slice", "Split"),
    *("SplitWithSizes", "Squeeze", "T", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View"),
    *("Clone", "Gather", "Index", "IndexSelect", "MaskedSelect", "ToCopy", "torch::autograd::Copy"),
    *("Cat", "ConstantPadNd", "IndexPut", "Stack", "torch::autograd::CopySlices"),
    *("Add", "Div", "Mul"),
}
_OF_PARTS = {"Cat", "IndexPut", "Stack", "torch::autograd::CopySlices"}  # take several tensors with a gradient


def is_summed_in_front(hidden: Tensor, group: ProcessGroup | None) -> bool:
    """Return whether the hidden-state gradient reaches an operation of Megatron whose backward sums over the group.

    The search stops at the first node that mixes elements, and covers all parts of a concatenation.
    """
    found: set[bool] = set()
    nodes: list[Any] = [] if hidden.grad_fn is None else [hidden.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        kind = node.name().split("Backward")[0]  # "torch::autograd::CopySlices" has no such suffix
        summing = node.name() == "_CopyToModelParallelRegionBackward" or (
            # without the flag, its backward cuts this rank's part out of a whole gradient
            node.name() == "_GatherFromSequenceParallelRegionBackward" and node.tensor_parallel_output_grad
        )
        inputs = [function for function, _ in node.next_functions if function is not None]
        if summing and collectives.same_ranks(node.group, group):
            found.add(True)
        elif inputs and kind in _KEEP_ELEMENTS and (len(inputs) == 1 or kind in _OF_PARTS):
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
