"""Statistics of every computed token over the whole vocabulary of a group."""

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
    """Return the whole vocabulary's extremes [E, N] and sums [`num_sums`, N], with the same bits on every rank.

    And base-2 logits at the candidates' `ids` [N, K], if any, of the same blocks, as long as their hidden states are
    there.
    """
    options, device, parts = call.options, call.hidden.device, []
    logits = None if ids is None else torch.empty_like(ids, dtype=torch.float32)
    for block in tokens.blocks():
        hidden, some = block.hidden.wait(), rows.select(block.rows)
        parts.append(stats_of_tokens(hidden, some, call, None if cache is None else cache.select(block.rows)))
        if ids is not None and logits is not None:
            logits[block.rows] = candidate_logits(hidden, ids[block.rows], some, call)
    if not parts:
        extremes = empty_extremes(0, options.telemetry, device)
        return extremes, empty_sums(0, options.entropy, options.telemetry, device), logits
    return *_side_by_side(parts), logits


def stats_of_tokens(
    hidden: Tensor,  # [N, H]
    rows: Rows,
    call: Call,
    cache: LogitsCache | None,
) -> tuple[Tensor, Tensor]:
    """Return the extremes and sums of gathered hidden states, as many at a time as the workspace has room for."""
    parts = []
    for part in cut(hidden.shape[0], stats_tokens(call.size, hidden.shape[0], call.options.workspace_bytes)):
        part_cache = None if cache is None else cache.select(part)
        parts.append(_stats_of_part(hidden[part], rows.select(part), call, part_cache))
    return _side_by_side(parts)


def _side_by_side(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate consecutive tokens' statistics."""
    if len(parts) == 1:
        return parts[0]
    extremes, sums = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    return extremes, sums


def _stats_of_part(hidden: Tensor, rows: Rows, call: Call, cache: LogitsCache | None) -> tuple[Tensor, Tensor]:
    """Return extremes and sums over the group's vocabulary: one exchange for the extremes, one for the sums."""
    backend, options, shard, num_tokens = call.backend, call.options, call.shard, hidden.shape[0]
    if shard.columns == 0:
        num_rows = packed_rows(options.entropy, options.telemetry)
        parts = hidden.new_empty(0, num_rows, num_tokens, dtype=torch.float32)
    else:
        parts = backend.softmax_stats(
            hidden,
            call.weight[: shard.columns],
            rows,
            options,
            vocab_start=shard.start,
            cache=cache,
            columns_at_once=stats_columns(call.size, num_tokens, options.workspace_bytes),
        )
    return merged_over_group(parts, call)


def merged_over_group(parts: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the extremes and sums over the group's vocabulary of this shard's statistics [chunks, K, N]."""
    backend, options, shard = call.backend, call.options, call.shard
    entropy, telemetry = options.entropy, options.telemetry
    all_extremes = parts
    if shard.columns == 0:
        all_extremes = empty_extremes(parts.shape[2], telemetry, parts.device)[None]
    if options.tp_group is not None:
        extremes = merge_extremes(all_extremes, telemetry)
        all_extremes = collectives.stack_over_group(extremes, options.tp_group)
    extremes, sums = backend.sum_chunks(parts, all_extremes, shard.columns, entropy, telemetry)
    if options.tp_group is not None:
        collectives.add_over_group(sums, options.tp_group)
    return extremes, sums
