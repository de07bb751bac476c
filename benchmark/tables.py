"""The tables of README and docs, from committed results: `python -m benchmark.tables` writes them into the pages.

A page says where a table goes by a comment, `<!-- table: NAME -->`, and ends it by `<!-- end -->`; what stands between
is replaced, and says on which device, when and with which package it was measured. `tests/test_docs.py` fails where a
page differs from the files.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmark import ratios, results
from megatron_lce import head_memory

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHAPES = {
    "S1": "Qwen3-8B, 8k tokens (S1)",
    "S2": "vocabulary 131k, 16k tokens (S2)",
    "S3": "Qwen3-8B's TP=8 shard, 16k tokens (S3)",
}
SHARES = (0.0, 0.3, 0.6, 0.9)
REBUILT = "2026-11-25T06"  # when the package was last rebuilt: times of before are marked
HEADS = {
    "ours": "**megatron_lce**, the default",
    "ours-cached": "**megatron_lce**, everything cached",
    "ours-token-640": "**megatron_lce**, `linear_token_loss`, 640 MiB",
    "ours-token-1280": "**megatron_lce**, `linear_token_loss`, 1.25 GiB",
    "ours-known-640": "**megatron_lce**, `known_loss` of the flag, 640 MiB",
    "megatron": "Megatron, fused cross-entropy",
    "eager": "PyTorch, eager",
    "compile": "PyTorch, torch.compile",
    "liger": "Liger, Triton",
    "liger-sm90": "Liger, for Hopper",
    "liger-tp": "Liger, TP, on one rank",
    "verl": "verl",
    "quack": "quack",
    "cce": "Cut Cross-Entropy",
}
SKIPPING = {"ours": "`skip_ignored=False`", "ours-skip": "`skip_ignored=True`"}
JSD_HEADS = {  # over the products that each cannot do without
    "ours": "per token, over 2 (Fs + Ft) + dX + dW",
    "ours-weights-512": "`token_weights`, 512 MiB, over Fs + Ft + dX + dW",
    "ours-weights-1024": "`token_weights`, 1 GiB, over the same",
    "compile": "torch.compile with all logits, over the same",
}
VARIANTS = {  # without those that differ little from these
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
RUNS = {
    "native-fused": "Megatron, fused cross-entropy",
    "ours": "flag on",
    "ours-known": "flag on, known_loss",
    "ours-skip": "flag on, skip_masked",
    "ours-known-skip": "flag on, known_loss, skip_masked",
}
TABLES: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {}  # how each is made, of which files of results


def table(*files: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """The decorated function makes the table of its name from the documents in these files."""

    def register(make: Callable[..., str]) -> Callable[..., str]:
        TABLES[make.__name__] = make, files
        return make

    return register


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |\n" for line in (header, *rows)]
    return "".join([lines[0], f"|{'---|' * len(header)}\n", *lines[1:]])


def grid(
    what: str, rows: dict[Any, str], columns: dict[Any, str], records: dict[tuple, Any], text: Callable[[Any], str]
) -> str:
    """A table of `text(records[row, column])` below the columns' titles and behind the rows'; no row is empty."""
    lines = []
    for row, title in rows.items():
        if any((row, column) in records for column in columns):
            cells = (text(records[row, x]) if (row, x) in records else "-" for x in columns)
            lines.append([title, *cells])
    return markdown([what, *columns.values()], lines)


def by(document: dict, section: str, row: str, column: str, **values: Any) -> dict[tuple, dict]:
    """What was measured, by the fields that tell rows apart, and columns; of equal ones the last counts."""
    row_of, column_of = itemgetter(*row.split()), itemgetter(*column.split())
    return {(row_of(x), column_of(x)): x for x in ratios.measured(document, section, **values)}


def cell(record: dict, ratio: str | None = None, memory: bool = True) -> str:
    """Time, its ratio to products, and memory over the gradients: torch's, and what is held outside of it."""
    text = f"{record['time_ms']:.1f}" + (f" ({record[ratio]:.2f})" if ratio else "")
    outside = record.get("outside_mib", 0.0) / 1024
    extra = f" / {ratios.extra_gib(record) - outside:.2f}" + (f" + {outside:.2f}" if outside else "")
    return text + (extra if memory else "")


def step_cell(record: dict) -> str:
    return f"{record['time_ms']:.1f} / {record['peak_mib']:,.0f}"


@table("head_h200")
def heads(document: dict) -> str:
    """Every head, in both kinds of a step, at two shapes."""
    kinds = itertools.product(("S1", "S3"), ("rl", "sft"))
    columns = {(mode, shape): f"{SHAPES[shape]}: {mode.upper()}" for shape, mode in kinds}
    return grid("ms / extra GiB", HEADS, columns, by(document, "times", "provider", "mode shape"), cell)


@table("known_loss_h200")
def known_loss(document: dict) -> str:
    """Gradients that are made in forward beside other heads, in both kinds of a step, at two shapes."""
    kinds = itertools.product(("S1", "S2"), ("rl", "sft"))
    columns = {(mode, shape): f"{shape}, {mode}" for shape, mode in kinds}
    rows = {name: title for name, title in HEADS.items() if name != "ours-token-1280"}  # which is as 640 MiB
    records = by(document, "times", "provider", "mode shape")
    return grid("ms (over F + dX + dW) / extra GiB", rows, columns, records, lambda x: cell(x, "over_products"))


@table("liger_tp_h100")
def liger_tp(document: dict) -> str:
    """The default beside Liger's native head: each way over the products that a head needs which keeps no logits."""
    records = by(document, "times", "shape mode", "provider")
    kinds = {"fwd": ("over_products", "over F"), "rl": ("over_products_recomputed", "over 2F + dX + dW")}
    rows = {(shape, mode): f"{shape}, {mode}, {kinds[mode][1]}" for (shape, mode), _ in records}
    columns = {name: HEADS[name] for name in ("ours", "liger-tp")}
    what = "ms (over the products) / extra GiB, + outside of torch's allocator"
    return grid(what, rows, columns, records, lambda x: cell(x, kinds[x["mode"]][0]))


@table("rows_h200")
def ignored_rows(document: dict) -> str:
    """Time over the share of ignored rows, and its ratio to that of the other rows by themselves."""
    records = by(document, "rows", "shape provider", "ignored", mode="rl", layout="scattered")
    cases = itertools.product(("S1", "S3"), SKIPPING)
    rows = {(shape, name): f"{shape}, {SKIPPING[name]}" for shape, name in cases}
    columns = {share: f"{share:.0%} ignored" for share in SHARES}
    what = "rl: ms (over the counted rows alone)"
    return grid(what, rows, columns, records, lambda x: cell(x, "over_alone", memory=False))


@table("jsd_h100")
def jsd(document: dict) -> str:
    """Distillation: time, its ratio to the products that each way needs, memory."""

    def text(record: dict) -> str:
        return cell(record, "over_products_recomputed" if record["provider"] == "ours" else "over_products")

    betas = {beta: f"beta {beta}" for beta in (0.5, 0, 1)}
    return grid("ms (over the products) / extra GiB", JSD_HEADS, betas, by(document, "jsd", "provider", "beta"), text)


@table("megatron_step_tp2_h100")
def steps(document: dict) -> str:
    """A whole step of a GPT at TP=2, where no token is masked."""
    sizes = {tokens: f"{tokens:,} tokens" for tokens in (8192, 16384)}
    rows = {name: title for name, title in VARIANTS.items() if not name.endswith("-skip")}
    records = by(document, "steps", "variant", "tokens")
    return grid("ms / MiB over the resting state", rows, sizes, records, step_cell)


@table("step_known_tp1_h100", "step_known_tp2_h100", "step_tp2_16384_h100")
def known_steps(*documents: dict) -> str:
    """A whole step where the flag makes gradients in forward, and where it leaves masked tokens out."""
    records = {}
    for document in documents:
        records |= by(document, "steps", "variant", "tp masked tokens")
    columns = {(1, 0.0, 8192): "TP=1", (2, 0.0, 8192): "TP=2", (2, 0.6, 8192): "TP=2, 60 % masked"}
    columns[2, 0.0, 16384] = "TP=2, 16,384 tokens"
    return grid("ms / MiB over the resting state, 8,192 tokens", VARIANTS, columns, records, step_cell)


@table("step_known_tp2_h100")
def masked_steps(document: dict) -> str:
    """The same with masked tokens."""
    rows = {name: VARIANTS[name] for name in ("native-fused", "ours", "ours-skip")}
    rows["ours-known-skip"] = "flag on, and `known_loss=True`"
    shares = {share: f"{share:.0%} masked" for share in SHARES}
    return grid("ms / MiB over the resting state", rows, shares, by(document, "steps", "variant", "masked"), step_cell)


@table("curves_h100", "curves_3e-4_h100", "curves_6e-4_h100")
def curves(*documents: dict) -> str:
    """Training runs at three learning rates: speed, memory, the last loss, and how far losses are from native ones."""
    rates = [ratios.grouped(ratios.measured(x, "curves"), "masked", "variant") for x in documents]
    rows = []
    for (masked, variant), runs in rates[0].items():
        title = ("masked: " if masked else "") + RUNS[variant]
        ends = sorted(record["held_out_loss"] for record in runs)
        row = [f"{title}, {len(runs)} runs" if len(runs) > 1 else title, step_cell(runs[0])]
        row.append(" to ".join(f"{end:.4f}" for end in dict.fromkeys((ends[0], ends[-1]))))
        for found in rates:
            distances = ratios.distances(found[masked, variant], found[masked, "native-fused"])
            row.append(" / ".join(f"{x:.1e}" for x in distances))
        rows.append(row)
    header = ["", "ms a step / MiB over the resting state", "loss of held-out text"]
    return markdown([*header, "from native runs: median / largest", "at 3e-4", "at 6e-4"], rows)


@table("head_h200", "liger_tp_h100")
def errors(*documents: dict) -> str:
    """Errors against fp64 of every head that was compared; of equal ones the first counts."""
    rows: dict[tuple, list[str]] = {}
    for record in itertools.chain(*(ratios.measured(document, "errors") for document in documents)):
        largest = record.get("logprobs_max_error", record.get("loss_max_error"))
        values = largest, record["grad_hidden_relative_error"], record["grad_weight_relative_error"]
        row = [HEADS[record["provider"]], record["mode"], *(f"{value:.1e}" for value in values)]
        rows.setdefault((record["provider"], record["mode"]), row)
    header = ["", "mode", "logprob (sft: loss), largest error", "dX, relative", "dW, relative"]
    return markdown(header, list(rows.values()))


@table("rounding_cpu")
def rounding(document: dict) -> str:
    """A sampler's logprobs beside its trainer's, where logits are rounded on both sides, on one or on none."""
    rows = {"same": "the sampler's", "halves": "bf16, partial sums of TP=2", "fp32": "fp32"}
    columns = {"hidden_difference": "hidden states differ by", "both_fp32": "both fp32"}
    columns |= {"sampler_bf16": "sampler bf16, trainer fp32", "both_bf16": "both bf16"}
    records = ratios.measured(document, "rounding")
    values = {(record["trainer"], column): record[column] for record in records for column in columns}
    return grid("trainer's body", rows, columns, values, lambda value: f"{value:.1e}" if value else "0")


@table()
def phases() -> str:
    """What S1 allocates in each phase of the default, and at the peak of two other ways."""
    step = head_memory.HeadStep(tokens=8192, hidden=4096, columns=151936)
    cached = replace(step, logits_cache_bytes=step.everything)
    default = head_memory.ours(step)[-1]
    in_order = ("forward", "slabs", "cast of hidden's gradient", "gradients")
    found = [("the default", phase, default[phase]) for phase in in_order]
    ways = {"everything cached": head_memory.ours(cached)[-1], "a known loss": head_memory.token_loss(step)[-1]}
    for way, parts in ways.items():
        found.append((way, "its largest phase", max(parts.values(), key=lambda x: sum(x.values()))))
    rows = []
    for way, phase, parts in found:
        there = [f"{name} {size / 2**20:,.0f}" for name, size in parts.items() if size >= 2**20]
        rows.append([way, phase, f"{sum(parts.values()) / 2**20:,.0f}", ", ".join(there)])
    return markdown(["way", "phase", "MiB", "of them"], rows)


def source(documents: Sequence[dict]) -> str:
    """Where and when they were measured, and with which package; one line."""
    found = [document["environment"] for document in documents]
    gpus = " and ".join(dict.fromkeys(x["device"].removeprefix("NVIDIA ").split()[0] for x in found))
    package = " and ".join(dict.fromkeys(x["megatron_lce_source"][:8] for x in found))
    dates = sorted(x["date"] for x in found)
    days = " and ".join(dict.fromkeys(date[:10] for date in dates))
    return f"({gpus}, {days}, package {package}{', before the rebuild' if dates[0] < REBUILT else ''}.)\n"


def fill(page: str) -> str:
    """The page with its tables made anew."""

    def made(place: re.Match[str]) -> str:
        make, files = TABLES[place[2]]
        documents = [results.load(RESULTS / f"{name}.json") for name in files]
        below = f"{source(documents)}\n" if documents else ""
        return f"{place[1]}\n{make(*documents)}\n{below}{place[3]}"

    return PLACE.sub(made, page)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def build_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog="python -m benchmark.tables", description=__doc__.splitlines()[0])


if __name__ == "__main__":
    build_parser().parse_args()
    for path in pages():
        path.write_text(fill(path.read_text()))
