"""The promise that one number is the upstream gradient of every token's loss that counts."""

import torch
from torch import Tensor

from megatron_lce.core import collectives


class Promise:
    """How many more backward passes have the host look whether the promise holds; each costs a wait."""

    def __init__(self, looks: int = 1) -> None:
        self.looks = looks


class OneNumber:
    """The number by which gradients of the sum of the losses are to be multiplied."""

    def __init__(self, counted: Tensor, promise: Promise) -> None:
        self._counted, self._promise = counted, promise  # [N] bool

    def __call__(self, upstream: Tensor) -> Tensor:
        """[N] upstream gradients -> [] fp32: what all counted tokens have; 0 where none counts, NaN where they differ.

        Raises:
            RuntimeError: they differ, and the host looks. Every rank has the same upstream, so all of them raise.
        """
        if upstream.numel() == 0:
            return upstream.new_zeros((), dtype=torch.float32)
        upstream, counted = upstream.reshape(-1).float(), self._counted
        largest = upstream.masked_fill(~counted, -torch.inf).amax()
        smallest = upstream.masked_fill(~counted, torch.inf).amin()
        if self._promise.looks and not collectives.is_captured():
            self._look(largest, smallest)
        return largest.masked_fill(largest != smallest, torch.nan).masked_fill(~counted.any(), 0.0)

    def _look(self, largest: Tensor, smallest: Tensor) -> None:
        low, high = float(smallest), float(largest)
        if low > high:  # no token counts
            return
        self._promise.looks -= 1
        if low < high:
            raise RuntimeError(
                f"known_loss needs one upstream gradient for all counted tokens, got {low:g} to {high:g}: the loss "
                "weights its tokens (a loss_mask that is not 0 or 1, a weight or a mean for each sequence). Pass a 0/1 "
                "loss_mask, or enable with known_loss=False"
            )
