"""`megatron_lce.jsd` makes both heads' products block by block; the backend reads them, the ranks exchange the results.

The products of a block of tokens with all columns stay in memory while the backend finds both softmaxes, the divergence
and, if the upstream gradient is known, the gradient. Backward, which has every token's `Found`, takes any range of
columns.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call
from megatron_lce.core.head_gradients import Slab, computed_slabs
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
from megatron_lce.core.products import product
from megatron_lce.core.protocols import Backend
from megatron_lce.core.two_heads import STATS_ROWS, Gradient, Head, Pair, merged_stats, softmax_stats

BYTES_PER_LOGIT = 2 * 4  # bytes of two heads' products in fp32
SLAB_PARTS = 4  # in backward the products of a quarter of a slab's tokens are in memory at once
LOGITS_SHARE = 3  # with known weights products take a third of the room, gradients the rest


class Heads(NamedTuple):
    """They are student and teacher, and all else that a reading of their products takes."""

    student: Head
    teacher: Head
    labels: Tensor | None  # [N] int32, see `Pair`
    beta: float
    backend: Backend

    def block(self, tokens: slice, columns: slice) -> "Heads":
        """Return both heads of some tokens and some columns."""
        student, teacher = (head.block(tokens, columns) for head in (self.student, self.teacher))
        labels = None if self.labels is None else self.labels[tokens]
        return self._replace(student=student, teacher=teacher, labels=labels)

    @property
    def num_columns(self) -> int:
        return self.student.weight.shape[0]


class ProductsRoom:
    """It is memory for both heads' products of some tokens with some columns."""

    def __init__(self, heads: Heads, tokens: int, columns: int) -> None:
        self.tokens, self.columns = tokens, max(columns, 1)
        size = tokens * slab_row_stride(columns)
        self._flat = torch.empty(2, size, dtype=torch.float32, device=heads.student.hidden.device)
        # A CPU's products copy 16-bit weights to fp32: few at a time.
        self._step = COLUMN_STEP if _copied_bytes(heads) else self.columns

    def fill(self, heads: Heads, stats: Tensor | None = None) -> Pair:
        """Compute both heads' products, which stay until the next call, and if given their `stats`, [4, N]."""
        num_tokens, width = heads.student.hidden.shape[0], heads.num_columns
        stride = slab_row_stride(width)
        room = self._flat[:, : num_tokens * stride].view(2, num_tokens, stride)[:, :, :width]
        both = heads.student, heads.teacher
        student, teacher = (head.products(values) for head, values in zip(both, room, strict=True))
        for head, products, rows in zip(both, (student, teacher), (slice(0, 2), slice(2, STATS_ROWS)), strict=True):
            if stats is not None and heads.backend.products_with_stats(head, products.values, stats[rows]):
                continue
            for columns in cut_columns(width, self._step):
                product(head.hidden, head.weight[columns].T, products.values[:, columns], accumulate=False)
            if stats is not None:
                stats[rows] = softmax_stats(products)
        return Pair(student, teacher, heads.beta, heads.labels)


def diverge(heads: Heads, call: Call, found: Tensor) -> None:
    """Fill `Found`, [6, N] or [9, N], block of tokens by block."""
    heads, num_tokens = heads.block(slice(None), slice(0, call.shard.columns)), found.shape[1]
    most = (call.options.workspace_bytes - _copied_bytes(heads)) // _row_bytes(heads, call)
    room = ProductsRoom(heads, max(1, even(num_tokens, most, MIN_TOKENS)), call.shard.columns)
    for tokens in cut(num_tokens, room.tokens):
        diverge_block(heads.block(tokens, slice(None)), room, call, found[:, tokens])


def diverge_block(
    heads: Heads, room: ProductsRoom, call: Call, found: Tensor, gradient: Gradient | None = None
) -> None:
    """Fill `Found` of a block, and its `gradient`: an exchange over the group for both softmaxes, one for the sums."""
    group, read = call.options.tp_group, heads.backend.read_products
    stats, sums, pair = found[:STATS_ROWS], found[STATS_ROWS:], None
    if heads.num_columns > 0:
        pair = room.fill(heads, stats)
    else:
        found.zero_()
        stats[::2] = -torch.inf  # the largest of no logits
    if group is not None:
        stats.copy_(merged_stats(collectives.stack_over_group(stats, group)))
    if pair is not None:
        read(pair, found, gradient if group is None else None, divergence=True)
    if group is not None:
        sums.copy_(collectives.stack_over_group(sums, group).sum(dim=0))
        if pair is not None and gradient is not None:
            read(pair, found, gradient)


def recomputed_slabs(
    heads: Heads,
    found: Tensor,  # [6, N]
    coefficient: Tensor,  # [N]
    call: Call,
    bytes_per_column: int,
) -> Iterator[Slab]:
    """Yield gradients of the student's products, slab by slab, from both heads' recomputed products."""
    num_tokens, num_columns = found.shape[1], call.shard.columns
    if num_columns == 0:
        return
    workspace, block_bytes = call.options.workspace_bytes - _copied_bytes(heads), _slab_bytes(heads, call)
    blocks = plan_blocks(
        num_tokens,
        slab_row_stride(num_columns),
        workspace,
        block_bytes,
        per_column_if_tokens_are_cut=bytes_per_column,
    )
    # As many tokens at once as have room: products of forward's shape have the bits of forward's.
    summed = blocks.columns * bytes_per_column if blocks.tokens < num_tokens else 0
    stride = slab_row_stride(blocks.columns)
    left = workspace - summed - blocks.tokens * stride * heads.student.hidden.element_size()
    most = left // (stride * BYTES_PER_LOGIT + block_bytes.per_token)
    room = ProductsRoom(heads, even(blocks.tokens, most, MIN_TOKENS), blocks.columns)

    def compute(tokens: slice, columns: slice, grad: Tensor) -> None:
        for part in cut(tokens.stop, room.tokens, start=tokens.start):
            out = grad[part.start - tokens.start : part.stop - tokens.start]
            block = heads.block(part, columns)
            heads.backend.read_products(room.fill(block), found[:, part], Gradient(coefficient[part], out))

    yield from computed_slabs(heads.student.hidden, num_tokens, slice(0, num_columns), num_columns, blocks, compute)


# A call is cut by the group's largest shard, which all ranks know.


def gradient_blocks(heads: Heads, num_tokens: int, call: Call) -> tuple[int, int] | None:
    """Return the number of tokens whose products, and whose gradients, are in memory at once; None without room.

    They share the workspace and the room of the weight's gradient, which is allocated when they are free. Products take
    about a third: a block of gradients reads and writes all of the weight's sum, which costs more than to read both
    weights for a block of products.
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
    tokens = min(most, max(1, round(room / LOGITS_SHARE / products / MIN_TOKENS)) * MIN_TOKENS)
    gradients = even(num_tokens, (room - tokens * products) // gradient, MIN_TOKENS)
    return even(gradients, (room - gradients * gradient) // products, MIN_TOKENS), gradients


def check_workspace(heads: Heads, call: Call) -> None:
    """Raise ValueError if a pass, backward included, has no room for its smallest block."""
    slab = _slab_bytes(heads, call)
    slab = slab._replace(per_column=slab.per_column + call.size.weight_sum_column)
    smallest = max(_row_bytes(heads, call), slab.smallest) + _copied_bytes(heads)
    workspace = call.options.workspace_bytes
    if workspace < smallest:
        raise ValueError(f"workspace_bytes must be at least {smallest} for these heads, got {workspace}")


def _slab_bytes(heads: Heads, call: Call) -> BlockBytes:
    """Bytes of a slab of the student's gradients and of one part of its tokens' products, rounded up."""
    per_logit = heads.student.hidden.element_size() + BYTES_PER_LOGIT // SLAB_PARTS
    return BlockBytes(per_logit, _token_bytes(heads, call), BYTES_PER_LOGIT)


def _row_bytes(heads: Heads, call: Call) -> int:
    """Bytes per token of both heads' products with all columns and of the intermediates of their reading."""
    return _token_bytes(heads, call) + slab_row_stride(call.shard.largest) * BYTES_PER_LOGIT


def _token_bytes(heads: Heads, call: Call) -> int:
    """Bytes per token of the intermediates from which products and what is read of them are made."""
    hiddens, columns = (heads.student.hidden, heads.teacher.hidden), call.shard.largest
    return max(heads.backend.intermediate_bytes(hidden, columns) for hidden in hiddens) + _copied_bytes(heads, 1)


def _copied_bytes(heads: Heads, rows: int = COLUMN_STEP) -> int:
    """Bytes of rows of hidden or weight in fp32, which a CPU's products of 16-bit inputs copy; 0 on a GPU."""
    hiddens = [head.hidden for head in (heads.student, heads.teacher) if head.hidden.dtype != torch.float32]
    return rows * max((4 * hidden.shape[1] for hidden in hiddens if hidden.device.type == "cpu"), default=0)
