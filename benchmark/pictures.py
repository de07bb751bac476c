"""Pictures of benchmarks: ours in colour, others in grey, and names that stand at what they name."""

import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from benchmark.curves_picture import draw_curves
from benchmark.ratios import extra_gib, grouped, jsd_limits_ms, limits_ms, measured, products_by
from benchmark.shapes import parse_shape
from benchmark.tables import HEADS, SHAPES, SKIPPING

BLUE, ORANGE, TEAL, GREY = "#2563eb", "#d97706", "#0d9488", "#6b7280"  # the demo's, and one more
OURS = {  # every other head is grey
    "ours": BLUE,
    "ours-cached": BLUE,
    "ours-main-grad": TEAL,
    "ours-token-640": ORANGE,
    "ours-token-1280": ORANGE,
    "ours-known-640": "#b45309",
    "ours-token-main-grad": "#b45309",
    "ours-skip": ORANGE,
    "ours-count": TEAL,
    "ours-weights-512": ORANGE,
    "ours-weights-1024": ORANGE,
}
TITLES = {  # beside those of the tables
    "ours": "megatron_lce",
    "ours-main-grad": "megatron_lce, main_grad",
    "ours-token-640": "linear_token_loss",
    "ours-token-main-grad": "linear_token_loss, main_grad",
    "ours-alone": "the counted rows alone (dotted)",
    "ours-weights-512": "megatron_lce, token_weights, 512 MiB",
    "ours-weights-1024": "megatron_lce, token_weights, 1 GiB",
    "compile": "torch.compile",
}
MODES = {"rl": "logprobs and entropy", "sft": "the mean loss", "logprob": "logprobs"}
DASHES = ("--", ":")  # of the time that products take: without and with logits that are computed again
HOLDS = "hatched: holds the logits of all tokens"


def draw(document: dict, folder: Path, only: Collection[str] = ()) -> list[Path]:
    """Time bars with the cuBLAS limit, time against memory, memory over tokens, time over the share of ignored rows,
    JSD, training curves: those there are records for.

    `only`: the names of those that are wanted (`time_rl`, `trade_rl_S1`, `memory_rl_S3`, `rows_rl_S1`, `jsd`,
    `curves`); empty: all.

    Raises:
        ValueError: there are no records for one of `only`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw_it = {}
    for (mode,) in grouped(document.get("times", []), "mode"):
        draw_it[f"time_{mode}"] = partial(_draw_times, mode=mode)
    kinds = {"trade": ("times", _draw_trade), "memory": ("memory", _draw_memory), "rows": ("rows", _draw_rows)}
    for name, (section, drawing) in kinds.items():
        for mode, shape in grouped(document.get(section, []), "mode", "shape"):
            if name != "trade" or mode != "fwd":
                draw_it[f"{name}_{mode}_{shape}"] = partial(drawing, mode=mode, shape=shape)
    whole = {"jsd": _draw_jsd, "curves": draw_curves}
    draw_it |= {name: drawing for name, drawing in whole.items() if document.get(name)}
    if unknown := set(only) - draw_it.keys():
        raise ValueError(f"only must name some of {', '.join(draw_it)}, got {', '.join(sorted(unknown))}")
    chosen = {name: drawing for name, drawing in draw_it.items() if not only or name in only}
    return [_save(drawing(document), document, folder / f"{name}.png") for name, drawing in chosen.items()]


def _color(provider: str) -> str:
    return OURS.get(provider, GREY)


def _name(provider: str) -> str:
    """What a head is called in a picture; others' names are what they are called."""
    return TITLES.get(provider) or re.sub("[*`]", "", HEADS.get(provider, provider))


def _title(mode: str, name: str) -> str:
    shape = parse_shape(name)
    sizes = f"{shape.tokens:,} tokens, hidden {shape.hidden:,}, vocabulary {shape.vocab:,}"
    return f"Forward and backward of {MODES.get(mode, mode)}: {SHAPES.get(name, sizes)}"


def _with_memory(document: dict, section: str, **values: str) -> list[dict]:
    return [record for record in measured(document, section, **values) if record["peak_mib"] is not None]


def _label(axis: Any, text: str, point: tuple[float, float], color: str, x: int = 7, y: int = 0, **more: Any) -> None:
    """Writes `text` beside a point, `x` and `y` away from it."""
    place = {"horizontalalignment": "left" if x > 0 else "right", "verticalalignment": "center"} | more
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # where lines end
    axis.annotate(text, point, xytext=(x, y), textcoords="offset points", color=color, fontsize=10, bbox=box, **place)


def _label_ends(axis: Any, ends: list[tuple[str, float, float, str]]) -> None:
    """Writes the names of lines, (name, x, y, color), behind their ends, as far apart as a line of text is high."""
    step = 0.062 * axis.get_ylim()[1]
    free = -step / 2
    for name, x, y, color in sorted(ends, key=lambda end: end[2]):
        free = max(y, free + step)
        _label(axis, name, (x, free), color)


def _draw_jsd(document: dict) -> Any:
    """Time of every provider at every beta, with the limits."""
    limits = jsd_limits_ms(document)
    betas = grouped(measured(document, "jsd"), "beta")
    names = {"ours": "megatron_lce, per token"}
    return _draw_bars(document, [(f"beta {beta:g}", records, limits) for (beta,), records in betas.items()], names)


def _draw_times(document: dict, mode: str) -> Any:
    shapes = grouped(measured(document, "times", mode=mode), "shape")
    names = {"ours": "megatron_lce, the default"}
    panels = [(shape, found, limits_ms(document, shape, mode)) for (shape,), found in shapes.items()]
    return _draw_bars(document, panels, names)


def _draw_bars(document: dict, panels: list[tuple[str, list[dict], dict[str, float]]], names: dict[str, str]) -> Any:
    """Panels of (title, records, {products: ms}) side by side, one row a provider in all: the first panel's fastest on
    top."""
    always = ("compile", "eager")  # in runs of before this was noted
    holding = {x["provider"] for x in document.get("providers", []) if x.get("holds_logits", x["provider"] in always)}
    order = [record["provider"] for record in sorted(panels[0][1], key=lambda record: record["time_ms"])]
    figure, axes = _figure(len(panels), 0.75 + 0.35 * len(order))
    for axis, (title, records, limits) in zip(axes, panels, strict=True):
        for record in records:
            provider = record["provider"]
            hatch = "///" if provider in holding else ""
            end = record["time_ms"], order.index(provider)
            axis.barh(end[1], end[0], color=_color(provider), hatch=hatch, edgecolor="white")
            _label(axis, f"{end[0]:.1f}", end, "black", x=4)
        for dashes, (name, limit) in zip(DASHES, limits.items(), strict=False):
            axis.axvline(limit, color="black", linestyle=dashes, linewidth=1, label=f"{products_by(document)} {name}")
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("ms", fontsize=10)
        axis.grid(visible=False)
        axis.set_xlim(0, 1.35 * axis.dataLim.x1)
    axes[0].set_yticks(range(len(order)), [names.get(name) or _name(name) for name in order], fontsize=10)
    axes[0].invert_yaxis()
    axes[0].fill([], [], facecolor="lightgray", edgecolor="white", hatch="///", label=HOLDS)
    return figure


def _draw_trade(document: dict, mode: str, shape: str) -> Any:
    """Time against extra memory: a point for each head, curves of ours over its cache and workspace where measured."""
    figure, (axis,) = _figure(1, 4.4)
    found = {record["provider"]: record for record in _with_memory(document, "times", mode=mode, shape=shape)}
    names = {"compile": "torch.compile"}
    if mode == "rl":  # Megatron's own gives no entropy
        without = _with_memory(document, "times", mode="logprob", shape=shape, provider="megatron")
        found |= {record["provider"]: record for record in without}
        names["megatron"] = "Megatron, fused\ncross-entropy\n(no entropy)"
    if curve := _with_memory(document, "cache", mode=mode, shape=shape):
        found = {name: record for name, record in found.items() if name not in ("ours", "ours-cached")}
        _plot_curve(axis, curve)
    for provider, record in found.items():
        point = extra_gib(record), record["time_ms"]
        axis.plot(*point, "o", color=_color(provider), markersize=8)
        place = {"megatron": {"y": 2, "verticalalignment": "bottom"}, "eager": {"x": -9}}.get(provider, {"y": 2})
        _label(axis, names.get(provider) or _name(provider), point, _color(provider), **({"x": 9} | place))
    for limit in list(limits_ms(document, shape, mode).values())[:1]:
        axis.axhline(limit, color="black", linestyle=DASHES[0], linewidth=1)
        _label(axis, f"{products_by(document)}'s time for three products", (0, limit), "black", x=6, y=-9)
    axis.set_xscale("symlog", base=2, linthresh=0.25)
    ticks = [0, 0.25, 0.5, 1, 2, 4, 8, 16, 32]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlim(0, 32)
    axis.set_ylim(0, 1.12 * axis.dataLim.y1)
    axis.set_title(_title(mode, shape), fontsize=11)
    axis.set_xlabel("GiB of memory beyond the gradients (logarithmic)", fontsize=10)
    axis.set_ylabel("ms", fontsize=10)
    return figure


def _plot_curve(axis: Any, records: list[dict]) -> None:
    """Ours over its cache: points that say how much is kept where there is room."""
    records = sorted(records, key=lambda record: record["logits_cache_bytes"])
    points = [(extra_gib(record), record["time_ms"]) for record in records]
    kept = [f"{record['logits_cache_bytes'] / 2**30:.1f}" for record in records]
    axis.plot(*zip(*points, strict=True), "o-", color=BLUE, markersize=6, linewidth=2)
    _label(axis, "megatron_lce,\nthe default", points[0], BLUE, x=-9, y=-12)
    for number in range(2, len(points) - 1):  # the second lies close to the first
        _label(axis, kept[number] + " GiB" * (number == 2), points[number], BLUE, x=-1, y=-11)
    _label(axis, f"all logits kept:\n{kept[-1]} GiB", points[-1], BLUE, x=9, y=12)


def _draw_rows(document: dict, mode: str, shape: str) -> Any:
    """Time over the share of ignored rows, which are scattered where there are both layouts."""
    figure, (axis,) = _figure(1, 4)
    found = measured(document, "rows", mode=mode, shape=shape)
    layouts = {record["layout"] for record in found}
    found = [x for x in found if x["layout"] == ("scattered" if "scattered" in layouts else x["layout"])]
    ends = []
    for (provider,), records in grouped(found, "provider").items():
        points = sorted((100 * record["ignored"], record["time_ms"]) for record in records)
        if provider == "ours-count":  # as `True` is
            continue
        dashes, color = (":", "black") if provider == "ours-alone" else ("o-", _color(provider))
        axis.plot(*zip(*points, strict=True), dashes, color=color, linewidth=2, markersize=5)
        ends.append((re.sub("`", "", SKIPPING.get(provider, _name(provider))), *points[-1], color))
    axis.set_ylim(0, 1.05 * axis.dataLim.y1)
    axis.set_xlim(0, 150)
    axis.set_xticks(range(0, 101, 20))
    _label_ends(axis, ends)
    axis.set_title(_title(mode.removesuffix("-cached"), shape), fontsize=11)
    axis.set_xlabel("% of the rows ignored", fontsize=10, x=0.33)
    axis.set_ylabel("ms", fontsize=10)
    return figure


def _draw_memory(document: dict, mode: str, shape: str) -> Any:
    """Extra memory over the number of tokens."""
    figure, (axis,) = _figure(1, 4)
    ends = []
    for (provider,), records in grouped(_with_memory(document, "memory", mode=mode, shape=shape), "provider").items():
        points = sorted((record["tokens"], extra_gib(record)) for record in records)
        axis.plot(*zip(*points, strict=True), "o-", color=_color(provider), linewidth=2, markersize=5)
        ends.append((_name(provider), *points[-1], _color(provider)))
    axis.set_xscale("log", base=2)
    sizes = sorted({record["tokens"] for record in document["memory"] if record["shape"] == shape})
    axis.set_xticks(sizes, [f"{size / 1024:g}k" if size >= 1024 else str(size) for size in sizes])
    axis.set_ylim(0, 1.15 * axis.dataLim.y1 if ends else 1)
    if ends:
        axis.set_xlim(None, axis.dataLim.x1 * (axis.dataLim.x1 / axis.dataLim.x0) ** 0.6)
        _label_ends(axis, ends)
    of = parse_shape(shape)
    axis.set_title(f"{MODES.get(mode, mode)}: hidden {of.hidden:,}, vocabulary {of.vocab:,}", fontsize=11)
    axis.set_xlabel("tokens (logarithmic)", fontsize=10)
    axis.set_ylabel("GiB of memory beyond the gradients", fontsize=10)
    return figure


def _figure(panels: int, height: float) -> tuple[Any, Any]:
    """A figure as wide as a page, and the axes of its panels, which share their rows."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, max(1, panels), figsize=(8, height), squeeze=False, sharey=True)
    figure.set_layout_engine("constrained")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes.flat


def _save(figure: Any, document: dict, path: Path) -> Path:
    """Writes the picture, with a line on where its numbers were taken, and above that its legend if it has one."""
    from matplotlib import pyplot

    legend: dict = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            legend.setdefault(label, handle)
    if legend:
        figure.legend(legend.values(), legend, loc="outside lower center", ncols=len(legend), fontsize=9, frameon=False)
    environment = document["environment"]
    dtype, version = document["dtype"].removeprefix("torch."), environment["versions"]["torch"]
    where = f"{environment['device']}, {dtype}, torch {version}, {environment['date'][:10]}"
    figure.suptitle(where, x=0.01, horizontalalignment="left", fontsize=8, color=GREY)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
