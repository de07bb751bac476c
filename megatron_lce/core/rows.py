"""Per-row values of a call: inputs, softmax, and the terms of the gradient."""

from typing import NamedTuple

from torch import Tensor

# Ignored rows get log_sum 1e30 and scale 1e-30, so exp2(logit - log_sum) is 0 for any finite product.
LOG_SUM_OF_IGNORED_ROW = 1e30
SCALE_OF_IGNORED_ROW = 1e-30
LOWEST_LOG_P = -256.0  # base 2; a lower log p is clamped to it, where p is 0, so that p log p is 0
NUM_TERMS = 6


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
