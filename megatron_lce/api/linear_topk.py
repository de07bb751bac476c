"""`linear_topk`: the K most probable ids of each token and their logprobs, without the logits of all tokens at once.

The fp32 products of a block of tokens are in one buffer. Statistics of every 128 columns (a chunk) give the
log-sum-exp, as in `linear_cross_entropy`. The K largest logits lie in the K chunks with the largest maxima, and within
them in the K groups of 8 columns with the largest maxima. So the selection reads the maxima of all chunks and of 16 K
groups, and 8 K logits. Results are normalised once, after the last block: a launch can take as long as a selection.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from megatron_lce.api.keywords import HeadOptions
from megatron_lce.checks import validation
from megatron_lce.checks.together import check_keywords, checked_together, keyword_options
from megatron_lce.core import collectives
from megatron_lce.core.call import Call
from megatron_lce.core.eager import eager, without_autocast
from megatron_lce.core.matmul import copies_to_fp32, matmul
from megatron_lce.core.one_head import merged_over_group
from megatron_lce.core.plan import MIN_TOKENS, round_up, slices
from megatron_lce.core.statistics import CHUNK_COLUMNS, FIXED_POINT_UNIT
from megatron_lce.core.tokens import RowIndex, tokens_in_blocks

MAX_K = 1024
_GROUP_COLUMNS = 8  # columns of a group
_GROUPS = CHUNK_COLUMNS // _GROUP_COLUMNS  # of a chunk
_ID_MASK = 2**32 - 1  # mask of a key's half that holds an id, the lowest as the largest
_EMPTY_KEY = -(2**63)  # a key below any logit's


class TopK(NamedTuple):
    """K most probable ids of each token, the most probable first.

    logprobs  fp32 [..., K], over the whole vocabulary; without gradient
    ids       int64 [..., K] global, the lowest first on ties; -1 in NaN rows
    lse       fp32 [...], log-sum-exp of all logits
    mass      fp32 [...], sum of the K probabilities

    A row is NaN if a logit is NaN or +inf, if all are -inf, or if its temperature is not positive and finite. If uneven
    shards have fewer than K ids together, and `vocab_size` does not say so, the others are -1, of logprob -inf.
    """

    logprobs: Tensor
    ids: Tensor
    lse: Tensor
    mass: Tensor


@eager
def linear_topk(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V_local, H]
    k: int,
    **options: Unpack[HeadOptions],
) -> TopK:
    """The K most probable ids of each token over a vocab-sharded weight: exact, in about the time of a forward pass.

    Args:
        hidden, weight: as in `linear_cross_entropy`, but no DTensors.
        k: from 1 to 1,024, and no more than the vocabulary has.
        options: as in `linear_cross_entropy`.

    Returns:
        `TopK`, the same bits on every rank.

    Raises:
        TypeError, ValueError: see `linear_cross_entropy`.
    """
    name, compared = "linear_topk", {"k": k}
    with torch.no_grad():
        call_options = keyword_options(options, HeadOptions, entropy=False)
        with checked_together(name, hidden, weight, None, call_options, compared=compared) as checks:
            check_keywords(name, options, HeadOptions)
            validation.check_scalar("k", k, int, least=1)
            validation.require(k <= MAX_K, "k", f"be at most {MAX_K}", k)
            checks.labels = checks.hidden.new_zeros(checks.shape, dtype=torch.int64)
            vocab_size = call_options.vocab_size
            if vocab_size is None and (checks.ranks == 1 or call_options.vocab_start is None):
                vocab_size = checks.ranks * weight.shape[0]
            limit, got = f"be at most the {vocab_size} ids of the vocabulary", f"{k}: is tp_group missing?"
            validation.require(vocab_size is None or k <= vocab_size, "k", limit, got)
        call = checks.call
        with without_autocast(call.head.hidden.device, name):
            return _topk(call, k)


def _topk(call: Call, k: int) -> TopK:
    num_tokens, stride = call.labels.shape[0], round_up(call.size.max_columns, CHUNK_COLUMNS)
    block_tokens, product_columns = _plan(call, k)
    tokens = tokens_in_blocks(call.head.hidden, RowIndex(num_tokens), block_tokens, call.options)
    rows = call.backend.prepare_rows(call.head, call.labels, call.options.ignore_index, call.shard)
    rows = tokens.row_index.select_rows(rows)
    buffer = call.head.hidden.new_empty(block_tokens * stride, dtype=torch.float32)
    logits = buffer.new_full((num_tokens, k), -torch.inf)
    columns = call.labels.new_full((num_tokens, k), stride)
    extremes, sums = logits.new_empty(2, num_tokens), columns.new_empty(1, num_tokens)
    for block in tokens.blocks():
        hidden = block.hidden.wait()
        raw_logits = buffer[: hidden.shape[0] * stride].view(-1, stride)
        _fill(raw_logits[:, : call.shard.num_columns], hidden, call, product_columns)
        stats, max_logits, col_index = _select(raw_logits, rows.scale[block.row_slice], call, k)
        logits[block.row_slice, : max_logits.shape[1]] = max_logits
        columns[block.row_slice, : col_index.shape[1]] = col_index
        extremes[:, block.row_slice], sums[:, block.row_slice] = merged_over_group(stats, call)
        del raw_logits
    del buffer
    max_logit, log_sum = extremes[0], (sums[0].float() * FIXED_POINT_UNIT).log2()
    log_sum.masked_fill_(log_sum.isneginf(), torch.nan)  # every logit is -inf
    lse, mass = (max_logit + log_sum) * rows.to_nats, torch.empty_like(log_sum)
    token_bytes = 64 * k * collectives.group_size(call.options.tp_group)
    for token_slice in slices(num_tokens, max(1, call.options.workspace_bytes // token_bytes)):
        keys = _largest_keys(logits[token_slice], columns[token_slice], call)
        none, bits = keys == _EMPTY_KEY, _ordered_bits((keys >> 32).int())
        log_p = bits.view(torch.float32).masked_fill_(none, -torch.inf)
        log_p = log_p.sub_(max_logit[token_slice, None]).sub_(log_sum[token_slice, None])
        logits[token_slice] = log_p.mul_(rows.to_nats[token_slice, None])
        columns[token_slice] = (_ID_MASK - (keys & _ID_MASK)).masked_fill_(none | lse[token_slice, None].isnan(), -1)
        mass[token_slice] = log_p.exp_().sum(dim=1)
    results = (tokens.row_index.scatter(result) for result in (logits, columns, lse, mass))
    return TopK(*(result.view((*call.shape, *result.shape[1:])) for result in results))


def _plan(call: Call, k: int) -> tuple[int, int]:
    """Return the tokens of a block, and the columns of one product, whose weight may need an fp32 copy."""
    options, stride, num_tokens = call.options, round_up(call.size.max_columns, CHUNK_COLUMNS), call.labels.shape[0]
    hidden, weight = call.head.hidden, call.head.weight
    row_bytes, copies = 4 * hidden.shape[1], copies_to_fp32(hidden) or hidden.dtype != weight.dtype
    column_bytes = row_bytes if copies_to_fp32(weight) else 0
    all_chunks = stride // CHUNK_COLUMNS
    chunks = min(k, all_chunks)
    token_bytes = (4 if options.logits_dtype is None else 6) * stride + (row_bytes if copies else 0)  # products, hidden
    token_bytes += 40 * all_chunks + 16 * CHUNK_COLUMNS  # statistics
    # The selection.
    token_bytes += (4 * CHUNK_COLUMNS + 24 * _GROUPS) * chunks + 36 * _GROUP_COLUMNS * min(k, chunks * _GROUPS)
    ranks = num_tokens // hidden.shape[0] if options.sequence_parallel and num_tokens else 1
    # A block has as many tokens of every rank.
    chunk_bytes, ranks_bytes = CHUNK_COLUMNS * column_bytes, token_bytes * ranks
    if options.workspace_bytes < ranks_bytes + chunk_bytes:
        min_bytes, workspace_bytes = ranks_bytes + chunk_bytes, options.workspace_bytes
        raise ValueError(f"workspace_bytes must be at least {min_bytes} for this head, got {workspace_bytes}")
    max_tokens = (options.workspace_bytes - chunk_bytes) // ranks_bytes * ranks
    block_tokens = min(max_tokens // (MIN_TOKENS * ranks) * MIN_TOKENS * ranks or max_tokens, max(num_tokens, 1))
    free_bytes = options.workspace_bytes - block_tokens * token_bytes
    return block_tokens, free_bytes // chunk_bytes * CHUNK_COLUMNS if column_bytes else stride


def _fill(raw_logits: Tensor, hidden: Tensor, call: Call, product_columns: int) -> None:
    """Write the raw logits of hidden with this shard's columns, rounded if asked for, or the tanh of a softcap."""
    dtype, cap = call.head.logits_dtype, call.head.softcap_scale
    # fp32 inputs are multiplied 256 of H at a time, because one running sum over a long H loses digits.
    step = 256 if hidden.dtype == torch.float32 else hidden.shape[1]
    for col_slice in slices(raw_logits.shape[1], product_columns):
        for h_slice in slices(hidden.shape[1], step):
            weight = call.head.weight[col_slice, h_slice]
            matmul(hidden[:, h_slice], weight.T, raw_logits[:, col_slice], accumulate=h_slice.start > 0)
    if dtype is not None:
        raw_logits.copy_(raw_logits.to(dtype))
    if cap is not None:
        raw_logits.mul_(cap).tanh_()


def _select(raw_logits: Tensor, scale: Tensor, call: Call, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return statistics of every chunk, and each row's largest logits and their columns, [n, k] or fewer.

    raw_logits [n, C] hold whole chunks, whose last columns may lie past the vocabulary's end.
    """
    num_tokens, num_columns = raw_logits.shape[0], call.shard.num_columns
    stats = call.backend.chunk_stats_of_logits(raw_logits[:, :num_columns], scale)
    chunks = _topk_indices(stats[:, 0].T, k)
    logits = raw_logits.view(num_tokens, -1, CHUNK_COLUMNS).take_along_dim(chunks[:, :, None], 1)
    logits.mul_(scale[:, None, None])
    if last_columns := num_columns % CHUNK_COLUMNS:
        is_last = chunks == num_columns // CHUNK_COLUMNS
        logits[..., last_columns:].masked_fill_(is_last[:, :, None], -torch.inf)
    logits = logits.view(num_tokens, -1, _GROUP_COLUMNS)
    groups = _topk_indices(logits.amax(dim=2), k)
    logits = logits.take_along_dim(groups[:, :, None], 1).flatten(1)
    first = chunks.gather(1, groups // _GROUPS) * CHUNK_COLUMNS + groups % _GROUPS * _GROUP_COLUMNS
    columns = (first[:, :, None] + torch.arange(_GROUP_COLUMNS, dtype=torch.int64, device=first.device)).flatten(1)
    top_index = _topk_indices(logits, k)
    return stats, logits.gather(1, top_index), columns.gather(1, top_index)


def _topk_indices(values: Tensor, k: int) -> Tensor:
    """Return the ascending indices [n, k] of each row's largest values [n, C]; on ties the first ones."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values


def _largest_keys(logits: Tensor, columns: Tensor, call: Call) -> Tensor:
    """Return int64 keys [n, k] of the group's largest logits, in order; `_EMPTY_KEY` where there are fewer.

    Keys are ordered by logit, and on ties the lowest id is the largest; no two are equal.
    """
    (num_tokens, k), group = logits.shape, call.options.tp_group
    bits = _ordered_bits((logits + 0.0).view(torch.int32))  # -0.0 is 0.0
    keys = bits.long().bitwise_left_shift_(32).add_(_ID_MASK - (columns + call.shard.start))
    keys.masked_fill_(columns >= call.shard.num_columns, _EMPTY_KEY)
    if group is not None:
        keys = collectives.all_gather_stack(keys, group).permute(1, 0, 2).reshape(num_tokens, -1)
    return keys.sort(dim=1, descending=True).values[:, :k]


def _ordered_bits(bits: Tensor) -> Tensor:
    """Return int32 in the order of the floats that have these bits, or the bits again."""
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
