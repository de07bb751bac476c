"""Tables and pictures of benchmarks' JSON: `python -m benchmark.report results.json --pictures folder`."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmark import pictures
from benchmark.ratios import products_ms
from scripts.arguments import HelpFormatter


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
    keys = ("shape", "mode", "workspace_mib")
    print_table(console, "linear_token_loss over workspace_bytes", keys, columns, document.get("workspace", []))
    keys = ("shape", "mode", "provider")
    title = "a call on an idle device: until it returns, until the device is done"
    print_table(console, title, keys, ("host_ms", "time_ms"), document.get("host", []))
    keys = ("shape", "tokens", "mode", "provider")
    print_table(console, "memory over tokens", keys, ("peak_mib", "gradients_mib"), document.get("memory", []))
    keys = ("shape", "mode", "ignored", "layout", "provider")
    columns = (
        "time_ms",
        "over_alone",
        "peak_mib",
        "logprobs_difference",
        "grad_hidden_difference",
        "grad_weight_difference",
    )
    print_table(console, "time over the share of ignored rows", keys, columns, document.get("rows", []))
    print_jsd_tables(document, console)


def print_jsd_tables(document: dict, console: Console) -> None:
    keys = ("shape", "beta", "provider")
    columns = ("time_ms", "over_products", "over_products_recomputed", "peak_mib", "gradients_mib", "first_call_s")
    print_table(console, "linear JSD, forward and backward", keys, columns, document.get("jsd", []))
    columns = ("loss_relative_error", "grad_hidden_relative_error", "grad_weight_relative_error")
    print_table(console, "error against fp64", keys, columns, document.get("jsd_errors", []))


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


def merge(documents: list[dict]) -> dict:
    """The documents of several runs as one: of records of the same head, shape, mode and size the first one counts."""
    merged = dict(documents[0])
    for document in documents[1:]:
        for section, records in document.items():
            if isinstance(records, list):
                known = {_key(record) for record in merged.get(section, [])}
                merged[section] = merged.get(section, []) + [x for x in records if _key(x) not in known]
    dates = sorted({document["environment"]["date"] for document in documents})
    devices = dict.fromkeys(document["environment"]["device"] for document in documents)
    merged["environment"] |= {"date": dates[-1], "device": ", ".join(devices)}
    return merged


_SIZES = ("fraction", "workspace_mib", "ignored", "layout", "variant", "masked")


def _key(record: dict) -> tuple:
    return tuple(record.get(name) for name in ("provider", "shape", "tokens", "mode", *_SIZES))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.report", description=__doc__.splitlines()[0], formatter_class=HelpFormatter
    )
    help = "JSON files written by benchmark.run; where several have the same measurement, the first one's counts."
    parser.add_argument("results", nargs="+", type=Path, help=help)
    parser.add_argument("--pictures", type=Path, help="Folder for the pictures; None: no pictures.")
    parser.add_argument("--only", default="", help="Comma-separated pictures, such as time_rl,memory; empty: all.")
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    document = merge([json.loads(path.read_text()) for path in arguments.results])
    print_tables(document)
    if arguments.pictures:
        for path in pictures.draw(document, arguments.pictures, [name for name in arguments.only.split(",") if name]):
            print(f"Picture: {path}")


if __name__ == "__main__":
    main()
