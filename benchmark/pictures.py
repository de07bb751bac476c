"""The pictures of README and docs: ours in colour, others in grey, each named at its line or bar."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark.results import extra_gib, measured

BLUE, ORANGE, GREY, DARK = "#2563eb", "#d97706", "#9ca3af", "#4b5563"
WAYS = {  # of a whole step: name and colour
    "native-fused": ("Megatron,\nfused cross-entropy", GREY),
    "ours": ("megatron-lce", BLUE),
    "ours-known": ("megatron-lce,\nknown_loss=True", ORANGE),
}
MASKED_WAYS = {
    "native-fused": WAYS["native-fused"],
    "ours-skip": ("megatron-lce,\nskip_masked=True", BLUE),
    "ours-known-skip": ("megatron-lce,\nknown_loss=True", ORANGE),
}


def step(document: dict) -> Any:
    """Peak memory and time of a training step at TP=2, with every token in the loss and with 60 % masked."""
    figure, axes = _figure(2, 2, (8, 5.2))
    cases = {"every token in the loss": (0.0, WAYS), "60 % of the tokens masked": (0.6, MASKED_WAYS)}
    for row, (title, (masked, ways)) in zip(axes, cases.items(), strict=True):
        records = {x["variant"]: x for x in measured(document, "steps", masked=masked, tp=2)}
        bars = [(*ways[name], records[name]) for name in ways if name in records]
        memory = [(name, color, x["peak_mib"] / 1024, f"{x['peak_mib'] / 1024:.1f} GiB") for name, color, x in bars]
        _bars(row[0], f"Transient memory: {title}", memory)
        times = [(name, color, x["time_ms"], f"{x['time_ms']:.0f} ms") for name, color, x in bars]
        _bars(row[1], f"Time: {title}", times)
        row[1].set_yticklabels([])
    figure.suptitle("Same training step, half the memory: four Qwen3-8B-size layers, TP=2, 8,192 tokens, bf16")
    return figure


def masked(document: dict) -> Any:
    """Time of a training step over the share of masked tokens."""
    figure, ((axis,),) = _figure(1, 1, (8, 3.8))
    lines = []
    for name, (title, color) in MASKED_WAYS.items():
        records = measured(document, "steps", variant=name, tp=2)
        lines.append((title, color, sorted((100 * x["masked"], x["time_ms"]) for x in records)))
    _lines(axis, lines)
    axis.set(title="Training step, TP=2, 8,192 tokens", xlabel="% of the tokens masked", ylabel="ms", xlim=(-2, 125))
    axis.set_ylim(0, None)
    axis.set_xticks(range(0, 100, 30))
    return figure


def memory(document: dict) -> Any:
    """Memory of one head over its tokens, beyond the gradients."""
    figure, ((axis,),) = _figure(1, 1, (8, 4))
    heads = {"megatron": ("Megatron, fused", GREY), "compile": ("torch.compile", DARK), "ours": ("megatron-lce", BLUE)}
    lines = []
    for name, (title, color) in heads.items():
        records = measured(document, "memory", provider=name)
        lines.append((title, color, sorted((x["tokens"], extra_gib(x)) for x in records)))
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="GiB beyond the gradients")
    _lines(axis, lines)
    axis.axhline(80, color=DARK, linestyle=":", linewidth=1)
    axis.annotate("80 GB GPU", (axis.dataLim.x0, 80), (0, 3), textcoords="offset points", color=DARK, fontsize=9)
    ticks = sorted({x for *_, points in lines for x, _ in points})
    axis.set_xticks(ticks, [f"{x // 1024}k" for x in ticks], minor=False)
    axis.set_xlim(ticks[0] / 1.2, ticks[-1] * 4)
    axis.set_title("Head of Qwen3-8B: hidden 4,096, vocabulary 151,936")
    return figure


def distillation(document: dict) -> Any:
    """Memory of linear JSD at beta 0.5, with its time as text."""
    figure, ((axis,),) = _figure(1, 1, (8, 2.4))
    titles = {"compile": ("torch.compile,\nwith all logits", GREY), "ours": ("linear_jsd", BLUE)}
    titles["ours-weights-512"] = ("linear_jsd,\ntoken_weights", ORANGE)
    records = {x["provider"]: x for x in measured(document, "jsd", beta=0.5)}
    bars = []
    for name in (name for name in titles if name in records):
        gib, ms = extra_gib(records[name]), records[name]["time_ms"]
        bars.append((*titles[name], gib, f"{gib:.1f} GiB, {ms:.0f} ms"))
    _bars(axis, "Distillation, 8,192 tokens, vocabulary 151,936: memory beyond the gradients, and time", bars)
    return figure


def training(document: dict) -> Any:
    """Losses of training runs from one seed, and their differences from the baseline."""
    figure, axes = _figure(2, 1, (8, 5.2), sharex=True, height_ratios=(2, 1))
    (above,), (below,) = axes
    runs = list(measured(document, "curves", masked=False))
    native = next(x for x in runs if x["run"] == "native")
    names = {"native": WAYS["native-fused"], "flag": WAYS["ours"], "known": WAYS["ours-known"]}
    for record in runs:
        title, color = names.get(record["run"], (None, GREY))
        steps, losses = range(1, len(record["losses"]) + 1), record["losses"]
        if title:
            width = 5 if record is native else 1.5
            above.plot(steps, losses, color=color, linewidth=width, label=title.replace("\n", " "))
        if record is not native:
            apart = [a - b for a, b in zip(losses, native["losses"], strict=True)]
            repeats = None if title or record["run"] != "native-1" else "Megatron again, other summation orders"
            below.plot(steps, apart, color=color, linewidth=1, label=repeats)
    above.set(title="GPT on real text, one seed", ylabel="loss per token, nats")
    below.set(xlabel="optimizer step", ylabel="difference\nfrom Megatron")
    above.legend(fontsize=9, frameon=False)
    below.legend(fontsize=8, frameon=False)
    return figure


PICTURES: dict[str, tuple[str, Callable[[dict], Any]]] = {  # the results' file, and what draws it
    "step": ("step_known_tp2_h100", step),
    "masked": ("step_known_tp2_h100", masked),
    "memory": ("memory_h200", memory),
    "distillation": ("jsd_h100", distillation),
    "training": ("curves_h100", training),
}


def draw(name: str, document: dict, folder: Path) -> Path:
    """Draws an entry of `PICTURES` into the folder, with a line on where it was measured."""
    from matplotlib import pyplot  # of an extra

    figure = PICTURES[name][1](document)
    environment = document["environment"]
    figure.supxlabel(
        f"{environment['device']}, torch {environment['versions']['torch']}", fontsize=7, color=GREY, x=0.9
    )
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
        where = {"xytext": (8, 24 * near), "textcoords": "offset points", "verticalalignment": "center"}
        axis.annotate(name, points[-1], color=color, fontsize=9, **where)
        ends.append(end)
    axis.grid(alpha=0.3)
