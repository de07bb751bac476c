"""Both heads' logits in memory: of all columns, kept for every pass that reads them, or of some at a time."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.blocks import (
    COLUMN_STEP,
    MIN_TOKENS,
    PREFERRED_COLUMNS,
    BlockBytes,
    Blocks,
    cheapest_size,
    cut,
    kept_tokens,
    logits_cost,
    plan_blocks,
    round_up,
    smallest_workspace,
)
from megatron_lce.core.head_gradients import (
    Slab,
    accumulator_bytes_per_column,
    computed_slabs,
    hidden_sum_bytes_per_token,
    sum_over_blocks_bytes,
)
from megatron_lce.core.jsd_stats import STATS_ROWS, Head, fill_with_nothing
from megatron_lce.core.options import Options
from megatron_lce.core.products import copies_of, slab_row_stride
from megatron_lce.core.protocols import JsdBackend


class Heads(NamedTuple):
    """Student and teacher, and what every pass over some of their tokens shares."""

    student: Head
    teacher: Head
    scale: Tensor  # [N] fp32 factor from products to base-2 logits at a logits_scale of 1
    beta: float
    backend: JsdBackend

    def block(self, tokens: slice, columns: slice) -> "Heads":
        student, teacher = (head.block(tokens, columns) for head in (self.student, self.teacher))
        return self._replace(student=student, teacher=teacher, scale=self.scale[tokens])


class LogitsBuffer(NamedTuple):
    """Room for both heads' logits of `tokens` x `columns`, which are made `copied` columns at a time."""

    storage: Tensor  # flat fp32
    columns: int
    copied: int

    @classmethod
    def allocate(cls, blocks: Blocks, copied: int, device: torch.device) -> "LogitsBuffer":
        size = 2 * blocks.tokens * slab_row_stride(blocks.columns)
        return cls(torch.empty(size, device=device), blocks.columns, copied)


HeadsParts = tuple[list[Tensor], list[Tensor]]  # of student and teacher


class JsdLogits:
    """Base-2 logits of some tokens of both heads; where the buffer holds all columns, they are computed once."""

    def __init__(self, heads: Heads, buffer: LogitsBuffer) -> None:
        self._heads, self._buffer = heads, buffer
        self._num_columns = heads.student.weight.shape[0]
        self._kept: tuple[Tensor, Tensor] | None = None

    def stats(self, out: Tensor) -> None:
        """[4, N], the first rows of `Found`, of this rank's columns."""
        if self._num_columns == 0:
            fill_with_nothing(out)
            return
        parts: HeadsParts = ([], [])
        for _ in self._pieces(parts):
            pass
        student, teacher = (_joined(of_head) for of_head in parts)
        self._heads.backend.merge_stats(student, teacher, out)

    def divergence(self, found: Tensor, out: Tensor) -> None:
        """[2, N] sums over this rank's columns: divergence and KL(p_student || m); found: the first rows of `Found`."""
        backend, beta = self._heads.backend, self._heads.beta
        parts = [backend.divergence_parts(*logits, found, beta=beta) for _, logits in self._pieces()]
        if parts:
            backend.sum_parts(_joined(parts), out)
        else:  # of no columns
            out.zero_()

    def gradient(self, found: Tensor, coefficient: Tensor, out: Tensor) -> None:
        """Gradient of the student's products [N, V]."""
        backend, beta = self._heads.backend, self._heads.beta
        for columns, logits in self._pieces():
            backend.grad_logits_from_kept(*logits, found, coefficient, self._tanh_scale(), out[:, columns], beta=beta)

    def divergence_and_gradient(self, found: Tensor, coefficient: Tensor, out: Tensor) -> None:
        """Both of logits that are all kept, without the group's other columns, or at a beta of 0; fills `found`."""
        if self._num_columns == 0:
            found[2 * STATS_ROWS :].zero_()
            return
        ((_, logits),) = self._pieces()
        backend, beta = self._heads.backend, self._heads.beta
        backend.divergence_and_grad(*logits, found, coefficient, self._tanh_scale(), out, beta=beta)

    def _tanh_scale(self) -> Tensor | None:
        student = self._heads.student
        return None if student.softcap is None else student.row_scale(self._heads.scale)

    def _pieces(self, stats: HeadsParts | None = None) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
        """Logits of student and teacher, [N, columns] each; valid until the next are asked for.

        `stats`: takes what either head's softmax is made of, [S, 2, N] at a time.
        """
        for columns in cut(self._num_columns, self._buffer.columns):
            logits = self._kept or self._computed(columns, stats)
            if columns == slice(0, self._num_columns):
                self._kept = logits
            yield columns, logits

    def _computed(self, columns: slice, stats: HeadsParts | None) -> tuple[Tensor, Tensor]:
        num_tokens, width = self._heads.scale.shape[0], columns.stop - columns.start
        rows = self._buffer.storage.view(2, -1)[:, : num_tokens * slab_row_stride(width)]
        student, teacher = rows.view(2, num_tokens, -1)[:, :, :width]
        for i, (head, logits) in enumerate(((self._heads.student, student), (self._heads.teacher, teacher))):
            row_scale = head.row_scale(self._heads.scale)
            for part in cut(width, self._buffer.copied):
                block = head.block(slice(None), slice(columns.start + part.start, columns.start + part.stop))
                found = self._heads.backend.logits(block, row_scale, logits[:, part], stats=stats is not None)
                if stats is not None and found is not None:
                    stats[i].append(found)
        return student, teacher


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def forward_blocks(heads: Heads, num_tokens: int, options: Options) -> tuple[Blocks, int]:
    """Tokens and columns whose logits are there at once, and how many columns are made at a time, by what ranks share.

    All columns of some tokens, for both passes over them, unless the workspace holds too few tokens.
    """
    columns, workspace = options.largest_shard, options.workspace_bytes
    block_bytes = heads.backend.logits_bytes(heads.student, heads.teacher, columns)
    copied = copied_columns(columns, workspace, block_bytes)
    most = (workspace - copied * block_bytes.per_column) // row_bytes(columns, block_bytes)
    if most >= min(num_tokens, MIN_TOKENS):
        return Blocks(cheapest_size(num_tokens, most, MIN_TOKENS, partial(logits_cost, columns)), columns), copied
    blocks = plan_blocks(num_tokens, slab_row_stride(columns), workspace, block_bytes)
    return blocks, blocks.columns


class GradientBlocks(NamedTuple):
    """Tokens whose logits are there at once, tokens whose gradients are, and how many columns are made at a time."""

    logits: int
    gradients: int
    copied: int


def gradient_blocks(heads: Heads, num_tokens: int, options: Options) -> GradientBlocks | None:
    """How tokens go all the way to their gradients at once; None: there is room for too few.

    They have the workspace, and the room of the weight's gradient, which is made of its sum over blocks when they are
    gone. About half of that is logits at most: a product that sums over tokens reads and writes the whole sum, so that
    it wants more of them, and a gradient takes less room than two heads' logits. Gradients are of whole blocks of
    logits: a small rest would read both weights once more.
    """
    student, columns, workspace = heads.student, options.largest_shard, options.workspace_bytes
    logits_bytes = heads.backend.logits_bytes(student, heads.teacher, columns)
    gradient_bytes = _gradient_bytes(student)
    slabs = gradient_bytes._replace(
        per_logit=0, per_column=gradient_bytes.per_column + accumulator_bytes_per_column(student.weight, options)
    )
    copies = logits_bytes._replace(per_column=max(logits_bytes.per_column, gradient_bytes.per_column))
    copied = copied_columns(columns, workspace, copies)
    room = workspace - copied * copies.per_column
    sum_bytes = sum_over_blocks_bytes(student.weight, options)
    beside_sum = room + sum_bytes // 2
    logits = row_bytes(columns, logits_bytes)
    gradient = row_bytes(columns, gradient_bytes) + hidden_sum_bytes_per_token(student.hidden, options)
    if smallest_workspace(slabs) > workspace // 4:
        return None
    if num_tokens * (logits + gradient) <= room + sum_bytes:
        return GradientBlocks(num_tokens, num_tokens, copied)
    most = beside_sum // (logits + gradient) // MIN_TOKENS * MIN_TOKENS
    if most == 0:
        return None
    half = min(most, max(1, round(beside_sum / 2 / logits / MIN_TOKENS)) * MIN_TOKENS)
    tokens = cheapest_size(num_tokens, half, MIN_TOKENS, partial(logits_cost, columns))
    left = room - tokens * logits
    gradients = kept_tokens(num_tokens, left, gradient, sum_bytes, student.hidden.shape[1], step=tokens)
    assert gradients is not None
    return GradientBlocks(tokens, gradients, copied)


def copied_columns(num_columns: int, workspace_bytes: int, block_bytes: BlockBytes) -> int:
    """How many columns of a head are copied at once, where they are: at most a quarter of the workspace.

    Whole tiles: the logits of the next ones start where a kernel can store them, at 16 bytes.
    """
    whole = round_up(num_columns, COLUMN_STEP)
    if block_bytes.per_column == 0:
        return whole
    room = workspace_bytes // 4 // block_bytes.per_column // COLUMN_STEP * COLUMN_STEP
    return min(whole, PREFERRED_COLUMNS, max(COLUMN_STEP, room))


def row_bytes(num_columns: int, block_bytes: BlockBytes) -> int:
    """Of a token with all its columns."""
    return block_bytes.per_token + slab_row_stride(num_columns) * block_bytes.per_logit


def recomputed_slabs(
    heads: Heads,
    found: Tensor,  # [6, N]
    coefficient: Tensor,  # [N]
    options: Options,
    bytes_per_column: int,
) -> Iterator[Slab]:
    """Gradients of the student's products, slab by slab, of both heads' logits once more."""
    num_tokens, num_columns = found.shape[1], options.num_columns
    if num_columns == 0:
        return
    block_bytes, stored = _recomputed_bytes(heads, options)
    blocks = plan_blocks(
        num_tokens,
        slab_row_stride(num_columns),
        options.workspace_bytes,
        block_bytes,
        per_column_if_tokens_are_cut=bytes_per_column,
    )
    buffer = LogitsBuffer.allocate(blocks, blocks.columns, found.device) if stored else None

    def compute(tokens: slice, columns: slice, grad: Tensor) -> None:
        here = heads.block(tokens, columns)
        of_tokens = found[:, tokens], coefficient[tokens]
        if buffer is None:
            heads.backend.grad_logits(here.student, here.teacher, here.scale, *of_tokens, grad, beta=heads.beta)
        else:
            JsdLogits(here, buffer).gradient(*of_tokens, grad)

    every = slice(0, num_columns)
    yield from computed_slabs(heads.student.hidden, num_tokens, every, num_columns, blocks, compute)


def _recomputed_bytes(heads: Heads, options: Options) -> tuple[BlockBytes, bool]:
    """What a slab of gradients takes while it is made and used, and whether both heads' logits are stored for it."""
    student, teacher, backend = heads.student, heads.teacher, heads.backend
    if (in_one := backend.grad_logits_bytes(student, teacher)) is not None:
        return in_one, False
    logits, gradient = backend.logits_bytes(student, teacher, options.largest_shard), _gradient_bytes(student)
    per_token, per_column = max(logits.per_token, gradient.per_token), max(logits.per_column, gradient.per_column)
    return BlockBytes(logits.per_logit + gradient.per_logit, per_token, per_column), True


def check_workspace(heads: Heads, options: Options) -> None:
    """Every pass, backward's too, must find room for its smallest block before the first one runs.

    Asked of the largest shard of the group, so that ranks agree.
    """
    student, teacher = heads.student, heads.teacher
    gradient, _ = _recomputed_bytes(heads, options)
    accumulator = accumulator_bytes_per_column(student.weight, options)
    passes = (
        heads.backend.logits_bytes(student, teacher, options.largest_shard),
        gradient._replace(per_column=gradient.per_column + accumulator),
    )
    smallest = max(smallest_workspace(block_bytes) for block_bytes in passes)
    if options.workspace_bytes < smallest:
        raise ValueError(f"workspace_bytes must be at least {smallest} for these heads, got {options.workspace_bytes}")


def _gradient_bytes(student: Head) -> BlockBytes:
    """A slab of the student's gradients, and the copies of unaligned inputs that its products take."""
    return BlockBytes(student.hidden.element_size(), *copies_of(student.hidden))
