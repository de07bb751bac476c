"""What one step of the head takes, by formula: products of matrices, and peak memory on one rank.

Every way of computing the head is a function in `WAYS`: from a `HeadStep` to what is allocated in each phase of the
step. The peak is the largest phase. Hidden and weight themselves, and Megatron's `main_grad`, are there anyway and are
not counted; both gradients are. This is the only place with these formulas: `megatron-lce estimate` and
`megatron_lce.explain` print them, and `tests/test_estimate.py` holds them against measured peaks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_lce.core.blocks import (
    ALIGNED_COLUMNS,
    BlockBytes,
    kept_tokens,
    plan_blocks,
    stats_tokens,
    tokens_per_block,
)
from megatron_lce.core.products import slab_row_stride
from megatron_lce.core.softmax_stats import num_extremes, num_sums, packed_rows

Phases = dict[str, dict[str, int]]  # phase: {what is allocated in it: bytes}

TILE_COLUMNS = {2: 256, 4: 64}  # by bytes of an element: what a kept logits' tile holds
CHUNK_COLUMNS = {2: 128, 4: 64}  # what one row of statistics is about
PER_TOKEN_BYTES = 40  # a token's labels, factors, outputs and what backward needs of them
TERMS_BYTES = 24  # a token's row terms in backward


@dataclass(frozen=True)
class HeadStep:
    """Forward and backward of one microbatch's head on one rank.

    tokens             N, of the whole sequence: under sequence parallel the ranks hold tokens / tp of hidden each
    hidden             H
    columns            this rank's rows of the weight, V / tp
    ignored            share of the tokens whose label is `ignore_index`
    skip_ignored       they are left out of everything
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
    workspace_bytes: int = 512 * 2**20
    logits_cache_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden", "columns", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.itemsize not in TILE_COLUMNS:
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
        return self.computed * _kept_row_bytes(self, self.columns)


class Estimate(NamedTuple):
    """One way of computing the head.

    products       matrix products of N x H x V / tp each; eager torch's forward and backward are 3
    kept_bytes     held from forward to backward
    peak_bytes     largest phase, gradients included
    phase          the largest one
    parts          what is allocated in it, in bytes
    """

    way: str
    products: float
    kept_bytes: int
    peak_bytes: int
    phase: str
    parts: dict[str, int]

    def time_ms(self, step: HeadStep, tflops: float) -> float:
        """Time of the products alone at that many TFLOP/s, in ms."""
        return self.products * 2 * step.logits * step.hidden / (tflops * 1e9)


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
    kept_columns = _cache_columns(step)
    kept = {"kept logits": computed * _kept_row_bytes(step, kept_columns)} if kept_columns else {}
    per_token = {"per token": PER_TOKEN_BYTES * step.tokens}
    inputs = _inputs_of_a_block(step, block)
    backward = {"per token": (PER_TOKEN_BYTES + TERMS_BYTES) * step.tokens} | inputs | _weight_sum(step, several)
    if kept_columns == step.columns:
        slab, widest = kept, kept_columns
    else:
        widest, slab_bytes = _slab(step, block, step.columns - kept_columns)
        slab = {"slab of logits": slab_bytes} | (kept if several else {})
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
        phases["cast of hidden's gradient"] = backward | slab | summed | {"its cast": cast}
    if kept_columns:
        phases["kept logits' products"] = backward | kept | summed
    phases["slabs"] = backward | slab | summed
    reduced = {"hidden's gradient": whole} | _over_group(step)
    phases["last product"] = backward | slab | reduced
    placeholder = {"weight's gradient": step.weight_bytes}  # under main_grad it is one
    phases["end"] = backward | reduced | _all_rows(step) | placeholder
    return (4 - kept_columns / step.columns) * computed / step.tokens, phases


def skipped(step: HeadStep) -> tuple[float, Phases]:
    """`linear_cross_entropy(skip_ignored=...)`: the counted rows alone."""
    return ours(replace(step, skip_ignored=True))


def token_loss(step: HeadStep) -> tuple[float, Phases]:
    """`linear_token_loss` of 16-bit inputs: blocks of tokens go all the way in forward; backward scales gradients."""
    row_bytes, block = _kept_row_bytes(step, step.columns), _tokens_kept_at_once(step)
    if block is None:
        smallest = 128 * (row_bytes + _chunk_bytes(step))
        raise ValueError(f"workspace_bytes must hold the logits of 128 tokens and their statistics, {smallest} bytes")
    per_token = {"per token": PER_TOKEN_BYTES * step.tokens}
    hidden = {"hidden's gradient": step.computed * step.hidden * step.itemsize}
    summed = step.main_grad or block < step.computed
    made = {"fp32 sum of weight's gradient": 4 * step.columns * step.hidden}
    if not summed:
        made = {"weight's gradient": step.weight_bytes}
    share = step.hidden_bytes // step.tp if step.gathers else step.hidden_bytes
    saved = per_token | made | {"hidden's gradient": share}
    left = max(step.workspace_bytes - block * row_bytes, block * _chunk_bytes(step))
    statistics = _statistics_bytes(replace(step, workspace_bytes=left), block)
    forward = per_token | made | hidden | _inputs_of_a_block(step, block)
    return 3 * step.computed / step.tokens, {
        "blocks": forward | {"logits of a block": block * row_bytes, "statistics": statistics},
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


def estimate(way: str, step: HeadStep) -> Estimate:
    """Products and memory of one of `WAYS`."""
    products, phases = WAYS[way](step)
    totals = {phase: sum(parts.values()) for phase, parts in phases.items()}
    largest = max(totals, key=lambda phase: totals[phase])
    return Estimate(way, products, totals["kept"], totals[largest], largest, phases[largest])


def largest_tokens(way: str, step: HeadStep, memory_bytes: int, *, everything_kept: bool = False) -> int:
    """The largest number of tokens (a multiple of 128) whose step peaks within that memory; 0 if there is none."""

    def fits(blocks: int) -> bool:
        longer = replace(step, tokens=128 * blocks)
        if everything_kept:
            longer = replace(longer, logits_cache_bytes=longer.everything)
        return estimate(way, longer).peak_bytes <= memory_bytes

    low, high = 0, 1
    while fits(high) and high < 2**24:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 128 * low


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


def _all_rows(step: HeadStep) -> dict[str, int]:
    return {"gradient of all rows": step.hidden_bytes} if step.skip_ignored else {}


def _sum_bytes(step: HeadStep) -> int:
    """Of a column in an fp32 sum of the weight's gradient; none where its own tensor is that."""
    return 0 if step.itemsize == 4 or step.main_grad else 4 * step.hidden


def _weight_sum(step: HeadStep, several: bool) -> dict[str, int]:
    if step.main_grad:
        return {}
    if several and step.itemsize == 2:
        return {"fp32 sum of weight's gradient": 4 * step.columns * step.hidden}
    return {"weight's gradient": step.weight_bytes}


def _tokens_of_a_block(step: HeadStep) -> int:
    block_bytes = BlockBytes(step.itemsize, 0, _sum_bytes(step))
    block = tokens_per_block(step.computed, step.columns, step.workspace_bytes, block_bytes)
    ranks = step.tp if step.gathers else 1
    return min(step.computed, max(1, block // ranks) * ranks)


def _tokens_kept_at_once(step: HeadStep) -> int | None:
    """Of a block of `linear_token_loss`; None: too few, and logits are made twice."""
    row_bytes = _kept_row_bytes(step, step.columns) + _chunk_bytes(step)
    sum_bytes = _sum_bytes(step) * step.columns
    return None if step.itemsize == 4 else kept_tokens(step.computed, step.workspace_bytes, row_bytes, sum_bytes)


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
    per_token = _chunk_bytes(step)
    part = stats_tokens(block, step.workspace_bytes, BlockBytes(0, per_token))
    extremes, sums = 4 * num_extremes(telemetry=False), 8 * num_sums(step.entropy)
    over_group = part * (2 + step.tp) * extremes if step.tp > 1 else 0
    return part * (per_token + extremes + sums) + step.computed * (extremes + sums) + over_group


def _chunk_bytes(step: HeadStep) -> int:
    """One token's statistics of every chunk."""
    return 4 * -(-step.columns // CHUNK_COLUMNS[step.itemsize]) * packed_rows(step.entropy, telemetry=False)


def _slab(step: HeadStep, block: int, columns: int) -> tuple[int, int]:
    """Width and bytes of one slab of a block, with the fp32 sum of its weight's gradient where its tokens are cut."""
    sum_bytes = _sum_bytes(step)
    blocks = plan_blocks(
        block,
        slab_row_stride(columns),
        step.workspace_bytes,
        BlockBytes(step.itemsize),
        per_column_if_tokens_are_cut=sum_bytes,
    )
    slab = blocks.tokens * slab_row_stride(blocks.columns) * step.itemsize
    return blocks.columns, slab + (blocks.columns * sum_bytes if blocks.tokens < block else 0)


def _kept_row_bytes(step: HeadStep, columns: int) -> int:
    """One token's kept exponentials and each chunk's largest logit."""
    return slab_row_stride(columns) * step.itemsize + 4 * -(-columns // CHUNK_COLUMNS[step.itemsize])


def _cache_columns(step: HeadStep) -> int:
    """How many columns `logits_cache_bytes` keeps: all, or whole tiles; none of fp32 inputs."""
    if step.itemsize == 4:
        return 0
    if step.everything <= step.logits_cache_bytes:
        return step.columns
    tile = TILE_COLUMNS[step.itemsize]
    return step.logits_cache_bytes // (step.computed * _kept_row_bytes(step, tile)) * tile


def estimate_table(
    step: HeadStep,
    *,
    cache_bytes: int | None = None,
    tflops: float | None = None,
    memory_bytes: int | None = None,
) -> list[dict[str, Any]]:
    """All ways that apply to this step, as rows: way, products, kept_mib, peak_mib, and what else is asked for.

    Args:
        cache_bytes: adds a row with this `logits_cache_bytes`.
        tflops: adds `time_ms`, of the products at so many TFLOP/s.
        memory_bytes: adds `largest_tokens`, whose peak stays within it.
    """
    everything = replace(step, logits_cache_bytes=step.everything)
    cases = [("Megatron, unfused", "Megatron, unfused", step)]
    if step.itemsize == 2:  # on fp32 logits Megatron's fused gradient is bf16: not the same thing
        cases.append(("Megatron, fused cross-entropy", "Megatron, fused cross-entropy", step))
    cases.append(("megatron_lce", "megatron_lce", step))
    if cache_bytes is not None:
        kept = replace(step, logits_cache_bytes=cache_bytes)
        cases.append((f"megatron_lce, cache of {cache_bytes / 2**20:,.0f} MiB", "megatron_lce", kept))
    if step.itemsize == 2:
        cases.append(("megatron_lce, everything cached", "megatron_lce", everything))
    if _tokens_kept_at_once(step) is not None:
        cases.append(("megatron_lce, linear_token_loss", "megatron_lce, linear_token_loss", step))
    if step.ignored:
        cases.append((f"megatron_lce, {step.ignored:.0%} ignored and skipped", "megatron_lce, skip_ignored", step))
    rows = []
    for title, way, of_way in cases:
        result = estimate(way, of_way)
        row: dict[str, Any] = {"way": title, "products": round(result.products, 2)}
        if tflops is not None:
            row["time_ms"] = round(result.time_ms(step, tflops), 1)
        row |= {"kept_mib": round(result.kept_bytes / 2**20), "peak_mib": round(result.peak_bytes / 2**20)}
        if memory_bytes is not None:
            row["largest_tokens"] = largest_tokens(
                way,
                of_way,
                memory_bytes,
                everything_kept=of_way.logits_cache_bytes == everything.logits_cache_bytes > 0,
            )
        rows.append(row | {"peak_is": result.phase, "peak_parts_mib": _in_mib(result.parts)})
    return rows


def _in_mib(parts: dict[str, int]) -> dict[str, int]:
    return {part: round(size / 2**20) for part, size in parts.items() if size >= 2**19}


def format_estimates(title: str, rows: list[dict[str, Any]]) -> str:
    """The rows as a table in plain text, and below it what each peak is made of."""
    names = [name for name in rows[0] if not name.startswith("peak_is") and not name.startswith("peak_parts")]
    cells = [names] + [[f"{row[name]:,}" if name != "way" else row[name] for name in names] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    lines = [title, ""]
    for line in cells:
        numbers = "".join(cell.rjust(width + 2) for cell, width in zip(line[1:], widths[1:], strict=True))
        lines.append(line[0].ljust(widths[0]) + numbers)
    lines += ["", "What the peaks are made of, in MiB:"]
    for row in rows:
        parts = ", ".join(f"{part} {size:,}" for part, size in row["peak_parts_mib"].items())
        lines.append(f"{row['way']}, {row['peak_is']}: {parts}")
    return "\n".join(lines)
