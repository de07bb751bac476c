"""What a token brings to the operation and takes from it, beside its hidden state: types and factors."""

from typing import NamedTuple

from torch import Tensor

from megatron_lce.core.options import Options
from megatron_lce.core.statistics import LOG2_E

# A log of the sum under which every probability is zero, and a scale under which no finite product reaches it: how an
# ignored row gets a zero gradient.
LOG_SUM_OF_IGNORED_ROW = 1e30
SCALE_OF_IGNORED_ROW = 1e-30
LOWEST_LOG_P = -256.0  # in base 2: from here on p is 0, and its product with a large term is to be 0 too
NUM_TERMS = 6


class Rows(NamedTuple):
    """What each token brings, [N] each."""

    labels: Tensor  # int32, local to this shard; -1: owned by another rank, by none, or ignored
    scale: Tensor  # fp32 factor from products (or their tanh) to base-2 logits; NaN where the temperature is unusable
    to_nats: Tensor  # fp32 ln 2; 0 where the row is ignored, NaN where it is broken

    @property
    def ignored(self) -> Tensor:
        return self.to_nats == 0

    def select(self, rows: slice | Tensor) -> "Rows":
        """Some of the tokens' rows."""
        return Rows(*(row[rows] if isinstance(rows, slice) else row.index_select(0, rows) for row in self))


class Saved(NamedTuple):
    """What backward needs of the forward's results, [N] each, in base 2.

    The log-sum-exp comes in two parts, so that log2 p = (z - max_logit) - log_sum keeps its last digits however large
    z is.
    """

    max_logit: Tensor
    log_sum: Tensor
    label_logprob: Tensor
    entropy: Tensor | None = None
    num_columns: Tensor | None = None  # fp32, of the whole vocabulary; with telemetry


class RowTerms(NamedTuple):
    """The numbers of each token from which its gradient of any logit follows: rows of [6, N] fp32, or of [7, N].

    With p = 2^t, t = (z - max_logit) - log_sum, and each output's own upstream gradient g,

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
    mean_term: Tensor | None = None  # only where the mean logit has an upstream gradient


def logits_factor(options: Options) -> float:
    """Factor from products (or, under a softcap, their tanh) to base-2 logits at temperature 1."""
    return LOG2_E * (options.logits_scale if options.softcap is None else options.softcap)


def softcap_scale(options: Options) -> float | None:
    """Factor from products to the argument of tanh; None without a softcap."""
    return None if options.softcap is None else options.logits_scale / options.softcap


def inner_factor(options: Options) -> float:
    """What `Rows.scale` leaves out of d logit / d product: the factor inside the softcap's tanh."""
    scale = softcap_scale(options)
    return 1.0 if scale is None else scale
