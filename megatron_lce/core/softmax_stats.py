"""Statistics of a softmax over part of the vocabulary: what one backend, one shard or one split knows of each token.

All logits are in base 2 (z * log2 e), which is what the exponential unit of a GPU computes. With m the largest one,

    sum_exp        sum of 2^(z - m)                 so that  lse     = m + log2(sum_exp)
    sum_exp_logit  sum of 2^(z - m) * (z - m)       so that  entropy = log2(sum_exp) - sum_exp_logit / sum_exp

Nothing cancels: every term of either sum has one sign, and the largest logit contributes exactly 1 to `sum_exp`, so
that no logprob is ever positive. The rows are packed in one [K, N] fp32 tensor, which is also what ranks exchange.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


class SoftmaxStats(NamedTuple):
    """The rows of a packed [..., K, N] tensor, in the order in which they are packed."""

    max_logit: Tensor
    sum_exp: Tensor
    label_logit: Tensor  # -inf where the label is in none of the columns seen
    sum_exp_logit: Tensor | None = None
    min_logit: Tensor | None = None
    argmax: Tensor | None = None  # a global vocabulary id; fp32 holds it exactly up to 2^24


def packed_rows(entropy: bool, telemetry: bool) -> int:
    """K: how many rows are packed."""
    return 3 + entropy + 2 * telemetry


def unpack(packed: Tensor, entropy: bool, telemetry: bool) -> SoftmaxStats:
    rows = list(packed.unbind(dim=-2))
    stats = SoftmaxStats(*rows[:3])
    if entropy:
        stats = stats._replace(sum_exp_logit=rows[3])
    if telemetry:
        stats = stats._replace(min_logit=rows[-2], argmax=rows[-1])
    return stats


def empty_stats(num_tokens: int, entropy: bool, telemetry: bool, device: torch.device) -> Tensor:
    """Packed [K, N] of no columns at all: the neutral element of a merge."""
    packed = torch.zeros(packed_rows(entropy, telemetry), num_tokens, device=device)
    stats = unpack(packed, entropy, telemetry)
    stats.max_logit.fill_(-torch.inf)
    stats.label_logit.fill_(-torch.inf)
    if stats.min_logit is not None and stats.argmax is not None:
        stats.min_logit.fill_(torch.inf)
        stats.argmax.fill_(torch.inf)
    return packed


def merge_stats(packed: Tensor, entropy: bool, telemetry: bool) -> Tensor:
    """[S, K, N] of S disjoint sets of columns -> [K, N] of their union."""
    parts = unpack(packed, entropy, telemetry)
    max_logit = parts.max_logit.amax(dim=0)
    shift = (parts.max_logit - max_logit).nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # an empty part has weight 0
    scale = torch.exp2(shift)
    rows = [max_logit, (scale * parts.sum_exp).sum(dim=0), parts.label_logit.amax(dim=0)]
    if parts.sum_exp_logit is not None:
        finite_shift = torch.where(scale > 0, shift, 0.0)
        rows.append((scale * (parts.sum_exp_logit + parts.sum_exp * finite_shift)).sum(dim=0))
    if parts.min_logit is not None and parts.argmax is not None:
        is_max = parts.max_logit == max_logit
        rows.append(parts.min_logit.amin(dim=0))
        rows.append(torch.where(is_max, parts.argmax, torch.inf).amin(dim=0))
    return torch.stack(rows)
