"""Matmuls and memory of one step of the head on one rank, by formula, for each implementation in `HEADS`.

Peaks include both gradients and exclude hidden, weight and Megatron's `main_grad`. `tests/test_estimate.py` compares
these formulas with measured peaks and times.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch

from megatron_lce.core import plan
from megatron_lce.core.call_plan import Plan, plan_cross_entropy
from megatron_lce.core.options import WORKSPACE_BYTES
from megatron_lce.core.statistics import num_extremes, num_sums, packed_rows

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PER_TOKEN_BYTES = 40  # labels, factors, outputs, and what backward needs of them
TERMS_BYTES = 24  # row terms of a token in backward
UNFUSED, FUSED = "Megatron", "Megatron, fused cross-entropy"
TE = "Megatron, TransformerEngine's cross-entropy"
OURS, KNOWN_LOSS = "megatron-lce", "megatron-lce, known_loss=True"
# Bytes per logit that passes over logits move, without the matmuls. Fitted to bf16 heads on an H200: the measured time
# minus the matmuls' time, times 4.8 TB/s; TransformerEngine's from whole steps.
MOVED_BY_MEGATRON = {UNFUSED: 70, FUSED: 40, TE: 10}
MOVED_RECOMPUTED, MOVED_KEPT = 2, 8  # per logit that backward recomputes, and per cached logit


@dataclass(frozen=True)
class HeadStep:
    """Forward and backward of one microbatch's head on one rank. The callers check the sizes."""

    tokens: int  # N, of the whole sequence: under sequence parallel each rank holds tokens / tp of hidden
    hidden: int  # H, a multiple of `ALIGNED_COLUMNS`
    columns: int  # this rank's rows of the weight, V / tp
    tp: int = 1
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.bfloat16  # of hidden and weight
    main_grad: bool = False  # the weight gradient is added to Megatron's fp32 buffer (`gradient_accumulation_fusion`)
    entropy: bool = True
    ignored: float = 0.0  # share of the tokens whose label is `ignore_index`
    skip_ignored: bool = False  # ignored rows are left out, by their number
    workspace_bytes: int = WORKSPACE_BYTES
    logits_cache_bytes: int = 0
    everything: ClassVar[int] = 2**62  # `logits_cache_bytes` that keeps the logits of any step

    def __str__(self) -> str:
        parallel = f"one rank of TP={self.tp}{' with sequence parallel' if self.gathers else ''}, "
        dtype = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        return f"{parallel * (self.tp > 1)}{self.tokens} tokens x {self.hidden} x {self.columns}, {dtype}"

    @property
    def logits(self) -> int:
        return self.tokens * self.columns

    @property
    def hidden_bytes(self) -> int:
        return self.tokens * self.hidden * self.dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        return self.columns * self.hidden * self.dtype.itemsize

    @property
    def gathers(self) -> bool:
        return self.sequence_parallel and self.tp > 1

    @property
    def own_hidden_bytes(self) -> int:
        """Bytes of the hidden states of this rank's tokens."""
        return self.hidden_bytes // self.tp if self.gathers else self.hidden_bytes

    @property
    def computed(self) -> int:
        return max(1, round(self.tokens * (1 - self.ignored))) if self.skip_ignored else self.tokens

    @property
    def size(self) -> plan.HeadSize:
        """The head as the operation plans it."""
        return plan.HeadSize(
            hidden=self.hidden,
            columns=self.columns,
            itemsize=self.dtype.itemsize,
            stats_rows=packed_rows(self.entropy, telemetry=False),
            costs=costs_on_a_gpu(self.dtype.itemsize, self.hidden),
            sums_weight=self.dtype.itemsize == 2 and not self.main_grad,
            even=self.columns % plan.ALIGNED_COLUMNS == 0,
        )

    @property
    def plan(self) -> Plan:
        """How `linear_cross_entropy` cuts the step."""
        sizes = self.size, self.computed, self.columns, self.workspace_bytes
        return plan_cross_entropy(*sizes, logits_cache_bytes=self.logits_cache_bytes)


class Needs(NamedTuple):
    """Cost of one step."""

    matmuls: float  # of tokens x hidden x columns each; 3 is the minimum
    moved_bytes: float  # by passes over logits
    kept_bytes: int  # held from forward to backward
    peak_bytes: int  # largest allocation at any time, gradients included

    def time_ms(self, step: HeadStep, tflops: float, terabytes: float) -> float:
        """Return the time of the matmuls, at TFLOP/s, plus the time of the passes over logits, at TB/s."""
        return self.matmuls * 2 * step.logits * step.hidden / (tflops * 1e9) + self.moved_bytes / (terabytes * 1e9)


def costs_on_a_gpu(itemsize: int, hidden: int) -> plan.Costs:
    """Return the Triton backend's costs on a Hopper GPU."""
    return plan.Costs(128, tile_columns=256) if itemsize == 2 else plan.costs_of_parts(hidden, 2, 128)


def megatron(step: HeadStep, loss: str = UNFUSED) -> Needs:
    """Megatron's vocab-parallel cross-entropy: logits, and fp32 logits that become the softmax in place.

    `FUSED` (`cross_entropy_loss_fusion`) holds the fp32 logits and their exponentials at once. `TE`, of version 2.20,
    keeps the logits, and makes the gradient in a copy of them. Both are for 16-bit heads.
    """
    logits, softmax = step.dtype.itemsize * step.logits, 4 * step.logits
    unfused = softmax + (logits if step.dtype.itemsize == 2 else 0)
    in_loss = {UNFUSED: unfused, FUSED: unfused + softmax, TE: 2 * logits}[loss]
    backward = logits + (1 + step.gathers) * step.hidden_bytes + _over_group(step) + step.weight_bytes
    kept = logits if loss == TE else softmax
    return Needs(3, MOVED_BY_MEGATRON[loss] * step.logits, kept, max(in_loss, backward))


def ours(step: HeadStep) -> Needs:
    """`linear_cross_entropy`."""
    size, computed, block = step.size, step.computed, _tokens_of_a_block(step)
    several = block < computed  # blocks of tokens, each in slabs of columns; else slabs alone
    weight_sum = size.weight_sum if several else 0
    kept_columns = size.cache_columns(computed, step.columns, step.logits_cache_bytes)
    kept = computed * size.kept_token(kept_columns) if kept_columns else 0
    per_token, inputs = PER_TOKEN_BYTES * step.tokens, _inputs_of_a_block(step, block)
    backward = per_token + TERMS_BYTES * step.tokens + inputs
    backward += 0 if step.main_grad else weight_sum or step.weight_bytes
    whole = kept_columns == step.columns
    width, slab = (kept_columns, 0) if whole else _slab(step, block, step.columns - kept_columns)
    slab += kept if whole or several else 0
    cast = grad_hidden = computed * step.hidden * step.dtype.itemsize
    reduced = backward + grad_hidden + _over_group(step)
    if step.dtype.itemsize == 2 and (width < step.columns or step.columns % plan.ALIGNED_COLUMNS):
        hidden_sum = 4 * block * step.hidden
        grad_hidden, cast = hidden_sum + (cast if several else 0), hidden_sum + cast
        # On one rank the cast follows the last matmul, when the slab is free.
        cast += slab if step.tp > 1 else 0
    peak = max(
        per_token + kept + inputs + _statistics(step, block),
        backward + kept + grad_hidden + _hidden_with_factor(step, computed, kept_columns) if kept else 0,
        backward + slab + grad_hidden,
        backward + cast,
        reduced + (slab if step.tp > 1 else 0),
        reduced + step.skip_ignored * step.hidden_bytes + (step.weight_bytes if weight_sum else 0),
        per_token + step.own_hidden_bytes + step.weight_bytes,
    )
    kept_share, rows_share = kept_columns / step.columns, computed / step.tokens
    moved = (kept_share * MOVED_KEPT + (1 - kept_share) * MOVED_RECOMPUTED) * rows_share * step.logits
    return Needs((4 - kept_share) * rows_share, moved, per_token + kept, peak)


def known_loss(step: HeadStep) -> Needs | None:
    """`known_loss` of the flag and `linear_token_loss`: gradients are computed in forward, and scaled in backward.

    None: logits are computed twice, because inputs are fp32 or the workspace holds too few tokens.
    """
    size, fp16 = step.size, step.dtype == torch.float16  # gradients are fp32 then: unscaled, they may leave its range
    blocks = plan.plan_known_loss(size, step.computed, step.workspace_bytes, single_is_sum=fp16 or step.main_grad)
    if blocks is None:
        return None
    block, left = blocks[0], replace(step, workspace_bytes=blocks[1])
    summed, widened = fp16 or step.main_grad or block < step.computed, 2 if fp16 else 1
    made = PER_TOKEN_BYTES * step.tokens + (4 * step.columns * step.hidden if summed else step.weight_bytes)
    kept = made + widened * step.own_hidden_bytes
    forward = made + widened * step.computed * step.hidden * step.dtype.itemsize + _inputs_of_a_block(step, block)
    logits = forward + block * size.kept_token(step.columns)
    odd_sum = 0 if fp16 else block * size.hidden_sum_token  # the last columns of an odd vocabulary: a further matmul
    if odd_sum and block >= step.computed and step.tp == 1:  # cast when the logits are freed
        logits -= step.computed * step.hidden * step.dtype.itemsize
    peak = max(
        logits + _statistics(left, block),
        logits + _hidden_with_factor(left, block, step.columns) + odd_sum,
        forward + odd_sum,
        forward + widened * (_over_group(step) + step.skip_ignored * step.hidden_bytes),
        kept + (step.weight_bytes if summed else 0) + (step.own_hidden_bytes if fp16 else 0),
    )
    share = step.computed / step.tokens
    return Needs(3 * share, MOVED_KEPT * share * step.logits, kept, peak)


HEADS: dict[str, Callable[[HeadStep], Needs | None]]
HEADS = {loss: partial(megatron, loss=loss) for loss in MOVED_BY_MEGATRON} | {OURS: ours, KNOWN_LOSS: known_loss}


def _over_group(step: HeadStep) -> int:
    """Output of the reduce-scatter of the hidden-state gradient; also its input if rows were left out."""
    return step.own_hidden_bytes + step.skip_ignored * step.hidden_bytes if step.gathers else 0


def _tokens_of_a_block(step: HeadStep) -> int:
    block = plan.backward_tokens(step.size, step.computed, step.workspace_bytes)
    if block >= step.computed:  # also if ranks cannot share the tokens evenly
        return step.computed
    ranks = step.tp if step.gathers else 1
    return block if step.skip_ignored else max(1, block // ranks) * ranks


def _inputs_of_a_block(step: HeadStep, block: int) -> int:
    """Gathered hidden, whole or two blocks at a time, and the rows selected from it."""
    block_bytes, gathered = block * step.hidden * step.dtype.itemsize, step.gathers * step.hidden_bytes
    if step.skip_ignored:
        return gathered + block_bytes
    return 2 * block_bytes if step.gathers and block < step.computed else gathered


def _statistics(step: HeadStep, block: int) -> int:
    """Statistics of each chunk for as many tokens as fit; merged ones of all tokens, on this rank and gathered."""
    part = plan.stats_tokens(step.size, block, step.workspace_bytes)
    extremes, sums = 4 * num_extremes(telemetry=False), 8 * num_sums(step.entropy, telemetry=False)
    over_group = part * (2 + step.tp) * extremes if step.tp > 1 else 0
    copies = plan.stats_columns(step.size, part, step.workspace_bytes) * step.size.stats.per_column
    by_chunk = part * (step.size.stats.per_token + extremes + sums)
    return by_chunk + copies + step.computed * (extremes + sums) + over_group


def _hidden_with_factor(step: HeadStep, tokens: int, kept_columns: int) -> int:
    """A copy of hidden for the weight's matmul, if all logits are cached and no entropy is wanted."""
    size = tokens * step.hidden * step.dtype.itemsize
    return size if not step.entropy and kept_columns == step.columns and size <= step.workspace_bytes else 0


def _slab(step: HeadStep, block: int, columns: int) -> tuple[int, int]:
    """Width of one slab of a block, and its bytes; if its tokens are cut, with the sum of the weight gradient."""
    per_column, costs = step.size.weight_sum_column, step.size.costs
    stride, room = plan.slab_row_stride(columns), step.workspace_bytes
    slab = plan.plan_blocks(block, stride, room, step.size.slab, per_column_if_tokens_are_cut=per_column)
    logits = slab.tokens * plan.slab_row_stride(slab.columns) * (step.dtype.itemsize + costs.logit)
    parts = max(slab.tokens * costs.slab_token, slab.columns * costs.slab_column)
    return slab.columns, logits + parts + (slab.columns * per_column if slab.tokens < block else 0)
