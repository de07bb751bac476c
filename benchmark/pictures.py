"""Pictures of benchmarks: each head has one colour in all of them, and whatever holds an N x V tensor is hatched."""

from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

from benchmark.ratios import jsd_limits_ms, products_ms

COLORS = {
    "ours": "tab:green",
    "ours-cached": "yellowgreen",
    "ours-weights-512": "yellowgreen",
    "ours-weights-1024": "olivedrab",
    "eager": "tab:gray",
    "compile": "tab:blue",
    "megatron": "tab:orange",
    "liger": "tab:purple",
    "liger-sm90": "plum",
    "verl": "tab:red",
    "cce": "tab:brown",
    "quack": "tab:pink",
}
OTHER_COLOR = "tab:cyan"
LINES = {"F": "-.", "2F+dX+dW": ":", "2(Fs+Ft)+dX+dW": ":"}  # of cuBLAS's time for these products; others "--"
HOLDS = "holds an N x V tensor"


def draw(document: dict, folder: Path, only: Collection[str] = ()) -> list[Path]:
    """Time bars with the cuBLAS limit, time over cache budget, memory over tokens, JSD: those there are records for.

    `only`: of these, the pictures with these names (`time_rl`, `cache`, `memory`, `jsd`); empty: all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    modes = dict.fromkeys(record["mode"] for record in document.get("times", []))
    draw_it = {f"time_{mode}": partial(_draw_times, mode=mode) for mode in modes}
    draw_it |= {"cache": _draw_cache, "memory": _draw_memory, "jsd": draw_jsd}
    return [
        drawing(document, path=folder / f"{name}.png")
        for name, drawing in draw_it.items()
        if (name.startswith("time") or document.get(name)) and (not only or name in only)
    ]


def holding_logits(document: dict) -> set[str]:
    """The providers that keep a tensor of N x V elements."""
    always = ("compile", "eager")  # in runs of before this was noted
    records = document.get("providers", [])
    return {x["provider"] for x in records if x.get("holds_logits", x["provider"] in always)}


def draw_jsd(document: dict, path: Path) -> Path:
    """Time of every provider at every beta, with the limits."""
    limits = jsd_limits_ms(document)
    measured = [record for record in document["jsd"] if record["status"] == "ok"]
    panels = []
    for beta in dict.fromkeys(record["beta"] for record in measured):
        records = [record for record in measured if record["beta"] == beta]
        panels.append((f"linear JSD, beta {beta:g}", records, limits))
    return draw_bars(document, panels, path)


def _draw_times(document: dict, path: Path, mode: str) -> Path:
    measured = [record for record in document["times"] if record["mode"] == mode and record["status"] == "ok"]
    panels = []
    for shape in dict.fromkeys(record["shape"] for record in measured):
        limits = {}
        if products := products_ms(document, shape):
            limits = {"F+dX+dW": sum(products), "2F+dX+dW": products[0] + sum(products)}
            if mode == "fwd":
                limits = {"F": products[0]}
        records = [record for record in measured if record["shape"] == shape]
        panels.append((f"{mode} at {shape}", records, limits))
    return draw_bars(document, panels, path)


def draw_bars(document: dict, panels: list[tuple[str, list[dict], dict[str, float]]], path: Path) -> Path:
    """Panels of (title, records, {products: ms}) side by side; in each, one bar a provider, the fastest on top."""
    from matplotlib import pyplot

    hatched = holding_logits(document)
    figure, axes = pyplot.subplots(1, max(1, len(panels)), figsize=(4.6 * max(1, len(panels)), 3.8), squeeze=False)
    for axis, (title, records, limits) in zip(axes[0], panels, strict=False):
        records = sorted(records, key=lambda record: record["time_ms"], reverse=True)
        names = [record["provider"] for record in records]
        bars = axis.barh(
            names,
            [record["time_ms"] for record in records],
            color=[COLORS.get(name, OTHER_COLOR) for name in names],
            hatch=["//" if name in hatched else "" for name in names],
            edgecolor="white",
        )
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8, bbox=box)
        axis.margins(x=0.15)
        for name, limit in limits.items():
            axis.axvline(limit, color="black", linestyle=LINES.get(name, "--"))
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("ms, lower is better", fontsize=8)
    return _save(figure, document, path, _limit_handles(name for _, _, limits in panels for name in limits))


def _limit_handles(limits: Iterable[str]) -> list:
    """Legend of the vertical lines and of the hatching."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    lines = [
        Line2D([], [], color="black", linestyle=LINES.get(name, "--"), label=f"cuBLAS {name}")
        for name in dict.fromkeys(limits)
    ]
    return [*lines, Patch(facecolor="lightgray", edgecolor="white", hatch="//", label=f"hatched: {HOLDS}")]


def _draw_cache(document: dict, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4.2))
    measured = [record for record in document["cache"] if record["status"] == "ok"]
    for mode, marker in zip(dict.fromkeys(record["mode"] for record in measured), ("o", "s", "^"), strict=False):
        records = [record for record in measured if record["mode"] == mode]
        budgets = [record["logits_cache_bytes"] / 2**30 for record in records]
        times = [record["time_ms"] for record in records]
        axis.plot(budgets, times, color=COLORS["ours"], marker=marker, label=f"ours, {mode}")
    shape = document["cache"][0]["shape"]
    if products := products_ms(document, shape):
        for name, limit in {"F+dX+dW": sum(products), "2F+dX+dW": products[0] + sum(products)}.items():
            axis.axhline(limit, color="black", linestyle=LINES.get(name, "--"), label=f"cuBLAS {name}")
    axis.set(title=f"forward and backward at {shape}", xlabel="logits_cache_bytes, GiB", ylabel="ms", ylim=(0, None))
    return _save(figure, document, path, axis.get_legend_handles_labels()[0])


def _draw_memory(document: dict, path: Path) -> Path:
    from matplotlib import pyplot

    dashed = holding_logits(document)
    figure, axis = pyplot.subplots(figsize=(7, 5))
    measured = [r for r in document["memory"] if r["status"] == "ok" and r["peak_mib"] is not None]
    for provider in dict.fromkeys(record["provider"] for record in measured):
        records = sorted((r for r in measured if r["provider"] == provider), key=lambda record: record["tokens"])
        over_gradients = [(record["peak_mib"] - record["gradients_mib"]) / 1024 for record in records]
        axis.plot(
            [record["tokens"] for record in records],
            over_gradients,
            color=COLORS.get(provider, OTHER_COLOR),
            linestyle="--" if provider in dashed else "-",
            linewidth=2.5 if provider.startswith("ours") else 1.5,
            marker="o",
            label=f"{provider} ({records[0]['mode']})",
        )
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}k")
    axis.set_yscale("symlog", linthresh=0.25)  # a logarithm down to 256 MiB, linear from there to 0
    axis.yaxis.set_major_formatter(lambda gib, _: f"{gib:g}")
    axis.set(title=f"at the head of {document['memory'][0]['shape']}; dashed: {HOLDS}", xlabel="tokens")
    axis.set_ylabel("GiB of extra memory over the gradients")
    if measured:
        axis.set_ylim(0, 2 * axis.dataLim.y1)
    return _save(figure, document, path, axis.get_legend_handles_labels()[0])


def _save(figure, document: dict, path: Path, legend: list) -> Path:
    """Writes the picture, its legend below, with a line on where its numbers were taken."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    environment = document["environment"]
    dtype = document["dtype"].removeprefix("torch.")
    where = f"{environment['device']}, {dtype}, torch {environment['versions']['torch']}, {environment['date'][:10]}"
    columns = max(1, min(len(legend), 4))
    bottom = 0.07 + 0.18 * -(-len(legend) // columns) / figure.get_figheight()
    figure.legend(
        handles=legend, loc="lower center", ncol=columns, fontsize=8, frameon=False, bbox_to_anchor=(0.5, 0.03)
    )
    figure.text(0.01, 0.01, where, fontsize=6, color="gray")
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
