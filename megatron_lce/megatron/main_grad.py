"""The head's weight gradient, added directly to Megatron's fp32 `main_grad` (`gradient_accumulation_fusion`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_lce.megatron.gtp import is_gtp_sharded

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import ColumnParallelLinear


class MainGradSink:
    """A sink whose buffer is `weight.main_grad`: the core adds slabs to it, or a known loss once in backward.

    Autograd still receives a gradient, zeros, so that the hook of DistributedDataParallel fires when all uses of the
    weight are done. The hook adds autograd's sum to `main_grad`, or drops it if `weight.grad_added_to_main_grad` is
    set. Megatron's own layers set that mark for good, which loses the gradient of any other use of the weight. Here it
    is set only while the zeros are the whole gradient, and cleared once the hook has run.
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
        zeros = weight.new_zeros(()).expand_as(weight)  # takes no memory
        # Megatron marks a tied embedding's weight `zero_out_wgrad`: the hook then adds the sum in any case.
        if not getattr(weight, "zero_out_wgrad", False):
            _mark_if_alone(zeros, weight)
        return zeros


def _mark_if_alone(zeros: Tensor, weight: Tensor) -> None:
    """Set `grad_added_to_main_grad` around DDP's hook in this backward pass, if `zeros` are the whole gradient.

    Called in backward, before the weight gradient is accumulated. A node's hooks run in the order of registration,
    and DDP registered its hook when it wrapped the model. Ours must not hold the node: it holds them.
    """

    def before(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        handle.remove()
        if gradients[0] is not zeros or weight.grad is not None:
            return None
        unwritten = torch.empty_like(weight)  # DDP drops it
        memory = unwritten.untyped_storage()  # holding the tensor itself would make autograd copy it

        def after(*_: Any) -> None:
            handle_after.remove()
            weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            grad = weight.grad
            if grad is not None and grad.untyped_storage().data_ptr() == memory.data_ptr():
                grad.zero_()  # no hook dropped or replaced it

        handle_after = torch.autograd.graph.get_gradient_edge(weight).node.register_hook(after)
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return (unwritten,)

    handle = torch.autograd.graph.get_gradient_edge(weight).node.register_prehook(before)


def main_grad_sink(weight: Tensor, head: ColumnParallelLinear) -> MainGradSink | None:
    """Return a sink for the weight that `head` is called with; None: the gradient is returned, and DDP's hook adds it.

    There is none without `gradient_accumulation_fusion`; if `main_grad` is not fp32, as slabs are; if H is not a
    multiple of 8, because the weight is then copied; under Megatron-FSDP, which allocates `main_grad` anew in each
    backward pass; and under GTP, where `main_grad` belongs to a shard.
    """
    if is_gtp_sharded(head):
        return None
    main_grad = getattr(weight, "main_grad", None)
    if not head.gradient_accumulation_fusion or not weight.requires_grad or hasattr(weight, "__fsdp_param__"):
        return None
    if main_grad is None or main_grad.dtype != torch.float32 or weight.shape[1] % 8:
        return None
    return MainGradSink(weight)
