"""`megatron_lce.jsd` with the tokens' weights known: a block of tokens goes all the way to its gradients at once."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_lce.core.blocks import BlockBytes, Blocks, cut, plan_blocks
from megatron_lce.core.divergence import diverge, diverge_block, gradient_factor, losses_in_nats
from megatron_lce.core.head_gradients import Slab, kept_slabs
from megatron_lce.core.jsd_logits import (
    GradientBlocks,
    Heads,
    JsdLogits,
    LogitsBuffer,
    check_workspace,
    gradient_blocks,
    recomputed_slabs,
)
from megatron_lce.core.jsd_stats import FOUND_ROWS, Head
from megatron_lce.core.options import Options
from megatron_lce.core.products import copies_of, slab_row_stride, with_zeros_behind
from megatron_lce.core.protocols import JsdBackend
from megatron_lce.core.tokens import TokenBlock, Tokens, counted_rows, rows_to_compute


class JsdPass:
    """One pass over the tokens: the weighted sum of their divergences, and what its gradients are made of."""

    name = "linear_jsd"

    def __init__(
        self,
        student: Head,  # its hidden [N, H_s], under sequence parallel [N / tp, H_s]
        teacher: Head,
        labels: Tensor,  # [N]
        temperature: Tensor | float,  # [N] if a tensor
        beta: float,
        token_weights: Tensor,  # [N]; 0: an ignored row
        options: Options,
        backend: JsdBackend,
        with_gradient: bool,
    ) -> None:
        self.backend, self._options, self._with_gradient = backend, options, with_gradient
        num_tokens = labels.shape[0]
        weighted = labels.masked_fill(token_weights == 0, options.ignore_index)
        rows = backend.prepare_rows(weighted, temperature, options)
        # A number from the caller is of the labels.
        whose = weighted if options.skip_ignored is True else labels
        self._counted = counted_rows(whose, rows, options, backend).wait()
        computed = num_tokens if self._counted.rows is None else self._counted.rows.shape[0]
        self._heads = Heads(student, teacher, rows.scale, beta, backend)
        check_workspace(self._heads, options)
        blocks = gradient_blocks(self._heads, computed, options) if with_gradient else None
        block_tokens = max(computed, 1) if blocks is None else blocks.gradients
        self.tokens, teacher_tokens = (
            Tokens(head.hidden, num_tokens, self._counted, block_tokens, options) for head in (student, teacher)
        )
        self._teacher_blocks = teacher_tokens.blocks()
        order = self.tokens.order()
        self._rows = rows_to_compute(rows, order, self._counted)
        self._token_weights = (token_weights if order is None else token_weights[order]).float()
        self._factor = gradient_factor(self._token_weights, self._rows.to_nats, self._rows.scale, student, beta)
        self._found = torch.empty(FOUND_ROWS, computed, device=labels.device)
        self._kept = None if blocks is None else _KeptGradients(blocks, student, options)

    def slabs(self, block: TokenBlock, bytes_per_column: int) -> Iterator[Slab]:
        """Finds a block's divergences, then yields the gradients of the student's products."""
        # Before anything that a rank without columns leaves out: ranks must agree on the order of collectives.
        student, teacher = block.hidden.wait(), next(self._teacher_blocks).hidden.wait()
        heads = self._heads._replace(
            student=self._heads.student._replace(hidden=student),
            teacher=self._heads.teacher._replace(hidden=teacher),
            scale=self._rows.scale[block.rows],
        )
        found, factor = self._found[:, block.rows], self._factor[block.rows]
        if self._kept is not None:
            gradients = self._kept.make(heads, found, factor)
            yield from self._kept.slabs(heads.student, gradients, bytes_per_column)
            return
        diverge(heads, self._options, found)
        if self._with_gradient:
            yield from recomputed_slabs(heads, found, factor, self._options, bytes_per_column)

    def total(self) -> Tensor:
        """The weighted sum of the divergences."""
        losses, _ = losses_in_nats(self._found, self._rows, self._heads.beta)
        total = torch.where(self._rows.ignored, 0.0, self._token_weights * losses).sum()
        return total if self._counted.unless_nan is None else total * self._counted.unless_nan


class _KeptGradients:
    """Gradients of a block's products, collected from smaller blocks whose logits are there for every pass."""

    def __init__(self, blocks: GradientBlocks, student: Head, options: Options) -> None:
        self._blocks, self._options = blocks, options
        logits = Blocks(blocks.logits, max(options.num_columns, 1))
        self._logits = LogitsBuffer.allocate(logits, blocks.copied, student.hidden.device)
        stride = slab_row_stride(options.num_columns)
        self._gradients = student.hidden.new_empty(blocks.gradients, stride)

    def make(self, heads: Heads, found: Tensor, factor: Tensor) -> Tensor:
        """Fills `Found`, [6, n], and returns the gradients [n, V], in hidden's dtype."""
        heads = heads.block(slice(None), slice(0, self._options.num_columns))
        gradients = with_zeros_behind(self._gradients[: found.shape[1]], self._options.num_columns)
        for tokens in cut(found.shape[1], self._blocks.logits):
            logits = JsdLogits(heads.block(tokens, slice(None)), self._logits)
            diverge_block(logits, self._options, heads, found[:, tokens], (factor[tokens], gradients[tokens]))
        return gradients

    def slabs(self, student: Head, gradients: Tensor, bytes_per_column: int) -> Iterator[Slab]:
        num_tokens, num_columns = gradients.shape
        if num_columns == 0:
            return
        room = self._options.workspace_bytes - self._logits.storage.nbytes - self._gradients.nbytes
        blocks = plan_blocks(
            num_tokens,
            num_columns,
            max(room, 0),  # without copies there may be none
            BlockBytes(0, *copies_of(student.hidden)),
            per_column_if_tokens_are_cut=bytes_per_column,
        )
        yield from kept_slabs(gradients, num_columns, blocks)
