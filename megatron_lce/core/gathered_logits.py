"""Logits at some ids of each token: products with single rows of the weight, which no other logit is needed for.

Forward: each rank multiplies what lies in its shard. One sum over the group, of which all terms but one are 0, gives
every rank the same bits. Backward: hidden's gradient sums over a token's ids, and over the group. The weight's sums
over an id's tokens, which a stable sort brings together. No sum has an order that is left to chance.

A softmax over each token's ids is one step more, whose own gradient is made in forward.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call
from megatron_lce.core.options import Shard
from megatron_lce.core.products import own_arithmetic
from megatron_lce.core.rows import Rows, inner_factor, softcap_scale
from megatron_lce.core.statistics import LN_2
from megatron_lce.core.tokens import Counted, Tokens
from megatron_lce.core.validation import refuse_double_backward


class Ids(NamedTuple):
    """They are M ids of N tokens, a token's one after another."""

    ids: Tensor  # [M] int64 global; negative: padding
    rows: Tensor  # [M] int64, the token of each
    offsets: Tensor  # [N + 1] int64, where a token's begin
    order: Tensor | None = None  # [M] int64, their places by id and then by token; None: not known yet

    def local(self, shard: Shard) -> Tensor:
        """Return this shard's own numbers of them, [M]; -1: padding, or another rank's."""
        local = self.ids - shard.start
        return local.masked_fill((self.ids < 0) | (local < 0) | (local >= shard.columns), -1)


def ids_of_rows(ids: Tensor) -> Ids:
    """Return [N, K] as `Ids`."""
    num_rows, width = ids.shape
    numbers = torch.arange(num_rows + 1, dtype=torch.int64, device=ids.device)
    return Ids(ids.reshape(-1), numbers[:num_rows].repeat_interleave(width), numbers * width)


def ids_of_offsets(ids: Tensor, offsets: Tensor) -> Ids:
    """Return CSR's ids [M] and offsets [N + 1] as `Ids`. What lies outside the offsets is of no rank."""
    places = torch.arange(ids.shape[0], dtype=torch.int64, device=ids.device)
    rows = torch.searchsorted(offsets[1:].contiguous(), places, right=True)
    outside = (places < offsets[0]) | (rows >= offsets.shape[0] - 1)
    ids = ids.masked_fill(outside & (ids >= 0), torch.iinfo(torch.int64).max)
    return Ids(ids, rows.clamp_(max=max(offsets.shape[0] - 2, 0)), offsets.clamp(0, ids.shape[0]))


def sets_of(ids: Ids, ignored: Tensor) -> tuple[Ids, Tensor]:
    """Return each token's ids, none of an ignored one's [N], in order, and them with -1 where one is repeated [M]."""
    given = ids.ids.masked_fill(ignored[ids.rows], -1)
    by_id, order = given.sort(stable=True)
    rows, repeated = ids.rows[order], torch.zeros_like(by_id, dtype=torch.bool)
    repeated[1:] = (by_id[1:] == by_id[:-1]) & (rows[1:] == rows[:-1])
    return Ids(given, ids.rows, ids.offsets, order), given.index_copy(0, order, by_id.masked_fill_(repeated, -1))


def logits_over_group(hidden: Tensor, ids: Ids, rows: Rows, call: Call) -> Tensor:
    """Return base-2 logits [M]: 0 at padding, NaN at an id of no rank."""
    local = ids.local(call.shard)
    logits = call.backend.gathered_products(hidden, call.weight, ids.rows, local, call.options.workspace_bytes)
    if call.options.logits_dtype is not None:
        logits.copy_(logits.to(call.options.logits_dtype))
    cap = softcap_scale(call.options)
    if cap is not None:
        logits.mul_(cap).tanh_()
    logits.mul_(rows.scale.index_select(0, ids.rows))
    found = torch.stack([logits, torch.ones_like(logits)]).masked_fill_(local < 0, 0.0)
    if call.options.tp_group is not None:
        collectives.add_over_group(found, call.options.tp_group)
    logits, owners = found.add_(0.0)  # -0.0 is 0.0 on one rank, too
    return logits.masked_fill_((owners == 0) & (ids.ids >= 0), torch.nan)


def products_factor(logits: Tensor, ids: Ids, rows: Rows, call: Call) -> Tensor:
    """Return the derivative of each base-2 logit by its product, [M]."""
    scale = rows.scale.index_select(0, ids.rows)
    factor = scale * inner_factor(call.options)
    return factor if call.options.softcap is None else factor * (1.0 - (logits / scale).square_())


class LogitsAtFunction(torch.autograd.Function):
    """Logits of a vocab-sharded weight at some ids of each token; of sets of ids, with labels, the labels' logprobs.

    hidden  replicated, or sharded along the sequence  -> its gradient is summed over the group
    weight  this rank's shard                          -> its gradient is complete on this rank
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        call: Call,
        ids: Ids,
        once: Tensor | None = None,  # [M] of `sets_of`
        labels: Tensor | None = None,  # [N] global
    ) -> Tensor:
        ctx.num_tokens = call.labels.shape[0]
        with own_arithmetic(hidden.device, "linear_logits_at forward"):
            rows = call.backend.prepare_rows(call.labels, call.temperature, call.options, call.shard)
            logits = hidden.new_empty(ids.ids.shape[0], dtype=torch.float32)
            for block in _tokens(call, ctx.num_tokens).blocks():
                logits = logits_over_group(block.hidden.wait(), ids, rows, call)
            result, slopes = logits, None
            if once is not None and labels is not None:
                result, slopes = call.backend.set_logprobs(logits, once, ids.rows, ids.offsets, labels)
        ctx.call = call.without_tensors()
        kept = None if call.options.softcap is None else logits
        ctx.save_for_backward(hidden, weight, kept, slopes, *rows, *ids)
        return result * LN_2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("linear_logits_at")
        hidden, weight, logits, slopes, *rest = ctx.saved_tensors
        call, rows, ids = ctx.call.with_tensors(hidden, weight), Rows(*rest[:3]), Ids(*rest[3:])
        with own_arithmetic(hidden.device, "linear_logits_at backward"):
            grad = grad.float() * LN_2
            factors = grad if slopes is None else grad[ids.rows] * slopes
            factors = factors * products_factor(logits, ids, rows, call)
            gradients = _gradients(_tokens(call, ctx.num_tokens), ids, factors, call, ctx.needs_input_grad)
        return *gradients, None, None, None, None


def _tokens(call: Call, num_tokens: int) -> Tokens:
    """Return all tokens in one block."""
    return Tokens(call.hidden, num_tokens, Counted(None), max(num_tokens, 1), call.options)


def _gradients(
    tokens: Tokens, ids: Ids, factors: Tensor, call: Call, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of hidden and weight; hidden's sum over the group runs under the weight's gradient."""
    local, room, backend = ids.local(call.shard), call.options.workspace_bytes, call.backend
    grad_weight = None
    for block in tokens.blocks():
        if needs[0]:
            out = tokens.grad_rows(block)
            backend.gathered_sums(call.weight, local, factors, ids.offsets, out, accumulate=False, workspace_bytes=room)
            tokens.reduce(block)
        if needs[1]:
            grad_weight = _weight_grad(block.hidden.wait(), ids, factors, call)
    if needs[1] and tokens.num_computed == 0:
        grad_weight = _weight_grad(call.hidden, ids, factors, call)
    return tokens.grad_hidden() if needs[0] else None, grad_weight


def _weight_grad(hidden: Tensor, ids: Ids, factors: Tensor, call: Call) -> Tensor | None:
    """Return the sum over each id's tokens, which a stable sort of the ids brings together, or add it to the sink."""
    shard, sink, room = call.shard, call.options.weight_grad_sink, call.options.workspace_bytes
    order = ids.ids.sort(stable=True).indices if ids.order is None else ids.order
    columns = torch.arange(call.weight.shape[0] + 1, dtype=torch.int64, device=order.device)
    offsets = torch.searchsorted(ids.ids[order], columns.clamp_(max=shard.columns).add_(shard.start))
    out = torch.empty_like(call.weight) if sink is None else sink.buffer()
    arguments = (hidden, ids.rows[order], factors[order], offsets, out)
    call.backend.gathered_sums(*arguments, accumulate=sink is not None, workspace_bytes=room)
    return out if sink is None else sink.finish()
