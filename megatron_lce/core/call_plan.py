"""The one plan of a call: how its tokens and columns are cut. `core.plan` has the sizes and rules it follows."""

from functools import lru_cache
from typing import NamedTuple

from megatron_lce.core.plan import (
    HeadSize,
    backward_tokens,
    plan_known_divergence,
    plan_known_loss,
    plan_slabs,
    slab_row_stride,
    stats_columns,
    stats_tokens,
    two_heads_tokens,
)


class Plan(NamedTuple):
    """How a call is cut. Made once for each configuration."""

    block_tokens: int  # of the outer loop, which gathers hidden states and reduces their gradient
    stats_tokens: int  # whose statistics are computed at once
    stats_columns: int  # of the weight that statistics may copy at once
    caches: bool  # the logits of a block are kept until their gradient is computed
    slab_tokens: int  # of the largest slab
    slab_columns: int  # 0: logits are cached, or there is no gradient

    def __str__(self) -> str:
        return f"blocks of {self.block_tokens:,} tokens, statistics of {self.stats_tokens:,} at once, " + (
            "logits cached" if self.caches else f"slabs of {self.slab_tokens:,} x {self.slab_columns:,} logits"
        )


@lru_cache(maxsize=1024)
def plan_cross_entropy(
    size: HeadSize,
    num_tokens: int,
    num_columns: int,  # of this rank's shard
    workspace_bytes: int,
    *,
    logits_cache_bytes: int = 0,
    needs_grad: bool = True,
    needs_weight: bool = True,
) -> Plan:
    """Return the plan of `linear_cross_entropy`. Its blocks are the same on every rank.

    Raises:
        ValueError: the workspace does not hold one token of `COLUMN_STEP` columns.
    """
    size.check_workspace(workspace_bytes, needs_grad=needs_grad, needs_weight=needs_weight)
    caches = needs_grad and size.fits_cache(num_tokens, logits_cache_bytes)
    return _plan(
        size,
        backward_tokens(size, num_tokens, workspace_bytes),
        caches,
        num_columns if needs_grad and not caches else 0,
        workspace_bytes,
        acc_per_column=size.weight_acc_per_column if needs_weight else 0,
    )


@lru_cache(maxsize=1024)
def plan_token_loss(
    size: HeadSize,
    num_tokens: int,
    num_columns: int,
    workspace_bytes: int,
    *,
    needs_grad: bool = True,
    needs_weight: bool = True,
    keeps_fp32_sum: bool = False,  # the weight gradient of a single block is an fp32 sum, too
) -> Plan:
    """Return the plan of `linear_token_loss`: blocks whose logits are cached until their gradients are computed.

    If none fit, all tokens are one block without a cache.

    Raises:
        ValueError: as `plan_cross_entropy`.
    """
    size.check_workspace(workspace_bytes, needs_grad=needs_grad, needs_weight=needs_weight)
    size = size._replace(needs_weight_acc=size.needs_weight_acc and needs_weight)
    block_plan = None
    if needs_grad:
        block_plan = plan_known_loss(size, num_tokens, workspace_bytes, keeps_fp32_sum=keeps_fp32_sum)
    block_tokens, workspace_bytes = block_plan or (max(1, num_tokens), workspace_bytes)
    return _plan(
        size,
        block_tokens,
        block_plan is not None,
        num_columns if needs_grad and not block_plan else 0,
        workspace_bytes,
        acc_per_column=0 if keeps_fp32_sum else size.weight_acc_per_column,
    )


@lru_cache(maxsize=1024)
def plan_divergence(
    size: HeadSize,  # of two heads
    num_tokens: int,
    num_columns: int,
    workspace_bytes: int,
    *,
    known_loss: bool,  # gradients are computed in forward
    needs_weight: bool = True,
    keeps_fp32_sum: bool = False,
) -> Plan:
    """Return the plan of two heads: `stats_tokens` are those whose logits of both heads are in memory at once.

    If gradients are known, a block is as long as all its gradients can be kept, or all tokens if none fit.
    """
    size = size._replace(needs_weight_acc=size.needs_weight_acc and needs_weight)
    block_plan = None
    if known_loss:
        block_plan = plan_known_divergence(size, num_tokens, workspace_bytes, keeps_fp32_sum=keeps_fp32_sum)
    block_tokens, logits_tokens = block_plan or (
        max(1, num_tokens),
        two_heads_tokens(size, num_tokens, workspace_bytes),
    )
    acc_per_column = 0 if keeps_fp32_sum else size.weight_acc_per_column
    slab_columns = 0 if block_plan else num_columns
    plan = _plan(size, block_tokens, block_plan is not None, slab_columns, workspace_bytes, acc_per_column)
    return plan._replace(stats_tokens=logits_tokens)


def _plan(
    size: HeadSize,
    block_tokens: int,
    caches: bool,
    recomputed_columns: int,  # of which the gradient is recomputed in slabs
    workspace_bytes: int,
    acc_per_column: int,  # bytes per column of a partial fp32 sum of the weight gradient, if slabs cut tokens
) -> Plan:
    slab_tokens = slab_columns = 0
    if recomputed_columns > 0:
        stride = slab_row_stride(recomputed_columns)
        slab_tokens, slab_columns = plan_slabs(
            block_tokens, stride, workspace_bytes, size.slab_bytes, split_tokens_per_column=acc_per_column
        )
    tokens_of_stats = stats_tokens(size, block_tokens, workspace_bytes)
    return Plan(
        block_tokens=block_tokens,
        stats_tokens=tokens_of_stats,
        stats_columns=stats_columns(size, tokens_of_stats, workspace_bytes),
        caches=caches,
        slab_tokens=slab_tokens,
        slab_columns=slab_columns,
    )
