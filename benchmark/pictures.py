"""The pictures of README and docs: ours in colour, others in grey, each named at its line or bar."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark.results import extra_gib, measured

BLUE, ORANGE, GREY, DARK = "#2563eb", "#d97706", "#9ca3af", "#4b5563"
STEPS = {  # of a whole step: name and colour
    "native": ("Megatron", GREY),
    "native-fused": ("Megatron, fused\ncross-entropy", GREY),
    "te": ("Megatron, with\nTransformerEngine's loss", DARK),
    "ours": ("megatron-lce", BLUE),
}
MASKED_STEPS = STEPS | {"ours": ("megatron-lce", BLUE), "ours-skip": ("megatron-lce, masked\ntokens skipped", ORANGE)}


def step(document: dict) -> Any:
    """Transient memory and time of a training step, with every token in the loss and with 60 % masked."""
    figure, axes = _figure(2, 2, (9, 5.4))
    tp = max(x["tp"] for x in document["steps"])
    cases = {"every token in the loss": (0.0, STEPS), "60 % of the tokens masked": (0.6, MASKED_STEPS)}
    for row, (title, (masked, ways)) in zip(axes, cases.items(), strict=True):
        records = {x["variant"]: x for x in measured(document, "steps", tp=tp, masked=masked, tokens=16384)}
        bars = [(*ways[name], records[name]) for name in ways if name in records]
        memory = [(name, color, x["peak_mib"] / 1024, f"{x['peak_mib'] / 1024:.1f} GiB") for name, color, x in bars]
        _bars(row[0], f"Transient memory, {title}", memory)
        times = [(name, color, x["time_ms"], f"{x['time_ms']:.1f} ms") for name, color, x in bars]
        _bars(row[1], f"Time, {title}", times)
        row[1].set_yticklabels([])
    figure.suptitle(f"One training step, TP={tp}: four Qwen3-8B-size layers, 16,384 tokens, bf16", fontsize=11)
    return figure


def memory(document: dict) -> Any:
    """Memory of one head over its tokens, beyond the gradients."""
    figure, ((axis,),) = _figure(1, 1, (8, 4.2))
    heads = {"megatron": ("Megatron, fused\ncross-entropy", GREY)}
    heads["ours"] = ("megatron-lce", BLUE)
    heads["ours-0"] = ("megatron-lce,\nlogits_cache_bytes=0", ORANGE)
    heads["compile"] = ("torch.compile", DARK)
    lines = []
    for name, (title, color) in heads.items():
        records = measured(document, "memory", provider=name)
        lines.append((title, color, sorted((x["tokens"], extra_gib(x)) for x in records)))
    axis.set(xscale="log", yscale="log", xlabel="tokens, log scale", ylabel="GiB beyond the gradients, log scale")
    _lines(axis, lines)
    axis.axhline(80e9 / 2**30, color=DARK, linestyle=":", linewidth=1)
    axis.annotate(
        "80 GB GPU", (axis.dataLim.x0, 80e9 / 2**30), (0, 3), textcoords="offset points", color=DARK, fontsize=9
    )
    ticks = sorted({x for *_, points in lines for x, _ in points})
    axis.set_xticks(ticks, [f"{x // 1024}k" for x in ticks], minor=False)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlim(ticks[0] / 1.2, ticks[-1] * 3)
    axis.set_title("Head of Qwen3-8B: hidden 4,096, vocabulary 151,936")
    return figure


def distillation(document: dict) -> Any:
    """Memory of linear JSD at beta 0.5, with its time as text."""
    figure, ((axis,),) = _figure(1, 1, (8, 2.3))
    titles = {"compile": ("torch.compile", GREY), "ours": ("linear_jsd", BLUE)}
    titles["ours-loss-1024"] = ("linear_divergence_loss", ORANGE)
    records = {x["provider"]: x for x in measured(document, "jsd", beta=0.5)}
    bars = []
    for name in (name for name in titles if name in records):
        gib, ms = extra_gib(records[name]), records[name]["time_ms"]
        bars.append((*titles[name], gib, f"{gib:.1f} GiB, {ms:.1f} ms"))
    _bars(axis, "Distillation, 8,192 tokens, vocabulary 151,936: memory beyond the gradients, and time", bars)
    return figure


def training(document: dict) -> Any:
    """Losses of training runs from one seed, and their differences from Megatron's."""
    figure, ((above,), (below,)) = _figure(2, 1, (8, 5.6), sharex=True, height_ratios=(3, 2))
    runs = {x["run"]: x for x in measured(document, "training")}
    names = {
        "native": ("Megatron, fused cross-entropy", GREY),
        "native-again": ("Megatron, sums in another order", DARK),
    }
    names["flag"] = STEPS["ours"]
    native = runs["native"]["losses"]
    above.plot(range(1, len(native) + 1), native, color=GREY, linewidth=5, label=names["native"][0])
    for name in (name for name in names if name in runs and name != "native"):
        (title, color), losses = names[name], runs[name]["losses"]
        if name != "native-again":
            label = title.replace("\n", " ")
            above.plot(range(1, len(losses) + 1), losses, color=color, linewidth=1, label=label)
        apart = [_mean(a) - _mean(b) for a, b in zip(_parts(losses), _parts(native), strict=True)]
        steps = [PART * i + PART / 2 for i in range(len(apart))]
        below.plot(steps, apart, color=color, linewidth=1.3, label=title.replace("\n", " "))
    above.set(title="A GPT on real text: same weights, same batches", ylabel="loss per token, nats")
    below.axhline(0, color=GREY, linewidth=0.8)
    largest = max((abs(y) for line in below.lines for y in line.get_ydata()), default=1) or 1
    below.set(xlabel="optimizer step", ylabel=f"difference from Megatron,\nmean of {PART} steps")
    below.set_ylim(-1.1 * largest, 2.1 * largest)
    above.legend(fontsize=9, frameon=False)
    below.legend(fontsize=8, frameon=False, ncols=3, loc="upper center")
    return figure


PART = 20  # steps whose differences are drawn as one


def _parts(values: Sequence[float]) -> list[Sequence[float]]:
    size = min(PART, len(values))
    return [values[i : i + size] for i in range(0, len(values) - size + 1, size)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


PICTURES: dict[str, tuple[str, Callable[[dict], Any]]] = {  # the results' file, and what draws it
    "step": ("steps_tp", step),
    "memory": ("memory", memory),
    "distillation": ("jsd", distillation),
    "training": ("training", training),
}


def draw(name: str, document: dict, folder: Path) -> Path:
    """Draws an entry of `PICTURES` into the folder, with a line on where it was measured."""
    from matplotlib import pyplot  # of an extra

    figure = PICTURES[name][1](document)
    environment = document["environment"]
    figure.supxlabel(environment["device"].removeprefix("NVIDIA "), fontsize=7, color=DARK, x=0.97, ha="right")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=150)
    pyplot.close(figure)
    return folder / f"{name}.png"


def _figure(rows: int, columns: int, size: tuple[float, float], **more: Any) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **more)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10)
    return figure, axes


def _bars(axis: Any, title: str, bars: Sequence[tuple[str, str, float, str]]) -> None:
    """Horizontal bars of (name, colour, value, what stands behind it), the first on top."""
    names, colors, values, texts = zip(*bars, strict=True)
    drawn = axis.barh(range(len(bars)), values, color=colors)
    axis.bar_label(drawn, texts, padding=3, fontsize=9)
    axis.set_yticks(range(len(bars)), names, fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.3)
    axis.set_title(title, fontsize=10, loc="left")
    axis.xaxis.set_visible(False)
    axis.spines["bottom"].set_visible(False)


def _lines(axis: Any, lines: Sequence[tuple[str, str, list[tuple[float, float]]]]) -> None:
    """Lines of (name, colour, points), each named behind its end."""
    ends: list[float] = []
    for name, color, points in sorted(lines, key=lambda line: line[2][-1][1]):
        axis.plot(*zip(*points, strict=True), "o-", color=color, linewidth=2, markersize=5)
        end = points[-1][1]
        near = sum(abs(end - other) < 0.08 * end for other in ends)  # names must not lie on each other
        where = {"xytext": (8, 14 * near), "textcoords": "offset points", "va": "center"}
        axis.annotate(name, points[-1], color=color, fontsize=9, ha="left", **where)
        ends.append(end)
    axis.grid(alpha=0.3)
