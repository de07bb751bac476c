"""Statistics of computed tokens over the vocabulary of the group."""

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call
from megatron_lce.core.candidates import candidate_logits
from megatron_lce.core.logits_cache import LogitsCache
from megatron_lce.core.plan import cut, stats_columns, stats_tokens
from megatron_lce.core.rows import Rows
from megatron_lce.core.statistics import empty_extremes, empty_sums, merge_extremes, packed_rows
from megatron_lce.core.tokens import Tokens


def stats_over_group(
    tokens: Tokens, rows: Rows, call: Call, cache: LogitsCache | None, ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return extremes [E, N], sums [`num_sums`, N] and base-2 logits at candidates' `ids` [N, K], or None without ids.

    All of them have the same bits on every rank.
    """
    of_blocks = []
    logits = None if ids is None else torch.empty_like(ids, dtype=torch.float32)
    for block in tokens.blocks():
        hidden, some = block.hidden.wait(), rows.select(block.rows)
        of_blocks.append(stats_of_tokens(hidden, some, call, None if cache is None else cache.select(block.rows)))
        if ids is not None and logits is not None:
            logits[block.rows] = candidate_logits(hidden, ids[block.rows], some, call)
    if not of_blocks:
        entropy, telemetry, device = call.options.entropy, call.options.telemetry, call.hidden.device
        of_blocks = [(empty_extremes(0, telemetry, device), empty_sums(0, entropy, telemetry, device))]
    return *_side_by_side(of_blocks), logits


def stats_of_tokens(hidden: Tensor, rows: Rows, call: Call, cache: LogitsCache | None) -> tuple[Tensor, Tensor]:
    """Return the extremes and sums of hidden states [N, H], as many at a time as the workspace holds."""
    of_ranges = []
    for tokens in cut(hidden.shape[0], stats_tokens(call.size, hidden.shape[0], call.options.workspace_bytes)):
        own_cache = None if cache is None else cache.select(tokens)
        of_ranges.append(_stats_at_once(hidden[tokens], rows.select(tokens), call, own_cache))
    return _side_by_side(of_ranges)


def _side_by_side(stats: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate the statistics of consecutive tokens."""
    if len(stats) == 1:
        return stats[0]
    extremes, sums = (torch.cat(each, dim=1) for each in zip(*stats, strict=True))
    return extremes, sums


def _stats_at_once(hidden: Tensor, rows: Rows, call: Call, cache: LogitsCache | None) -> tuple[Tensor, Tensor]:
    """Compute the statistics of this shard and merge them over the group."""
    options, shard, num_tokens = call.options, call.shard, hidden.shape[0]
    if shard.columns == 0:
        num_rows = packed_rows(options.entropy, options.telemetry)
        of_chunks = hidden.new_empty(0, num_rows, num_tokens, dtype=torch.float32)
    else:
        at_once = stats_columns(call.size, num_tokens, options.workspace_bytes)
        inputs = hidden, call.weight[: shard.columns], rows, options
        of_chunks = call.backend.softmax_stats(*inputs, vocab_start=shard.start, cache=cache, columns_at_once=at_once)
    return merged_over_group(of_chunks, call)


def merged_over_group(of_chunks: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Merge statistics [chunks, K, N] of all shards: the ranks exchange extremes, then sums.

    The backend's `sum_chunks` returns integer sums, whose bits do not depend on the order (`core.statistics`).
    """
    backend, options, shard = call.backend, call.options, call.shard
    entropy, telemetry = options.entropy, options.telemetry
    all_extremes = of_chunks
    if shard.columns == 0:
        all_extremes = empty_extremes(of_chunks.shape[2], telemetry, of_chunks.device)[None]
    if options.tp_group is not None:
        extremes = merge_extremes(all_extremes, telemetry)
        all_extremes = collectives.stack_over_group(extremes, options.tp_group)
    extremes, sums = backend.sum_chunks(of_chunks, all_extremes, shard.columns, entropy, telemetry)
    if options.tp_group is not None:
        collectives.add_over_group(sums, options.tp_group)
    return extremes, sums
