"""Matmuls, time and peak memory of the head's implementations, and the recommended one, from `head_memory`.

`megatron-lce estimate` and `megatron_lce.explain` print them.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

from megatron_lce.command.head_memory import (
    FUSED,
    HEADS,
    KNOWN_LOSS,
    MOVED_BY_MEGATRON,
    OURS,
    TE,
    UNFUSED,
    UNLIMITED_CACHE,
    HeadStep,
)

MOST_TOKENS = 2**18  # that `largest_tokens` looks for
LITTLE_MIB = 1024  # a smaller saving matters little in a whole model


def largest_tokens(head: str, step: HeadStep, memory_bytes: int) -> int:
    """Return how many tokens fit: the step peaks within that memory, and beyond it with 1 % more tokens.

    A multiple of 128, at most `MOST_TOKENS`, 0 if not even 128 fit. Larger numbers may fit, too, where blocks are cut
    anew.
    """

    def peak(blocks: int) -> float:
        try:
            cost = HEADS[head](replace(step, tokens=128 * blocks))
        except ValueError:  # the workspace has no room for so many tokens
            return inf
        return inf if cost is None else cost.peak_bytes

    most, fits, exceeds = MOST_TOKENS // 128, 0, 1
    low, high = 0.0, peak(1)
    while high <= memory_bytes:
        if exceeds == most:
            return MOST_TOKENS
        fits, low, exceeds = exceeds, high, min(4 * exceeds, most)
        high = peak(exceeds)
    while exceeds - fits > max(1, fits // 100):  # the peak grows almost linearly with the tokens
        share = 0.5 if high == inf else min(max((memory_bytes - low) / (high - low), 0.1), 0.9)
        middle = min(max(fits + round(share * (exceeds - fits)), fits + 1), exceeds - 1)
        if (found := peak(middle)) <= memory_bytes:
            fits, low = middle, found
        else:
            exceeds, high = middle, found
    return 128 * fits


def estimate_table(
    step: HeadStep,
    *,
    cache_bytes: int | None = None,
    speeds: tuple[float, float] | None = None,
    memory_bytes: int | None = None,
) -> list[dict[str, Any]]:
    """Return a row per implementation that runs this step: head, matmuls, kept_mib, peak_mib, and more on request.

    `cache_bytes` adds a row with this `logits_cache_bytes`; `speeds` adds `time_ms`, with matmuls at the first, in
    TFLOP/s, and memory at the second, in TB/s; `memory_bytes` adds `most_tokens`, whose peak stays within it.
    """
    cached, all_cached = (replace(step, logits_cache_bytes=size) for size in (cache_bytes or 0, UNLIMITED_CACHE))
    skipped, masked = replace(step, skip_ignored=True), f"{step.ignored:.0%} masked and skipped"
    in_16_bits, some_ignored = step.dtype.itemsize == 2, step.ignored > 0
    cases = [
        (True, UNFUSED, UNFUSED, step),
        (in_16_bits, FUSED, FUSED, step),  # in fp32 it rounds the gradient to bf16: not comparable
        (in_16_bits, TE, TE, step),
        (True, OURS, OURS, step),
        (True, KNOWN_LOSS, KNOWN_LOSS, step),
        (cache_bytes is not None, f"{OURS}, cache of {cached.logits_cache_bytes / 2**20:,.0f} MiB", OURS, cached),
        (in_16_bits and step.backend == "triton", f"{OURS}, all logits cached", OURS, all_cached),
        (some_ignored, f"{OURS}, {masked}", OURS, skipped),
        (some_ignored, f"{KNOWN_LOSS}, {masked}", KNOWN_LOSS, skipped),
    ]
    rows = []
    for _, title, head, of_head in (case for case in cases if case[0]):
        if (cost := HEADS[head](of_head)) is None:
            continue
        row: dict[str, Any] = {"head": title, "matmuls": round(float(cost.matmuls), 2)}
        if speeds is not None:
            row["time_ms"] = round(cost.time_ms(step, *speeds), 1)
        row |= {"kept_mib": round(cost.kept_bytes / 2**20), "peak_mib": round(cost.peak_bytes / 2**20)}
        if memory_bytes is not None:
            row["most_tokens"] = largest_tokens(head, of_head, memory_bytes)
        rows.append(row)
    return rows


def saved_mib(rows: Sequence[dict[str, Any]]) -> int:
    """Return how far the default peaks below the lowest of Megatron's losses."""
    peaks = {row["head"]: row["peak_mib"] for row in rows}
    return peaks[_lowest_of_megatron(peaks)] - peaks[OURS]


def _lowest_of_megatron(peaks: dict[str, int]) -> str:
    return min((loss for loss in MOVED_BY_MEGATRON if loss in peaks), key=lambda loss: peaks[loss])


def verdict(rows: list[dict[str, Any]], budget_bytes: int | None = None) -> str:
    """Say how far the peak falls, and which row to take.

    The recommended row has the fewest matmuls of those that fit into the head's budget or, without a budget, peak no
    higher than Megatron; among several, the lowest peak.
    """
    peaks = {row["head"]: row["peak_mib"] for row in rows}
    saved, native = saved_mib(rows), f"{_size(peaks[UNFUSED])} (Megatron, unfused"
    if FUSED in peaks:
        others = f"{_size(peaks[UNFUSED])} unfused, {_size(peaks[TE])} with TransformerEngine's"
        native = f"{_size(peaks[FUSED])} (Megatron, fused; {others}"
    known = f", or to {_size(peaks[KNOWN_LOSS])} with known_loss=True" if KNOWN_LOSS in peaks else ""
    text = f"The head's peak falls from {native}) to {_size(peaks[OURS])}{known}."
    if saved <= 0:
        lowest = _lowest_of_megatron(peaks)
        text = f"Fusing saves no memory here: the head peaks at {_size(peaks[OURS])}, "
        text += f"and at {_size(peaks[lowest])} without it ({lowest})."
    elif saved < LITTLE_MIB:
        text += f" Fusing helps little here: at best Megatron peaks {_size(saved)} higher."
    most = peaks[OURS] + max(saved, 0) if budget_bytes is None else budget_bytes / 2**20
    within = [row for row in rows if row["head"].startswith(OURS) and row["peak_mib"] <= most]
    if not within:
        return f"{text} No row fits into {_size(most)}."
    # The known loss wins if peaks are nearly equal: it keeps no logits between forward and backward.
    best = min(within, key=lambda row: (row["matmuls"], row["peak_mib"] * (1.0 if KNOWN_LOSS in row["head"] else 1.05)))
    if saved <= 0 and best["matmuls"] >= 3:
        return text
    also = " (with a loss of your own: linear_token_loss)" if KNOWN_LOSS in best["head"] else ""
    return f"{text} Recommended: {best['head']}{also}."


def _size(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:,.0f} MiB"


def format_estimates(
    title: str, rows: list[dict[str, Any]], budget_bytes: int | None = None, notes: Sequence[str] = ()
) -> str:
    """Return the rows as a table in plain text, then notes, and the verdict at the end."""
    headers = {
        "head": "head",
        "matmuls": "matmuls (3 is the minimum)",
        "time_ms": "ms",
        "kept_mib": "kept MiB",
        "peak_mib": "peak MiB",
        "most_tokens": f"tokens in {(budget_bytes or 0) / 2**30:g} GiB",
    }
    names = [name for name in headers if name in rows[0]]
    cells = [[headers[name] for name in names]]
    cells += [[row[name] if name == "head" else f"{row[name]:,}" for name in names] for row in rows]
    if "most_tokens" in names:
        cells = [[*row[:-1], row[-1] + "+" * (row[-1] == f"{MOST_TOKENS:,}")] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [title, ""]
    for head, *numbers in cells:
        aligned = (number.rjust(width + 2) for number, width in zip(numbers, widths[1:], strict=True))
        lines.append(head.ljust(widths[0]) + "".join(aligned))
    small = "Kept memory is held from forward to backward. Peaks include both gradients, but not hidden and weight."
    lines += ["", small, *notes]
    peaks = {row["head"]: row["peak_mib"] for row in rows}
    for row in rows:  # those that may surprise
        head, _, how = row["head"].rpartition(", ")
        if row.get("most_tokens") == 0:
            lines.append(f"{row['head']}: the weight gradient and the workspace alone exceed the budget")
        if how.endswith("skipped") and row["peak_mib"] > peaks[head]:
            lines.append(f"{row['head']}: skipping raises the peak, because the remaining rows are copied")
    return "\n".join([*lines, "", verdict(rows, budget_bytes)])
