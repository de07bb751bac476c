"""`linear_topk`: the K most probable ids of each token and their logprobs, without the logits of all tokens at once.

A block of tokens has its fp32 logits in one buffer. Statistics of every 128 columns give the log-sum-exp, as they do in
`linear_cross_entropy`. The K largest logits lie in the K chunks of the largest maxima, so that a selection looks at
these maxima, and then at K x 128 of the logits; for a large K in between at maxima of every 8. What does not need the
logits is done once, after the last block: on some machines a launch takes as long as a selection.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from megatron_lce.arguments import shaped
from megatron_lce.core import collectives, validation
from megatron_lce.core.call import Call
from megatron_lce.core.computed_rows import ComputedRows
from megatron_lce.core.group_stats import merged_over_group
from megatron_lce.core.plan import MIN_TOKENS, cut, round_up
from megatron_lce.core.products import own_arithmetic, product
from megatron_lce.core.rows import Rows, logits_factor, softcap_scale
from megatron_lce.core.statistics import CHUNK_COLUMNS, LOWEST_LOGIT, UNIT, empty_extremes, empty_sums
from megatron_lce.core.tokens import tokens_in_blocks
from megatron_lce.keywords import HeadOptions
from megatron_lce.logits_at import call_of_head

MOST = 1024
_FEW = 8  # columns whose maximum is looked at first where there are more logits than
_MOST_VALUES = 2**14
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
    **options: Unpack[HeadOptions],
) -> TopK:
    """The K most probable ids of each token over a vocab-sharded weight: exact, in about the time of a forward pass.

    Args:
        hidden, weight: as `linear_cross_entropy` takes them, but no DTensors.
        k: from 1 to 1,024.
        options: tp_group, sequence_parallel, temperature, logits_scale, softcap, logits_dtype, vocab_start,
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
        call = call_of_head("linear_topk", hidden, weight, options, HeadOptions.__optional_keys__, check, {"k": k})
        with own_arithmetic(call.hidden.device, "linear_topk"):
            return shaped(_topk(call, k), call.shape)


def _topk(call: Call, k: int) -> TopK:
    num_tokens, stride = call.labels.shape[0], round_up(call.size.columns, CHUNK_COLUMNS)
    chunks = stride // CHUNK_COLUMNS
    of_token = 5 * stride + 48 * chunks + 24 * min(k * CHUNK_COLUMNS, stride, _MOST_VALUES)
    if call.options.logits_dtype is not None:
        of_token += 2 * stride
    ranks = num_tokens // call.hidden.shape[0] if call.options.sequence_parallel and num_tokens else 1
    most = call.options.workspace_bytes // (of_token * ranks) * ranks  # a block has a token of every rank, or several
    if most == 0:
        raise ValueError(
            f"workspace_bytes must be at least {of_token * ranks} for this head, got {call.options.workspace_bytes}"
        )
    most = most // (MIN_TOKENS * ranks) * MIN_TOKENS * ranks or most
    tokens = tokens_in_blocks(call.hidden, ComputedRows(num_tokens), most, call.options)
    rows = call.backend.prepare_rows(call.labels, call.temperature, call.options, call.shard)
    rows = tokens.computed.select_rows(rows)
    buffer = call.hidden.new_empty(min(most, num_tokens) * stride, dtype=torch.float32)
    logits = buffer.new_full((num_tokens, k), -torch.inf)
    columns = call.labels.new_full((num_tokens, k), stride)
    stats = [(empty_extremes(0, False, buffer.device), empty_sums(0, False, False, buffer.device))]
    for block in tokens.blocks():
        found = logits[block.rows], columns[block.rows]
        stats.append(_select(block.hidden.wait(), rows.select(block.rows), call, buffer, *found))
    del buffer
    extremes, sums = (torch.cat(parts, dim=1) for parts in zip(*stats, strict=True))
    log_sum = (sums[0].float() * UNIT).log2()
    lse, mass = (extremes[0] + log_sum) * rows.to_nats, torch.empty_like(log_sum)
    of_token = 64 * k * collectives.group_size(call.options.tp_group)
    for part in cut(num_tokens, max(1, call.options.workspace_bytes // of_token)):
        keys = _ordered_keys(logits[part], columns[part], call)
        none = keys == _NOTHING
        log_p = _logit_of(keys).masked_fill_(none, -torch.inf).sub_(extremes[0, part, None]).sub_(log_sum[part, None])
        logits[part] = log_p.mul_(rows.to_nats[part, None])
        columns[part] = (_LOW - (keys & _LOW)).masked_fill_(none | lse[part, None].isnan(), -1)
        mass[part] = log_p.exp_().sum(dim=1)
    return TopK(*(tokens.computed.spread(part) for part in (logits, columns, lse, mass)))


def _select(
    hidden: Tensor, rows: Rows, call: Call, buffer: Tensor, logits: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Write a block's largest logits [n, k] and their columns, ascending; return its statistics over the group."""
    (num_tokens, k), num_columns = logits.shape, call.shard.columns
    stride = round_up(num_columns, CHUNK_COLUMNS)
    whole = buffer[: num_tokens * stride].view(num_tokens, stride)
    products, scale, width = whole[:, :num_columns], rows.scale, CHUNK_COLUMNS
    _fill(products, hidden, call)
    stats = call.backend.product_stats(products, scale)
    _, parts = _largest_values(stats[:, 0].T, min(k, stats.shape[0]))
    if parts.shape[1] * width > max(_MOST_VALUES, _FEW * k):
        falling = logits_factor(call.options) < 0
        whole[:, num_columns:].fill_(-LOWEST_LOGIT if falling else LOWEST_LOGIT)
        of_few = whole.view(num_tokens, -1, _FEW)
        of_few = of_few.amin(dim=2) if falling else of_few.amax(dim=2)
        _, parts = _largest_values(of_few, k, scale, parts, width // _FEW)
        width = _FEW
    found = _largest_values(products, min(k, parts.shape[1] * width), scale, parts, width)
    for out, part in zip((logits, columns), found, strict=True):
        out[:, : part.shape[1]] = part
    return merged_over_group(stats, call)


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


def _largest_values(
    values: Tensor,  # [n, C] fp32
    k: int,
    scale: Tensor | None = None,  # [n] fp32 factors of the values; None: 1
    parts: Tensor | None = None,  # [n, P] int64 numbers of parts of the columns; None: all columns
    width: int = 1,  # columns of a part
) -> tuple[Tensor, Tensor]:
    """Return the largest values [n, k] of each row's parts and their columns, on ties the first ones; -inf beyond C."""
    num_columns = values.shape[1]
    if parts is None:
        columns = torch.arange(num_columns, dtype=torch.int64, device=values.device).expand_as(values)
    else:
        within = torch.arange(width, dtype=torch.int64, device=parts.device)
        columns = (parts[:, :, None] * width + within).flatten(1)
        values = values.gather(1, columns.clamp(max=num_columns - 1))
    values = values if scale is None else values * scale[:, None]
    keys = _keys(values.masked_fill(columns >= num_columns, -torch.inf), columns).topk(k, dim=1, sorted=False).values
    return _logit_of(keys), _LOW - (keys & _LOW)


def _ordered_keys(logits: Tensor, columns: Tensor, call: Call) -> Tensor:
    """Return the keys [n, k] of the group's largest logits, in order; `_NOTHING` where there are fewer."""
    (num_tokens, k), group = logits.shape, call.options.tp_group
    keys = _keys(logits, columns + call.shard.start).masked_fill_(columns >= call.shard.columns, _NOTHING)
    if group is not None:
        keys = collectives.stack_over_group(keys, group).permute(1, 0, 2).reshape(num_tokens, -1)
    return keys.sort(dim=1, descending=True).values[:, :k]


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """Return int64 keys in the order of the values [n, k], and on ties against that of the ids; no two are equal."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 is 0.0
    return (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32) + (_LOW - ids)


def _logit_of(keys: Tensor) -> Tensor:
    """Return the values of keys."""
    bits = (keys >> 32).int()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)
