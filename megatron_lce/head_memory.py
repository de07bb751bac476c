"""One step of the head by formula: its products of matrices, and what it allocates on one rank, phase by phase.

Every way of computing the head is a function in `WAYS`: from a `HeadStep` to its products and to what is allocated in
each phase of the step. Hidden and weight themselves, and Megatron's `main_grad`, are there anyway and are not counted;
both gradients are. This is the only place with these formulas, and `tests/test_estimate.py` holds them against
measured peaks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_lce.core.options import WORKSPACE_BYTES
from megatron_lce.core.plan import (
    ALIGNED_COLUMNS,
    Costs,
    HeadSize,
    KnownLossPlan,
    backward_tokens,
    plan_known_loss,
    plan_slabs,
    slab_row_stride,
    stats_tokens,
)
from megatron_lce.core.statistics import num_extremes, num_sums, packed_rows

Phases = dict[str, dict[str, int]]  # phase: {what is allocated in it: bytes}

COSTS = {2: Costs(128, tile_columns=256), 4: Costs(64)}  # of the Triton backend, by bytes of an element
PER_TOKEN_BYTES = 40  # a token's labels, factors, outputs and what backward needs of them
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

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden", "columns", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.itemsize not in COSTS:
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
    def computed(self) -> int:
        """Rows that take part."""
        return max(1, round(self.tokens * (1 - self.ignored))) if self.skip_ignored else self.tokens

    @property
    def everything(self) -> int:
        """`logits_cache_bytes` that keeps all of this step's logits."""
        return self.computed * self.size.kept_token(self.columns)

    @property
    def size(self) -> HeadSize:
        """The head as the operation plans it."""
        return HeadSize(
            hidden=self.hidden,
            columns=self.columns,
            itemsize=self.itemsize,
            stats_rows=packed_rows(self.entropy, telemetry=False),
            costs=COSTS[self.itemsize],
            sums_weight=self.itemsize == 2 and not self.main_grad,
            even=self.columns % ALIGNED_COLUMNS == 0,
        )


def megatron(step: HeadStep) -> tuple[float, Phases]:
    """Megatron's unfused vocab-parallel cross-entropy: logits, and fp32 ones that turn into the softmax in place."""
    kept = {"fp32 softmax": 4 * step.logits}
    logits = {} if step.itemsize == 4 else {"logits": step.itemsize * step.logits}
    return 3, {
        "forward": logits | kept,
        "kept": kept,
        "gradient of logits": kept | ({} if step.itemsize == 4 else {"its cast": step.itemsize * step.logits}),
        "products": _native_products(step),
    }


def megatron_fused(step: HeadStep) -> tuple[float, Phases]:
    """Megatron's `cross_entropy_loss_fusion`: logits, their fp32 copy and its exponentials at once (16-bit heads)."""
    kept = {"fp32 softmax": 4 * step.logits}
    return 3, {
        "forward": {"logits": 2 * step.logits, "fp32 logits": 4 * step.logits} | kept,
        "kept": kept,
        "gradient of logits": kept | {"gradient of logits": 2 * step.logits},
        "products": _native_products(step),
    }


def _native_products(step: HeadStep) -> dict[str, int]:
    return ({"gradient of logits": step.itemsize * step.logits} | _gathered(step) | _hidden_gradient(step)) | {
        "weight's gradient": step.weight_bytes
    }


def ours(step: HeadStep) -> tuple[float, Phases]:
    """`linear_cross_entropy`, as `megatron_lce.core` orders and allocates it."""
    computed, item = step.computed, step.itemsize
    block = _tokens_of_a_block(step)
    several, block_bytes = block < computed, block * step.hidden * item  # blocks of tokens outside, or slabs alone
    kept_columns = step.size.cache_columns(computed, step.columns, step.logits_cache_bytes)
    kept = {"kept logits": computed * step.size.kept_token(kept_columns)} if kept_columns else {}
    per_token = {"per token": PER_TOKEN_BYTES * step.tokens}
    inputs = _inputs_of_a_block(step, block)
    backward = {"per token": (PER_TOKEN_BYTES + TERMS_BYTES) * step.tokens} | inputs | _weight_sum(step, several)
    if kept_columns == step.columns:
        slab, widest = kept, kept_columns
    else:
        widest, slab_bytes, sum_bytes = _slab(step, block, step.columns - kept_columns)
        slab = {"slab of logits": slab_bytes}
        slab |= {"fp32 sum of the slab's weight's gradient": sum_bytes} if sum_bytes else {}
        slab |= kept if several else {}
    whole = computed * step.hidden * item  # the rows' gradient of hidden; block by block it is there from the first one
    earlier = {"hidden's gradient": whole} if several else {}
    phases: Phases = {
        "forward": per_token | kept | inputs | {"statistics": _statistics_bytes(step, block)},
        "kept": per_token | kept,
    }
    if item == 4 or (widest >= step.columns and step.columns % ALIGNED_COLUMNS == 0):
        summed = {"hidden's gradient": whole}  # is its own sum
    else:
        summed = earlier | {"fp32 sum of hidden's gradient": 4 * block * step.hidden}
        cast = block_bytes if not several else 0
        # Without a sum over the group it is behind the last product of the weight's gradient, and behind the slab.
        at_cast = slab if step.tp > 1 else {}
        phases["cast of hidden's gradient"] = backward | at_cast | summed | {"its cast": cast}
    if kept_columns:
        phases["kept logits' products"] = backward | kept | summed | _hidden_with_factor(step, computed, kept_columns)
    phases["slabs"] = backward | slab | summed
    reduced = {"hidden's gradient": whole} | _over_group(step)
    if step.tp > 1:
        phases["last product"] = backward | slab | reduced
    of_sum = several and item == 2 and not step.main_grad
    made = {"weight's gradient": step.weight_bytes} if of_sum else {}  # beside its sum
    phases["end"] = backward | reduced | _all_rows(step) | made
    # Which main_grad replaces by a placeholder, in front of DDP's hook.
    phases["gradients"] = per_token | _gradient_of_own_rows(step) | {"weight's gradient": step.weight_bytes}
    return (4 - kept_columns / step.columns) * computed / step.tokens, phases


def skipped(step: HeadStep) -> tuple[float, Phases]:
    """`linear_cross_entropy(skip_ignored=...)`: the counted rows alone."""
    return ours(replace(step, skip_ignored=True))


def token_loss(step: HeadStep) -> tuple[float, Phases]:
    """`linear_token_loss` of 16-bit inputs: blocks of tokens go all the way in forward; backward scales gradients."""
    row_bytes, plan = step.size.kept_token(step.columns), token_loss_plan(step)
    if plan is None:
        smallest = 128 * (row_bytes + _beside_kept_bytes(step)) - step.size.weight_sum // 2
        raise ValueError(
            f"workspace_bytes must be at least {smallest} and itemsize 2, for blocks of the logits of 128 tokens, "
            f"got {step.workspace_bytes} and {step.itemsize}"
        )
    block = plan.tokens
    per_token = {"per token": PER_TOKEN_BYTES * step.tokens}
    hidden = {"hidden's gradient": step.computed * step.hidden * step.itemsize}
    summed = step.main_grad or block < step.computed
    made = {"fp32 sum of weight's gradient": 4 * step.columns * step.hidden}
    if not summed:
        made = {"weight's gradient": step.weight_bytes}
    share = step.hidden_bytes // step.tp if step.gathers else step.hidden_bytes
    saved = per_token | made | {"hidden's gradient": share}
    left = replace(step, workspace_bytes=plan.workspace_bytes)
    statistics = _statistics_bytes(left, block)
    forward = per_token | made | hidden | _inputs_of_a_block(step, block)
    return 3 * step.computed / step.tokens, {
        "statistics of a block": forward | {"logits of a block": block * row_bytes, "statistics": statistics},
        "products of a block": forward
        | {"logits of a block": block * row_bytes}
        | _hidden_with_factor(left, block, step.columns)
        | _odd_sum(step, block),
        "end of forward": forward | _over_group(step) | _all_rows(step),
        "kept": saved,
        "gradients scaled": saved | {"weight's gradient": step.weight_bytes if summed else 0},
    }


WAYS: dict[str, Callable[[HeadStep], tuple[float, Phases]]] = {
    "Megatron, unfused": megatron,
    "Megatron, fused cross-entropy": megatron_fused,
    "megatron_lce": ours,
    "megatron_lce, skip_ignored": skipped,
    "megatron_lce, linear_token_loss": token_loss,
}


def _gathered(step: HeadStep) -> dict[str, int]:
    return {"gathered hidden": step.hidden_bytes} if step.gathers else {}


def _hidden_gradient(step: HeadStep) -> dict[str, int]:
    return {"hidden's gradient": step.hidden_bytes} | _over_group(step)


def _over_group(step: HeadStep) -> dict[str, int]:
    """What the reduce-scatter of hidden's gradient leaves, and reads where rows were left out."""
    if not step.gathers:
        return {}
    share = {"its share of the sum": step.hidden_bytes // step.tp}
    return share | ({"gradient of all rows": step.hidden_bytes} if step.skip_ignored else {})


def _gradient_of_own_rows(step: HeadStep) -> dict[str, int]:
    return {"hidden's gradient": step.hidden_bytes // step.tp if step.gathers else step.hidden_bytes}


def _all_rows(step: HeadStep) -> dict[str, int]:
    return {"gradient of all rows": step.hidden_bytes} if step.skip_ignored else {}


def _weight_sum(step: HeadStep, several: bool) -> dict[str, int]:
    if step.main_grad:
        return {}
    if several and step.itemsize == 2:
        return {"fp32 sum of weight's gradient": 4 * step.columns * step.hidden}
    return {"weight's gradient": step.weight_bytes}


def _tokens_of_a_block(step: HeadStep) -> int:
    block = backward_tokens(step.size, step.computed, step.workspace_bytes)
    if block >= step.computed:  # also where the ranks' shards are not equal, as in estimates of any number of tokens
        return step.computed
    ranks = step.tp if step.gathers else 1
    return block if step.skip_ignored else max(1, block // ranks) * ranks


def token_loss_plan(step: HeadStep) -> KnownLossPlan | None:
    """The blocks of `linear_token_loss`; None: too few tokens have room, and logits are made twice."""
    return plan_known_loss(step.size, step.computed, step.workspace_bytes)


def _inputs_of_a_block(step: HeadStep, block: int) -> dict[str, int]:
    """hidden gathered, whole or two blocks of it at a time, and its counted rows taken out."""
    row_bytes = step.hidden * step.itemsize
    if step.skip_ignored:
        return _gathered(step) | {"counted rows of hidden": block * row_bytes}
    if step.gathers and block < step.computed:
        return {"gathered hidden": 2 * block * row_bytes}
    return _gathered(step)


def _statistics_bytes(step: HeadStep, block: int) -> int:
    """Of as many tokens as fit, chunk by chunk; and of all of them, merged, on this rank and gathered."""
    per_token = step.size.stats.per_token
    part = stats_tokens(step.size, block, step.workspace_bytes)
    extremes, sums = 4 * num_extremes(telemetry=False), 8 * num_sums(step.entropy, telemetry=False)
    over_group = part * (2 + step.tp) * extremes if step.tp > 1 else 0
    return part * (per_token + extremes + sums) + step.computed * (extremes + sums) + over_group


def _beside_kept_bytes(step: HeadStep) -> int:
    """One token's statistics, then its hidden state times what its gradients have in common, and their sum."""
    return max(step.size.stats.per_token, step.hidden * step.itemsize + step.size.hidden_sum_token)


def _odd_sum(step: HeadStep, tokens: int) -> dict[str, int]:
    """Kept columns in two products: the odd end of a vocabulary is one of its own."""
    summed = tokens * step.size.hidden_sum_token
    return {"fp32 sum of hidden's gradient": summed} if summed else {}


def _hidden_with_factor(step: HeadStep, tokens: int, kept_columns: int) -> dict[str, int]:
    """For the weight's product of what was kept of all columns, unless the entropy is asked for."""
    row_bytes = step.hidden * step.itemsize
    if step.entropy or kept_columns < step.columns or tokens * row_bytes > step.workspace_bytes:
        return {}
    return {"hidden times a factor": tokens * row_bytes}


def _slab(step: HeadStep, block: int, columns: int) -> tuple[int, int, int]:
    """Width and bytes of one slab of a block, and of the fp32 sum of its weight's gradient where its tokens are cut."""
    sum_bytes = step.size.weight_sum_column
    blocks = plan_slabs(step.size, block, columns, step.workspace_bytes, per_column_if_tokens_are_cut=sum_bytes)
    slab = blocks.tokens * slab_row_stride(blocks.columns) * step.itemsize
    return blocks.columns, slab, blocks.columns * sum_bytes if blocks.tokens < block else 0
