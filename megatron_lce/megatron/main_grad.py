"""The head's weight gradient added straight into Megatron's fp32 `main_grad` (`gradient_accumulation_fusion`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import ColumnParallelLinear


class MainGradSink:
    """`weight.main_grad` as the place where each slab's weight gradient is added.

    Autograd still receives a gradient, zeros, so that the hook of DistributedDataParallel fires when all uses of the
    weight are done. That hook adds what autograd has summed to `main_grad`, unless `weight.grad_added_to_main_grad`
    tells it to drop it. Megatron's own layers set that mark for good, and so lose what any other use of the weight
    gives. Here it is set only where the zeros are all there is, to save their addition, and taken back once the hook
    has run: the next backward pass may hold a use that returns its gradient.
    """

    def __init__(self, weight: Tensor):
        self._weight = weight  # [V/tp, H]
        self._main_grad: Tensor = weight.main_grad  # type: ignore[attr-defined]  # [V/tp, H] fp32

    def buffer(self) -> Tensor:
        return self._main_grad

    def finish(self) -> Tensor | None:
        weight = self._weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        zeros = weight.new_zeros(()).expand_as(weight)  # as a sum's term; no memory
        # A tied embedding's weight Megatron marks `zero_out_wgrad`: the hook then adds the sum whatever the mark says.
        if not getattr(weight, "zero_out_wgrad", False):
            _mark_if_alone(zeros, weight)
        return zeros


def _mark_if_alone(zeros: Tensor, weight: Tensor) -> None:
    """`grad_added_to_main_grad` around DDP's hook in this backward pass, where `zeros` are the weight's whole gradient.

    Called in backward, before the weight's gradient is accumulated. Hooks of a node run in the order in which they were
    registered, and DDP has registered its own with the model.
    """
    node = torch.autograd.graph.get_gradient_edge(weight).node

    def before(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        remove_before.remove()
        if gradients[0] is not zeros or weight.grad is not None:
            return None
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        unwritten = torch.empty_like(weight)  # what is dropped need not be written
        place = unwritten.data_ptr()  # not the tensor: with another owner autograd would copy it
        remove_after.append(node.register_hook(lambda *_: after(place)))
        return (unwritten,)

    def after(place: int) -> None:
        remove_after.pop().remove()
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        if weight.grad is not None and weight.grad.data_ptr() == place:  # no hook dropped it, or put another there
            weight.grad.zero_()

    remove_before = node.register_prehook(before)
    remove_after: list[torch.utils.hooks.RemovableHandle] = []


def main_grad_sink(weight: Tensor, head: ColumnParallelLinear) -> MainGradSink | None:
    """Return a sink for the weight that `head` is called with if its gradient can go into an fp32 `main_grad`.

    None: the gradient is returned, and DDP's hook adds it. So for a `main_grad` of another dtype, because slabs are
    accumulated in fp32 only, for an H that is not a multiple of 8, whose rows are copied, and under Megatron-FSDP,
    which allocates `main_grad` anew in each backward pass.
    """
    main_grad = getattr(weight, "main_grad", None)
    if not head.gradient_accumulation_fusion or not weight.requires_grad or hasattr(weight, "__fsdp_param__"):
        return None
    if main_grad is None:
        return None
    aligned = weight.shape[1] % 8 == 0
    return MainGradSink(weight) if main_grad.dtype == torch.float32 and aligned else None
