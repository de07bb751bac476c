"""Pointers to the rows of packed tensors by name, in kernels. Each function takes pointers to the first row."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.core.lm_head import RowTerms
from megatron_lce.core.statistics import Extremes


class Sums(NamedTuple):
    """Sums of a chunk or of the vocabulary, see `megatron_lce.core.statistics`."""

    sum_exp: Tensor
    sum_exp_logit: Tensor  # with an entropy
    sum_logit: Tensor  # with a mean logit
    sum_exp_squared: Tensor  # with all telemetry, as sum_logit_squared
    sum_logit_squared: Tensor
    num_columns: Tensor  # of the vocabulary, with a mean logit


@triton.jit
def row_terms_at(first, stride):
    return RowTerms(
        max_logit=first,
        log_sum=first + stride,
        p_term=first + 2 * stride,
        entropy_term=first + 3 * stride,
        label_term=first + 4 * stride,
        label_logprob=first + 5 * stride,
        mean_term=first + 6 * stride,
    )


@triton.jit
def extremes_at(first, stride):
    return Extremes(
        max_logit=first,
        label_logit=first + stride,
        min_logit=first + 2 * stride,  # with a mean logit
        argmax=first + 3 * stride,  # with all telemetry
    )


@triton.jit
def sums_at(first, stride, ENTROPY: tl.constexpr, TELEMETRY: tl.constexpr, EXTREMES: tl.constexpr):
    """EXTREMES: number of rows before the sums."""
    return Sums(
        sum_exp=first + EXTREMES * stride,
        sum_exp_logit=first + (EXTREMES + 1) * stride,
        sum_logit=first + (EXTREMES + 1 + ENTROPY) * stride,
        sum_exp_squared=first + (EXTREMES + 2 + ENTROPY) * stride,
        sum_logit_squared=first + (EXTREMES + 3 + ENTROPY) * stride,
        num_columns=first + (EXTREMES + 2 + ENTROPY + 2 * TELEMETRY) * stride,
    )
