"""One step of the head by formula: its products of matrices, and what it allocates on one rank, phase by phase.

Every way of computing the head is a function in `FORMULAS`: from a `HeadStep` to its products, to the bytes a logit
that it moves beside them, and to what is allocated in each phase of the step. Hidden and weight themselves, and
Megatron's `main_grad`, are there anyway and are not counted; both gradients are. This is the only place with these
formulas, and `tests/test_estimate.py` holds them against measured peaks and times.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from megatron_lce.core.options import WORKSPACE_BYTES
from megatron_lce.core.plan import (
    ALIGNED_COLUMNS,
    Costs,
    HeadSize,
    KnownLossPlan,
    backward_tokens,
    costs_of_parts,
    plan_blocks,
    plan_known_loss,
    slab_row_stride,
    stats_columns,
    stats_tokens,
)
from megatron_lce.core.statistics import num_extremes, num_sums, packed_rows

Phases = dict[str, dict[str, int]]  # phase: {what is allocated in it: bytes}

PER_TOKEN_BYTES = 40  # a token's labels, factors, outputs and what backward needs of them
# Bytes a logit that pass through memory beside the products: of bf16 heads on an H200, the measured time less that of
# the products, times 4.8 TB/s (heads alone at S1 to S3, whole steps at S1).
MOVED_UNFUSED, MOVED_FUSED = 70, 40  # by Megatron
MOVED_RECOMPUTED, MOVED_KEPT = 2, 8  # of a logit that backward makes again, and of one that was kept
TERMS_BYTES = 24  # a token's row terms in backward


@dataclass(frozen=True)
class HeadStep:
    """Forward and backward of one microbatch's head on one rank.

    tokens             N, of the whole sequence: under sequence parallel the ranks hold tokens / tp of hidden each
    hidden             H
    columns            this rank's rows of the weight, V / tp
    ignored            share of the tokens whose label is `ignore_index`
    skip_ignored       they are left out of everything (by their number; forward with True takes up to the workspace)
    itemsize           bytes of an element of hidden and weight: 2 or 4
    main_grad          the weight's gradient is added into Megatron's fp32 buffer (`gradient_accumulation_fusion`)
    """

    tokens: int
    hidden: int
    columns: int
    tp: int = 1
    sequence_parallel: bool = False
    itemsize: int = 2
    main_grad: bool = False
    entropy: bool = True
    ignored: float = 0.0
    skip_ignored: bool = False
    workspace_bytes: int = WORKSPACE_BYTES
    logits_cache_bytes: int = 0
    everything: ClassVar[int] = 2**62  # `logits_cache_bytes` that keeps the logits of any step

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden", "columns", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.itemsize not in (2, 4):
            raise ValueError(f"itemsize must be 2 or 4, got {self.itemsize}")
        if self.hidden % ALIGNED_COLUMNS:
            raise ValueError(f"hidden must be a multiple of {ALIGNED_COLUMNS} for an estimate, got {self.hidden}")
        if not 0 <= self.ignored <= 1:
            raise ValueError(f"ignored must be between 0 and 1, got {self.ignored}")

    @property
    def logits(self) -> int:
        return self.tokens * self.columns

    @property
    def hidden_bytes(self) -> int:
        """Of all tokens, in hidden's dtype."""
        return self.tokens * self.hidden * self.itemsize

    @property
    def weight_bytes(self) -> int:
        return self.columns * self.hidden * self.itemsize

    @property
    def gathers(self) -> bool:
        return self.sequence_parallel and self.tp > 1

    @property
    def own_hidden_bytes(self) -> int:
        """Of this rank's tokens."""
        return self.hidden_bytes // self.tp if self.gathers else self.hidden_bytes

    @property
    def computed(self) -> int:
        """Rows that take part."""
        return max(1, round(self.tokens * (1 - self.ignored))) if self.skip_ignored else self.tokens

    @property
    def size(self) -> HeadSize:
        """The head as the operation plans it."""
        return HeadSize(
            hidden=self.hidden,
            columns=self.columns,
            itemsize=self.itemsize,
            stats_rows=packed_rows(self.entropy, telemetry=False),
            costs=costs_on_a_gpu(self.itemsize, self.hidden),
            sums_weight=self.itemsize == 2 and not self.main_grad,
            even=self.columns % ALIGNED_COLUMNS == 0,
        )


def costs_on_a_gpu(itemsize: int, hidden: int) -> Costs:
    """Of the Triton backend, on a Hopper GPU."""
    return Costs(128, tile_columns=256) if itemsize == 2 else costs_of_parts(hidden, 2, 128)


def megatron(step: HeadStep, fused: bool = False) -> tuple[float, float, Phases]:
    """Megatron's vocab-parallel cross-entropy: logits, and fp32 ones that turn into the softmax in place.

    `fused`, its `cross_entropy_loss_fusion` (16-bit heads): these and their exponentials at once.
    """
    logits, kept = step.itemsize * step.logits, {"fp32 softmax": 4 * step.logits}
    rounded = logits if step.itemsize == 2 else 0
    gradients = {"hidden's gradient": step.hidden_bytes} | _over_group(step) | {"weight's gradient": step.weight_bytes}
    return (
        3,
        MOVED_FUSED if fused else MOVED_UNFUSED,
        {
            "forward": {"logits": rounded, "fp32 logits": 4 * step.logits if fused else 0} | kept,
            "kept": kept,
            "products": {"gradient of logits": logits} | _gathered(step) | gradients,
        },
    )


def ours(step: HeadStep) -> tuple[float, float, Phases]:
    """`linear_cross_entropy`, as `megatron_lce.core` orders and allocates it."""
    size, computed = step.size, step.computed
    block = _tokens_of_a_block(step)
    several = block < computed  # blocks of tokens outside, or slabs alone
    sums = several and size.sums_weight
    kept_columns = size.cache_columns(computed, step.columns, step.logits_cache_bytes)
    kept = {"kept logits": computed * size.kept_token(kept_columns) if kept_columns else 0}
    per_token, inputs = {"per token": PER_TOKEN_BYTES * step.tokens}, _inputs_of_a_block(step, block)
    backward, made = {"per token": (PER_TOKEN_BYTES + TERMS_BYTES) * step.tokens} | inputs, _weight_gradient(step)
    backward |= {} if step.main_grad else _weight_gradient(step, sums)
    if kept_columns == step.columns:
        widest, slab = kept_columns, kept
    else:
        widest, slab = _slab(step, block, step.columns - kept_columns)
        slab |= kept if several else {}
    whole = computed * step.hidden * step.itemsize  # the rows' gradient of hidden
    phases: Phases = {
        "forward": per_token | kept | inputs | {"statistics": _statistics_bytes(step, block)},
        "kept": per_token | kept,
    }
    summed = {"hidden's gradient": whole}  # is its own sum, or there from the first block on
    if step.itemsize == 2 and (widest < step.columns or step.columns % ALIGNED_COLUMNS):
        cast, sum_bytes = (0, whole) if several else (whole, 0)
        summed = {"hidden's gradient": sum_bytes, "fp32 sum of hidden's gradient": 4 * block * step.hidden}
        # Without a sum over the group it is behind the last product of the weight's gradient, and behind the slab.
        phases["cast of hidden's gradient"] = backward | (slab if step.tp > 1 else {}) | summed | {"its cast": cast}
    if kept_columns:
        phases["kept logits' products"] = backward | kept | summed | _hidden_with_factor(step, computed, kept_columns)
    phases["slabs"] = backward | slab | summed
    reduced = {"hidden's gradient": whole} | _over_group(step)
    if step.tp > 1:
        phases["last product"] = backward | slab | reduced
    phases["end"] = backward | reduced | _all_rows(step) | (made if sums else {})  # beside its sum
    # Which main_grad replaces by a placeholder, in front of DDP's hook.
    phases["gradients"] = per_token | {"hidden's gradient": step.own_hidden_bytes} | made
    kept_share, rows_share = kept_columns / step.columns, computed / step.tokens
    moved = kept_share * MOVED_KEPT + (1 - kept_share) * MOVED_RECOMPUTED
    return (4 - kept_share) * rows_share, moved * rows_share, phases


def token_loss(step: HeadStep) -> tuple[float, float, Phases]:
    """`linear_token_loss` of 16-bit inputs: blocks of tokens go all the way in forward; backward scales gradients."""
    size, plan = step.size, token_loss_plan(step)
    if step.itemsize != 2:
        raise ValueError(f"itemsize must be 2 for linear_token_loss in blocks of logits, got {step.itemsize}")
    if plan is None:
        rooms = range(2**50)
        smallest = bisect_left(rooms, True, key=lambda room: plan_known_loss(size, step.computed, room) is not None)
        raise ValueError(
            f"workspace_bytes must be at least {smallest} for blocks of the logits of 128 tokens, "
            f"got {step.workspace_bytes}"
        )
    block, left = plan.tokens, replace(step, workspace_bytes=plan.workspace_bytes)
    summed = step.main_grad or block < step.computed
    made = {"per token": PER_TOKEN_BYTES * step.tokens} | _weight_gradient(step, summed)
    saved = made | {"hidden's gradient": step.own_hidden_bytes}
    whole = step.computed * step.hidden * step.itemsize
    forward = made | {"hidden's gradient": whole} | _inputs_of_a_block(step, block)
    logits = forward | {"logits of a block": block * size.kept_token(step.columns)}
    # Kept columns in two products: the odd end of a vocabulary is one of its own.
    odd_sum = {"fp32 sum of hidden's gradient": block * size.hidden_sum_token}
    return (
        3 * step.computed / step.tokens,
        MOVED_KEPT * step.computed / step.tokens,
        {
            "statistics of a block": logits | {"statistics": _statistics_bytes(left, block)},
            "products of a block": logits | _hidden_with_factor(left, block, step.columns) | odd_sum,
            "end of forward": forward | _over_group(step) | _all_rows(step),
            "kept": saved,
            "gradients scaled": saved | {"weight's gradient": step.weight_bytes if summed else 0},
        },
    )


FORMULAS: dict[str, Callable[[HeadStep], tuple[float, float, Phases]]] = {
    "Megatron, unfused": megatron,
    "Megatron, fused cross-entropy": partial(megatron, fused=True),
    "megatron_lce": ours,
    "megatron_lce, linear_token_loss": token_loss,
}


def token_loss_plan(step: HeadStep) -> KnownLossPlan | None:
    """The blocks of `linear_token_loss`; None: too few tokens have room, and logits are made twice."""
    return plan_known_loss(step.size, step.computed, step.workspace_bytes)


def _weight_gradient(step: HeadStep, summed: bool = False) -> dict[str, int]:
    if summed:
        return {"fp32 sum of weight's gradient": 4 * step.columns * step.hidden}
    return {"weight's gradient": step.weight_bytes}


def _gathered(step: HeadStep) -> dict[str, int]:
    return {"gathered hidden": step.hidden_bytes if step.gathers else 0}


def _over_group(step: HeadStep) -> dict[str, int]:
    """What the reduce-scatter of hidden's gradient leaves, and reads where rows were left out."""
    return {"its share of the sum": step.own_hidden_bytes} | _all_rows(step) if step.gathers else {}


def _all_rows(step: HeadStep) -> dict[str, int]:
    return {"gradient of all rows": step.hidden_bytes if step.skip_ignored else 0}


def _tokens_of_a_block(step: HeadStep) -> int:
    block = backward_tokens(step.size, step.computed, step.workspace_bytes)
    if block >= step.computed:  # also where the ranks' shards are not equal, as in estimates of any number of tokens
        return step.computed
    ranks = step.tp if step.gathers else 1
    return block if step.skip_ignored else max(1, block // ranks) * ranks


def _inputs_of_a_block(step: HeadStep, block: int) -> dict[str, int]:
    """hidden gathered, whole or two blocks of it at a time, and its counted rows taken out."""
    block_bytes = block * step.hidden * step.itemsize
    if step.skip_ignored:
        return _gathered(step) | {"counted rows of hidden": block_bytes}
    return {"gathered hidden": 2 * block_bytes} if step.gathers and block < step.computed else _gathered(step)


def _statistics_bytes(step: HeadStep, block: int) -> int:
    """Of as many tokens as fit, chunk by chunk; and of all of them, merged, on this rank and gathered."""
    part = stats_tokens(step.size, block, step.workspace_bytes)
    extremes, sums = 4 * num_extremes(telemetry=False), 8 * num_sums(step.entropy, telemetry=False)
    over_group = part * (2 + step.tp) * extremes if step.tp > 1 else 0
    copies = stats_columns(step.size, part, step.workspace_bytes) * step.size.stats.per_column
    return (
        part * (step.size.stats.per_token + extremes + sums) + copies + step.computed * (extremes + sums) + over_group
    )


def _hidden_with_factor(step: HeadStep, tokens: int, kept_columns: int) -> dict[str, int]:
    """For the weight's product of what was kept of all columns, unless the entropy is asked for."""
    size = tokens * step.hidden * step.itemsize
    has_one = not step.entropy and kept_columns == step.columns and size <= step.workspace_bytes
    return {"hidden times a factor": size if has_one else 0}


def _slab(step: HeadStep, block: int, columns: int) -> tuple[int, dict[str, int]]:
    """Width of one slab of a block; its bytes, and those of its weight's gradient's sum where its tokens are cut."""
    per_column = step.size.weight_sum_column
    stride, room = slab_row_stride(columns), step.workspace_bytes
    slab = plan_blocks(block, stride, room, step.size.slab, per_column_if_tokens_are_cut=per_column)
    sum_bytes = slab.columns * per_column if slab.tokens < block else 0
    logits = slab.tokens * slab_row_stride(slab.columns) * step.itemsize
    costs = step.size.costs
    parts = costs.logit * slab.tokens * slab_row_stride(slab.columns)
    parts += max(slab.tokens * costs.slab_token, slab.columns * costs.slab_column)
    beside = {"bf16 parts of it and of rows": parts, "fp32 sum of the slab's weight's gradient": sum_bytes}
    return slab.columns, {"slab of logits": logits} | beside
