"""Tables and pictures of benchmarks' JSON: `python -m benchmark.report results.json --pictures folder`."""

import argparse
import itertools
from pathlib import Path
from typing import Any

from benchmark import pictures, results
from benchmark.ratios import grouped, measured, products_by, products_ms
from benchmark.results import as_cell
from scripts.arguments import HelpFormatter

TITLES = {  # of a document's sections
    "times": "forward and backward",
    "errors": "error against fp64",
    "cache": "ours over logits_cache_bytes",
    "workspace": "linear_token_loss over workspace_bytes",
    "host": "a call on an idle device: until it returns, until the device is done",
    "memory": "memory over tokens",
    "rows": "time over the share of ignored rows",
    "jsd": "linear JSD, forward and backward",
    "jsd_errors": "error against fp64",
    "steps": "forward and backward of a GPT: slowest rank, peak memory over the resting state",
    "curves": "a GPT trained on real text: peak memory over the resting state, losses beside the native run's",
    "rounding": "mean |difference of logprobs| between sampler and trainer",
}
# what tells records apart; in tables it stands in front of what was measured
KEYS = ("tp", "pp", "shape", "tokens", "hidden", "vocab", "layers", "masked", "mode", "beta", "ignored", "layout")
KEYS += ("fraction", "logits_cache_bytes", "workspace_mib", "run", "variant", "trainer", "provider")
NO_COLUMNS = ("status", "reason", "fastest_ms", "slowest_ms", "repeats", "first_call_s")
NO_COLUMNS += ("losses", "order")  # of training curves: one is long, the other in the name


def print_tables(document: dict) -> None:
    """Where the numbers were taken, which providers are missing, and every section as a table."""
    from rich.console import Console

    console, environment = Console(width=170), document["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lines = [f"{environment['device']}, {document['dtype']}, {versions}, {environment['date']}"]
    missing = [record for record in document.get("providers", []) if record["status"] != "ok"]
    lines += [f"{x['provider']}: {x['status']}: {x.get('reason', '')}" for x in missing]
    for (shape,), records in grouped(measured(document, "products"), "shape").items():
        products = "F {:.2f}, dX {:.2f}, dW {:.2f} ms".format(*products_ms(records, "logits_ms"))
        lines.append(f"{shape}: {products_by(document)} {products}")
    lines += [f"{x['shape']}: all-reduce {x['time_ms']:.2f} ms" for x in measured(document, "all_reduce")]
    for line in dict.fromkeys(lines):
        console.print(line, markup=False, highlight=False)
    for section, title in TITLES.items():
        if records := document.get(section):
            console.print(as_table(title, records))


def as_table(title: str, records: list[dict]) -> Any:
    """One row a record: what tells it apart, what was measured, and why it has nothing where it was not."""
    from rich.table import Table  # of an extra

    there = dict.fromkeys(itertools.chain(*records))
    keys, columns = [x for x in KEYS if x in there], [x for x in there if x not in KEYS + NO_COLUMNS]
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
    """The documents of several runs as one: of records that nothing tells apart those of the first document count."""
    merged = dict(documents[0])
    for document in documents[1:]:
        for section, records in document.items():
            if isinstance(records, list):
                known = {tuple(map(record.get, KEYS)) for record in merged.get(section, [])}
                new = [record for record in records if tuple(map(record.get, KEYS)) not in known]
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
