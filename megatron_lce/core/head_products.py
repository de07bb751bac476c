"""`megatron_lce.jsd` makes both heads' products block by block; the backend reads them, the ranks exchange the results.

The products of a block of tokens with all columns stay in memory while the backend finds both softmaxes, the divergence
and, if the upstream gradient is known, the gradient. Backward, which has every token's `Found`, takes any range of
columns.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call
from megatron_lce.core.head_gradients import Slab, computed_slabs, kept_slabs
from megatron_lce.core.known_loss import scales_a_sum
from megatron_lce.core.plan import (
    COLUMN_STEP,
    MIN_TOKENS,
    BlockBytes,
    cut,
    cut_columns,
    even,
    plan_blocks,
    slab_row_stride,
)
from megatron_lce.core.products import copies_to_fp32, product, with_zeros_behind
from megatron_lce.core.two_heads import STATS_ROWS, Heads, merged_stats

BYTES_PER_LOGIT = 2 * 4  # bytes of two heads' products in fp32
# Products of 8192 x (2048, 4096) x 151936 take 30.4, 23.4, 22.3 and 24.5 ms in blocks of 256, 384, 512, 640 tokens.
WIDE_PRODUCTS = 512  # tokens of a block: more gain nothing, unless the shard is narrow
WIDE_LOGITS = 2**26  # a head's logits of a narrow shard's block


class ProductsRoom:
    """It is memory for both heads' products of some tokens with some columns."""

    def __init__(self, heads: Heads, tokens: int, columns: int) -> None:
        self.tokens, size = tokens, tokens * slab_row_stride(columns)
        self._flat = torch.empty(2, size, dtype=torch.float32, device=heads.student.hidden.device)
        # A CPU's products copy 16-bit weights to fp32: few at a time.
        self._step = COLUMN_STEP if _copied_bytes(heads) else columns

    def fill(self, heads: Heads) -> Tensor:
        """Compute both heads' products [2, N, C], which stay until the next call."""
        num_tokens, width = heads.student.hidden.shape[0], heads.student.weight.shape[0]
        stride = slab_row_stride(width)
        room = self._flat[:, : num_tokens * stride].view(2, num_tokens, stride)[:, :, :width]
        for head, values in zip(heads[:2], room, strict=True):
            for columns in cut_columns(width, self._step):
                product(head.hidden, head.weight[columns].T, values[:, columns], accumulate=False)
        return room


def diverge(
    heads: Heads, found: Tensor, call: Call, products_tokens: int | None = None, gradient: Tensor | None = None
) -> None:
    """Fill `Found`, [6, N] or [9, N], and the gradient [N, C], if any, a block of `products_tokens` at a time."""
    num_tokens, all_columns = found.shape[1], slice(0, call.shard.columns)
    if products_tokens is None:
        workspace = call.options.workspace_bytes - _copied_bytes(heads)
        products_tokens = _products_tokens(heads, num_tokens, workspace, call)
    room = ProductsRoom(heads, min(products_tokens, num_tokens), call.shard.columns)
    for tokens in cut(num_tokens, room.tokens):
        grad = None if gradient is None else gradient[tokens]
        _find_block(heads.block(tokens, all_columns), room, call, found[:, tokens], grad)


def collected_slabs(heads: Heads, found: Tensor, call: Call, products_tokens: int) -> Iterator[Slab]:
    """Fill `Found` and collect the gradients of the student's products, `products_tokens` at a time, for one slab."""
    num_columns = call.shard.columns
    grad = heads.student.hidden.new_empty(found.shape[1], slab_row_stride(num_columns))
    grad = with_zeros_behind(grad, num_columns)
    diverge(heads, found, call, products_tokens, grad)
    yield from kept_slabs(grad)


def _find_block(heads: Heads, room: ProductsRoom, call: Call, found: Tensor, gradient: Tensor | None = None) -> None:
    """Fill `Found` of a block, and its `gradient`: an exchange over the group for both softmaxes, one for the sums."""
    group, read = call.options.tp_group, call.backend.read_products
    stats, sums = found[:STATS_ROWS], found[STATS_ROWS:]
    products = room.fill(heads) if call.shard.columns > 0 else None
    if products is None:
        found.zero_()
        stats[::2] = -torch.inf  # the largest of no logits
    elif group is None:
        read(heads, products, found, gradient, softmaxes=True, divergence=True)
    else:
        read(heads, products, found, softmaxes=True)
    if group is not None:
        stats.copy_(merged_stats(collectives.stack_over_group(stats, group)))
        if products is not None:
            read(heads, products, found, divergence=True)
        sums.copy_(collectives.stack_over_group(sums, group).sum(dim=0))
        if products is not None and gradient is not None:
            read(heads, products, found, gradient)


def recomputed_slabs(heads: Heads, found: Tensor, call: Call, bytes_per_column: int) -> Iterator[Slab]:
    """Yield gradients of the student's products, slab by slab, from both heads' recomputed products."""
    num_tokens, num_columns = found.shape[1], call.shard.columns
    if num_columns == 0:
        return
    workspace, stride = call.options.workspace_bytes - _copied_bytes(heads), slab_row_stride(num_columns)
    slab_bytes = _slab_bytes(heads, call)
    blocks = plan_blocks(num_tokens, stride, workspace, slab_bytes, per_column_if_tokens_are_cut=bytes_per_column)
    room = ProductsRoom(heads, blocks.tokens, blocks.columns)

    def compute(tokens: slice, columns: slice, grad: Tensor) -> None:
        block = heads.block(tokens, columns)
        call.backend.read_products(block, room.fill(block), found[:, tokens], grad)

    yield from computed_slabs(heads.student.hidden, num_tokens, slice(0, num_columns), blocks, compute)


# A call is cut by the group's largest shard, which all ranks know.


def gradient_blocks(heads: Heads, num_tokens: int, call: Call) -> tuple[int, int] | None:
    """Return the number of tokens whose products, and whose gradients, are in memory at once; None without room.

    They share the workspace and the room of the weight's gradient, which is allocated when they are free. Products take
    up to `WIDE_PRODUCTS` in the workspace, and gradients the rest: a block of these reads and writes the weight's sum.
    What is left is the products'.
    """
    student, workspace = heads.student, call.options.workspace_bytes - _copied_bytes(heads)
    products = _row_bytes(heads, call)
    gradient = slab_row_stride(call.shard.largest) * student.hidden.element_size()
    gradient += call.size.hidden_sum_token
    sum_bytes = call.size.weight_sum if student.weight.requires_grad else 0
    single = sum_bytes // 2 if scales_a_sum(call) else sum_bytes
    if num_tokens * (products + gradient) <= workspace + single:
        return num_tokens, num_tokens
    room = workspace + sum_bytes // 2
    most = room // (products + gradient) // MIN_TOKENS * MIN_TOKENS
    if most == 0:
        return None
    tokens = min(most, even(num_tokens, min(workspace // products, WIDE_PRODUCTS), MIN_TOKENS))
    gradients = even(num_tokens, (room - tokens * products) // gradient, MIN_TOKENS)
    return _products_tokens(heads, gradients, room - gradients * gradient, call), gradients


def _products_tokens(heads: Heads, num_tokens: int, room: int, call: Call) -> int:
    """Number of tokens of a block whose products with all columns have `room` bytes, no more than gain by it."""
    most = min(room // _row_bytes(heads, call), max(WIDE_PRODUCTS, WIDE_LOGITS // call.shard.largest))
    return max(1, even(num_tokens, most, MIN_TOKENS))


def check_workspace(heads: Heads, call: Call) -> None:
    """Raise ValueError if a pass, backward included, has no room for its smallest block."""
    slab = _slab_bytes(heads, call)
    slab = slab._replace(per_column=slab.per_column + call.size.weight_sum_column)
    smallest = max(_row_bytes(heads, call), slab.smallest) + _copied_bytes(heads)
    if (workspace := call.options.workspace_bytes) < smallest:
        raise ValueError(f"workspace_bytes must be at least {smallest} for these heads, got {workspace}")


def _slab_bytes(heads: Heads, call: Call) -> BlockBytes:
    """Bytes of a slab of the student's gradients and of the products that they are made of."""
    return BlockBytes(heads.student.hidden.element_size() + BYTES_PER_LOGIT, _token_bytes(heads, call))


def _row_bytes(heads: Heads, call: Call) -> int:
    """Bytes per token of both heads' products with all columns and of the intermediates of their reading."""
    return _token_bytes(heads, call) + slab_row_stride(call.shard.largest) * BYTES_PER_LOGIT


def _token_bytes(heads: Heads, call: Call) -> int:
    """Bytes per token of the intermediates of products and of their reading."""
    return call.backend.intermediate_bytes(call.shard.largest) + _copied_bytes(heads, 1)


def _copied_bytes(heads: Heads, rows: int = COLUMN_STEP) -> int:
    """Bytes of rows of hidden or weight in fp32, which products of 16-bit inputs copy on a CPU; else 0."""
    hiddens = [head.hidden for head in heads[:2] if copies_to_fp32(head.hidden)]
    return rows * max((4 * hidden.shape[1] for hidden in hiddens), default=0)
