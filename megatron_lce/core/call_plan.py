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
    in_forward: bool = False  # gradients are computed in forward, block by block


@lru_cache(maxsize=1024)
def plan_call(
    size: HeadSize,
    num_tokens: int,
    num_columns: int,  # of this rank's shard
    workspace_bytes: int,
    *,
    known_loss: bool = False,  # if not all logits are cached, gradients are computed in forward, block by block
    only_if_faster: bool = False,  # under a known loss not even then if no block's logits can be kept
    keeps_fp32_sum: bool = False,  # under a known loss the weight gradient of a single block is an fp32 sum, too
    logits_cache_bytes: int | None = 0,
    needs_grad: bool = True,
    needs_weight: bool = True,
) -> Plan:
    """Return the plan of a call. Its blocks are the same on every rank.

    If gradients are computed in forward and no block's logits fit, all tokens are one block, which recomputes them.

    Raises:
        ValueError: the workspace does not hold one token of `COLUMN_STEP` columns.
    """
    size.check_workspace(workspace_bytes, needs_grad=needs_grad, needs_weight=needs_weight)
    workspace_bytes, two_heads = workspace_bytes - size.copied_bytes, size.num_heads == 2
    acc_size = size if needs_weight else size._replace(needs_weight_acc=False)
    block_tokens, cache_tokens, tokens_of_stats = max(1, num_tokens), 0, None
    if needs_grad and not two_heads and size.fits_cache(num_tokens, logits_cache_bytes):
        cache_tokens = num_tokens
    in_forward = known_loss and needs_grad and not cache_tokens
    if in_forward:
        plan_known = plan_known_divergence if two_heads else plan_known_loss
        known = plan_known(acc_size, num_tokens, workspace_bytes, keeps_fp32_sum=keeps_fp32_sum)
        if known is not None:
            block_tokens, left = known
            cache_tokens = block_tokens
            tokens_of_stats, workspace_bytes = (left, workspace_bytes) if two_heads else (None, left)
        in_forward = known is not None or not only_if_faster
    if not in_forward and not two_heads:
        block_tokens = backward_tokens(size, num_tokens, workspace_bytes)
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
    return Plan(block_tokens, tokens_of_stats, columns, cache_tokens, slab_tokens, slab_columns, in_forward)
