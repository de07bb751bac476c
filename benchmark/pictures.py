"""Pictures of benchmarks: each head has one colour in all of them, and whatever holds an N x V tensor is hatched."""

import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from benchmark.curves_picture import draw_curves
from benchmark.ratios import grouped, jsd_limits_ms, limits_ms, measured, products_by
from benchmark.shapes import parse_shape
from benchmark.tables import HEADS, SKIPPING

COLORS = {
    "ours": "tab:green",
    "ours-cached": "yellowgreen",
    "ours-token": "teal",
    "ours-token-640": "teal",
    "ours-token-1280": "mediumturquoise",
    "ours-known-640": "steelblue",
    "ours-main-grad": "darkolivegreen",
    "ours-token-main-grad": "darkslategray",
    "ours-skip": "deepskyblue",
    "ours-count": "navy",
    "ours-alone": "black",
    "ours-weights-512": "teal",
    "ours-weights-1024": "mediumturquoise",
    "eager": "tab:gray",
    "compile": "tab:blue",
    "megatron": "tab:orange",
    "liger": "tab:purple",
    "liger-sm90": "plum",
    "verl": "tab:red",
    "cce": "tab:brown",
    "quack": "tab:pink",
}
TITLES = {  # beside those of the tables
    "ours-main-grad": "megatron_lce, main_grad",
    "ours-token-main-grad": "linear_token_loss, main_grad",
    "ours-alone": "the counted rows by themselves",
    "ours-weights-512": "token_weights, 512 MiB",
    "ours-weights-1024": "token_weights, 1 GiB",
}
MARKERS = {"rl": "o", "sft": "s", "logprob": "^"}
LINES = {"F": "-.", "2F+dX+dW": ":", "2(Fs+Ft)+dX+dW": ":"}  # of cuBLAS's time for these products; others "--"
HOLDS = "holds an N x V tensor"


def draw(document: dict, folder: Path, only: Collection[str] = ()) -> list[Path]:
    """Time bars with the cuBLAS limit, time over cache budget, time against memory, memory over tokens, time over the
    share of ignored rows, JSD, training curves: those there are records for.

    `only`: names of those that are wanted (`time_rl`, `cache`, `trade`, `memory_S1`, `rows`, `jsd`, `curves`), or all.

    Raises:
        ValueError: there are no records for one of `only`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    modes = dict.fromkeys(record["mode"] for record in document.get("times", []))
    draw_it = {f"time_{mode}": partial(_draw_times, mode=mode) for mode in modes}
    shapes = dict.fromkeys(record["shape"] for record in document.get("memory", []))
    draw_it |= {f"memory_{shape}": partial(_draw_memory, shape=shape) for shape in shapes}
    sections = {"cache": ("cache", _draw_cache), "times": ("trade", _draw_trade)}
    sections |= {"rows": ("rows", _draw_rows), "jsd": ("jsd", _draw_jsd), "curves": ("curves", draw_curves)}
    draw_it |= dict(named for section, named in sections.items() if document.get(section))
    if unknown := set(only) - draw_it.keys():
        raise ValueError(f"only must name some of {', '.join(draw_it)}, got {', '.join(sorted(unknown))}")
    chosen = {name: drawing for name, drawing in draw_it.items() if not only or name in only}
    return [_save(drawing(document), document, folder / f"{name}.png") for name, drawing in chosen.items()]


def _holding_logits(document: dict) -> set[str]:
    """The providers that keep a tensor of N x V elements."""
    always = ("compile", "eager")  # in runs of before this was noted
    records = document.get("providers", [])
    return {x["provider"] for x in records if x.get("holds_logits", x["provider"] in always)}


def _name(provider: str) -> str:
    """What a head is called in a legend; others' names are what they are called."""
    return TITLES.get(provider) or re.sub("[*`]", "", HEADS.get(provider, provider))


def _style(provider: str, **more: Any) -> dict[str, Any]:
    return {"color": COLORS.get(provider, "tab:cyan"), "label": _name(provider)} | more


def _title(what: str, name: str) -> str:
    """With the shape's tokens x hidden x vocabulary."""
    shape = parse_shape(name)
    return f"{what} at {name}: {shape.tokens:,} x {shape.hidden:,} x {shape.vocab:,}"


def _draw_jsd(document: dict) -> Any:
    """Time of every provider at every beta, with the limits."""
    limits = jsd_limits_ms(document)
    betas = grouped(measured(document, "jsd"), "beta")
    return _draw_bars(document, [(f"linear JSD, beta {beta:g}", records, limits) for (beta,), records in betas.items()])


def _draw_times(document: dict, mode: str) -> Any:
    shapes = grouped(measured(document, "times", mode=mode), "shape")
    return _draw_bars(
        document, [(_title(mode, name), found, limits_ms(document, name, mode)) for (name,), found in shapes.items()]
    )


def _draw_limits(line: Any, document: dict, limits: dict[str, float]) -> None:
    for name, limit in limits.items():
        line(limit, color="black", linestyle=LINES.get(name, "--"), label=f"{products_by(document)} {name}")


def _draw_bars(document: dict, panels: list[tuple[str, list[dict], dict[str, float]]]) -> Any:
    """Panels of (title, records, {products: ms}) side by side; in each, one bar a provider, the fastest on top."""
    hatched = _holding_logits(document)
    figure, axes = _figure(len(panels), 4.6, 3.8, columns=len(panels))
    for axis, (title, records, limits) in zip(axes, panels, strict=False):
        records = sorted(records, key=lambda record: record["time_ms"], reverse=True)
        names = [record["provider"] for record in records]
        bars = axis.barh(
            [_name(name) for name in names],
            [record["time_ms"] for record in records],
            color=[_style(name)["color"] for name in names],
            hatch=["//" if name in hatched else "" for name in names],
            edgecolor="white",
        )
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8, bbox=box)
        axis.margins(x=0.2)
        axis.tick_params(labelsize=8)
        _draw_limits(axis.axvline, document, limits)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("ms, lower is better", fontsize=8)
    axes[0].fill([], [], facecolor="lightgray", edgecolor="white", hatch="//", label=f"hatched: {HOLDS}")
    return figure


def _draw_cache(document: dict) -> Any:
    figure, (axis,) = _figure(1, 6, 4.2)
    for (mode,), records in grouped(measured(document, "cache"), "mode").items():
        points = [(record["logits_cache_bytes"] / 2**30, record["time_ms"]) for record in records]
        style = _style("ours", marker=MARKERS[mode], label=f"megatron_lce, {mode}")
        axis.plot(*zip(*points, strict=True), **style)
    shape = document["cache"][0]["shape"]
    _draw_limits(axis.axhline, document, limits_ms(document, shape, "rl"))
    axis.set(title=_title("forward and backward", shape), xlabel="logits_cache_bytes, GiB", ylabel="ms", ylim=(0, None))
    return figure


def _over_gradients_gib(record: dict) -> float:
    return (record["peak_mib"] - record["gradients_mib"]) / 1024


def _with_memory(document: dict, section: str, **values: str) -> list[dict]:
    return [record for record in measured(document, section, **values) if record["peak_mib"] is not None]


def _draw_trade(document: dict) -> Any:
    """Time against extra memory: a point for each head, curves of ours over its workspace and cache where measured."""
    panels = grouped([x for x in _with_memory(document, "times") if x["mode"] != "fwd"], "mode", "shape")
    figure, axes = _figure(len(panels), 4.6, 3.6)
    for axis, (mode, shape) in zip(axes, sorted(panels), strict=False):
        by_workspace, by_cache = (_with_memory(document, x, mode=mode, shape=shape) for x in ("workspace", "cache"))
        # The names of the one stand below and of the other above: the curves end close to each other.
        _plot_trade(
            axis,
            by_workspace,
            "ours-token",
            "workspace_mib",
            "{:g} MiB",
            "linear_token_loss over its workspace",
            (5, -10),
        )
        _plot_trade(axis, by_cache, "ours", "fraction", "{:.0%}", "megatron_lce over its cache", (6, 6))
        for record in panels[mode, shape]:
            style = _style(record["provider"], markersize=8, alpha=0.8)
            axis.plot(_over_gradients_gib(record), record["time_ms"], "o", **style)
        _draw_limits(axis.axhline, document, limits_ms(document, shape, mode))
        axis.set_xscale("symlog", linthresh=0.25)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlim(-0.02, 2 * axis.dataLim.x1)  # room for a name
        axis.margins(y=0.15)
        axis.set_title(_title(mode, shape), fontsize=10)
        axis.set(xlabel="GiB of extra memory over the gradients", ylabel="ms")
    return figure


def _plot_trade(
    axis, records: list[dict], name: str, size: str, text: str, label: str, offset: tuple[int, int]
) -> None:
    """One curve, its ends labelled with what it is over."""
    if not records:
        return
    records = sorted(records, key=lambda record: record[size])
    points = [(_over_gradients_gib(record), record["time_ms"]) for record in records]
    axis.plot(*zip(*points, strict=True), **_style(name, marker=".", label=label))
    x, y = offset
    for end, where, align in ((0, (-x, y), "right"), (-1, (x, y), "left")):  # away from the curve
        place = {"xytext": where, "textcoords": "offset points", "horizontalalignment": align}
        axis.annotate(text.format(records[end][size]), points[end], **place, fontsize=7, color=COLORS[name])


def _draw_rows(document: dict) -> Any:
    """Time over the share of ignored rows, a panel for each shape and mode; crosses are contiguous rows."""
    panels = grouped(measured(document, "rows"), "shape", "mode")
    figure, axes = _figure(len(panels), 4.6, 3.4)
    for axis, ((shape, mode), found) in zip(axes, panels.items(), strict=False):
        for (name, layout), records in grouped(found, "provider", "layout").items():
            points = sorted((100 * record["ignored"], record["time_ms"]) for record in records)
            title = re.sub("`", "", SKIPPING.get(name, _name(name)))
            mark = ".-" if layout == "scattered" else "x"
            axis.plot(*zip(*points, strict=True), mark, **_style(name, label=title))
        axis.set_title(_title(mode, shape), fontsize=10)
        axis.set(xlabel="% of the rows ignored", ylabel="ms", ylim=(0, None))
    axes[0].plot([], [], "x", color="gray", label="crosses: ignored rows lie together")
    return figure


def _draw_memory(document: dict, shape: str) -> Any:
    dashed = _holding_logits(document)
    figure, (axis,) = _figure(1, 7, 5)
    found = _with_memory(document, "memory", shape=shape)
    for (provider, mode), records in grouped(found, "provider", "mode").items():
        points = sorted((record["tokens"], _over_gradients_gib(record)) for record in records)
        style = _style(provider, marker=MARKERS[mode], label=f"{_name(provider)} ({mode})")
        style["linestyle"] = "--" if provider in dashed else "-"
        # With main_grad the curve may lie on the one without.
        width = 3.5 if provider.startswith("ours") and "main-grad" not in provider else 1.5
        axis.plot(*zip(*points, strict=True), **style, linewidth=width)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}k")
    sizes = parse_shape(shape)
    title = f"hidden {sizes.hidden:,}, vocabulary {sizes.vocab:,}" + (f"; dashed: {HOLDS}" if dashed else "")
    axis.set(title=title, xlabel="tokens", ylabel="GiB of extra memory over the gradients")
    axis.set_ylim(0, 1.1 * axis.dataLim.y1 if found else 1)
    if axis.dataLim.y1 > 4:  # peers that grow with the tokens: a logarithm down to 256 MiB, linear from there to 0
        axis.set_yscale("symlog", linthresh=0.25)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_ylim(0, 2 * axis.dataLim.y1)
    return figure


def _figure(panels: int, width: float, height: float, columns: int = 3) -> tuple[Any, Any]:
    """A figure and the axes of its panels, at most so many in a row."""
    from matplotlib import pyplot

    columns = 2 if panels == 4 == columns + 1 else max(1, min(panels, columns))
    rows = max(1, -(-panels // columns))
    size = (width * columns, height * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[panels:]:
        axis.set_axis_off()
    return figure, axes.flat[: max(1, panels)]


def _save(figure: Any, document: dict, path: Path) -> Path:
    """Writes the picture, its legend below, with a line on where its numbers were taken."""
    from matplotlib import pyplot

    legend: dict = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            legend.setdefault(label, handle)
    longest = max(map(len, legend), default=0)
    columns = max(1, min(len(legend), 4, int(figure.get_figwidth() / (0.7 + 0.065 * longest))))
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    environment = document["environment"]
    dtype, version = document["dtype"].removeprefix("torch."), environment["versions"]["torch"]
    where = f"{environment['device']}, {dtype}, torch {version}, {environment['date'][:10]}"
    figure.suptitle(where, x=0.01, horizontalalignment="left", fontsize=6, color="gray")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
