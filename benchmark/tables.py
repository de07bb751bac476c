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
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from benchmark import curves_picture, ratios, results
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
SKIPPING = {
    "ours": "`skip_ignored=False`",
    "ours-skip": "`skip_ignored=True`",
    "ours-count": "`skip_ignored=` the number of counted rows",
}
JSD_HEADS = {  # by name, and by the products that each cannot do without
    ("ours", "over_products_recomputed"): "per token, over 2 (Fs + Ft) + dX + dW",
    ("ours-weights-512", "over_products"): "`token_weights`, 512 MiB, over Fs + Ft + dX + dW",
    ("ours-weights-1024", "over_products"): "`token_weights`, 1 GiB, over the same",
    ("compile", "over_products"): "torch.compile with all logits, over the same",
}
VARIANTS = {
    "native": "Megatron, unfused cross-entropy",
    "native-fused": "Megatron, fused cross-entropy",
    "ours": "flag on",
    "ours-512-mib": "flag on, `logits_cache_bytes` of 512 MiB",
    "ours-cached": "flag on, everything cached",
    "ours-main-grad": "flag on, `gradient_accumulation_fusion` on the head",
    "ours-main-grad-512-mib": "the same, `logits_cache_bytes` of 512 MiB",
    "ours-token-640": "capture, `linear_token_loss` with 640 MiB",
    "ours-token-main-grad": "the same, `gradient_accumulation_fusion` on the head",
}


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |\n" for line in (header, *rows)]
    return "".join([lines[0], f"|{'---|' * len(header)}\n", *lines[1:]])


def grid(what: str, rows: dict[Any, str], columns: dict[Any, str], text: Callable[[Any, Any], str]) -> str:
    """A table of `text(row, column)` below the columns' titles and behind the rows'."""
    lines = [[title, *(text(row, column) for column in columns)] for row, title in rows.items()]
    return markdown([what, *columns.values()], lines)


def cell(record: dict, ratio: str | None = None, memory: bool = True) -> str:
    """Time, its ratio to products, and memory over the gradients: torch's, and what is held outside of it."""
    text = f"{record['time_ms']:.1f}" + (f" ({record[ratio]:.2f})" if ratio else "")
    outside = record.get("outside_mib", 0.0) / 1024
    extra = f" / {ratios.extra_gib(record) - outside:.2f}" + (f" + {outside:.2f}" if outside else "")
    return text + (extra if memory else "")


def step_cell(record: dict) -> str:
    return f"{record['time_ms']:.1f} / {record['peak_mib']:,.0f}"


def measured(name: str, section: str, *keys: str) -> dict[tuple, dict]:
    """What was measured, by the values of some of its fields; of equal ones the last counts."""
    found = ratios.measured(results.load(RESULTS / f"{name}.json"), section)
    return {values: records[-1] for values, records in ratios.grouped(found, *keys).items()}


def heads() -> str:
    """Every head, in both kinds of a step, at two shapes."""
    records = measured("head_h200", "times", "mode", "provider", "shape")
    modes = {"rl": "RL", "sft": "SFT"}
    columns = {(mode, shape): f"{SHAPES[shape]}: {modes[mode]}" for shape in ("S1", "S3") for mode in modes}
    rows = {name: title for name, title in HEADS.items() if ("sft", name, "S1") in records}

    def text(name: str, column: tuple[str, str]) -> str:
        record = records.get((column[0], name, column[1]))
        return cell(record) if record else "-"

    return grid("ms / extra GiB", rows, columns, text)


def known_loss() -> str:
    """Gradients that are made in forward beside other heads, in both kinds of a step, at two shapes."""
    records = measured("known_loss_h200", "times", "mode", "provider", "shape")
    columns = {(mode, shape): f"{shape}, {mode}" for shape in ("S1", "S2") for mode in ("rl", "sft")}
    rows = {name: title for name, title in HEADS.items() if ("sft", name, "S1") in records}
    rows.pop("ours-token-1280", None)  # as 640 MiB

    def text(name: str, column: tuple[str, str]) -> str:
        record = records.get((column[0], name, column[1]))
        return cell(record, "over_products") if record else "-"

    return grid("ms (over F + dX + dW) / extra GiB", rows, columns, text)


def liger_tp() -> str:
    """The default beside Liger's native head: each way over the products that a head needs which keeps no logits."""
    records = measured("liger_tp_h100", "times", "shape", "mode", "provider")
    kinds = {"fwd": ("over_products", "over F"), "rl": ("over_products_recomputed", "over 2F + dX + dW")}
    rows = {(x, mode): f"{x}, {mode}, {kinds[mode][1]}" for x, mode in dict.fromkeys(key[:2] for key in records)}
    columns = {name: HEADS[name] for name in ("ours", "liger-tp")}
    what = "ms (over the products) / extra GiB, + outside of torch's allocator"
    return grid(what, rows, columns, lambda row, name: cell(records[*row, name], kinds[row[1]][0]))


def ignored_rows() -> str:
    """Time over the share of ignored rows, and its ratio to that of the other rows by themselves."""
    records = measured("rows_h200", "rows", "mode", "layout", "shape", "provider", "ignored")
    cases = itertools.product(("S1", "S3"), ("ours", "ours-skip"))
    return grid(
        "rl: ms (over the counted rows alone)",
        {(shape, name): f"{shape}, {SKIPPING[name]}" for shape, name in cases},
        {share: f"{share:.0%} ignored" for share in SHARES},
        lambda row, share: cell(records["rl", "scattered", *row, share], "over_alone", memory=False),
    )


def jsd() -> str:
    """Distillation: time, its ratio to the products that each way needs, memory."""
    records, betas = measured("jsd_h100", "jsd", "provider", "beta"), {beta: f"beta {beta}" for beta in (0.5, 0, 1)}
    what = "ms (over the products) / extra GiB"
    return grid(what, JSD_HEADS, betas, lambda row, beta: cell(records[row[0], beta], row[1]))


def steps() -> str:
    """A whole step of a GPT at TP=2, without the ways that differ little from those here."""
    records = measured("megatron_step_tp2_h100", "steps", "variant", "tokens")
    sizes = {tokens: f"{tokens:,} tokens" for tokens in (8192, 16384)}
    left_out = ("native", "ours-main-grad-512-mib", "ours-token-main-grad")
    rows = {name: title for name, title in VARIANTS.items() if name not in left_out}
    return grid("ms / MiB over the resting state", rows, sizes, lambda *case: step_cell(records[case]))


def known_steps() -> str:
    """A whole step where the flag makes gradients in forward, and where it leaves masked tokens out."""
    titles = VARIANTS | {"ours-known": "flag on, `known_loss=True`", "ours-skip": "flag on, `skip_masked=True`"}
    titles["ours-known-skip"] = "flag on, both"
    records = {}
    for tp in (1, 2):
        found = measured(f"step_known_tp{tp}_h100", "steps", "variant", "masked")
        records |= {(name, (tp, masked)): record for (name, masked), record in found.items()}
    longer = measured("step_tp2_16384_h100", "steps", "variant", "tokens")
    records |= {(name, (2, tokens)): record for (name, tokens), record in longer.items()}
    rows = {name: titles[name] for name in dict.fromkeys(name for name, _ in records)}
    columns = {(1, 0.0): "TP=1", (2, 0.0): "TP=2", (2, 0.6): "TP=2, 60 % masked", (2, 16384): "TP=2, 16,384 tokens"}

    def text(name: str, column: tuple[int, float]) -> str:
        return step_cell(records[name, column]) if (name, column) in records else "-"

    return grid("ms / MiB over the resting state, 8,192 tokens", rows, columns, text)


def masked_steps() -> str:
    """The same with masked tokens."""
    records = measured("step_known_tp2_h100", "steps", "variant", "masked")
    own = {"ours-skip": "flag on, `skip_masked=True`", "ours-known-skip": "flag on, and `known_loss=True`"}
    rows = {name: VARIANTS.get(name, own.get(name, "")) for name in ("native-fused", "ours", *own)}
    shares = {share: f"{share:.0%} masked" for share in SHARES}
    return grid("ms / MiB over the resting state", rows, shares, lambda *case: step_cell(records[case]))


def curves() -> str:
    """Training runs at three learning rates: speed, memory, the last loss, and how far losses are from native ones."""
    rates = [list(measured(name, "curves", "run").values()) for name in FILES["curves"]]
    rows = []
    for (masked, variant), runs in ratios.grouped(rates[0], "masked", "variant").items():
        title = ("masked: " if masked else "") + curves_picture.TITLES[variant]
        ends = sorted(record["held_out_loss"] for record in runs)
        row = [f"{title}, {len(runs)} runs" if len(runs) > 1 else title]
        row += [f"{runs[0]['time_ms']:.1f} / {runs[0]['peak_mib']:,.0f}"]
        row += [" to ".join(f"{end:.4f}" for end in dict.fromkeys((ends[0], ends[-1])))]
        rows.append(row + [_distances(records, masked, variant) for records in rates])
    header = ["", "ms a step / MiB over the resting state", "loss of held-out text"]
    return markdown([*header, "from native runs: median / largest", "at 3e-4", "at 6e-4"], rows)


def _distances(records: list[dict], masked: bool, variant: str) -> str:
    """Of every pair of native runs, or of this way's run and a native one."""
    native = [x["losses"] for x in records if x["masked"] == masked and x["variant"] == "native-fused"]
    pairs = list(combinations(native, 2))
    if variant != "native-fused":
        (own,) = (x["losses"] for x in records if x["masked"] == masked and x["variant"] == variant)
        pairs = [(own, losses) for losses in native]
    apart = [ratios.distance(*pair) for pair in pairs]
    return f"{median(apart):.1e} / {max(apart):.1e}"


def errors() -> str:
    """Errors against fp64 of every head that was compared."""
    rows = []
    found, later = (measured(name, "errors", "provider", "mode") for name in FILES["errors"])
    for (provider, mode), record in (found | later | found).items():
        largest = record.get("logprobs_max_error", record.get("loss_max_error"))
        values = largest, record["grad_hidden_relative_error"], record["grad_weight_relative_error"]
        rows.append([HEADS[provider], mode, *(f"{value:.1e}" for value in values)])
    return markdown(["", "mode", "logprob (sft: loss), largest error", "dX, relative", "dW, relative"], rows)


def rounding() -> str:
    """A sampler's logprobs beside its trainer's, where logits are rounded on both sides, on one or on none."""
    records = measured("rounding_cpu", "rounding", "trainer")
    rows = {"same": "the sampler's", "halves": "bf16, partial sums of TP=2", "fp32": "fp32"}
    columns = {"hidden_difference": "hidden states differ by", "both_fp32": "both fp32"}
    columns |= {"sampler_bf16": "sampler bf16, trainer fp32", "both_bf16": "both bf16"}

    def text(name: str, column: str) -> str:
        value = records[name,][column]
        return f"{value:.1e}" if value else "0"

    return grid("trainer's body", rows, columns, text)


def phases() -> str:
    """What S1 allocates in each phase of the default, and at the peak of two other ways."""
    step = head_memory.HeadStep(tokens=8192, hidden=4096, columns=151936)
    cached = replace(step, logits_cache_bytes=step.everything)
    peak = "its largest phase"
    ways = {"everything cached": head_memory.ours(cached)[-1], "a known loss": head_memory.token_loss(step)[-1]}
    default = head_memory.ours(step)[-1]
    in_order = ("forward", "slabs", "cast of hidden's gradient", "gradients")
    found = [("the default", phase, default[phase]) for phase in in_order]
    found += [(way, peak, max(parts.values(), key=lambda x: sum(x.values()))) for way, parts in ways.items()]
    rows = []
    for way, phase, parts in found:
        there = {name: f"{size / 2**20:,.0f}" for name, size in parts.items() if size >= 2**20}
        total = f"{sum(parts.values()) / 2**20:,.0f}"
        rows.append([way, phase, total, ", ".join(f"{name} {size}" for name, size in there.items())])
    return markdown(["way", "phase", "MiB", "of them"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "heads": heads,
    "known_loss": known_loss,
    "liger_tp": liger_tp,
    "ignored_rows": ignored_rows,
    "jsd": jsd,
    "phases": phases,
    "errors": errors,
    "rounding": rounding,
    "steps": steps,
    "known_steps": known_steps,
    "curves": curves,
    "masked_steps": masked_steps,
}
FILES = {  # of results, that a table is made of
    "heads": ("head_h200",),
    "known_loss": ("known_loss_h200",),
    "liger_tp": ("liger_tp_h100",),
    "ignored_rows": ("rows_h200",),
    "jsd": ("jsd_h100",),
    "errors": ("head_h200", "liger_tp_h100"),
    "rounding": ("rounding_cpu",),
    "steps": ("megatron_step_tp2_h100",),
    "known_steps": ("step_known_tp1_h100", "step_known_tp2_h100", "step_tp2_16384_h100"),
    "curves": ("curves_h100", "curves_3e-4_h100", "curves_6e-4_h100"),
    "masked_steps": ("step_known_tp2_h100",),
}


def source(*files: str) -> str:
    """Where and when the files were measured, and with which package; one line."""
    found = [results.load(RESULTS / f"{name}.json")["environment"] for name in files]
    gpus = " and ".join(dict.fromkeys(x["device"].removeprefix("NVIDIA ").split()[0] for x in found))
    package = " and ".join(dict.fromkeys(x["megatron_lce_source"][:8] for x in found))
    dates = " and ".join(dict.fromkeys(x["date"][:10] for x in sorted(found, key=lambda x: x["date"])))
    before = ", before the rebuild" if min(x["date"] for x in found) < REBUILT else ""
    return f"({gpus}, {dates}, package {package}{before}.)\n"


def fill(page: str) -> str:
    """The page with its tables made anew."""

    def table(place: re.Match[str]) -> str:
        name = place[2]
        below = f"{source(*FILES[name])}\n" if name in FILES else ""
        return f"{place[1]}\n{TABLES[name]()}\n{below}{place[3]}"

    return PLACE.sub(table, page)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def build_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog="python -m benchmark.tables", description=__doc__.splitlines()[0])


if __name__ == "__main__":
    build_parser().parse_args()
    for path in pages():
        path.write_text(fill(path.read_text()))
