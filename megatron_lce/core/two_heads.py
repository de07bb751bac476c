"""Two heads as a source of the passes: divergences of student and teacher, and gradients of the student's logits.

For some tokens of a block at a time, with all columns:

1. Two products write the logits of both heads to memory.
2. The backend reads them for both softmaxes, which the ranks merge.
3. It reads them for the divergences, whose parts the ranks add up.
4. Under a known loss, the backend reads the logits for the student's gradient. If no block's gradients fit in the
   workspace, all tokens are one block, whose products are recomputed for this step.

Backward of divergences per token recomputes the products for a range of columns, and continues with step 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.call import Call
from megatron_lce.core.call_plan import Plan
from megatron_lce.core.divergence_types import (
    DIVERGENCE_ROWS,
    KINDS,
    LABEL_ROWS,
    SOFTMAX_ROWS,
    Heads,
    Kind,
    LinearDivergenceOutput,
    computed_kind,
    divergences_in_nats,
    gradient_terms,
    merged_softmaxes,
    student_outputs,
)
from megatron_lce.core.lm_head import LMHead, RowInputs
from megatron_lce.core.matmul import copies_to_fp32, matmul, with_zeros_behind
from megatron_lce.core.plan import COLUMN_STEP, aligned_slices, slab_row_stride, slices
from megatron_lce.core.tokens import RowIndex, TokenBlock


@dataclass
class TwoHeads:
    """Some rows of two heads, of which the student's gets gradients, a `Source`; see `OneHead`."""

    name: ClassVar[str] = "linear_divergence"
    output_type: ClassVar[type] = LinearDivergenceOutput
    differentiable: ClassVar[tuple[str, ...]] = KINDS
    kept: ClassVar[tuple[str, ...]] = ("teacher", "rows", "teacher_scale", "stats")

    call: Call  # with the student's tensors, and options
    teacher: LMHead | Any
    kinds: tuple[Kind, ...]  # once there are terms, those with an upstream gradient
    beta: float
    return_student: bool
    rows: RowInputs | Any = None  # the student's
    teacher_scale: Tensor | Any = None  # [N]
    stats: Tensor | Any = None  # [10 or 13, N], `DivergenceStats`
    hiddens: tuple[Tensor, ...] = ()  # of a block, the student's and the teacher's
    raw_logits: Tensor | None = None  # [2, N, C] products while they are in memory
    terms: Tensor | Any = None  # [5, N], `GradTerms`
    grad_buffer: Tensor | None = None  # of a block's gradients, which are collected
    cached: Tensor | None = None  # [N, C] finished gradients

    @property
    def has_grad(self) -> Tensor:
        return (self.terms != 0).any(dim=0)  # NaN in broken rows

    def take_rows(self, rows: RowInputs, row_index: RowIndex, plan: Plan) -> None:
        call, self.rows = self.call, rows
        teacher_rows = call.backend.prepare_rows(self.teacher, call.labels, call.options.ignore_index, call.shard)
        self.teacher_scale = row_index.select(teacher_rows.scale)
        self.teacher = self.teacher._replace(temperature=1.0)  # backward keeps no tensor of the caller's
        num_stats = DIVERGENCE_ROWS + LABEL_ROWS * self.return_student
        self.stats = rows.scale.new_zeros(num_stats, row_index.count)
        if plan.cache_tokens:
            shape = min(plan.cache_tokens, row_index.count), slab_row_stride(call.shard.num_columns)
            self.grad_buffer = with_zeros_behind(call.head.hidden.new_empty(shape), call.shard.num_columns)

    def subset(self, index: slice | Tensor) -> Self:
        some = replace(self, rows=self.rows.select(index), stats=self.stats[:, index])
        some.hiddens, some.teacher_scale = tuple(x[index] for x in self.hiddens), self.teacher_scale[index]
        some.terms = None if self.terms is None else self.terms[:, index]
        some.cached = None if self.cached is None else self.cached[index]
        return some

    def of_block(self, *blocks: TokenBlock) -> Self:
        of_block, num_tokens = self.subset(blocks[0].row_slice), blocks[0].num_tokens
        of_block.hiddens = tuple(block.hidden.wait() for block in blocks)
        of_block.cached = None if self.grad_buffer is None else self.grad_buffer[:num_tokens]
        return of_block

    def heads(self, columns: slice) -> Heads:
        """Return both heads of a block's rows and some columns."""
        pairs = zip((self.call.head, self.teacher), self.hiddens, strict=True)
        student, teacher = (head._replace(hidden=hidden, weight=head.weight[columns]) for head, hidden in pairs)
        scales = self.rows.scale, self.teacher_scale
        kinds = tuple(dict.fromkeys(computed_kind(kind, self.beta) for kind in self.kinds))
        labels = self.rows.labels if self.return_student and self.terms is None else None
        return Heads(student, teacher, scales, self.beta, kinds, labels, self.terms)

    def parts_with_stats(self, plan: Plan) -> Iterator[Self]:
        backend, group, shard, all_terms = self.call.backend, self.call.options.tp_group, self.call.shard, []
        buffer = self.call.head.hidden.new_empty(0, dtype=torch.float32)
        for tokens in slices(self.stats.shape[1], plan.stats_tokens):
            part = self.subset(tokens)
            stats, heads = part.stats, part.heads(slice(0, shard.num_columns))
            softmaxes, sums = stats[:SOFTMAX_ROWS], stats[SOFTMAX_ROWS:]
            # A rank without columns skips products only, and runs every collective.
            raw_logits = part.raw_logits = _raw_logits(heads, buffer) if shard.num_columns > 0 else None
            if raw_logits is not None:
                backend.divergence_softmaxes(heads, raw_logits, stats)
            else:
                stats.zero_()
                softmaxes[::2] = -torch.inf  # the largest of no logits
            if group is not None:
                softmaxes.copy_(merged_softmaxes(collectives.all_gather_stack(softmaxes, group)))
            if raw_logits is not None:
                backend.divergence_sums(heads, raw_logits, stats)
            if group is not None:
                sums.copy_(collectives.all_gather_stack(sums, group).sum(dim=0))
            yield part
            part.raw_logits = None  # the next part's take its memory
            if self.cached is None and part.terms is not None:
                all_terms.append(part.terms)
        if all_terms:  # for `write`
            self.terms = torch.cat(all_terms, dim=1)

    def outputs(self) -> LinearDivergenceOutput:
        outputs, to_nats = divergences_in_nats(self.stats, self.rows, self.kinds, self.beta)
        student = student_outputs(self.stats, self.rows) if self.return_student else None
        self.rows = self.rows._replace(to_nats=to_nats)  # NaN if a divergence is
        return outputs._replace(student=student)

    def find_terms(self, upstream: dict[str, Tensor | None]) -> None:
        call, to_nats, scale = self.call, self.rows.to_nats, self.rows.scale
        grads = {kind: grad.float() for kind in self.kinds if (grad := upstream[kind]) is not None}
        self.terms = gradient_terms(grads, self.stats, to_nats, scale, call.head, self.beta)
        if self.raw_logits is not None and self.cached is not None:
            heads = self.heads(slice(0, call.shard.num_columns))
            call.backend.divergence_grad_logits(heads, self.raw_logits, self.stats, self.cached)
        self.kinds = tuple(grads)

    def take_cached(self) -> Tensor | None:
        cached, self.cached = self.cached, None
        return cached

    def write(self, grad: Tensor, token_slice: slice, col_slice: slice) -> None:
        """Recompute both heads' logits, and write the student's gradient to a slab."""
        if self.raw_logits is None:
            self.raw_logits = self.call.head.hidden.new_empty(0, dtype=torch.float32)
        part = self.subset(token_slice)
        heads = part.heads(col_slice)
        raw_logits = _raw_logits(heads, self.raw_logits)
        self.call.backend.divergence_grad_logits(heads, raw_logits, part.stats, grad)


def _raw_logits(heads: Heads, buffer: Tensor) -> Tensor:
    """Return the products of both heads, [2, N, C], in this buffer, which is empty the first time."""
    num_tokens, num_columns = heads.student.hidden.shape[0], heads.student.weight.shape[0]
    raw_logits = buffer.resize_(2, num_tokens, slab_row_stride(num_columns))[:, :, :num_columns]
    step = COLUMN_STEP if any(copies_to_fp32(head.hidden) for head in heads[:2]) else num_columns
    for head, logits in zip(heads[:2], raw_logits, strict=True):
        for columns in aligned_slices(num_columns, step):
            matmul(head.hidden, head.weight[columns].T, logits[:, columns], accumulate=False)
    return raw_logits
