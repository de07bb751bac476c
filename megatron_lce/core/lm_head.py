"""What determines the logits of a head on this rank."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.statistics import LOG2_E


class LMHead(NamedTuple):
    """One head, or its part of some tokens or columns: hidden and weight of them, per-token temperatures of all.

    With `x = hidden @ weight.T`, base-2 logits are `scale * x` or, under a softcap, `scale * tanh(softcap_scale * x)`,
    where scale is that of `RowInputs`.
    """

    hidden: Tensor  # [N, H], under sequence parallel [N / tp, H]; rows start at 16 bytes and may be up to 7 zeros wider
    weight: Tensor  # [V_local, H], hidden's dtype or fp32, rows as wide as hidden's
    temperature: float | Tensor = 1.0  # [N] if a tensor
    logits_scale: float = 1.0
    softcap: float | None = None
    logits_dtype: torch.dtype | None = None

    @property
    def logits_factor(self) -> float:
        """The factor from products (or, under a softcap, their tanh) to base-2 logits at temperature 1."""
        return LOG2_E * (self.logits_scale if self.softcap is None else self.softcap)

    @property
    def softcap_scale(self) -> float | None:
        """The factor from products to the argument of tanh, or None without a softcap."""
        return None if self.softcap is None else self.logits_scale / self.softcap

    @property
    def slope(self) -> float:
        """The part of d logit / d product that `RowInputs.scale` lacks, but for the slope of tanh."""
        return 1.0 if self.softcap is None else self.logits_scale / self.softcap

    def block(self, hidden: Tensor, col_slice: slice) -> "LMHead":
        """Return the head of tokens with these hidden states, and of some columns."""
        return self._replace(hidden=hidden, weight=self.weight[col_slice])
