"""`megatron_lce.jsd` makes both heads' products block by block; the backend reads them, the ranks exchange the results.

The products of a block of tokens with all columns stay in memory while the backend finds both softmaxes, the divergence
and, if the upstream gradient is known, the gradient. If the workspace holds too few tokens so, columns come in pieces,
which are computed again for the next reading. Backward, which has every token's `Found`, takes any range of columns.
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
    Blocks,
    ceil_div,
    cut,
    cut_columns,
    plan_blocks,
    round_up,
    slab_row_stride,
)
from megatron_lce.core.products import product
from megatron_lce.core.protocols import Backend
from megatron_lce.core.two_heads import STATS_ROWS, Gradient, Head, Pair, Products, merged_stats, softmax_stats

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
        labels = None if self.labels is None else self.labels[tokens] - (columns.start or 0)
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

    def fill(self, heads: Heads) -> Pair:
        """Compute both heads' products, which stay until the next call."""
        pair = self._pair(heads)
        self._multiply(heads.student, pair.student)
        self._multiply(heads.teacher, pair.teacher)
        return pair

    def fill_with_stats(self, heads: Heads, stats: Tensor) -> Pair:
        """Do as `fill`, and fill the products' softmax statistics, too, [4, N]."""
        pair = self._pair(heads)
        for head, products, of_head in (
            (heads.student, pair.student, stats[:2]),
            (heads.teacher, pair.teacher, stats[2:]),
        ):
            if not heads.backend.products_with_stats(head, products.values, of_head):
                self._multiply(head, products)
                of_head.copy_(softmax_stats(products))
        return pair

    def _pair(self, heads: Heads) -> Pair:
        num_tokens, width = heads.student.hidden.shape[0], heads.num_columns
        stride = slab_row_stride(width)
        room = self._flat[:, : num_tokens * stride].view(2, num_tokens, stride)[:, :, :width]
        return Pair(heads.student.products(room[0]), heads.teacher.products(room[1]), heads.beta, heads.labels)

    def _multiply(self, head: Head, products: Products) -> None:
        for columns in cut_columns(head.weight.shape[0], self._step):
            product(head.hidden, head.weight[columns].T, products.values[:, columns], accumulate=False)


def diverge(heads: Heads, call: Call, found: Tensor) -> None:
    """Fill `Found`, [6, N] or [9, N], block of tokens by block."""
    heads = heads.block(slice(None), slice(0, call.shard.columns))
    blocks = products_blocks(heads, found.shape[1], call)
    room = ProductsRoom(heads, *blocks)
    for tokens in cut(found.shape[1], blocks.tokens):
        diverge_block(heads.block(tokens, slice(None)), room, call, found[:, tokens])


def diverge_block(
    heads: Heads, room: ProductsRoom, call: Call, found: Tensor, gradient: Gradient | None = None
) -> None:
    """Fill `Found` of a block: one exchange over the group for both softmaxes, one for the sums behind them.

    A `gradient` is filled, too; then the room must hold all columns.
    """
    group, all_tokens, read = call.options.tp_group, slice(None), heads.backend.read_products
    pieces = list(cut(heads.num_columns, room.columns))
    stats, sums = found[:STATS_ROWS], found[STATS_ROWS:]
    pair = room.fill_with_stats(heads, stats) if len(pieces) == 1 else None  # both heads' products with all columns
    part = torch.empty_like(found)
    if pair is None:
        stats.zero_()  # the statistics of no columns: sums of 0, and -inf as the largest
        stats[::2] = -torch.inf
        for columns in pieces:
            room.fill_with_stats(heads.block(all_tokens, columns), part[:STATS_ROWS])
            stats.copy_(merged_stats(torch.stack([stats, part[:STATS_ROWS]])))
    if group is not None:
        stats.copy_(merged_stats(collectives.stack_over_group(stats, group)))
    elif pair is not None:
        read(pair, found, gradient, divergence=True)
        return
    sums.zero_()
    for columns in pieces:
        piece = pair or room.fill_with_stats(heads.block(all_tokens, columns), part[:STATS_ROWS])
        part[:STATS_ROWS] = stats
        read(piece, part, divergence=True)
        sums.add_(part[STATS_ROWS:])
    if group is not None:
        sums.copy_(collectives.stack_over_group(sums, group).sum(dim=0))
    if gradient is not None and pair is not None:
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
    room = ProductsRoom(heads, _even(blocks.tokens, most, MIN_TOKENS), blocks.columns)

    def compute(tokens: slice, columns: slice, grad: Tensor) -> None:
        for part in cut(tokens.stop, room.tokens, start=tokens.start):
            out = grad[part.start - tokens.start : part.stop - tokens.start]
            block = heads.block(part, columns)
            heads.backend.read_products(room.fill(block), found[:, part], Gradient(coefficient[part], out))

    yield from computed_slabs(heads.student.hidden, num_tokens, slice(0, num_columns), num_columns, blocks, compute)


# A call is cut by the group's largest shard, which all ranks know.


def products_blocks(heads: Heads, num_tokens: int, call: Call) -> Blocks:
    """Return the block whose products are in memory at once: all columns, unless the workspace holds too few tokens."""
    room = call.options.workspace_bytes - _copied_bytes(heads)
    most = room // _row_bytes(heads, call)
    if most >= min(num_tokens, MIN_TOKENS):
        return Blocks(max(1, _even(num_tokens, most, MIN_TOKENS)), call.shard.largest)
    return plan_blocks(num_tokens, slab_row_stride(call.shard.largest), room, _products_bytes(heads, call))


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
    gradients = _even(num_tokens, (room - tokens * products) // gradient, MIN_TOKENS)
    return _even(gradients, (room - gradients * gradient) // products, MIN_TOKENS), gradients


def check_workspace(heads: Heads, call: Call) -> None:
    """Raise ValueError if a pass, backward included, has no room for its smallest block."""
    slab = _slab_bytes(heads, call)
    slab = slab._replace(per_column=slab.per_column + call.size.weight_sum_column)
    smallest = max(_products_bytes(heads, call).smallest, slab.smallest) + _copied_bytes(heads)
    workspace = call.options.workspace_bytes
    if workspace < smallest:
        raise ValueError(f"workspace_bytes must be at least {smallest} for these heads, got {workspace}")


def _products_bytes(heads: Heads, call: Call) -> BlockBytes:
    """Bytes of a block of both heads' products and of the intermediates of their reading."""
    columns = call.shard.largest
    per_token = max(heads.backend.intermediate_bytes(head.hidden, columns) for head in (heads.student, heads.teacher))
    return BlockBytes(BYTES_PER_LOGIT, per_token + _copied_bytes(heads, 1))


def _slab_bytes(heads: Heads, call: Call) -> BlockBytes:
    """Bytes of a slab of the student's gradients and of one part of its tokens' products, rounded up."""
    _, per_token, _ = _products_bytes(heads, call)
    per_logit = heads.student.hidden.element_size() + BYTES_PER_LOGIT // SLAB_PARTS
    return BlockBytes(per_logit, per_token, BYTES_PER_LOGIT)


def _row_bytes(heads: Heads, call: Call) -> int:
    """Bytes per token of both heads' products with all columns and of the intermediates of their reading."""
    return _products_bytes(heads, call).per_token + slab_row_stride(call.shard.largest) * BYTES_PER_LOGIT


def _copied_bytes(heads: Heads, rows: int = COLUMN_STEP) -> int:
    """Bytes of rows of hidden or weight in fp32, which a CPU's products of 16-bit inputs copy; 0 on a GPU."""
    hiddens = [head.hidden for head in (heads.student, heads.teacher) if head.hidden.dtype != torch.float32]
    return rows * max((4 * hidden.shape[1] for hidden in hiddens if hidden.device.type == "cpu"), default=0)


def _even(num_tokens: int, most: int, step: int) -> int:
    """Number of tokens of at most `most` a block that cuts `num_tokens` most evenly; `step` limits `most` alone."""
    if most >= num_tokens:
        return num_tokens
    if most >= step:
        most -= most % step
    return min(most, round_up(ceil_div(num_tokens, ceil_div(num_tokens, most)), step))
