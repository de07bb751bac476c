"""Statistics and outputs of computed tokens over the vocabulary of the group."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call
from megatron_lce.core.call_plan import Plan
from megatron_lce.core.candidates import candidate_logprobs
from megatron_lce.core.logits_at import csr_from_dense, logits_over_group
from megatron_lce.core.logits_cache import LogitsCache
from megatron_lce.core.options import LinearCrossEntropyOutput, new_outputs
from megatron_lce.core.plan import slices
from megatron_lce.core.rows import RowInputs, RowSoftmax
from megatron_lce.core.statistics import merge_extremes, new_empty_stats
from megatron_lce.core.tokens import TokenBlock


def outputs_over_group(
    blocks: Iterable[TokenBlock],  # which make up the rows
    rows: RowInputs,
    labels: Tensor,  # [N] global; used with candidates
    ids: Tensor | None,  # [N, K] global, of candidates
    call: Call,
    plan: Plan,
    cache: LogitsCache | None,
) -> tuple[LinearCrossEntropyOutput, RowSoftmax, Tensor | None]:
    """Return outputs, softmaxes, and candidates' base-2 logprobs [N, K], if any; the same bits on every rank."""
    options, merged = call.options, []
    logits = None if ids is None else torch.empty_like(ids, dtype=torch.float32)
    for block in blocks:
        hidden, block_rows = block.hidden.wait(), rows.select(block.row_slice)
        block_cache = None if cache is None else cache.select(block.row_slice)
        for token_slice in slices(hidden.shape[0], plan.stats_tokens):
            slice_cache = None if block_cache is None else block_cache.select(token_slice)
            merged.append(_merged_stats(hidden[token_slice], block_rows.select(token_slice), call, plan, slice_cache))
        if ids is not None and logits is not None:
            block_ids = csr_from_dense(ids[block.row_slice])
            logits[block.row_slice] = logits_over_group(hidden, block_ids, block_rows, call).view(-1, ids.shape[1])
    if not merged:
        empty_stats = new_empty_stats(0, options.entropy, options.telemetry, call.hidden.device)
        merged = [call.backend.merge_chunks(empty_stats, empty_stats, 0, options.entropy, options.telemetry)]
    extremes, sums = merged[0] if len(merged) == 1 else (torch.cat(each, dim=1) for each in zip(*merged, strict=True))
    outputs = new_outputs(rows.labels.shape[0], options, call.hidden, ids)
    softmax, log_p = call.backend.write_outputs(extremes, sums, rows, options, outputs), None
    if ids is not None and logits is not None and outputs.candidate_logprobs is not None:
        log_p = candidate_logprobs(logits, ids, labels, rows, softmax, outputs.candidate_logprobs)
    return outputs, softmax, log_p


def _merged_stats(
    hidden: Tensor, rows: RowInputs, call: Call, plan: Plan, cache: LogitsCache | None
) -> tuple[Tensor, Tensor]:
    """Return extremes and sums of the vocabulary; the statistics of chunks are freed."""
    weight, start = call.weight[: call.shard.num_columns], call.shard.start
    stats = call.backend.softmax_stats(
        hidden, weight, rows, call.options, vocab_start=start, cache=cache, max_copied_columns=plan.stats_columns
    )
    return merged_over_group(stats, call)


def merged_over_group(stats: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Merge statistics [chunks, K, N] of all shards: the ranks exchange extremes, then sums.

    The backend's `merge_chunks` returns integer sums, whose bits do not depend on the order (`core.statistics`).
    """
    group, entropy, telemetry = call.options.tp_group, call.options.entropy, call.options.telemetry
    if call.shard.num_columns == 0:
        stats = new_empty_stats(stats.shape[2], entropy, telemetry, stats.device)
    all_extremes = stats
    if group is not None:
        all_extremes = collectives.all_gather_stack(merge_extremes(stats, telemetry), group)
    extremes, sums = call.backend.merge_chunks(stats, all_extremes, call.shard.num_columns, entropy, telemetry)
    if group is not None:
        collectives.all_reduce_sum(sums, group)
    return extremes, sums
