"""Tables and pictures of README and docs, from committed results: `python -m benchmark.publish` writes all of them.

A page has a table's place between `<!-- table: NAME -->` and `<!-- end -->`; NAME is an entry of `TABLES`. Pictures go
to docs/images/NAME.png; NAME is an entry of `PICTURES`. Each entry names its files of benchmark/results. To publish a
new measurement, commit its JSON, name it here, and run this program; `tests/test_docs.py` fails if a page differs from
its results.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmark import pictures
from benchmark.results import distances, extra_gib, grouped, load, measured, products_ms

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "benchmark" / "results", ROOT / "docs" / "images"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

SHAPES = {
    "S1": "Qwen3-8B, 8k tokens (S1)",
    "S2": "vocabulary 131k, 16k tokens (S2)",
    "S3": "Qwen3-8B's TP=8 shard, 16k tokens (S3)",
}
SHARES = (0.0, 0.3, 0.6, 0.9)
HEADS = {
    "ours": "**megatron_lce**, the default",
    "ours-cached": "**megatron_lce**, everything cached",
    "ours-token-640": "**megatron_lce**, `linear_token_loss`, 640 MiB",
    "ours-known-640": "**megatron_lce**, `known_loss` of the flag, 640 MiB",
    "megatron": "Megatron, fused cross-entropy",
    "eager": "PyTorch, eager",
    "compile": "PyTorch, torch.compile",
    "liger": "Liger, Triton",
    "liger-sm90": "Liger, for Hopper",
    "verl": "verl",
    "quack": "quack",
    "cce": "Cut Cross-Entropy",
}
SKIPPING = {"ours": "`skip_ignored=False`", "ours-skip": "`skip_ignored=True`"}
JSD_HEADS = {  # over the matmuls that each cannot do without
    "ours": "per token, over 2 (Fs + Ft) + dX + dW",
    "ours-weights-512": "`token_weights`, 512 MiB, over Fs + Ft + dX + dW",
    "ours-weights-1024": "`token_weights`, 1 GiB, over the same",
    "compile": "torch.compile with all logits, over the same",
}
VARIANTS = {
    "native-fused": "Megatron, fused cross-entropy",
    "ours": "flag on",
    "ours-512-mib": "flag on, `logits_cache_bytes` of 512 MiB",
    "ours-cached": "flag on, everything cached",
    "ours-main-grad": "flag on, `gradient_accumulation_fusion` on the head",
    "ours-known": "flag on, `known_loss=True`",
    "ours-token-640": "capture, `linear_token_loss` with 640 MiB",
    "ours-skip": "flag on, `skip_masked=True`",
    "ours-known-skip": "flag on, both",
}
TE_STEPS = {
    "native": "Megatron, unfused",
    "native-fused": "Megatron, fused cross-entropy",
    "te": "Megatron, TransformerEngine's cross-entropy",
    **{name: title for name, title in VARIANTS.items() if name.startswith("ours")},
}
RUNS = {
    "native-fused": "Megatron, fused cross-entropy",
    "ours": "flag on",
    "ours-known": "flag on, known_loss",
    "ours-skip": "flag on, skip_masked",
    "ours-known-skip": "flag on, known_loss, skip_masked",
}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |\n" for line in (header, *rows)]
    return "".join([lines[0], f"|{'---|' * len(header)}\n", *lines[1:]])


@dataclass(frozen=True)
class Table:
    """A table of `cell(record)`, records of a section found by the values of their row's and their column's fields.

    `rows` and `columns` hold the titles by these values, a tuple if there are several fields. A row without a record is
    left out; of equal records the last counts.
    """

    corner: str
    section: str
    row: str
    rows: dict[Any, str]
    column: str
    columns: dict[Any, str]
    cell: Callable[[dict], str]
    where: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *documents: dict) -> str:
        records = [record for document in documents for record in measured(document, self.section, **self.where)]
        row_of, column_of = itemgetter(*self.row.split()), itemgetter(*self.column.split())
        found = {(row_of(record), column_of(record)): self.cell(record) for record in records}
        lines = [[title, *(found.get((row, x), "-") for x in self.columns)] for row, title in self.rows.items()]
        return markdown([self.corner, *self.columns.values()], [line for line in lines if {*line[1:]} != {"-"}])


def cell(record: dict, ratio: str | None = None, memory: bool = True) -> str:
    """Time, its ratio to matmuls, and memory over the gradients."""
    text = f"{record['time_ms']:.1f}" + (f" ({record[ratio]:.2f})" if ratio else "")
    return text + (f" / {extra_gib(record):.2f}" if memory else "")


def step_cell(record: dict) -> str:
    return f"{record['time_ms']:.1f} / {record['peak_mib']:,.0f}"


def jsd_cell(record: dict) -> str:
    """Over the matmuls that this way needs."""
    return cell(record, "over_products_recomputed" if record["provider"] == "ours" else "over_products")


def curves(*documents: dict) -> str:
    """Training runs at three learning rates: speed, memory, the last loss, and how far losses are from native ones."""
    rates = [grouped(measured(x, "curves"), "masked", "variant") for x in documents]
    rows = []
    for (masked, variant), runs in rates[0].items():
        title = ("masked: " if masked else "") + RUNS[variant]
        ends = sorted(record["held_out_loss"] for record in runs)
        row = [f"{title}, {len(runs)} runs" if len(runs) > 1 else title, step_cell(runs[0])]
        row.append(" to ".join(f"{end:.4f}" for end in dict.fromkeys((ends[0], ends[-1]))))
        for found in rates:
            apart = distances(found[masked, variant], found[masked, "native-fused"])
            row.append(" / ".join(f"{x:.1e}" for x in apart))
        rows.append(row)
    header = ["", "ms a step / MiB over the resting state", "loss of held-out text"]
    return markdown([*header, "from native runs: median / largest", "at 3e-4", "at 6e-4"], rows)


def errors(*documents: dict) -> str:
    """Errors against fp64 of every head that was compared; among equal ones the first counts."""
    rows: dict[tuple, list[str]] = {}
    for record in itertools.chain(*(measured(document, "errors") for document in documents)):
        largest = record.get("logprobs_max_error", record.get("loss_max_error"))
        values = largest, record["grad_hidden_relative_error"], record["grad_weight_relative_error"]
        row = [HEADS[record["provider"]], record["mode"], *(f"{value:.1e}" for value in values)]
        rows.setdefault((record["provider"], record["mode"]), row)
    return markdown(["", "mode", "logprob (sft: loss), largest error", "dX, relative", "dW, relative"], rows.values())


def rounding(document: dict) -> str:
    """A sampler's logprobs beside its trainer's, with logits rounded on both sides, on one or on none."""
    titles = {"same": "the sampler's", "halves": "bf16, partial sums of TP=2", "fp32": "fp32"}
    columns = {"hidden_difference": "hidden states differ by", "both_fp32": "both fp32"}
    columns |= {"sampler_bf16": "sampler bf16, trainer fp32", "both_bf16": "both bf16"}
    records = {record["trainer"]: record for record in measured(document, "rounding")}
    rows = [
        [title, *(f"{records[name][x]:.1e}" if records[name][x] else "0" for x in columns)]
        for name, title in titles.items()
    ]
    return markdown(["trainer's body", *columns.values()], rows)


def _by_mode(*shapes: str) -> dict[tuple, str]:
    return {(mode, shape): f"{SHAPES[shape]}: {mode.upper()}" for shape in shapes for mode in ("rl", "sft")}


_MIB = "ms / MiB over the resting state"
_ROWS = [(shape, name) for shape in ("S1", "S3") for name in SKIPPING]

TABLES: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "heads": (
        ("head_h200",),
        Table("ms / extra GiB", "times", "provider", HEADS, "mode shape", _by_mode("S1", "S3"), cell),
    ),
    "known_loss": (
        ("known_loss_h200",),
        Table(
            "ms (over F + dX + dW) / extra GiB", "times", "provider", HEADS, "shape mode",
            {(shape, mode): f"{shape}, {mode}" for shape in ("S1", "S2") for mode in ("rl", "sft")},
            lambda x: cell(x, "over_products"),
        ),
    ),
    "ignored_rows": (
        ("rows_h200",),
        Table(
            "rl: ms (over the counted rows alone)", "rows", "shape provider",
            {(shape, name): f"{shape}, {SKIPPING[name]}" for shape, name in _ROWS},
            "ignored", {share: f"{share:.0%} ignored" for share in SHARES},
            lambda x: cell(x, "over_alone", memory=False), {"mode": "rl", "layout": "scattered"},
        ),
    ),
    "jsd": (
        ("jsd_h100",),
        Table(
            "ms (over the products) / extra GiB", "jsd", "provider", JSD_HEADS,
            "beta", {beta: f"beta {beta}" for beta in (0.5, 0, 1)}, jsd_cell,
        ),
    ),
    "steps": (
        ("megatron_step_tp2_h100",),
        Table(_MIB, "steps", "variant", VARIANTS, "tokens", {x: f"{x:,} tokens" for x in (8192, 16384)}, step_cell),
    ),
    "known_steps": (
        ("step_known_tp1_h100", "step_known_tp2_h100", "step_tp2_16384_h100"),
        Table(
            f"{_MIB}, 8,192 tokens", "steps", "variant", VARIANTS, "tp masked tokens",
            {
                (1, 0.0, 8192): "TP=1", (2, 0.0, 8192): "TP=2", (2, 0.6, 8192): "TP=2, 60 % masked",
                (2, 0.0, 16384): "TP=2, 16,384 tokens",
            },
            step_cell,
        ),
    ),
    "masked_steps": (
        ("step_known_tp2_h100",),
        Table(
            _MIB, "steps", "variant",
            {x: VARIANTS[x] for x in ("native-fused", "ours", "ours-skip")}
            | {"ours-known-skip": "flag on, and `known_loss=True`"},
            "masked", {share: f"{share:.0%} masked" for share in SHARES}, step_cell,
        ),
    ),
    "te_steps": (
        ("step_te_tp1_h200",),
        Table(
            f"{_MIB}, 8,192 tokens", "steps", "variant", TE_STEPS,
            "masked tokens", {(share, 8192): f"{share:.0%} masked" for share in (0.0, 0.6)}, step_cell,
        ),
    ),
    "curves": (("curves_h100", "curves_3e-4_h100", "curves_6e-4_h100"), curves),
    "errors": (("head_h200",), errors),
    "rounding": (("rounding_cpu",), rounding),
}  # fmt: skip


def source(documents: Sequence[dict]) -> str:
    """Where and when they were measured; one line."""
    found = [document["environment"] for document in documents]
    gpus = " and ".join(dict.fromkeys(x["device"].removeprefix("NVIDIA ").split()[0] for x in found))
    days = " and ".join(sorted({x["date"][:10] for x in found}))
    return f"({gpus}, {days}.)\n"


def results(names: Sequence[str]) -> list[dict]:
    return [load(RESULTS / f"{name}.json") for name in names]


def fill(page: str) -> str:
    """The page with its tables made anew."""

    def made(place: re.Match[str]) -> str:
        files, make = TABLES[place[2]]
        documents = results(files)
        return f"{place[1]}\n{make(*documents)}\n{source(documents)}\n{place[3]}"

    return PLACE.sub(made, page)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


# What tells records apart, in front of what was measured when a run prints its tables.
KEYS = ("tp", "pp", "shape", "tokens", "hidden", "vocab", "layers", "masked", "mode", "beta", "ignored", "layout")
KEYS += ("run", "variant", "trainer", "provider")
NO_COLUMNS = ("status", "reason", "fastest_ms", "slowest_ms", "repeats", "first_call_s", "losses", "order")


def print_tables(document: dict) -> None:
    """Prints where the numbers were taken, which providers are missing, and every section as a table."""
    environment = document["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lines = [f"{environment['device']}, {document['dtype']}, {versions}, {environment['date']}"]
    missing = [record for record in document.get("providers", []) if record["status"] != "ok"]
    lines += [f"{x['provider']}: {x['status']}: {x.get('reason', '')}" for x in missing]
    by = "matmul" if environment["device"] == "CPU" else "cuBLAS"  # whose products torch.mm's are
    for (shape,), records in grouped(measured(document, "products"), "shape").items():
        lines.append(f"{shape}: {by} " + "F {:.2f}, dX {:.2f}, dW {:.2f} ms".format(*products_ms(records, "logits_ms")))
    print(*dict.fromkeys(lines), sep="\n")
    for section, records in document.items():
        if isinstance(records, list) and records and section != "providers" and "products" not in section:
            print(f"\n{section}\n{as_table(records)}")


def as_table(records: list[dict]) -> str:
    """One row a record: what tells it apart, what was measured, and why it has nothing if it was not."""
    there = dict.fromkeys(itertools.chain(*records))
    names = [x for x in KEYS if x in there] + [x for x in there if x not in KEYS + NO_COLUMNS]

    def text(value: object) -> str:
        if isinstance(value, float):
            return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}"
        return "-" if value is None else str(value)

    def why(record: dict) -> str:
        return "" if record["status"] == "ok" else f"{record['status']}: {record.get('reason', '')}"[:120]

    rows = [[*(text(record.get(name)) for name in names), why(record)] for record in records]
    return markdown([*names, "not measured"], rows)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmark.publish", description=__doc__.splitlines()[0])
    parser.add_argument("--no-pictures", action="store_true", help="Write the tables only.")
    return parser


def main(argv: list[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    for path in pages():
        path.write_text(fill(path.read_text()))
    for name, (file, _) in pictures.PICTURES.items():
        if not arguments.no_pictures:
            print(f"Picture: {pictures.draw(name, *results([file]), IMAGES)}")


if __name__ == "__main__":
    main()
