"""The head's weight gradient added straight into Megatron's fp32 `main_grad` (`gradient_accumulation_fusion`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import ColumnParallelLinear


class MainGradSink:
    """Megatron's protocol for a layer that accumulates its own weight gradient, as its own linear layers do.

    Each slab's gradient is added to `weight.main_grad`. Autograd still receives a gradient, so that the hook of
    DistributedDataParallel fires when all uses of the weight are done; `grad_added_to_main_grad` tells that hook to
    drop it. A tied embedding's gradient is summed with it, and Megatron marks such a weight `zero_out_wgrad`: the
    hook then adds the sum, so that the head's part must be zeros.
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
        weight.grad_added_to_main_grad = True
        dummy = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return dummy(weight, requires_grad=False)


def main_grad_sink(weight: Tensor, head: ColumnParallelLinear) -> MainGradSink | None:
    """A sink for the weight that `head` is called with, where its gradient can go into an fp32 `main_grad`; else None.

    Without one the gradient is returned, and DDP's hook adds it. That is so for a `main_grad` of another dtype
    (slabs are accumulated in fp32 only), and for an embedding's weight without `zero_out_wgrad`: its own gradient
    would be dropped with the dummy. Megatron leaves that mark out with tied embeddings, MTP and pipeline parallelism.
    """
    main_grad = getattr(weight, "main_grad", None)
    if not head.gradient_accumulation_fusion or not weight.requires_grad or main_grad is None:
        return None
    alone = weight is head.weight or getattr(weight, "zero_out_wgrad", False)
    return MainGradSink(weight) if alone and main_grad.dtype == torch.float32 else None
