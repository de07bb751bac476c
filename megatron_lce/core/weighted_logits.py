"""A weighted sum of a token's logits over the vocabulary is hidden times one vector, and needs no logits.

    sum over v of w[v] (hidden[n] . weight[v]) = hidden[n] . (sum over v of w[v] weight[v])

With w = 1 / V it is the mean logit, which label smoothing takes. A softcap has no such form.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.core import collectives
from megatron_lce.core.plan import cut
from megatron_lce.core.products import own_arithmetic
from megatron_lce.core.validation import refuse_double_backward

_ROWS = 1024  # rows of hidden or weight that are in fp32 at a time


class _WeightedLogits(torch.autograd.Function):
    """It sums a factor times the logit over a vocab-sharded vocabulary.

    hidden   replicated        -> its gradient is complete on every rank
    weight   this rank's shard -> its gradient is complete on this rank
    factors  this rank's       -> no gradient
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V_local, H]
        factors: Tensor,  # [V_local] fp32
        group: ProcessGroup | None,
    ) -> Tensor:
        with own_arithmetic(hidden.device, "weighted logits forward"):
            row = _weighted_sum(factors, weight)
            if group is not None:
                collectives.add_over_group(row, group)
            ctx.save_for_backward(hidden, weight, factors, row)
            out = row.new_empty(hidden.shape[0])
            for part in cut(hidden.shape[0], _ROWS):
                out[part] = hidden[part].float() @ row
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        refuse_double_backward("label smoothing")
        hidden, weight, factors, row = ctx.saved_tensors
        with own_arithmetic(hidden.device, "weighted logits backward"):
            grad_hidden = _outer(grad, row, hidden) if ctx.needs_input_grad[0] else None
            grad_weight = _outer(factors, _weighted_sum(grad, hidden), weight) if ctx.needs_input_grad[1] else None
        return grad_hidden, grad_weight, None, None


def weighted_logits(
    hidden: Tensor,  # [N, H], equal on every rank
    weight: Tensor,  # [V_local, H]
    factors: Tensor,  # [V_local] fp32, of this rank's rows
    group: ProcessGroup | None,
) -> Tensor:
    """Return the sums, [N] fp32. Backward makes a gradient [V_local, H] of weight's dtype, which autograd adds."""
    return _WeightedLogits.apply(hidden, weight, factors, group)


def _weighted_sum(factors: Tensor, rows: Tensor) -> Tensor:
    """Sum the rows [n, H] times their factors [n] to [H] fp32. A row with a factor of 0 may hold anything."""
    total = factors.new_zeros(rows.shape[1])
    for part in cut(rows.shape[0], _ROWS):
        in_fp32 = rows[part].to(torch.float32, copy=True)
        total += factors[part] @ in_fp32.masked_fill_(factors[part, None] == 0, 0.0)
    return total


def _outer(column: Tensor, row: Tensor, like: Tensor) -> Tensor:
    """Return the outer product of [n] and [H], [n, H] of `like`'s dtype."""
    out = torch.empty_like(like)
    for part in cut(like.shape[0], _ROWS):
        out[part] = column[part, None] * row
    return out
