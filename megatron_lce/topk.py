"""`linear_topk`: the K most probable ids of each token and their logprobs, without the logits of all tokens at once.

A block of tokens has its fp32 logits in one buffer. Statistics of every 128 columns give the log-sum-exp, as they do in
`linear_cross_entropy`. The K largest logits lie in the K chunks of the largest maxima, so that a selection looks at
these maxima, and then at K x 128 of the logits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lce.core import collectives, validation
from megatron_lce.core.call import Call
from megatron_lce.core.group_stats import merged_over_group
from megatron_lce.core.plan import MIN_TOKENS, cut, round_up
from megatron_lce.core.products import own_arithmetic, product
from megatron_lce.core.protocols import Backend
from megatron_lce.core.rows import Rows, softcap_scale
from megatron_lce.core.statistics import CHUNK_COLUMNS, UNIT
from megatron_lce.core.tokens import Counted, Tokens
from megatron_lce.logits_at import OF_HEAD, call_of_head

MOST = 1024
_MOST_VALUES = 2**14  # that a selection looks at; of more, it first looks at the maxima of every `_FEW`
_FEW = 8
_LOW = 2**32 - 1  # the half of a key that holds an id: the lowest is the largest
_NOTHING = -(2**63)  # a key below that of any logit


class TopK(NamedTuple):
    """The K most probable ids of each token, the most probable first.

    logprobs  fp32 [..., K], over the whole vocabulary; -inf where the vocabulary holds fewer ids; without gradient
    ids       int64 [..., K] global, the lowest first on ties; -1 where there is none, and in NaN rows
    lse       fp32 [...], log-sum-exp of all logits
    mass      fp32 [...], the sum of the K probabilities
    """

    logprobs: Tensor
    ids: Tensor
    lse: Tensor
    mass: Tensor


def linear_topk(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V_local, H]
    k: int,
    **keywords: Any,
) -> TopK:
    """The K most probable ids of each token over a vocab-sharded weight: exact, in about the time of a forward pass.

    Args:
        hidden, weight: as `linear_cross_entropy` takes them, but no DTensors.
        k: from 1 to 1,024.
        keywords: tp_group, sequence_parallel, temperature, logits_scale, softcap, logits_dtype, vocab_start,
            vocab_size, workspace_bytes and backend ("triton", "torch" or "auto"), as in `linear_cross_entropy`.

    Returns:
        `TopK`, the same bits on every rank.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it, what it must be and what it was.
    """

    def check(_: tuple[int, ...]) -> None:
        validation.check_integer("k", k, minimum=1)
        if k > MOST:
            raise ValueError(f"k must be at most {MOST}, got {k}")

    with torch.no_grad():
        call = call_of_head("linear_topk", hidden, weight, keywords, OF_HEAD, check, {"k": k})
        with own_arithmetic(call.hidden.device, "linear_topk"):
            found = _topk(call, k)
    return TopK(*(part.view(call.shape + part.shape[1:]) for part in found))


def _topk(call: Call, k: int) -> TopK:
    num_tokens, stride = call.labels.shape[0], round_up(call.size.columns, CHUNK_COLUMNS)
    chunks = stride // CHUNK_COLUMNS
    values = min(k, chunks) * CHUNK_COLUMNS  # that are gathered, and sorted if they are not too many
    of_token = 4 * stride + 48 * chunks + 5 * values + 24 * min(values, _MOST_VALUES) + 128 * k
    if call.options.logits_dtype is not None:
        of_token += 2 * stride
    ranks = num_tokens // call.hidden.shape[0] if call.options.sequence_parallel and num_tokens else 1
    most = call.options.workspace_bytes // (of_token * ranks) * ranks  # a block has a token of every rank, or several
    if most == 0:
        raise ValueError(
            f"workspace_bytes must be at least {of_token * ranks} for this head, got {call.options.workspace_bytes}"
        )
    most = most // (MIN_TOKENS * ranks) * MIN_TOKENS * ranks or most
    tokens = Tokens(call.hidden, num_tokens, Counted(None), min(most, max(num_tokens, 1)), call.options)
    rows, order = call.backend.prepare_rows(call.labels, call.temperature, call.options, call.shard), tokens.order()
    rows = rows if order is None else rows.select(order)
    buffer = call.hidden.new_empty(min(most, num_tokens) * stride, dtype=torch.float32)
    parts = [_topk_of_block(block.hidden.wait(), rows.select(block.rows), call, k, buffer) for block in tokens.blocks()]
    if not parts:
        empty = call.hidden.new_empty(0, dtype=torch.float32)
        return TopK(empty.view(0, k), call.labels.new_empty(0, k), empty, empty)
    found = TopK(*(torch.cat(part) for part in zip(*parts, strict=True)))
    return found if order is None else TopK(*(torch.empty_like(part).index_copy_(0, order, part) for part in found))


def _topk_of_block(hidden: Tensor, rows: Rows, call: Call, k: int, buffer: Tensor) -> TopK:
    num_tokens, columns, options = hidden.shape[0], call.shard.columns, call.options
    stride = round_up(columns, CHUNK_COLUMNS)
    products = buffer[: num_tokens * stride].view(num_tokens, stride)
    _fill(products[:, :columns], hidden, call)
    stats = call.backend.product_stats(products[:, :columns], rows.scale)
    extremes, sums = merged_over_group(stats, call)
    keys = _largest_keys(products, columns, stats[:, 0].T, rows.scale, call, k)
    if options.tp_group is not None:
        keys = collectives.stack_over_group(keys, options.tp_group).permute(1, 0, 2).reshape(num_tokens, -1)
    keys = keys.sort(dim=1, descending=True).values[:, :k]
    none = keys == _NOTHING
    log_sum = (sums[0].float() * UNIT).log2()
    lse = (extremes[0] + log_sum) * rows.to_nats
    logits = _logit_of(keys).masked_fill_(none, -torch.inf)
    logprobs = ((logits - extremes[0][:, None]) - log_sum[:, None]) * rows.to_nats[:, None]
    broken = lse.isnan()[:, None]
    ids = (_LOW - (keys & _LOW)).masked_fill_(none | broken, -1)
    logprobs = logprobs.masked_fill_(broken, torch.nan)
    return TopK(logprobs, ids, lse, logprobs.exp().sum(dim=1))


def _fill(products: Tensor, hidden: Tensor, call: Call) -> None:
    """Write the products of hidden with this shard's columns, rounded if asked for, or the tanh of a softcap."""
    num_columns, dtype, cap = products.shape[1], call.options.logits_dtype, softcap_scale(call.options)
    # fp32 inputs: sums over 256 of H are added up, as one running sum over a long H loses digits.
    step = 256 if hidden.dtype == torch.float32 else hidden.shape[1]
    for inner in cut(hidden.shape[1], step if num_columns else hidden.shape[1]):
        product(hidden[:, inner], call.weight[:num_columns, inner].T, products, accumulate=inner.start > 0)
    if dtype is not None:
        products.copy_(products.to(dtype))
    if cap is not None:
        products.mul_(cap).tanh_()


def _largest_keys(
    products: Tensor,  # [n, C] and what fills the last chunk
    num_columns: int,  # C
    maxima: Tensor,  # [n, chunks] logits
    scale: Tensor,  # [n]
    call: Call,
    k: int,
) -> Tensor:
    """Return keys [n, k] of the largest logits, ascending by id, and then `_NOTHING` if there are fewer."""
    num_tokens, chunks = maxima.shape
    width, tail = min(k, chunks), num_columns % CHUNK_COLUMNS
    chosen = call.backend.largest_places(maxima, width)
    at = chosen[:, :, None].expand(-1, -1, CHUNK_COLUMNS)
    logits = products.view(num_tokens, chunks, CHUNK_COLUMNS).gather(1, at).mul_(scale[:, None, None])
    if tail:
        logits[:, :, tail:].masked_fill_((chosen == chunks - 1)[:, :, None], -torch.inf)
    logits = logits.view(num_tokens, width * CHUNK_COLUMNS)
    places = _largest_places(logits, min(k, logits.shape[1]), call.backend)
    columns = chosen.gather(1, places // CHUNK_COLUMNS) * CHUNK_COLUMNS + places % CHUNK_COLUMNS
    keys = _keys(logits.gather(1, places), columns + call.shard.start).masked_fill_(columns >= num_columns, _NOTHING)
    return torch.nn.functional.pad(keys, (0, k - keys.shape[1]), value=_NOTHING)


def _largest_places(values: Tensor, k: int, backend: Backend) -> Tensor:
    """Return the places [n, k] of the largest values [n, C], ascending; on ties the first ones."""
    if values.shape[1] <= max(_MOST_VALUES, _FEW * k):
        return backend.largest_places(values, k)
    of_few = values.unflatten(1, (-1, _FEW))
    chosen = backend.largest_places(of_few.amax(dim=2), k)
    places = backend.largest_places(of_few.gather(1, chosen[:, :, None].expand(-1, -1, _FEW)).flatten(1), k)
    return chosen.gather(1, places // _FEW) * _FEW + places % _FEW


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """Return int64 keys in the order of the values [n, k], and on ties against that of the ids; no two are equal."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 is 0.0
    return (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32) + (_LOW - ids)


def _logit_of(keys: Tensor) -> Tensor:
    """Return the values of keys."""
    bits = (keys >> 32).int()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)
