"""Which rows of a call are computed, and in which order. Skipped rows are 0."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.core import collectives
from megatron_lce.core.lm_head import RowInputs
from megatron_lce.core.options import Options


@dataclass(frozen=True)
class RowIndex:
    """Indices of the n computed rows among all N: ascending, until `Tokens` puts them in the order of its blocks."""

    num_tokens: int  # N
    index: Tensor | None = None  # [n] int64; None: every row in its place
    count_is_wrong: Tensor | None = None  # [] bool: the caller's number is not the number of unignored labels

    @classmethod
    def from_labels(cls, labels: Tensor, options: Options) -> Self:
        """Return the rows to compute under `skip_ignored`. With True the host waits for their number.

        Raises:
            RuntimeError: `skip_ignored=True` while a CUDA graph is captured.
        """
        num_tokens, skip = labels.shape[0], options.skip_ignored
        if skip is False:
            return cls(num_tokens)
        valid_mask = labels != options.ignore_index
        if skip is not True:
            index = None if skip == num_tokens else valid_mask.nonzero_static(size=skip, fill_value=0)[:, 0]
            return cls(num_tokens, index, valid_mask.sum() != skip)
        if collectives.is_cuda_graph_capturing():
            raise RuntimeError(
                "skip_ignored must be False or the number of counted rows while a CUDA graph is captured, got True: "
                "it reads the number from the device"
            )
        return cls.from_mask(valid_mask, options.tp_group)

    @classmethod
    def from_mask(cls, mask: Tensor, group: ProcessGroup | None) -> Self:
        """Return the rows whose mask [N] is true on any rank, the same ones on all ranks. The host waits."""
        if group is not None:
            mask = collectives.all_reduce_any(mask, group)
        index = mask.nonzero()[:, 0]
        return cls(mask.shape[0], None if index.shape[0] == mask.shape[0] else index)

    @property
    def count(self) -> int:
        """The number n of computed rows."""
        return self.num_tokens if self.index is None else self.index.shape[0]

    def subset(self, index: Tensor) -> Self:
        """Return some of the computed rows."""
        return replace(self, index=index if self.index is None else self.index[index])

    def select(self, per_row: Tensor, row_slice: slice = slice(None)) -> Tensor:
        """Return the computed rows [n, ...], or a range of them, of a tensor [N, ...]."""
        return per_row[row_slice] if self.index is None else per_row.index_select(0, self.index[row_slice])

    def select_rows(self, rows: RowInputs) -> RowInputs:
        """Return the computed rows, NaN if the caller's count is wrong."""
        rows = rows if self.index is None else rows.select(self.index)
        return rows if self.count_is_wrong is None else rows._replace(to_nats=self.nan_if_wrong(rows.to_nats))

    def scatter(self, per_row: Tensor) -> Tensor:
        """Return values [n, ...] of the computed rows as [N, ...], with 0 in skipped rows."""
        if self.index is None:
            return per_row
        return per_row.new_zeros(self.num_tokens, *per_row.shape[1:]).index_copy_(0, self.index, per_row)

    def scatter_hidden(self, grad: Tensor) -> Tensor:
        """Apply `scatter` to gradients of hidden states, whose rows are whole words: torch copies one at a time."""
        return grad if self.index is None else self.scatter(grad.view(torch.int64)).view(grad.dtype)

    def scatter_outputs(self, outputs: Any, shape: tuple[int, ...]) -> Any:
        """Return outputs [n, ...], in named tuples, in the caller's shape; they are NaN if its count is wrong."""
        if outputs is None:
            return None
        if not isinstance(outputs, Tensor):
            return outputs._make(self.scatter_outputs(output, shape) for output in outputs)
        if self.index is not None or self.count_is_wrong is not None:
            outputs = self.nan_if_wrong(self.scatter(outputs))
        return outputs.resize_((*shape, *outputs.shape[1:]))  # a view could not be changed in place

    def nan_if_wrong(self, values: Tensor) -> Tensor:
        """Return the values, or NaN (integers: -1) if the caller's count is wrong. The host does not wait."""
        if self.count_is_wrong is None:
            return values
        return values.masked_fill(self.count_is_wrong, torch.nan if values.is_floating_point() else -1)
