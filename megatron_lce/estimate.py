"""What one step of the head takes: products, time, peak memory, and the most tokens that fit.

`megatron-lce estimate` and `megatron_lce.explain` print it; the formulas are those of `megatron_lce.head_memory`.
"""

from bisect import bisect_left
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_lce.head_memory import FORMULAS, HeadStep, token_loss_plan

TERABYTES = 3.35  # TB/s of an H100's memory


class Estimate(NamedTuple):
    """One way of computing the head.

    products       matrix products of N x H x V / tp each; eager torch's forward and backward are 3
    moved_bytes    through memory, by passes over logits beside the products
    kept_bytes     held from forward to backward
    peak_bytes     largest phase, gradients included
    phase          the largest one
    parts          what is allocated in it, in bytes
    """

    products: float
    moved_bytes: float
    kept_bytes: int
    peak_bytes: int
    phase: str
    parts: dict[str, int]

    def time_ms(self, step: HeadStep, tflops: float, terabytes: float) -> float:
        """Time in ms of the products at so many TFLOP/s, and of the passes over logits at so many TB/s."""
        products = self.products * 2 * step.logits * step.hidden
        return products / (tflops * 1e9) + self.moved_bytes / (terabytes * 1e9)


def estimate(way: str, step: HeadStep) -> Estimate:
    """Products and memory of one of `FORMULAS`."""
    products, moved, phases = FORMULAS[way](step)
    phases = {phase: {part: size for part, size in parts.items() if size} for phase, parts in phases.items()}
    totals = {phase: sum(parts.values()) for phase, parts in phases.items()}
    largest = max(totals, key=lambda phase: totals[phase])
    return Estimate(products, moved * step.logits, totals["kept"], totals[largest], largest, phases[largest])


def largest_tokens(way: str, step: HeadStep, memory_bytes: int) -> int:
    """The largest number of tokens (a multiple of 128) whose step peaks within that memory; 0 if there is none.

    By bisection: where blocks are cut anew more tokens may take less, and a larger number may fit as well.
    """

    def exceeds(blocks: int) -> bool:
        try:
            return estimate(way, replace(step, tokens=128 * blocks)).peak_bytes > memory_bytes
        except ValueError:  # so many tokens do not go in one block, and blocks have no room
            return True

    return 128 * bisect_left(range(1, 2**24), True, key=exceeds)


def estimate_table(
    step: HeadStep,
    *,
    cache_bytes: int | None = None,
    tflops: float | None = None,
    terabytes: float = TERABYTES,
    memory_bytes: int | None = None,
) -> list[dict[str, Any]]:
    """All ways that apply to this step, as rows: way, products, kept_mib, peak_mib, and what else is asked for.

    Args:
        cache_bytes: adds a row with this `logits_cache_bytes`.
        tflops: adds `time_ms`, with products at so many TFLOP/s.
        terabytes: TB/s of memory, for `time_ms`.
        memory_bytes: adds `largest_tokens`, whose peak stays within it.
    """
    native, ours, in_16_bits = "Megatron, unfused", "megatron_lce", step.itemsize == 2
    fused, token_loss = "Megatron, fused cross-entropy", "megatron_lce, linear_token_loss"
    cached, everything = (replace(step, logits_cache_bytes=size) for size in (cache_bytes or 0, step.everything))
    skipped = replace(step, skip_ignored=True)
    cases = [
        (True, native, native, step),
        (in_16_bits, fused, fused, step),  # on fp32 logits Megatron's fused gradient is bf16: not the same thing
        (True, ours, ours, step),
        (cache_bytes is not None, f"{ours}, cache of {cached.logits_cache_bytes / 2**20:,.0f} MiB", ours, cached),
        (in_16_bits, f"{ours}, everything cached", ours, everything),
        (token_loss_plan(step) is not None, f"{ours}, known_loss of the flag, linear_token_loss", token_loss, step),
        (step.ignored > 0, f"{ours}, {step.ignored:.0%} ignored and skipped", ours, skipped),
    ]
    rows = []
    for _, title, way, of_way in (case for case in cases if case[0]):
        result = estimate(way, of_way)
        row: dict[str, Any] = {"way": title, "products": round(float(result.products), 2)}
        if tflops is not None:
            row["time_ms"] = round(result.time_ms(step, tflops, terabytes), 1)
        row |= {"kept_mib": round(result.kept_bytes / 2**20), "peak_mib": round(result.peak_bytes / 2**20)}
        if memory_bytes is not None:
            row["largest_tokens"] = largest_tokens(way, of_way, memory_bytes)
        parts = {part: round(size / 2**20) for part, size in result.parts.items() if size >= 2**19}
        rows.append(row | {"peak_is": result.phase, "peak_parts_mib": parts})
    return rows


COLUMNS = {
    "products": "matrix products of tokens x hidden x columns, forward and backward",
    "time_ms": "of these products and of the passes over logits",
    "kept_mib": "held from forward to backward",
    "peak_mib": "the most of the step, both gradients included; hidden, weight and main_grad are not",
    "largest_tokens": "the most tokens whose peak stays within the given memory",
}


def format_estimates(title: str, rows: list[dict[str, Any]]) -> str:
    """The rows as a table in plain text; below it what the columns say, and what each peak is made of."""
    names = ["way", *(name for name in COLUMNS if name in rows[0])]
    cells = [names] + [[f"{row[name]:,}" if name != "way" else row[name] for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [title, ""]
    for way, *numbers in cells:
        aligned = (number.rjust(width + 2) for number, width in zip(numbers, widths[1:], strict=True))
        lines.append(way.ljust(widths[0]) + "".join(aligned))
    lines += ["", *(f"{name}: {COLUMNS[name]}" for name in names[1:])]
    lines += ["", "The phase in which each way peaks, and what is allocated then, in MiB:"]
    for row in rows:
        parts = ", ".join(f"{part} {size:,}" for part, size in row["peak_parts_mib"].items())
        lines.append(f"{row['way']} ({row['peak_is']}): {parts}")
    lines += _remarks(rows)
    return "\n".join(lines)


def _remarks(rows: list[dict[str, Any]]) -> list[str]:
    """What a reader may not expect of these rows."""
    ways = {row["way"]: row for row in rows}
    lines = [
        f"{way}: no number of tokens fits, as the weight's gradient and the workspace take more than that memory alone"
        for way, row in ways.items()
        if row.get("largest_tokens") == 0
    ]
    if ways["megatron_lce"]["kept_mib"] == 0:
        lines.append("megatron_lce keeps a few bytes a token from forward to backward, here less than 0.5 MiB")
    lines += [
        f"{way}: skipping raises the peak, as the counted rows of hidden or its gradient stand beside all of them"
        for way, row in ways.items()
        if "skipped" in way and row["peak_mib"] > ways["megatron_lce"]["peak_mib"]
    ]
    return ["", *lines] if lines else []
