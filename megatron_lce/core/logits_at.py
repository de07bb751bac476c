"""Logits at some ids of each token: products with single rows of the weight.

Forward: each rank computes the ids in its shard. A sum over the group, of which all terms but one are 0, gives every
rank the same bits. Backward: the hidden gradient sums over the ids of a token and over the group; the weight gradient
sums over the tokens of an id, which a stable sort brings together. All sums have a fixed order.

For a softmax over the ids of each token, forward also computes the gradient of the softmax.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call, check_backward
from megatron_lce.core.eager import without_autocast
from megatron_lce.core.lm_head import RowInputs
from megatron_lce.core.matmul import as_saved
from megatron_lce.core.statistics import LN_2
from megatron_lce.core.tokens import RowIndex, Tokens, tokens_in_blocks

_UNOWNED_ID = 2**31 - 1  # no rank owns an id from here on


class CsrIds(NamedTuple):
    """M ids of N tokens, in the order of tokens."""

    ids: Tensor  # [M] int64 global; negative: padding
    token_index: Tensor  # [M] int64, the token of each
    offsets: Tensor  # [N + 1] int64, the first id of each token
    keys: Tensor | None = None  # [M] int64, sorted id * N + token; None: not sorted yet
    order: Tensor | None = None  # [M] int64, the place of each key among the ids

    @property
    def num_tokens(self) -> int:
        return max(1, self.offsets.shape[0] - 1)

    def sorted(self) -> "CsrIds":
        """Return the ids with keys, in which the tokens of an id are adjacent."""
        if self.keys is not None:
            return self
        keys = torch.add(self.token_index, self.ids.clamp(-1, _UNOWNED_ID), alpha=self.num_tokens)
        return self._replace(**dict(zip(("keys", "order"), keys.sort(stable=True), strict=True)))

    def deduplicated(self) -> "CsrIds":
        """Return the ids with keys, and padding where a token repeats an id."""
        ids = self.sorted()
        assert ids.keys is not None
        assert ids.order is not None
        repeated = torch.zeros_like(ids.keys, dtype=torch.bool)
        torch.eq(ids.keys[1:], ids.keys[:-1], out=repeated[1:])
        repeated = torch.empty_like(repeated).scatter_(0, ids.order, repeated)
        return ids._replace(ids=ids.ids.masked_fill(repeated, -1))


def csr_from_dense(ids: Tensor) -> CsrIds:
    """Return [N, K] as `CsrIds`."""
    num_rows, width = ids.shape
    numbers = torch.arange(num_rows + 1, dtype=torch.int64, device=ids.device)
    return CsrIds(ids.reshape(-1).contiguous(), numbers[:num_rows].repeat_interleave(width), numbers * width)


def csr_from_offsets(ids: Tensor, offsets: Tensor) -> CsrIds:
    """Return ids [M] and offsets [N + 1] in CSR form as `CsrIds`. No rank owns ids outside the offsets.

    Without tokens there are no ids.
    """
    if offsets.shape[0] == 1:
        ids = ids[:0]
    positions = torch.arange(ids.shape[0], dtype=torch.int64, device=ids.device)
    token_index = torch.searchsorted(offsets.contiguous(), positions, right=True).sub_(1)
    nearest = token_index.clamp(0, max(offsets.shape[0] - 2, 0))
    ids = ids.masked_fill((nearest != token_index) & (ids >= 0), _UNOWNED_ID)
    return CsrIds(ids, nearest, offsets.clamp(0, ids.shape[0]))


def logits_over_group(hidden: Tensor, ids: CsrIds, rows: RowInputs, call: Call) -> Tensor:
    """Return base-2 logits [M]: 0 at padding, NaN at an id of no rank."""
    head, workspace_bytes = call.head._replace(hidden=hidden), call.options.workspace_bytes
    logits_and_owners = call.backend.indexed_logits(head, ids.token_index, ids.ids, rows, call.shard, workspace_bytes)
    if call.options.tp_group is not None:
        collectives.all_reduce_sum(logits_and_owners, call.options.tp_group)
    logits, owners = logits_and_owners
    return logits.masked_fill_(owners == 0, torch.nan)


def logprobs_over_sets(
    logits: Tensor,  # [M] base 2
    ids: Tensor,  # [M], distinct within a set; negative: none
    token_index: Tensor,  # [M] the set of each id
    offsets: Tensor,  # [N + 1] the first id of each set
    labels: Tensor,  # [N]
    to_nats: Tensor,  # [N] fp32, as in `RowInputs`
) -> tuple[Tensor, Tensor]:
    """Return logprobs [N] of labels in their sets in nats, NaN outside, and 1[label] - p [M]; 0 in ignored rows."""

    def reduce_sets(how: str, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, how, offsets=offsets, unsafe=True)

    ignored = to_nats == 0
    absent, is_label = (ids < 0) | ignored[token_index], ids == labels[token_index]
    logits = logits.masked_fill(absent, -torch.inf)
    max_logit, label_logit = reduce_sets("max", logits), reduce_sets("max", logits.masked_fill(~is_label, -torch.inf))
    exp = (logits - max_logit[token_index]).exp2()
    sum_exp = reduce_sets("sum", exp)
    logprobs = (label_logit - max_logit) - sum_exp.log2()
    logprobs.masked_fill_(label_logit.isneginf(), torch.nan)
    dlogprob = is_label.float() - exp / sum_exp[token_index] + 0.0 * logprobs[token_index]
    return (logprobs * to_nats).masked_fill_(ignored, 0.0), dlogprob.masked_fill_(absent, 0.0)


class LogitsAtFunction(torch.autograd.Function):
    """Logits of a vocab-sharded weight at some ids of each token; `over_sets`: the labels' logprobs in their sets.

    hidden  replicated, or sharded along the sequence  -> its gradient is summed over the group
    weight  this rank's shard                          -> its gradient is complete on this rank
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, call: Call, ids: CsrIds, over_sets: bool) -> Tensor:
        ctx.num_tokens = call.labels.shape[0]
        with without_autocast(hidden.device, "linear_logits_at forward"):
            rows = call.backend.prepare_rows(call.head, call.labels, call.options.ignore_index, call.shard)
            logits = hidden.new_empty(ids.ids.shape[0], dtype=torch.float32)
            for block in _tokens(call, ctx.num_tokens).blocks():
                logits = logits_over_group(block.hidden.wait(), ids, rows, call)
            result, dlogprob = logits * LN_2, None
            if over_sets:
                result, dlogprob = logprobs_over_sets(
                    logits, ids.ids, ids.token_index, ids.offsets, call.labels, rows.to_nats
                )
        ctx.call = call.without_tensors()
        saved_logits = None if call.head.softcap is None else logits
        ctx.save_for_backward(hidden, weight, rows.scale, saved_logits, dlogprob, *ids)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("linear_logits_at", grad)
        hidden, weight, scale, logits, dlogprob, *saved_ids = map(as_saved, ctx.saved_tensors)
        call, ids, needs = ctx.call.with_tensors(hidden, weight), CsrIds(*saved_ids), ctx.needs_input_grad
        with without_autocast(hidden.device, "linear_logits_at backward"):
            factors, grad = scale * (call.head.slope * LN_2), grad.reshape(-1).float()
            factors = (
                factors[ids.token_index] * grad if dlogprob is None else (factors * grad)[ids.token_index] * dlogprob
            )
            if logits is not None:
                factors *= 1.0 - (logits / scale[ids.token_index]).square_()
            if dlogprob is not None:  # in ignored rows, logits and the upstream gradient may be NaN
                factors.masked_fill_(dlogprob == 0, 0.0)
            return *_gradients(_tokens(call, ctx.num_tokens), ids, factors, call, needs), None, None, None


def _tokens(call: Call, num_tokens: int) -> Tokens:
    """Return all tokens in one block."""
    return tokens_in_blocks(call.head.hidden, RowIndex(num_tokens), num_tokens, call.options)


def _gradients(
    tokens: Tokens, ids: CsrIds, factors: Tensor, call: Call, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of hidden and weight. The hidden gradient is reduced while the other is computed."""
    shard, sink, (hidden, weight, *_) = call.shard, call.options.weight_grad_sink, call.head
    grad_weight, bag_sums = None, partial(call.backend.bag_sums, workspace_bytes=call.options.workspace_bytes)
    for block in tokens.blocks():  # one, or none without tokens
        hidden = block.hidden.wait()
        if needs[0]:
            out = tokens.grad_buffer(block)
            bag_sums(weight, ids.ids, factors, ids.offsets, out, shard, accumulate=False)
            tokens.reduce(block, out)
    if needs[1]:  # sums over the tokens of each id
        ids, step = ids.sorted(), ids.num_tokens
        assert ids.keys is not None
        first_key, last_key = shard.start * step, (shard.start + weight.shape[0]) * step
        starts = torch.arange(first_key, last_key + 1, step, dtype=torch.int64, device=ids.keys.device)
        offsets = torch.searchsorted(ids.keys, starts.clamp_(max=first_key + shard.num_columns * step))
        grad_weight = torch.empty_like(weight) if sink is None else sink.buffer()
        terms = ids.keys % step, factors[ids.order], offsets
        bag_sums(hidden, *terms, grad_weight, accumulate=sink is not None)
        grad_weight = grad_weight if sink is None else sink.finish()
    return tokens.grad_hidden() if needs[0] else None, grad_weight
