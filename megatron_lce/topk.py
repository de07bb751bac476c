"""`linear_topk`: the K most probable ids of each token and their logprobs, without the logits of all tokens at once.

A block of tokens has its fp32 logits in one buffer. Statistics of every 128 columns give the log-sum-exp, as they do in
`linear_cross_entropy`. The K largest logits lie in the K chunks of the largest maxima, so that a selection looks at
K x 128 of the logits, then at K x 8, then at those.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lce.core import collectives, validation
from megatron_lce.core.call import Call
from megatron_lce.core.group_stats import merged_over_group
from megatron_lce.core.plan import MIN_TOKENS, ceil_div, cut, slab_row_stride
from megatron_lce.core.products import own_arithmetic, product
from megatron_lce.core.rows import Rows, softcap_scale
from megatron_lce.core.statistics import CHUNK_COLUMNS, UNIT
from megatron_lce.core.tokens import Counted, Tokens
from megatron_lce.logits_at import OF_HEAD, call_of_head

MOST = 1024
_FEW = 8  # columns that the second selection takes together
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
        keywords: tp_group, sequence_parallel, temperature, logits_scale, softcap, vocab_start, vocab_size,
            workspace_bytes and backend ("triton", "torch" or "auto"), with `linear_cross_entropy`'s meaning.

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
    num_tokens, stride = call.labels.shape[0], slab_row_stride(call.size.columns)
    of_token = 4 * stride + 48 * ceil_div(stride, CHUNK_COLUMNS) + 24 * min(k * CHUNK_COLUMNS, stride)
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
    num_tokens, columns, group = hidden.shape[0], call.shard.columns, call.options.tp_group
    stride = slab_row_stride(columns)
    products = buffer[: num_tokens * stride].view(num_tokens, stride)[:, :columns]
    # fp32 inputs: sums over 256 of H are added up, as one running sum over a long H loses digits.
    step = 256 if hidden.dtype == torch.float32 else hidden.shape[1]
    for inner in cut(hidden.shape[1], step if columns else hidden.shape[1]):
        product(hidden[:, inner], call.weight[:columns, inner].T, products, accumulate=inner.start > 0)
    cap = softcap_scale(call.options)
    if cap is not None:
        products.mul_(cap).tanh_()
    stats = call.backend.product_stats(products, rows.scale)
    extremes, sums = merged_over_group(stats, call)
    keys = _largest(products, stats[:, 0].T, rows.scale, call.shard.start, k)
    if group is not None:
        keys = collectives.stack_over_group(keys, group).permute(1, 0, 2).reshape(num_tokens, -1).topk(k).values
    none = keys == _NOTHING
    log_sum = (sums[0].float() * UNIT).log2()
    lse = (extremes[0] + log_sum) * rows.to_nats
    logits = _logit_of(keys).masked_fill_(none, -torch.inf)
    logprobs = ((logits - extremes[0][:, None]) - log_sum[:, None]) * rows.to_nats[:, None]
    broken = lse.isnan()[:, None]
    ids = (_LOW - (keys & _LOW)).masked_fill_(none | broken, -1)
    logprobs = logprobs.masked_fill_(broken, torch.nan)
    return TopK(logprobs, ids, lse, logprobs.exp().sum(dim=1))


def _largest(products: Tensor, maxima: Tensor, scale: Tensor, first_id: int, k: int) -> Tensor:
    """Return keys [n, k] of the largest logits, in order; `maxima` [n, chunks] are those of every chunk."""
    num_tokens, num_columns = products.shape
    columns = torch.arange(num_columns, dtype=torch.int64, device=products.device).expand(num_tokens, -1)
    if maxima.shape[1] > k:
        columns = _spread(_places_of_largest(maxima, k), CHUNK_COLUMNS)
    logits = products.gather(1, columns.clamp(max=num_columns - 1)) * scale[:, None]
    logits.masked_fill_(columns >= num_columns, -torch.inf)
    if logits.shape[1] > _FEW * k:
        ragged = -logits.shape[1] % _FEW
        of_few = torch.nn.functional.pad(logits, (0, ragged), value=-torch.inf).unflatten(1, (-1, _FEW)).amax(dim=2)
        places = _spread(_places_of_largest(of_few, k), _FEW)
        inside = places < logits.shape[1]
        places.clamp_(max=logits.shape[1] - 1)
        logits, columns = logits.gather(1, places), columns.gather(1, places).masked_fill_(~inside, num_columns)
    keys = _keys(logits, columns + first_id).masked_fill_(columns >= num_columns, _NOTHING)
    if keys.shape[1] < k:
        keys = torch.nn.functional.pad(keys, (0, k - keys.shape[1]), value=_NOTHING)
    return keys.topk(k).values


def _places_of_largest(values: Tensor, k: int) -> Tensor:
    """Return the places of the k largest values, ascending; on ties the first ones."""
    places = torch.arange(values.shape[1], dtype=torch.int64, device=values.device)
    return (_LOW - (_keys(values, places).topk(k, sorted=False).values & _LOW)).sort(dim=1).values


def _spread(places: Tensor, width: int) -> Tensor:
    """Return the columns [n, k * width] of these places of so many columns each."""
    within = torch.arange(width, dtype=torch.int64, device=places.device)
    return (places[:, :, None] * width + within).flatten(1)


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """Return int64 keys in the order of the values [n, C], and on ties against that of the ids; no two are equal."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 is 0.0
    return (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32) + (_LOW - ids)


def _logit_of(keys: Tensor) -> Tensor:
    """Return the values of keys."""
    bits = (keys >> 32).int()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)
