"""Tables and pictures of a benchmark's JSON: `python -m benchmark.report results.json --pictures folder`."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table


def products_ms(document: dict, shape: str) -> tuple[float, float, float] | None:
    """Median cuBLAS times of one shape in this run: logits, hidden's gradient, weight's gradient."""
    records = [
        record for record in document.get("products", []) if record["shape"] == shape and record["status"] == "ok"
    ]
    if not records:
        return None
    names = ("logits_ms", "grad_hidden_ms", "grad_weight_ms")
    logits, grad_hidden, grad_weight = (median(ms for record in records for ms in record[name]) for name in names)
    return logits, grad_hidden, grad_weight


def add_ratios(document: dict) -> None:
    """Adds to every time its ratio to the products the mode cannot do without.

    over_products             F for mode `fwd`, else F + dX + dW
    over_products_recomputed  2F + dX + dW: what a head must do that keeps no logits for its backward
    """
    for record in document.get("times", []) + document.get("cache", []):
        products = products_ms(document, record["shape"])
        if record["status"] != "ok" or products is None:
            continue
        if record["mode"] == "fwd":
            record["over_products"] = record["time_ms"] / products[0]
        else:
            record["over_products"] = record["time_ms"] / sum(products)
            record["over_products_recomputed"] = record["time_ms"] / (products[0] + sum(products))


def one_line(section: str, record: dict) -> str:
    values = (f"{key}={_text(value)}" for key, value in record.items() if not isinstance(value, list))
    return f"{section}: " + " ".join(values)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value)


def print_header(document: dict, console: Console) -> None:
    """Where the numbers were taken, and which providers are missing."""
    environment = document["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    console.print(f"{environment['device']}, {document['dtype']}, {versions}, {environment['date']}", highlight=False)
    missing = [record for record in document.get("providers", []) if record["status"] != "ok"]
    for line in dict.fromkeys(f"{x['provider']}: {x['status']}: {x.get('reason', '')}" for x in missing):
        console.print(line, markup=False, highlight=False)


def print_tables(document: dict, console: Console | None = None) -> None:
    """Every section as a table; what was not measured stands there with its reason."""
    console = console or Console(width=150)
    print_header(document, console)
    times = document.get("times", [])
    for shape in dict.fromkeys(record["shape"] for record in times):
        products = products_ms(document, shape)
        title = f"{shape}: no cuBLAS times"
        if products:
            title = f"{shape}: cuBLAS F {products[0]:.2f} ms, dX {products[1]:.2f} ms, dW {products[2]:.2f} ms"
        columns = ("time_ms", "over_products", "over_products_recomputed", "peak_mib", "gradients_mib", "first_call_s")
        records = [record for record in times if record["shape"] == shape]
        print_table(console, title, ("mode", "provider"), columns, sorted(records, key=lambda x: x["mode"]))
    errors = document.get("errors", [])
    columns = dict.fromkeys(key for record in errors for key in record if key.endswith("_error"))
    print_table(console, "error against fp64", ("shape", "provider", "mode"), columns, errors)
    columns = ("time_ms", "over_products", "over_products_recomputed", "peak_mib")
    keys = ("shape", "mode", "fraction", "logits_cache_bytes")
    print_table(console, "ours over logits_cache_bytes", keys, columns, document.get("cache", []))
    keys = ("shape", "tokens", "mode", "provider")
    print_table(console, "memory over tokens", keys, ("peak_mib", "gradients_mib"), document.get("memory", []))


def print_table(console: Console, title: str, keys: Iterable, columns: Iterable, records: list[dict]) -> None:
    """One row a record: its keys, its columns, and why it has none where it was not measured."""
    if not records:
        return
    table = Table(title=title, title_justify="left")
    for name in (*keys, *columns):
        table.add_column(name, justify="left" if name in keys else "right")
    all_measured = all(record["status"] == "ok" for record in records)
    if not all_measured:
        table.add_column("not measured", overflow="fold")
    for record in records:
        cells = [_text(record.get(name)) for name in (*keys, *columns)]
        if not all_measured:
            cells.append("" if record["status"] == "ok" else f"{record['status']}: {record.get('reason', '')}"[:120])
        table.add_row(*cells)
    console.print(table)


def draw_pictures(document: dict, folder: Path) -> list[Path]:
    """Time bars with the cuBLAS limit, memory over tokens, time over cache budget: those there are records for."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for mode in dict.fromkeys(record["mode"] for record in document.get("times", [])):
        drawn.append(_draw_times(document, mode, folder / f"time_{mode}.png"))
    if document.get("cache"):
        drawn.append(_draw_cache(document, folder / "cache.png"))
    if document.get("memory"):
        drawn.append(_draw_memory(document, folder / "memory.png"))
    return drawn


def _caption(document: dict) -> str:
    environment = document["environment"]
    dtype = document["dtype"].removeprefix("torch.")
    return f"{environment['device']}, {dtype}, torch {environment['versions']['torch']}, {environment['date'][:10]}"


def _draw_times(document: dict, mode: str, path: Path) -> Path:
    from matplotlib import pyplot

    measured = [record for record in document["times"] if record["mode"] == mode and record["status"] == "ok"]
    shapes = list(dict.fromkeys(record["shape"] for record in measured))
    holding = {record["provider"] for record in document["providers"] if record["holds_logits"]}
    figure, axes = pyplot.subplots(1, max(1, len(shapes)), figsize=(5 * max(1, len(shapes)), 3.5), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=False):
        limits = []
        if products := products_ms(document, shape):
            limits = [(sum(products), "--", "cuBLAS F+dX+dW"), (products[0] + sum(products), ":", "cuBLAS 2F+dX+dW")]
            if mode == "fwd":
                limits = [(products[0], "--", "cuBLAS F")]
        draw_bars(axis, [record for record in measured if record["shape"] == shape], limits, holding)
        axis.set_title(f"{mode} at {shape}", fontsize=10)
        axis.set_xlabel("ms, lower is better; hatched: holds an N x V tensor", fontsize=8)
    return save_figure(figure, document, path)


def draw_bars(axis, records: list[dict], limits: list[tuple[float, str, str]], hatched: set[str]) -> None:
    """One bar a provider, the fastest on top, and a vertical line for each (ms, line style, label) of `limits`."""
    records = sorted(records, key=lambda record: record["time_ms"], reverse=True)
    names = [record["provider"] for record in records]
    colors = ["tab:green" if name.startswith("ours") else "tab:gray" for name in names]
    hatches = ["//" if name in hatched else "" for name in names]
    bars = axis.barh(names, [record["time_ms"] for record in records], color=colors, hatch=hatches, edgecolor="white")
    axis.bar_label(
        bars, fmt="%.1f", padding=3, fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    )
    axis.margins(x=0.15)
    for limit, style, label in limits:
        axis.axvline(limit, color="black", linestyle=style, label=label)
    if limits:
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncol=2, frameon=False)


def _draw_cache(document: dict, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4))
    measured = [record for record in document["cache"] if record["status"] == "ok"]
    for mode in dict.fromkeys(record["mode"] for record in measured):
        records = [record for record in measured if record["mode"] == mode]
        budgets = [record["logits_cache_bytes"] / 2**30 for record in records]
        axis.plot(budgets, [record["time_ms"] for record in records], marker="o", label=mode)
    shape = document["cache"][0]["shape"]
    if products := products_ms(document, shape):
        axis.axhline(sum(products), color="black", linestyle="--", label="cuBLAS F+dX+dW")
        axis.axhline(products[0] + sum(products), color="black", linestyle=":", label="cuBLAS 2F+dX+dW")
    axis.set(title=f"forward and backward at {shape}", xlabel="logits_cache_bytes, GiB", ylabel="ms", ylim=(0, None))
    axis.legend()
    return save_figure(figure, document, path)


def _draw_memory(document: dict, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    measured = [r for r in document["memory"] if r["status"] == "ok" and r["peak_mib"] is not None]
    for provider in dict.fromkeys(record["provider"] for record in measured):
        records = [record for record in measured if record["provider"] == provider]
        over_gradients = [(record["peak_mib"] - record["gradients_mib"]) / 1024 for record in records]
        width = 2.5 if provider.startswith("ours") else 1.2
        label = f"{provider} ({records[0]['mode']})"
        axis.plot([record["tokens"] for record in records], over_gradients, marker="o", linewidth=width, label=label)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}k")
    axis.set_yscale("symlog", linthresh=0.25)  # a logarithm down to 256 MiB, linear from there to 0
    axis.yaxis.set_major_formatter(lambda gib, _: f"{gib:g}")
    axis.set(title=f"at the head of {document['memory'][0]['shape']}", xlabel="tokens")
    axis.set_ylabel("GiB of extra memory over the gradients")
    if measured:
        axis.set_ylim(0, 2 * axis.dataLim.y1)
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return save_figure(figure, document, path)


def save_figure(figure, document: dict, path: Path) -> Path:
    """Writes the picture with a line on where its numbers were taken."""
    from matplotlib import pyplot

    figure.text(0.01, 0.01, _caption(document), fontsize=6, color="gray")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="JSON written by benchmark.run")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures")
    arguments = parser.parse_args(argv)
    document = json.loads(arguments.results.read_text())
    print_tables(document)
    if arguments.pictures:
        draw_pictures(document, arguments.pictures)


if __name__ == "__main__":
    main()
