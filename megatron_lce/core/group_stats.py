"""Statistics of every computed token over the whole vocabulary of a group."""

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.blocks import cut, stats_tokens
from megatron_lce.core.options import Options
from megatron_lce.core.protocols import CrossEntropyBackend, LogitsCache
from megatron_lce.core.rows import Rows, softcap_scale
from megatron_lce.core.softmax_stats import empty_extremes, empty_sums, packed_rows
from megatron_lce.core.tokens import Tokens


def stats_over_group(
    tokens: Tokens,
    weight: Tensor,  # [V_local, H]
    rows: Rows,
    options: Options,
    backend: CrossEntropyBackend,
    cache: LogitsCache | None,
) -> tuple[Tensor, Tensor]:
    """Extremes [E, N] and sums [`num_sums`, N] of the whole vocabulary, the same bits on every rank."""
    found = []
    for block in tokens.blocks() if tokens.num_computed else ():
        cache_here = None if cache is None else cache.select(block.rows)
        here = rows.select(block.rows)
        found.append(stats_of_tokens(block.hidden.wait(), weight, here, options, backend, cache_here))
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
    cache: LogitsCache | None = None,
) -> tuple[Tensor, Tensor]:
    """The same of hidden states that are here, as many at a time as the workspace has room for."""
    num_tokens = hidden.shape[0]
    most = stats_tokens(num_tokens, options.workspace_bytes, backend.softmax_stats_bytes(hidden, options))
    if most >= num_tokens:
        return _stats_of_part(hidden, weight, rows, options, backend, cache)
    found = []
    for part in cut(num_tokens, most):
        cache_here = None if cache is None else cache.select(part)
        found.append(_stats_of_part(hidden[part], weight, rows.select(part), options, backend, cache_here))
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
    cache: LogitsCache | None,
) -> tuple[Tensor, Tensor]:
    """Extremes and sums over the group's vocabulary: one exchange for the largest logits, one for the sums."""
    num_tokens = hidden.shape[0]
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
            cache=cache,
        )
    if options.tp_group is not None:
        extremes = backend.merge_extremes(of_all, telemetry)
        of_all = collectives.stack_over_group(extremes, options.tp_group)
    extremes, sums = backend.sum_chunks(parts, of_all, options.num_columns, entropy, telemetry)
    if options.tp_group is not None:
        collectives.add_over_group(sums, options.tp_group)
    return extremes, sums
