"""Statistics of every computed token over the whole vocabulary of a group."""

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.blocks import cut, stats_tokens
from megatron_lce.core.options import Options
from megatron_lce.core.protocols import CacheAhead, CrossEntropyBackend, LogitsCache
from megatron_lce.core.rows import Ahead, Rows, softcap_scale
from megatron_lce.core.softmax_stats import empty_extremes, empty_sums, packed_rows
from megatron_lce.core.tokens import Tokens


def stats_over_group(
    tokens: Tokens,
    weight: Tensor,  # [V_local, H]
    rows: Rows,
    options: Options,
    backend: CrossEntropyBackend,
    cache: LogitsCache | CacheAhead | None,
) -> tuple[Tensor, Tensor]:
    """Extremes [E, N] and sums [`num_sums`, N] of the whole vocabulary, the same bits on every rank."""
    found = []
    for block in tokens.blocks() if tokens.num_computed else ():
        cache_here = None if cache is None else cache.of(block.rows)
        of_block = block.hidden.wait(), weight, rows.of(block.rows), options, backend, cache_here
        found.append(stats_of_tokens(*of_block, block.ahead))
    if not found:
        extremes = empty_extremes(0, options.telemetry, weight.device)
        return extremes, empty_sums(0, options.entropy, options.telemetry, weight.device)
    return _side_by_side(found)


def stats_of_tokens(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V_local, H]
    rows: Rows,
    options: Options,
    backend: CrossEntropyBackend,
    cache: LogitsCache | CacheAhead | None = None,
    ahead: Ahead | None = None,  # only where all of them fit at once
) -> tuple[Tensor, Tensor]:
    """The same of hidden states that are here, as many at a time as the workspace has room for."""
    num_tokens = hidden.shape[0]
    most = stats_tokens(num_tokens, options.workspace_bytes, backend.softmax_stats_bytes(hidden, options))
    if most >= num_tokens:
        return _stats_of_part(hidden, weight, rows, options, backend, cache, ahead)
    assert ahead is None
    found = []
    for part in cut(num_tokens, most):
        cache_here = None if cache is None else cache.of(part)
        found.append(_stats_of_part(hidden[part], weight, rows.of(part), options, backend, cache_here, None))
    return _side_by_side(found)


def _side_by_side(found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Those of consecutive tokens as one."""
    if len(found) == 1:
        return found[0]
    extremes, sums = zip(*found, strict=True)
    return torch.cat(extremes, dim=1), torch.cat(sums, dim=1)


def _stats_of_part(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V_local, H]
    rows: Rows,
    options: Options,
    backend: CrossEntropyBackend,
    cache: LogitsCache | CacheAhead | None,
    ahead: Ahead | None,
) -> tuple[Tensor, Tensor]:
    """Extremes and sums over the group's vocabulary: one exchange for the largest logits, one for the sums."""
    num_tokens = hidden.shape[0]
    num_rows = None if ahead is None else ahead.number
    entropy, telemetry = options.entropy, options.telemetry
    if options.num_columns == 0:
        parts = hidden.new_empty(0, packed_rows(entropy, telemetry), num_tokens, dtype=torch.float32)
        of_all = empty_extremes(num_tokens, telemetry, hidden.device)[None]
    else:
        of_all = parts = backend.softmax_stats(
            hidden,
            weight[: options.num_columns],
            rows.labels,
            rows.scale,
            softcap_scale=softcap_scale(options),
            entropy=entropy,
            telemetry=telemetry,
            vocab_start=options.vocab_start,
            workspace_bytes=options.workspace_bytes,
            cache=cache,
            ahead=ahead,
        )
    if options.tp_group is not None:
        extremes = backend.merge_extremes(of_all, telemetry, num_rows)
        of_all = collectives.stack_over_group(extremes, options.tp_group)
    extremes, sums = backend.sum_chunks(parts, of_all, options.num_columns, entropy, telemetry, num_rows)
    if options.tp_group is not None:
        collectives.add_over_group(sums, options.tp_group)
    return extremes, sums
