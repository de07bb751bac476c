"""`FusedLinearHead`: the head as a module of plain PyTorch, for FSDP2 and for tensor parallelism with DTensors."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lce.api.linear_cross_entropy import linear_cross_entropy
from megatron_lce.core.options import LinearCrossEntropyOutput


class FusedLinearHead(nn.Linear):
    """An `nn.Linear` without bias that returns logits or, with labels, the fused result.

    The weight is used only inside the call, so `fully_shard` (FSDP2) gathers it once.
    """

    def __init__(
        self, in_features: int, out_features: int, *, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        """in_features: H; out_features: the size of the vocabulary; the parameter is `weight`, [V, H]."""
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        temperature = keywords.get("temperature")
        if isinstance(temperature, Tensor):  # hidden from FSDP's mixed precision, which would round it
            keywords["temperature"] = SimpleNamespace(tensor=temperature)
        return super().__call__(*args, **keywords)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,  # [..., H]
        labels: Tensor | None = None,  # [...]
        **keywords: Any,
    ) -> Tensor | LinearCrossEntropyOutput:
        """Return logits [..., V]; with labels, `linear_cross_entropy(hidden, weight, labels, **keywords)`.

        Raises:
            TypeError: also for keywords without labels, and for a 16-bit temperature.
        """
        temperature = keywords.get("temperature")
        if isinstance(temperature, SimpleNamespace):
            temperature = keywords["temperature"] = temperature.tensor
        if isinstance(temperature, Tensor) and temperature.dtype.itemsize == 2:
            raise TypeError(  # the policy may be an outer module's: only the dtype tells
                f"temperature must be a float, float32 or float64, got {temperature.dtype}. A MixedPrecisionPolicy of "
                "FSDP rounds the tensors that a forward is given: make it inside the module that calls the head"
            )
        if labels is not None:
            return linear_cross_entropy(hidden, self.weight, labels, **keywords)
        if keywords:
            raise TypeError(f"labels must be given beside {', '.join(keywords)}")
        return super().forward(hidden)
