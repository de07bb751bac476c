"""Softmax statistics of chunks of the vocabulary, which merge to the same bits in any order.

All logits are in base 2 (z * log2 e), as the exponential unit of a GPU is. A chunk has at most `CHUNK_COLUMNS` columns.
With m the largest logit of a chunk,

    sum_exp        sum of 2^(z - m)
    sum_exp_logit  sum of 2^(z - m) * (z - m)

and with M the largest of the whole vocabulary,

    S = sum over chunks of 2^(m - M) sum_exp                                 lse = M + log2(S)
    T = sum over chunks of 2^(m - M) (sum_exp_logit + (m - M) sum_exp)       entropy = log2(S) - T / S

Nothing cancels: all terms of a sum have the same sign, and the largest logit contributes exactly 1 to S, so that no
logprob is ever positive. The terms of S and T are rounded to integer multiples of `FIXED_POINT_UNIT`, whose sum does
not depend on the order: outputs have the same bits however the vocabulary is split over ranks, as long as it is split
between chunks. Rounding adds an error of 2^-37 per chunk to a sum of at least 1.

Telemetry adds the sums of z, 2^(2 (z - m)) and z^2. The second is merged as S is, with the square of the factor. The
others are rounded as sums of z / A and (z / A)^2, where A is the largest absolute logit of the vocabulary; their error
is relative to A. The number of columns is summed, too. The mean logit alone takes the sum of z and no other, and the
largest absolute sum of a chunk bounds A.

The statistics of a chunk are the rows of `stats` [chunks, K, N] fp32: extremes, then sums. If a logit of the chunk is
NaN, its largest logit is NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.options import Telemetry

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
CHUNK_COLUMNS = 128
LOWEST_LOGIT = float(torch.finfo(torch.float32).min)  # stands for -inf in 0 * -inf and -inf - -inf
NO_ID = 2**31 - 1  # the argmax of no columns: no id is larger
FIXED_POINT_UNIT = 2.0**-36  # S and T are integers times this: 2^63 units are the sum of 2^27 equal logits


class Extremes(NamedTuple):
    """Rows of a packed [..., E, N] fp32 tensor, in order."""

    max_logit: Tensor
    label_logit: Tensor  # -inf if the label is not among the columns
    min_logit: Tensor | None = None  # for the mean alone: minus the largest absolute sum of a chunk
    argmax: Tensor | None = None  # int32 global id, whose bits are packed


def row_counts(entropy: bool, telemetry: Telemetry) -> tuple[int, int, int]:
    """Return how many extremes (E) and sums a row of the vocabulary has, and how many rows a chunk has (K).

    Extremes come first, then sum_exp, with an entropy sum_exp_logit, and the others. With telemetry the last sum of the
    vocabulary, which chunks lack, counts columns.
    """
    num_extremes = 2 + bool(telemetry) + (telemetry is True)
    num_sums = 1 + entropy + 2 * bool(telemetry) + 2 * (telemetry is True)
    return num_extremes, num_sums, num_extremes + num_sums - bool(telemetry)


def unpack_extremes(packed: Tensor, telemetry: Telemetry) -> Extremes:
    """Return the extremes in the first rows of a tensor [..., E or more, N]."""
    num_extremes, *_ = row_counts(False, telemetry)
    rows = packed.unbind(dim=-2)[:num_extremes]
    return Extremes(*rows[:3], *(row.view(torch.int32) for row in rows[3:]))


def merge_extremes(extremes: Tensor, telemetry: Telemetry) -> Tensor:
    """Merge the extremes [S, E or more, N] of S disjoint sets of columns, to [E, N]."""
    merged = extremes[:, :2].amax(dim=0)  # NaN if any is
    if not telemetry:
        return merged
    merged = torch.cat([merged, extremes[:, 2].amin(dim=0, keepdim=True)])
    if telemetry is not True:
        return merged
    ids = torch.where(extremes[:, 0] == merged[0], extremes[:, 3].view(torch.int32), NO_ID)
    return torch.cat([merged, ids.amin(dim=0, keepdim=True).view(torch.float32)])  # the lowest on ties


def new_empty_stats(num_tokens: int, entropy: bool, telemetry: Telemetry, device: torch.device) -> Tensor:
    """Return statistics [1, K, N] of a chunk without columns, as of a shard that is all padding."""
    stats = torch.zeros(1, row_counts(entropy, telemetry)[2], num_tokens, dtype=torch.float32, device=device)
    stats[:, :2] = -torch.inf
    if telemetry:
        stats[:, 2] = torch.inf  # the smallest logit
    if telemetry is True:
        stats[:, 3].view(torch.int32).fill_(NO_ID)
    return stats
