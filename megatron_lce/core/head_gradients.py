"""Gradients of logits to gradients of hidden and weight: products, with the sum over the group under the last one."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.blocks import Blocks, cut, cut_columns
from megatron_lce.core.collectives import Pending
from megatron_lce.core.options import Options, WeightGradSink
from megatron_lce.core.products import aligned, product, row_stride


class Slab(NamedTuple):
    columns: slice
    tokens: slice
    grad: Tensor  # [tokens, columns] gradient of the products, in hidden's dtype
    first_tokens: bool  # no block of these columns went before
    last_tokens: bool  # none follows
    is_last: bool  # of all


def head_gradients(
    hidden: Tensor,
    weight: Tensor,
    num_tokens: int,
    options: Options,
    slabs: Callable[[Pending, int], Iterator["Slab"]],
    *,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients, slab by slab. The sum over the group runs under the last product of the weight's gradient.

    `slabs(hidden, bytes_per_column)` yields the gradient of every product: of the gathered hidden, which is waited for
    where it is first read, and where a slab's column takes that many bytes of the workspace if its tokens come in
    several blocks.
    """
    weight_grad = _WeightGrad(weight, options) if needs_weight else None
    if num_tokens == 0:
        if weight_grad is not None and weight_grad.sink is None:
            weight_grad.grad.zero_()
        return (torch.zeros_like(hidden) if needs_hidden else None), (weight_grad.finish() if weight_grad else None)
    gathered = Pending(hidden)
    if options.sequence_parallel and options.tp_group is not None:
        gathered = collectives.start_gather_rows(hidden, options.tp_group)
    grad_hidden = reduced = None
    if options.num_columns == 0 and needs_hidden:
        reduced = _start_reduction(torch.zeros_like(gathered.tensor), options)
    for slab in slabs(gathered, accumulator_bytes_per_column(weight, options) if needs_weight else 0):
        if needs_hidden:
            if grad_hidden is None:
                one_sum = slab.columns == slice(0, options.num_columns)  # the product's own accumulator is enough
                width = _for_products(weight[:1]).shape[1]
                grad_hidden = hidden.new_empty(num_tokens, width, dtype=hidden.dtype if one_sum else torch.float32)
            weight_slab = _for_products(weight[slab.columns])
            product(slab.grad, weight_slab, grad_hidden[slab.tokens], accumulate=slab.columns.start > 0)
            del weight_slab
            if slab.is_last:
                grad_hidden = grad_hidden[:, : hidden.shape[1]].to(hidden.dtype).contiguous()
                reduced = _start_reduction(grad_hidden, options)
        if weight_grad is not None:
            weight_grad.add(slab, _for_products(gathered.wait()[slab.tokens]))
        del slab  # its memory goes before the next buffer, or a sink's placeholder, comes
    gathered.wait()  # also where nothing read it: its memory must not go to others before it is filled
    return (
        None if reduced is None else reduced.wait(),
        None if weight_grad is None else weight_grad.finish(),
    )


def computed_slabs(
    hidden: Tensor, all_columns: slice, blocks: Blocks, compute: Callable[[slice, slice, Tensor], None]
) -> Iterator[Slab]:
    """Slabs that `compute(tokens, columns, grad)` fills, all in one reused buffer."""
    item = hidden.dtype.itemsize
    buffer = hidden.new_empty(blocks.tokens * row_stride(blocks.columns, item))
    for columns in cut_columns(all_columns.stop, blocks.columns, start=all_columns.start):
        width = columns.stop - columns.start
        stride = row_stride(width, item)
        for tokens in cut(hidden.shape[0], blocks.tokens):
            length = tokens.stop - tokens.start
            grad = buffer[: length * stride].view(length, stride)[:, :width]
            compute(tokens, columns, grad)
            yield _slab(columns, tokens, grad, hidden.shape[0], all_columns.stop)


def kept_slabs(grad: Tensor, num_columns: int, blocks: Blocks) -> Iterator[Slab]:
    """Slabs of a gradient [N, C] that is there already: of the first C of `num_columns`."""
    num_tokens, kept_columns = grad.shape
    for columns in cut_columns(kept_columns, blocks.columns):
        for tokens in cut(num_tokens, blocks.tokens):
            yield _slab(columns, tokens, grad[tokens, columns], num_tokens, num_columns)


def _slab(columns: slice, tokens: slice, grad: Tensor, num_tokens: int, num_columns: int) -> Slab:
    last_tokens = tokens.stop == num_tokens
    return Slab(columns, tokens, grad, tokens.start == 0, last_tokens, last_tokens and columns.stop == num_columns)


class _WeightGrad:
    """This shard's weight gradient: a tensor of weight's dtype, or added into a sink's fp32 buffer."""

    def __init__(self, weight: Tensor, options: Options) -> None:
        self.sink: WeightGradSink | None = options.weight_grad_sink
        if self.sink is None:
            self.grad = torch.empty_like(weight)
            self.grad[options.num_columns :].zero_()  # padding
        else:
            self.grad = self.sink.buffer()
        self.padded = _padded(weight)
        self.partial: Tensor | None = None  # of one slab, where its gradient cannot be written in place

    def add(self, slab: Slab, hidden: Tensor) -> None:
        grad = self.grad[slab.columns]
        one_product = slab.first_tokens and slab.last_tokens
        if not self.padded and (one_product or grad.dtype == torch.float32):
            product(slab.grad.T, hidden, grad, accumulate=self.sink is not None or not slab.first_tokens)
            return
        if self.partial is None or slab.first_tokens:
            self.partial = None  # the last slab's memory goes first
            dtype = grad.dtype if one_product else torch.float32
            self.partial = hidden.new_empty(grad.shape[0], hidden.shape[1], dtype=dtype)
        product(slab.grad.T, hidden, self.partial, accumulate=not slab.first_tokens)
        if slab.last_tokens:
            partial = self.partial[:, : grad.shape[1]]
            grad.copy_(partial) if self.sink is None else grad.add_(partial)
            self.partial = None

    def finish(self) -> Tensor | None:
        return self.grad if self.sink is None else self.sink.finish()


def accumulator_bytes_per_column(weight: Tensor, options: Options) -> int:
    """Bytes of a column in the fp32 sum over blocks of tokens; 0 where the gradient's own tensor can be that sum."""
    fp32 = weight.dtype == torch.float32 or options.weight_grad_sink is not None
    return 0 if fp32 and not _padded(weight) else 4 * row_stride(weight.shape[1], weight.element_size())


def _padded(weight: Tensor) -> bool:
    """Whether products with the contiguous weight are wider than its rows."""
    return weight.dtype != torch.float32 and row_stride(weight.shape[1], weight.element_size()) > weight.shape[1]


def _for_products(matrix: Tensor) -> Tensor:
    """16-bit rows as `aligned` lays them out, up to 7 columns wider: with an odd H cuBLAS takes five times as long."""
    return matrix if matrix.dtype == torch.float32 else aligned(matrix)


def _start_reduction(grad_hidden: Tensor, options: Options) -> Pending:
    if options.tp_group is None or not options.reduce_grad_hidden:
        return Pending(grad_hidden)
    if options.sequence_parallel:
        return collectives.start_reduce_scatter(grad_hidden, options.tp_group)
    return collectives.start_all_reduce(grad_hidden, options.tp_group)
