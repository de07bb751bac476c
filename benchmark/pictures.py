"""Pictures of benchmarks: each head has one colour in all of them, and whatever holds an N x V tensor is hatched."""

from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

from benchmark.ratios import jsd_limits_ms, products_by, products_ms
from benchmark.shapes import parse_shape

COLORS = {
    "ours": "tab:green",
    "ours-cached": "yellowgreen",
    "ours-token": "teal",
    "ours-token-640": "teal",
    "ours-token-1280": "mediumturquoise",
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
TITLES = {  # others' names are what they are called
    "ours": "megatron_lce",
    "ours-cached": "megatron_lce, all cached",
    "ours-token": "linear_token_loss",
    "ours-token-640": "linear_token_loss, 640 MiB",
    "ours-token-1280": "linear_token_loss, 1.25 GiB",
    "ours-main-grad": "megatron_lce, main_grad",
    "ours-token-main-grad": "linear_token_loss, main_grad",
    "ours-skip": "skip_ignored=True",
    "ours-count": "skip_ignored=number of counted rows",
    "ours-alone": "the counted rows by themselves",
    "ours-weights-512": "token_weights, 512 MiB",
    "ours-weights-1024": "token_weights, 1 GiB",
    "eager": "PyTorch, eager",
    "compile": "torch.compile",
    "megatron": "Megatron, fused",
    "liger": "Liger, Triton",
    "liger-sm90": "Liger, for Hopper",
    "cce": "Cut Cross-Entropy",
}
MARKERS = {"rl": "o", "sft": "s", "logprob": "^"}
OTHER_COLOR = "tab:cyan"
LINES = {"F": "-.", "2F+dX+dW": ":", "2(Fs+Ft)+dX+dW": ":"}  # of cuBLAS's time for these products; others "--"
HOLDS = "holds an N x V tensor"


def draw(document: dict, folder: Path, only: Collection[str] = ()) -> list[Path]:
    """Time bars with the cuBLAS limit, time over cache budget, time against memory, memory over tokens, time over the
    share of ignored rows, JSD: those there are records for.

    `only`: the names of those that are wanted (`time_rl`, `cache`, `trade`, `memory_S1`, `rows`, `jsd`); empty: all.

    Raises:
        ValueError: there are no records for one of `only`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    modes = dict.fromkeys(record["mode"] for record in document.get("times", []))
    draw_it = {f"time_{mode}": partial(_draw_times, mode=mode) for mode in modes}
    shapes = dict.fromkeys(record["shape"] for record in document.get("memory", []))
    draw_it |= {f"memory_{shape}": partial(_draw_memory, shape=shape) for shape in shapes}
    sections = {"cache": ("cache", _draw_cache), "times": ("trade", _draw_trade)}
    sections |= {"rows": ("rows", _draw_rows), "jsd": ("jsd", draw_jsd)}
    draw_it |= dict(named for section, named in sections.items() if document.get(section))
    if unknown := set(only) - draw_it.keys():
        raise ValueError(f"only must name some of {', '.join(draw_it)}, got {', '.join(sorted(unknown))}")
    return [
        drawing(document, path=folder / f"{name}.png") for name, drawing in draw_it.items() if not only or name in only
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
        records = [record for record in measured if record["shape"] == shape]
        panels.append((_title(mode, shape), records, _limits(document, shape, mode)))
    return draw_bars(document, panels, path)


def _title(what: str, name: str) -> str:
    """With the shape's tokens x hidden x vocabulary."""
    shape = parse_shape(name)
    return f"{what} at {name}: {shape.tokens:,} x {shape.hidden:,} x {shape.vocab:,}"


def _limits(document: dict, shape: str, mode: str) -> dict[str, float]:
    """cuBLAS's time in ms for the products that the mode needs, with and without computing the logits again."""
    products = products_ms(document, shape)
    if products is None:
        return {}
    if mode == "fwd":
        return {"F": products[0]}
    return {"F+dX+dW": sum(products), "2F+dX+dW": products[0] + sum(products)}


def draw_bars(document: dict, panels: list[tuple[str, list[dict], dict[str, float]]], path: Path) -> Path:
    """Panels of (title, records, {products: ms}) side by side; in each, one bar a provider, the fastest on top."""
    from matplotlib import pyplot

    hatched = holding_logits(document)
    figure, axes = pyplot.subplots(1, max(1, len(panels)), figsize=(4.6 * max(1, len(panels)), 3.8), squeeze=False)
    for axis, (title, records, limits) in zip(axes[0], panels, strict=False):
        records = sorted(records, key=lambda record: record["time_ms"], reverse=True)
        names = [record["provider"] for record in records]
        bars = axis.barh(
            [TITLES.get(name, name) for name in names],
            [record["time_ms"] for record in records],
            color=[COLORS.get(name, OTHER_COLOR) for name in names],
            hatch=["//" if name in hatched else "" for name in names],
            edgecolor="white",
        )
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8, bbox=box)
        axis.margins(x=0.2)
        axis.tick_params(labelsize=8)
        for name, limit in limits.items():
            axis.axvline(limit, color="black", linestyle=LINES.get(name, "--"))
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("ms, lower is better", fontsize=8)
    return _save(figure, document, path, _limit_handles(document, (name for _, _, limits in panels for name in limits)))


def _limit_handles(document: dict, limits: Iterable[str]) -> list:
    """Legend of the vertical lines and of the hatching."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    lines = [
        Line2D([], [], color="black", linestyle=LINES.get(name, "--"), label=f"{products_by(document)} {name}")
        for name in dict.fromkeys(limits)
    ]
    return [*lines, Patch(facecolor="lightgray", edgecolor="white", hatch="//", label=f"hatched: {HOLDS}")]


def _draw_cache(document: dict, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4.2))
    measured = [record for record in document["cache"] if record["status"] == "ok"]
    for mode in dict.fromkeys(record["mode"] for record in measured):
        records = [record for record in measured if record["mode"] == mode]
        budgets = [record["logits_cache_bytes"] / 2**30 for record in records]
        times = [record["time_ms"] for record in records]
        axis.plot(budgets, times, color=COLORS["ours"], marker=MARKERS[mode], label=f"megatron_lce, {mode}")
    shape = document["cache"][0]["shape"]
    for name, limit in _limits(document, shape, "rl").items():
        axis.axhline(limit, color="black", linestyle=LINES.get(name, "--"), label=f"{products_by(document)} {name}")
    axis.set(title=_title("forward and backward", shape), xlabel="logits_cache_bytes, GiB", ylabel="ms", ylim=(0, None))
    return _save(figure, document, path, axis.get_legend_handles_labels()[0])


def _over_gradients_gib(record: dict) -> float:
    return (record["peak_mib"] - record["gradients_mib"]) / 1024


def _with_memory(records: list[dict]) -> list[dict]:
    return [record for record in records if record["status"] == "ok" and record["peak_mib"] is not None]


def _draw_trade(document: dict, path: Path) -> Path:
    """Time against extra memory: a point for each head, curves of ours over its workspace and cache where measured."""
    measured = {x: _with_memory(document.get(x, [])) for x in ("times", "workspace", "cache")}
    panels = dict.fromkeys((x["mode"], x["shape"]) for x in measured["times"] if x["mode"] != "fwd")
    figure, axes = _grid(len(panels), width=4.6, height=3.6)
    legend: dict = {}
    for axis, (mode, shape) in zip(axes, sorted(panels), strict=True):
        points, by_workspace, by_cache = (
            [x for x in records if (x["mode"], x["shape"]) == (mode, shape)] for records in measured.values()
        )
        # The names of the one stand below and of the other above: the curves end close to each other.
        _plot_trade(axis, by_workspace, "ours-token", "workspace_mib", "{:g} MiB", "its workspace", (5, -10))
        _plot_trade(axis, by_cache, "ours", "fraction", "{:.0%}", "its cache", (6, 6))
        for record in points:
            name = record["provider"]
            point = (_over_gradients_gib(record), record["time_ms"])
            color, title = COLORS.get(name, OTHER_COLOR), TITLES.get(name, name)
            axis.plot(*point, "o", color=color, markersize=8, alpha=0.8, label=title)
        for name, limit in _limits(document, shape, mode).items():
            axis.axhline(limit, color="black", linestyle=LINES.get(name, "--"), label=f"{products_by(document)} {name}")
        axis.set_xscale("symlog", linthresh=0.25)
        axis.xaxis.set_major_formatter(lambda gib, _: f"{gib:g}")
        axis.set_xlim(-0.02, 2 * axis.dataLim.x1)  # room for a name
        axis.margins(y=0.15)
        axis.set_title(_title(mode, shape), fontsize=10)
        axis.set(xlabel="GiB of extra memory over the gradients", ylabel="ms")
        handles, labels = axis.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    return _save(figure, document, path, list(legend.values()))


def _plot_trade(axis, records: list[dict], name: str, size: str, text: str, what: str, offset: tuple[int, int]) -> None:
    """One curve, its ends labelled with what it is over."""
    records = sorted(records, key=lambda record: record[size])
    points = [(_over_gradients_gib(record), record["time_ms"]) for record in records]
    if points:
        axis.plot(*zip(*points, strict=True), color=COLORS[name], marker=".", label=f"{TITLES[name]} over {what}")
    x, y = offset
    for end, where, align in ((0, (-x, y), "right"), (-1, (x, y), "left")) if points else ():  # away from the curve
        place = {"xytext": where, "textcoords": "offset points", "horizontalalignment": align}
        axis.annotate(text.format(records[end][size]), points[end], **place, fontsize=7, color=COLORS[name])


def _draw_rows(document: dict, path: Path) -> Path:
    """Time over the share of ignored rows, a panel for each shape and mode; crosses are contiguous rows."""
    from matplotlib.lines import Line2D

    measured = [record for record in document["rows"] if record["status"] == "ok"]
    panels = list(dict.fromkeys((record["shape"], record["mode"]) for record in measured))
    figure, axes = _grid(len(panels), width=4.6, height=3.4)
    legend: dict = {}
    for axis, panel in zip(axes, panels, strict=True):
        for name in dict.fromkeys(record["provider"] for record in measured):
            records = [x for x in measured if (x["shape"], x["mode"], x["provider"]) == (*panel, name)]
            for layout, style in (("scattered", ".-"), ("contiguous", "x")):
                points = sorted((100 * x["ignored"], x["time_ms"]) for x in records if x["layout"] == layout)
                if points:
                    title = "skip_ignored=False" if name == "ours" else TITLES.get(name, name)
                    color = COLORS.get(name, OTHER_COLOR)
                    (line,) = axis.plot(*zip(*points, strict=True), style, color=color, label=title)
                    legend.setdefault(name, line)
        axis.set_title(_title(panel[1], panel[0]), fontsize=10)
        axis.set(xlabel="% of the rows ignored", ylabel="ms", ylim=(0, None))
    lines = [Line2D([], [], color="gray", linestyle="", marker="x", label="crosses: ignored rows lie together")]
    return _save(figure, document, path, [*legend.values(), *lines])


def _grid(panels: int, width: float, height: float) -> tuple:
    """A figure and the axes of its panels, at most three in a row."""
    from matplotlib import pyplot

    columns = 2 if panels == 4 else max(1, min(panels, 3))
    rows = max(1, -(-panels // columns))
    figure, axes = pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    for axis in axes.flat[panels:]:
        axis.set_axis_off()
    return figure, axes.flat[:panels]


def _draw_memory(document: dict, path: Path, shape: str) -> Path:
    from matplotlib import pyplot

    dashed = holding_logits(document)
    figure, axis = pyplot.subplots(figsize=(7, 5))
    measured = [record for record in _with_memory(document["memory"]) if record["shape"] == shape]
    for provider, mode in dict.fromkeys((record["provider"], record["mode"]) for record in measured):
        records = [record for record in measured if (record["provider"], record["mode"]) == (provider, mode)]
        records = sorted(records, key=lambda record: record["tokens"])
        axis.plot(
            [record["tokens"] for record in records],
            [_over_gradients_gib(record) for record in records],
            color=COLORS.get(provider, OTHER_COLOR),
            linestyle="--" if provider in dashed else "-",
            # With main_grad the curve may lie on the one without.
            linewidth=3.5 if provider.startswith("ours") and "main-grad" not in provider else 1.5,
            marker=MARKERS[mode],
            label=f"{TITLES.get(provider, provider)} ({mode})",
        )
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}k")
    sizes = parse_shape(shape)
    title = f"hidden {sizes.hidden:,}, vocabulary {sizes.vocab:,}" + (f"; dashed: {HOLDS}" if dashed else "")
    axis.set(title=title, xlabel="tokens", ylabel="GiB of extra memory over the gradients")
    axis.set_ylim(0, 1.1 * axis.dataLim.y1 if measured else 1)
    if axis.dataLim.y1 > 4:  # peers that grow with the tokens: a logarithm down to 256 MiB, linear from there to 0
        axis.set_yscale("symlog", linthresh=0.25)
        axis.yaxis.set_major_formatter(lambda gib, _: f"{gib:g}")
        axis.set_ylim(0, 2 * axis.dataLim.y1)
    return _save(figure, document, path, axis.get_legend_handles_labels()[0])


def _save(figure, document: dict, path: Path, legend: list) -> Path:
    """Writes the picture, its legend below, with a line on where its numbers were taken."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    environment = document["environment"]
    dtype = document["dtype"].removeprefix("torch.")
    where = f"{environment['device']}, {dtype}, torch {environment['versions']['torch']}, {environment['date'][:10]}"
    longest = max((len(handle.get_label()) for handle in legend), default=0)
    columns = max(1, min(len(legend), 4, int(figure.get_figwidth() / (0.7 + 0.065 * longest))))
    bottom = 0.07 + 0.18 * -(-len(legend) // columns) / figure.get_figheight()
    figure.legend(
        handles=legend, loc="lower center", ncol=columns, fontsize=8, frameon=False, bbox_to_anchor=(0.5, 0.02)
    )
    figure.text(0.01, 0.01, where, fontsize=6, color="gray")
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
