"""Tables and pictures of benchmarks' JSON: `python -m benchmark.report results.json --pictures folder`."""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark import pictures, results
from benchmark.ratios import products_by, products_ms
from benchmark.results import as_cell
from scripts.arguments import HelpFormatter


def print_header(document: dict, console: Any) -> None:
    """Where the numbers were taken, and which providers are missing."""
    environment = document["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    console.print(f"{environment['device']}, {document['dtype']}, {versions}, {environment['date']}", highlight=False)
    missing = [record for record in document.get("providers", []) if record["status"] != "ok"]
    for line in dict.fromkeys(f"{x['provider']}: {x['status']}: {x.get('reason', '')}" for x in missing):
        console.print(line, markup=False, highlight=False)


SECTIONS = {  # title, and what tells records apart; every other number in them is a column
    "times": ("forward and backward", ("shape", "mode", "provider")),
    "errors": ("error against fp64", ("shape", "provider", "mode")),
    "cache": ("ours over logits_cache_bytes", ("shape", "mode", "fraction", "logits_cache_bytes")),
    "workspace": ("linear_token_loss over workspace_bytes", ("shape", "mode", "workspace_mib")),
    "host": (
        "a call on an idle device: until it returns, until the device is done",
        ("shape", "mode", "provider"),
    ),
    "memory": ("memory over tokens", ("shape", "tokens", "mode", "provider")),
    "rows": ("time over the share of ignored rows", ("shape", "mode", "ignored", "layout", "provider")),
    "jsd": ("linear JSD, forward and backward", ("shape", "beta", "provider")),
    "jsd_errors": ("error against fp64", ("shape", "beta", "provider")),
    "steps": (
        "forward and backward of a GPT: slowest rank, peak memory over the resting state",
        ("tp", "pp", "tokens", "masked", "variant"),
    ),
    "curves": (
        "a GPT trained on real text: peak memory over the resting state, losses beside the native run's",
        ("tp", "run", "variant"),
    ),
    "rounding": ("mean |difference of logprobs| between sampler and trainer", ("trainer",)),
}
NO_COLUMNS = ("status", "reason", "provider", "fastest_ms", "slowest_ms", "repeats", "first_call_s")
NO_COLUMNS += ("losses", "order")  # of training curves: one is long, the other in the name


def print_tables(document: dict) -> None:
    """Every section as a table; what was not measured stands there with its reason."""
    from rich.console import Console

    console = Console(width=170)
    print_header(document, console)
    for shape in dict.fromkeys(record["shape"] for record in document.get("products", [])):
        if products := products_ms(document, shape):
            text = "F {:.2f}, dX {:.2f}, dW {:.2f} ms".format(*products)
            console.print(f"{shape}: {products_by(document)} {text}", highlight=False)
    for record in document.get("all_reduce", []):
        if record["status"] == "ok":
            console.print(f"{record['shape']}: all-reduce {record['time_ms']:.2f} ms", highlight=False)
    for section, (title, keys) in SECTIONS.items():
        if records := document.get(section):
            console.print(as_table(title, keys, records))


def as_table(title: str, keys: Sequence[str], records: list[dict]) -> Any:
    """One row a record: its keys, what was measured, and why it has nothing where it was not."""
    from rich.table import Table  # of an extra

    columns = [name for name in dict.fromkeys(itertools.chain(*records)) if name not in (*keys, *NO_COLUMNS)]
    table = Table(*keys, title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    all_measured = all(record["status"] == "ok" for record in records)
    if not all_measured:
        table.add_column("not measured", overflow="fold")
    for record in records:
        cells = [as_cell(record.get(name)) for name in (*keys, *columns)]
        if not all_measured:
            cells.append("" if record["status"] == "ok" else f"{record['status']}: {record.get('reason', '')}"[:120])
        table.add_row(*cells)
    return table


def merge(documents: list[dict]) -> dict:
    """The documents of several runs as one: of records of the same head, shape, mode and size the first one counts."""
    merged = dict(documents[0])
    for document in documents[1:]:
        for section, records in document.items():
            if isinstance(records, list):
                keys = ("provider", *SECTIONS.get(section, ("", ("shape",)))[1])
                known = {tuple(map(record.get, keys)) for record in merged.get(section, [])}
                new = [record for record in records if tuple(map(record.get, keys)) not in known]
                merged[section] = merged.get(section, []) + new
    dates = sorted({document["environment"]["date"] for document in documents})
    devices = dict.fromkeys(document["environment"]["device"] for document in documents)
    merged["environment"] |= {"date": dates[-1], "device": ", ".join(devices)}
    return merged


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.report", description=__doc__.splitlines()[0], formatter_class=HelpFormatter
    )
    help = "JSON files written by benchmark.run; where several have the same measurement, the first one's counts."
    parser.add_argument("results", nargs="+", type=Path, help=help)
    parser.add_argument("--pictures", type=Path, help="Folder for the pictures; None: no pictures.")
    parser.add_argument("--only", default="", help="Comma-separated pictures, such as time_rl,jsd; empty: all.")
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    document = merge([results.load(path) for path in arguments.results])
    print_tables(document)
    if arguments.pictures:
        for path in pictures.draw(document, arguments.pictures, [name for name in arguments.only.split(",") if name]):
            print(f"Picture: {path}")


if __name__ == "__main__":
    main()
