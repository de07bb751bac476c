"""Pictures of benchmarks: ours in colour, others in grey, and names that stand at what they name."""

import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from benchmark.ratios import extra_gib, grouped, jsd_limits_ms, limits_ms, measured, products_by
from benchmark.shapes import parse_shape
from benchmark.tables import HEADS, RUNS, SHAPES, SKIPPING

BLUE, ORANGE, TEAL, BROWN, GREY = "#2563eb", "#d97706", "#0d9488", "#b45309", "#6b7280"  # the demo's, and two more
OURS = {  # every other head is grey
    **dict.fromkeys(("ours", "ours-cached"), BLUE),
    **dict.fromkeys(("ours-token-640", "ours-token-1280", "ours-known", "ours-known-skip"), ORANGE),
    **dict.fromkeys(("ours-skip", "ours-weights-512", "ours-weights-1024"), ORANGE),
    **dict.fromkeys(("ours-known-640", "ours-token-main-grad"), BROWN),
    "ours-main-grad": TEAL,
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
MEMORY = "GiB of memory beyond the gradients"
WINDOW = 10  # steps to either side, over which the largest noise of training runs is the band's width


def draw(document: dict, folder: Path, only: Collection[str] = ()) -> list[Path]:
    """Time bars with the cuBLAS limit, time against memory, memory over tokens, time over the share of ignored rows,
    JSD, training curves: those there are records for.

    `only`: the names of those that are wanted (`time_rl`, `trade_rl_S1`, `memory_rl_S3`, `rows_rl_S1`, `jsd`,
    `curves`); empty: all.

    Raises:
        ValueError: there are no records for one of `only`.
    """
    from matplotlib import pyplot  # of an extra

    folder.mkdir(parents=True, exist_ok=True)
    kinds = {  # the section, the fields of whose records tell pictures apart
        "time": (_draw_times, "times", "mode"),
        "trade": (_draw_trade, "times", "mode", "shape"),
        "memory": (_draw_memory, "memory", "mode", "shape"),
        "rows": (_draw_rows, "rows", "mode", "shape"),
        "jsd": (_draw_jsd, "jsd"),
        "curves": (_draw_curves, "curves"),
    }
    draw_it = {}
    for kind, (drawing, section, *fields) in kinds.items():
        for values in grouped(document.get(section, []), *fields):
            if (kind, *values[:1]) != ("trade", "fwd"):
                draw_it["_".join((kind, *values))] = partial(drawing, document, *values)
    if unknown := set(only) - draw_it.keys():
        raise ValueError(f"only must name some of {', '.join(draw_it)}, got {', '.join(sorted(unknown))}")
    paths = {name: folder / f"{name}.png" for name in draw_it if not only or name in only}
    for name, path in paths.items():
        with pyplot.rc_context({"axes.titlesize": 10 if name == "curves" else 11}):
            _save(draw_it[name](), document, path)
    return list(paths.values())


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


def _plot_lines(axis: Any, lines: list[tuple[str, list[tuple[float, float]], str]], height: float) -> None:
    """Plots lines of (name, points, color), dotted where black, below `height` times the highest point.

    Names stand behind the ends, as far apart as a line of text is high.
    """
    for _, points, color in lines:
        style = ":" if color == "black" else "o-"
        axis.plot(*zip(*points, strict=True), style, color=color, linewidth=2, markersize=5)
    axis.set_ylim(0, height * axis.dataLim.y1 if lines else 1)
    step = 0.062 * axis.get_ylim()[1]
    free = -step / 2
    for name, points, color in sorted(lines, key=lambda line: line[1][-1][1]):
        free = max(points[-1][1], free + step)
        _label(axis, name, (points[-1][0], free), color)


def _draw_jsd(document: dict) -> Any:
    """Time of every provider at every beta, with the limits."""
    betas = grouped(measured(document, "jsd"), "beta")
    panels = [(f"beta {beta:g}", records, jsd_limits_ms(document)) for (beta,), records in betas.items()]
    return _draw_bars(document, panels, "megatron_lce, per token")


def _draw_times(document: dict, mode: str) -> Any:
    shapes = grouped(measured(document, "times", mode=mode), "shape")
    panels = [(shape, records, limits_ms(document, shape, mode)) for (shape,), records in shapes.items()]
    return _draw_bars(document, panels, "megatron_lce, the default")


def _draw_bars(document: dict, panels: list[tuple[str, list[dict], dict[str, float]]], ours: str) -> Any:
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
        axis.set(title=title, xlabel="ms", xlim=(0, 1.35 * axis.dataLim.x1))
        axis.grid(visible=False)
    axes[0].set_yticks(range(len(order)), [ours if name == "ours" else _name(name) for name in order])
    axes[0].invert_yaxis()
    holds = "hatched: holds the logits of all tokens"
    axes[0].fill([], [], facecolor="lightgray", edgecolor="white", hatch="///", label=holds)
    return figure


def _draw_trade(document: dict, mode: str, shape: str) -> Any:
    """Time against extra memory: a point for each head, a curve of ours over its cache where measured."""
    figure, (axis,) = _figure(1, 4.4)
    found = {record["provider"]: record for record in _with_memory(document, "times", mode=mode, shape=shape)}
    megatron = _name("megatron")
    if mode == "rl":  # Megatron's own gives no entropy
        without = _with_memory(document, "times", mode="logprob", shape=shape, provider="megatron")
        found |= {record["provider"]: record for record in without}
        megatron = "Megatron, fused\ncross-entropy\n(no entropy)"
    if curve := _with_memory(document, "cache", mode=mode, shape=shape):
        found = {name: record for name, record in found.items() if name not in ("ours", "ours-cached")}
        _plot_curve(axis, curve)
    for provider, record in found.items():
        point = extra_gib(record), record["time_ms"]
        axis.plot(*point, "o", color=_color(provider), markersize=8)
        place = {"megatron": {"y": 2, "verticalalignment": "bottom"}, "eager": {"x": -9}}.get(provider, {"y": 2})
        name = megatron if provider == "megatron" else _name(provider)
        _label(axis, name, point, _color(provider), **({"x": 9} | place))
    for limit in list(limits_ms(document, shape, mode).values())[:1]:
        axis.axhline(limit, color="black", linestyle=DASHES[0], linewidth=1)
        _label(axis, f"{products_by(document)}'s time for three products", (0, limit), "black", x=6, y=-9)
    axis.set_xscale("symlog", base=2, linthresh=0.25)
    ticks = [0, 0.25, 0.5, 1, 2, 4, 8, 16, 32]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set(xlim=(0, 32), xlabel=f"{MEMORY} (logarithmic)", ylim=(0, 1.12 * axis.dataLim.y1), ylabel="ms")
    axis.set_title(_title(mode, shape))
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
    """Time over the share of ignored rows, which are scattered in runs that have another layout too."""
    figure, (axis,) = _figure(1, 4)
    lines = []
    found = measured(document, "rows", mode=mode, shape=shape, layout="scattered")
    for (provider,), records in grouped(found, "provider").items():
        if provider != "ours-count":  # as `True` is
            name, color = re.sub("`", "", SKIPPING.get(provider, _name(provider))), _color(provider)
            points = sorted((100 * record["ignored"], record["time_ms"]) for record in records)
            lines.append((name, points, "black" if provider == "ours-alone" else color))
    _plot_lines(axis, lines, 1.05)
    axis.set(title=_title(mode.removesuffix("-cached"), shape), ylabel="ms", xlim=(0, 150), xticks=range(0, 101, 20))
    axis.set_xlabel("% of the rows ignored", x=0.33)
    return figure


def _draw_memory(document: dict, mode: str, shape: str) -> Any:
    """Extra memory over the number of tokens."""
    figure, (axis,) = _figure(1, 4)
    lines = []
    for (provider,), records in grouped(_with_memory(document, "memory", mode=mode, shape=shape), "provider").items():
        points = sorted((record["tokens"], extra_gib(record)) for record in records)
        lines.append((_name(provider), points, _color(provider)))
    axis.set_xscale("log", base=2)
    _plot_lines(axis, lines, 1.15)
    sizes = sorted({record["tokens"] for record in document["memory"] if record["shape"] == shape})
    axis.set_xticks(sizes, [f"{size / 1024:g}k" if size >= 1024 else str(size) for size in sizes])
    if lines:
        axis.set_xlim(None, axis.dataLim.x1 * (axis.dataLim.x1 / axis.dataLim.x0) ** 0.6)
    of = parse_shape(shape)
    title = f"{MODES.get(mode, mode)}: hidden {of.hidden:,}, vocabulary {of.vocab:,}"
    axis.set(title=title, xlabel="tokens (logarithmic)", ylabel=MEMORY)
    return figure


def _draw_curves(document: dict) -> Any:
    """Training runs: a column of losses and their differences for all tokens, one for masked prompts, one of bars."""
    from matplotlib import pyplot

    groups, in_order = grouped(measured(document, "curves"), "masked"), measured(document, "curves", order=0)
    columns = len(groups) + 1
    figure, axes = pyplot.subplots(2, columns, figsize=(4.6 * columns, 6.6), squeeze=False, layout="constrained")
    for (above, below), ((masked,), group) in zip(axes.T, groups.items(), strict=False):
        ways = [record for record in in_order if record["masked"] == masked]
        native = next(record for record in ways if record["variant"] == "native-fused")
        tokens = native["step_tokens"] * len(native["losses"]) / 1e6
        title = f"{'masked prompts' if masked else 'every token counts'}: {tokens:.1f} M tokens"
        above.set(title=title, ylabel="loss per token, nats")
        below.set(xlabel="optimizer step", ylabel="loss less that of the native run")
        if noise := [_less(record, native) for record in group if record["order"]]:
            largest = [max(map(abs, at_step)) for at_step in zip(*noise, strict=True)]
            band = [max(largest[max(0, i - WINDOW) : i + WINDOW + 1]) for i in range(len(largest))]
            label = "noise: native runs that take sums in another order"
            below.fill_between(range(1, len(band) + 1), [-x for x in band], band, color="lightgray", label=label)
        for index, record in enumerate(ways):  # each curve thinner than the one below it
            steps = range(1, len(record["losses"]) + 1)
            style = {"color": _run_color(record), "label": RUNS[record["variant"]]}
            above.plot(steps, record["losses"], **style, linewidth=4 - 3 * index / max(1, len(ways) - 1))
            if record is not native:
                below.plot(steps, _less(record, native), **style, linewidth=0.9)
    _draw_runs(axes[0][-1], in_order, "time_ms", "ms a step", 1.0)
    _draw_runs(axes[1][-1], in_order, "peak_mib", "GiB of peak memory over the resting state", 1024.0)
    for axis in axes.flat:
        axis.tick_params(labelsize=8)
    return figure


def _less(record: dict, native: dict) -> list[float]:
    return [a - b for a, b in zip(record["losses"], native["losses"], strict=True)]


def _run_color(record: dict) -> str:
    """That of the way without a mask."""
    return _color(record["variant"].removesuffix("-skip"))


def _draw_runs(axis: Any, records: list[dict], field: str, title: str, unit: float) -> None:
    """One bar for each way, the first run on top."""
    shown = [record for record in reversed(records) if record[field] is not None]
    names = [RUNS[x["variant"]] + ("\nmasked prompts" if x["masked"] else "") for x in shown]
    bars = axis.barh(names, [record[field] / unit for record in shown], color=[_run_color(record) for record in shown])
    axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axis.margins(x=0.2)
    axis.set_title(title)


def _figure(panels: int, height: float) -> tuple[Any, Any]:
    """A figure as wide as a page, and the axes of its panels, which share their rows."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, max(1, panels), figsize=(8, height), squeeze=False, sharey=True)
    figure.set_layout_engine("constrained")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes.flat


def _save(figure: Any, document: dict, path: Path) -> None:
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
