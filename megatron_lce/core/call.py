"""One call of an operation: the tensors and options that everything else is handed."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from megatron_lce.core.options import Options, Shard
from megatron_lce.core.plan import ALIGNED_COLUMNS, HeadSize
from megatron_lce.core.protocols import Backend
from megatron_lce.core.statistics import packed_rows


@dataclass(frozen=True)
class Call:
    """One call: its tensors localised and laid out, its options checked and agreed over the group.

    hidden   [N, H], under sequence parallel [N / tp, H]; rows start at 16 bytes and may be up to 7 zeros wider
    weight   [V_local, H], hidden's dtype, its rows alike
    labels   [N] int64 global ids
    options  tp_group is None where there is nobody to communicate with, and sequence_parallel only ever with a group
    shape    of the labels as the caller has them, N elements
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    temperature: float | Tensor  # [N] if a tensor
    options: Options
    shard: Shard
    backend: Backend
    shape: tuple[int, ...]

    @cached_property
    def size(self) -> HeadSize:
        """The head as its ranks plan it."""
        options, hidden = self.options, self.hidden
        return HeadSize(
            hidden=hidden.shape[1],
            columns=self.shard.largest,
            itemsize=hidden.element_size(),
            stats_rows=packed_rows(options.entropy, options.telemetry),
            costs=self.backend.costs(hidden, options.telemetry),
            sums_weight=hidden.dtype != torch.float32 and options.weight_grad_sink is None,
            even=not any(columns % ALIGNED_COLUMNS for columns in (self.shard.largest, options.vocab_size or 0)),
        )

    def without_tensors(self) -> Self:
        """The same for an autograd node, which saves tensors its own way."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        return replace(self, hidden=nothing, weight=nothing, labels=nothing, temperature=1.0)

    def with_tensors(self, hidden: Tensor, weight: Tensor) -> Self:
        """The same in backward, with what its node saved."""
        return replace(self, hidden=hidden, weight=weight)
