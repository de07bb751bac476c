"""Softmax statistics of chunks of the vocabulary, which merge to the same bits in any order.

All logits are in base 2 (z * log2 e), which is what the exponential unit of a GPU computes. A chunk has at most
`CHUNK_COLUMNS` columns. With m the largest logit of a chunk,

    sum_exp        sum of 2^(z - m)
    sum_exp_logit  sum of 2^(z - m) * (z - m)

and with M the largest of the whole vocabulary,

    S = sum over chunks of 2^(m - M) sum_exp                                 lse = M + log2(S)
    T = sum over chunks of 2^(m - M) (sum_exp_logit + (m - M) sum_exp)       entropy = log2(S) - T / S

Nothing cancels: every term of either sum has one sign, and the largest logit contributes exactly 1 to S, so that no
logprob is ever positive. The terms of S and T are rounded to integers, multiples of `UNIT`, and integers have the same
sum in any order: a token's outputs are the same bits however the vocabulary is cut over ranks, as long as it is cut
between chunks. Rounding to `UNIT` is an error of 2^-37 a chunk beside a sum of at least 1.

Telemetry has three sums more, of 2^(2 (z - m)), z and z^2. The first is merged as S is, with the factor's square. The
sums of z and z^2 become integers as sums of z / A and (z / A)^2, with A the largest absolute logit of the whole
vocabulary; their error is relative to A. The number of columns is summed, too.

A chunk's numbers are the rows of `parts` [chunks, K, N] fp32: its extremes, then its sums. If a logit of a chunk is
NaN, its largest logit is NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

CHUNK_COLUMNS = 128
LOWEST_LOGIT = float(torch.finfo(torch.float32).min)  # stands for -inf in 0 * -inf and -inf - -inf
UNIT = 2.0**-36  # S and T are integers times this: 2^63 units are the sum of 2^27 equal logits


class Extremes(NamedTuple):
    """Rows of a packed [..., E, N] fp32 tensor, in order."""

    max_logit: Tensor
    label_logit: Tensor  # -inf if the label is none of the columns
    min_logit: Tensor | None = None
    argmax: Tensor | None = None  # a global vocabulary id; fp32 holds it exactly up to 2^24


def num_extremes(telemetry: bool) -> int:
    """E, the number of rows of extremes."""
    return 2 + 2 * telemetry


def num_chunk_sums(entropy: bool, telemetry: bool) -> int:
    """Number of sums of a chunk: of 2^(z - m); for the entropy, of that times z - m; with telemetry three more."""
    return 1 + entropy + 3 * telemetry


def num_sums(entropy: bool, telemetry: bool) -> int:
    """Number of sums of the vocabulary: a chunk's and, with telemetry, the number of columns, in the last row."""
    return num_chunk_sums(entropy, telemetry) + telemetry


def packed_rows(entropy: bool, telemetry: bool) -> int:
    """K, the number of rows of a chunk."""
    return num_extremes(telemetry) + num_chunk_sums(entropy, telemetry)


def unpack_extremes(packed: Tensor, telemetry: bool) -> Extremes:
    """Return the extremes of a [..., E, N] tensor, or of the first rows of a [..., K, N] one."""
    return Extremes(*packed.unbind(dim=-2)[: num_extremes(telemetry)])


def merge_extremes(parts: Tensor, telemetry: bool) -> Tensor:
    """Merge the extremes of S disjoint sets of columns, [S, E or more, N], to their union's, [E, N]."""
    merged = parts[:, :2].amax(dim=0)  # NaN if any is
    if not telemetry:
        return merged
    ids = torch.where(parts[:, 0] == merged[0], parts[:, 3], torch.inf)  # the lowest on ties
    return torch.cat([merged, parts[:, 2].amin(dim=0, keepdim=True), ids.amin(dim=0, keepdim=True)])


def empty_extremes(num_tokens: int, telemetry: bool, device: torch.device) -> Tensor:
    """Return packed extremes [E, N] of no columns, which a shard that is all padding brings to a merge."""
    packed = torch.full((num_extremes(telemetry), num_tokens), -torch.inf, dtype=torch.float32, device=device)
    packed[2:] = torch.inf  # the smallest logit, and the id of the largest
    return packed


def empty_sums(num_tokens: int, entropy: bool, telemetry: bool, device: torch.device) -> Tensor:
    """Return sums of no columns, int64 [`num_sums`, N]."""
    return torch.zeros(num_sums(entropy, telemetry), num_tokens, dtype=torch.int64, device=device)
