"""The picture of training curves: losses, below them the differences to the native run, beside them time and memory."""

from typing import Any

from benchmark.ratios import grouped, measured

TITLES = {
    "native-fused": "Megatron, fused cross-entropy",
    "ours": "flag on",
    "ours-known": "flag on, known_loss",
    "ours-skip": "flag on, skip_masked",
    "ours-known-skip": "flag on, known_loss, skip_masked",
}
COLORS = {"native-fused": "#6b7280", "ours": "#2563eb", "ours-known": "#d97706"}  # as in the other pictures
COLORS |= {"ours-skip": COLORS["ours"], "ours-known-skip": COLORS["ours-known"]}
NOISE = "native runs that take sums in another order"
WINDOW = 10  # steps to either side, over which the largest noise is the band's width


def draw_curves(document: dict) -> Any:
    """A column for all tokens and one for masked prompts, and one of bars."""
    from matplotlib import pyplot

    records = measured(document, "curves")
    groups = grouped(records, "masked")
    size = (4.6 * (len(groups) + 1), 6.6)
    figure, axes = pyplot.subplots(2, len(groups) + 1, figsize=size, squeeze=False, layout="constrained")
    for column, ((masked,), group) in enumerate(groups.items()):
        first = next(record for record in group if _in_order(record) and record["variant"] == "native-fused")
        _draw_losses(axes[0][column], group)
        _draw_differences(axes[1][column], group, first["losses"])
        tokens = first["step_tokens"] * len(first["losses"])
        title = f"{'masked prompts' if masked else 'every token counts'}: {tokens / 1e6:.1f} M tokens"
        axes[0][column].set_title(title, fontsize=10)
        for axis in axes[:, column]:
            axis.tick_params(labelsize=8)
    _draw_bars(axes[0][-1], records, "time_ms", "ms a step", 1.0)
    _draw_bars(axes[1][-1], records, "peak_mib", "GiB of peak memory over the resting state", 1024.0)
    return figure


def _in_order(record: dict) -> bool:
    return record["order"] == 0


def _style(variant: str) -> dict[str, Any]:
    return {"color": COLORS[variant], "label": TITLES[variant]}


def _draw_losses(axis: Any, group: list[dict]) -> None:
    """Every way's curve, each thinner than the one below it."""
    shown = [record for record in group if _in_order(record)]
    for index, record in enumerate(shown):
        steps = range(1, len(record["losses"]) + 1)
        axis.plot(
            steps, record["losses"], **_style(record["variant"]), linewidth=4 - 3 * index / max(1, len(shown) - 1)
        )
    axis.set_ylabel("loss per token, nats")


def _draw_differences(axis: Any, group: list[dict], native: list[float]) -> None:
    steps = range(1, len(native) + 1)
    noise = [_differences(x, native) for x in group if not _in_order(x)]
    if noise:
        largest = [max(map(abs, at_step)) for at_step in zip(*noise, strict=True)]
        band = [max(largest[max(0, i - WINDOW) : i + WINDOW + 1]) for i in range(len(largest))]
        axis.fill_between(steps, [-x for x in band], band, color="lightgray", label=f"noise: {NOISE}")
    for record in group:
        if _in_order(record) and record["variant"] != "native-fused":
            axis.plot(steps, _differences(record, native), **_style(record["variant"]), linewidth=0.9)
    axis.set(xlabel="optimizer step", ylabel="loss less that of the native run")


def _differences(record: dict, native: list[float]) -> list[float]:
    return [a - b for a, b in zip(record["losses"], native, strict=True)]


def _draw_bars(axis: Any, records: list[dict], field: str, title: str, unit: float) -> None:
    """One bar for each way, the first run on top."""
    shown = [record for record in reversed(records) if _in_order(record) and record[field] is not None]
    names = [TITLES[x["variant"]] + ("\nmasked prompts" if x["masked"] else "") for x in shown]
    bars = axis.barh(
        names, [record[field] / unit for record in shown], color=[COLORS[record["variant"]] for record in shown]
    )
    axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axis.margins(x=0.2)
    axis.tick_params(labelsize=8)
    axis.set_title(title, fontsize=10)
