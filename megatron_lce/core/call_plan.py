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
    stats_tokens: int  # whose statistics are computed at once; of two heads, whose logits are in memory at once
    stats_columns: int  # of the weight that statistics may copy at once
    cache_tokens: int  # most whose logits, or gradients, are kept until they are added; 0: recomputed in slabs
    slab_tokens: int  # of the largest slab
    slab_columns: int  # 0: logits are cached, or there is no gradient

    def __str__(self) -> str:
        return f"blocks of {self.block_tokens:,} tokens, statistics of {self.stats_tokens:,} at once, " + (
            "logits cached" if self.cache_tokens else f"slabs of {self.slab_tokens:,} x {self.slab_columns:,} logits"
        )


@lru_cache(maxsize=1024)
def plan_call(
    size: HeadSize,
    num_tokens: int,
    num_columns: int,  # of this rank's shard
    workspace_bytes: int,
    *,
    known_loss: bool = False,  # gradients are computed in forward, of blocks whose logits are kept until then
    keeps_fp32_sum: bool = False,  # under a known loss the weight gradient of a single block is an fp32 sum, too
    logits_cache_bytes: int = 0,
    needs_grad: bool = True,
    needs_weight: bool = True,
) -> Plan:
    """Return the plan of a call. Its blocks are the same on every rank.

    If under a known loss no block's logits fit, all tokens are one block, whose logits are recomputed.

    Raises:
        ValueError: the workspace does not hold one token of `COLUMN_STEP` columns.
    """
    size.check_workspace(workspace_bytes, needs_grad=needs_grad, needs_weight=needs_weight)
    workspace_bytes, two_heads = workspace_bytes - size.copied_bytes, size.num_heads == 2
    acc_size = size if needs_weight else size._replace(needs_weight_acc=False)
    block_tokens, cache_tokens, tokens_of_stats = max(1, num_tokens), 0, None
    if known_loss and needs_grad:
        plan_known = plan_known_divergence if two_heads else plan_known_loss
        known = plan_known(acc_size, num_tokens, workspace_bytes, keeps_fp32_sum=keeps_fp32_sum)
        if known is not None:
            block_tokens, left = known
            cache_tokens = block_tokens
            tokens_of_stats, workspace_bytes = (left, workspace_bytes) if two_heads else (None, left)
    elif not known_loss and not two_heads:
        block_tokens = backward_tokens(size, num_tokens, workspace_bytes)
        if needs_grad and size.fits_cache(num_tokens, logits_cache_bytes):
            cache_tokens = max(1, num_tokens)
    if two_heads and not cache_tokens:
        tokens_of_stats = two_heads_tokens(acc_size, num_tokens, workspace_bytes)
    slab_tokens = slab_columns = 0
    if needs_grad and not cache_tokens and num_columns > 0:
        acc_bytes = 0 if keeps_fp32_sum else acc_size.weight_acc_per_column  # if slabs cut tokens
        slab_tokens, slab_columns = plan_slabs(
            block_tokens,
            slab_row_stride(num_columns),
            workspace_bytes,
            size.slab_bytes,
            split_tokens_per_column=acc_bytes,
        )
    tokens_of_stats = tokens_of_stats or stats_tokens(size, block_tokens, workspace_bytes)
    columns = stats_columns(size, tokens_of_stats, workspace_bytes)
    return Plan(block_tokens, tokens_of_stats, columns, cache_tokens, slab_tokens, slab_columns)
