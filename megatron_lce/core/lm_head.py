"""What core and backends share of one head on this rank: what determines its logits, and the values of its rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.matmul import with_zeros_behind
from megatron_lce.core.plan import HeadSize, ceil_div, slab_row_stride, slices
from megatron_lce.core.statistics import LOG2_E

# Ignored rows get log_sum 1e30 and scale 1e-30, so exp2(logit - log_sum) is 0 for any finite product.
LOG_SUM_OF_IGNORED_ROW = 1e30
SCALE_OF_IGNORED_ROW = 1e-30
LOWEST_LOG_P = -256.0  # base 2; a lower log p is clamped to it, where p is 0, so that p log p is 0
NUM_TERMS = 6


class LMHead(NamedTuple):
    """One head, or its part of some tokens or columns: hidden and weight of them, per-token temperatures of all.

    With `x = hidden @ weight.T`, base-2 logits are `scale * x` or, under a softcap, `scale * tanh(softcap_scale * x)`,
    with the `scale` of `RowInputs`.
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


class RowInputs(NamedTuple):
    """Inputs of each row apart from its hidden state, [N] each."""

    labels: Tensor  # int32, local to this shard; -1: ignored, or not in this shard
    scale: Tensor  # fp32 factor from products (or their tanh) to base-2 logits; NaN if the temperature is unusable
    to_nats: Tensor  # fp32 ln 2; 0: the row is ignored; NaN: its temperature is unusable

    @property
    def ignored(self) -> Tensor:
        return self.to_nats == 0

    def select(self, rows: slice | Tensor) -> "RowInputs":
        """Return some of the rows."""
        return RowInputs(*(row[rows] if isinstance(rows, slice) else row.index_select(0, rows) for row in self))


class RowSoftmax(NamedTuple):
    """Softmax of each row over the vocabulary, saved for backward, [N] each, base 2.

    The two parts of the log-sum-exp are kept apart, so that log2 p = (z - max_logit) - log_sum keeps its last digits.
    """

    max_logit: Tensor
    log_sum: Tensor
    label_logprob: Tensor
    entropy: Tensor | None = None
    num_columns: Tensor | None = None  # fp32, of the vocabulary; with a mean logit


class RowTerms(NamedTuple):
    """Terms from which the gradient of any logit of a row follows: rows of [6, N] fp32, or of [7, N].

    With p = 2^t, t = (z - max_logit) - log_sum, and the upstream gradient g of each output,

        dz = g_logprobs (1[label] - p) + g_lse p - g_entropy p (ln p + entropy) + g_mean_logit / columns
           = p (p_term - entropy_term t) + 1[label] label_term + mean_term

    The four terms carry the factor from logits to products, d logit / d product.
    """

    max_logit: Tensor
    log_sum: Tensor
    p_term: Tensor
    entropy_term: Tensor
    label_term: Tensor
    label_logprob: Tensor  # base 2
    mean_term: Tensor | None = None  # if the mean logit has an upstream gradient


class ExpCache(NamedTuple):
    """Exponentials 2^(z - shift), from forward to backward, in the dtype of the inputs.

    The shift of a row and chunk is its largest logit.
    """

    exp: Tensor  # [N, C], rows a multiple of `SLAB_ROW_STEP` apart, zeros behind them
    shift: Tensor  # [chunks, N] fp32, base 2

    def select(self, rows: slice) -> "ExpCache":
        """Return a view of some of the rows."""
        return ExpCache(self.exp[rows], self.shift[:, rows])

    def keep(self, index: Tensor, moved_bytes: int) -> "ExpCache":
        """Move some rows, in ascending order, to the front, in place; so many bytes of them are copied at a time."""
        num_rows, stride = self.exp.shape[0], self.exp.stride(0)
        rows = self.exp.as_strided((num_rows, stride), (stride, 1)).view(torch.int64)  # torch copies whole words faster
        for part in slices(index.shape[0], max(1, moved_bytes // (stride * self.exp.element_size()))):
            rows[part] = rows.index_select(0, index[part])
        return ExpCache(self.exp[: index.shape[0]], self.shift.index_select(1, index))


def new_cache(size: HeadSize, num_tokens: int, num_columns: int, like: Tensor) -> ExpCache | None:
    """Allocate a cache of so many columns, of like's dtype; None for no columns."""
    if num_columns == 0:
        return None
    exp = with_zeros_behind(like.new_empty(num_tokens, slab_row_stride(num_columns)), num_columns)
    num_chunks = ceil_div(num_columns, size.scratch.chunk_columns)
    return ExpCache(exp, like.new_empty(num_chunks, num_tokens, dtype=torch.float32))
