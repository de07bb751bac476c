"""The tables of README and docs, from committed results: `python -m benchmark.tables` writes them into the pages.

A page says where a table goes by a comment, `<!-- table: NAME -->`, and ends it by `<!-- end -->`; what stands between
is replaced. `tests/test_docs.py` fails where a page differs from the files.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmark import curves_picture, ratios, results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHAPES = {shape: shape for shape in ("S1", "S2", "S3")}
SHARES = (0.0, 0.3, 0.6, 0.9)
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
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def grid(what: str, rows: dict[Any, str], columns: dict[Any, str], text: Callable[[Any, Any], str]) -> str:
    """A table of `text(row, column)` below the columns' titles and behind the rows'."""
    lines = [[title, *(text(row, column) for column in columns)] for row, title in rows.items()]
    return markdown([what, *columns.values()], lines)


def cell(record: dict, ratio: str | None = None, memory: bool = True) -> str:
    """Time, its ratio to products, and memory over the gradients."""
    text = f"{record['time_ms']:.1f}" + (f" ({record[ratio]:.2f})" if ratio else "")
    return text + (f" / {(record['peak_mib'] - record['gradients_mib']) / 1024:.2f}" if memory else "")


def step_cell(record: dict) -> str:
    return f"{record['time_ms']:.1f} / {record['peak_mib']:,.0f}"


def measured(name: str, section: str, *keys: str) -> dict[tuple, dict]:
    """What was measured, by the values of some of its fields; of equal ones the last counts."""
    found = ratios.measured(results.load(RESULTS / f"{name}.json"), section)
    return {values: records[-1] for values, records in ratios.grouped(found, *keys).items()}


def head(name: str, mode: str, header: str, ratio: str | None = None) -> str:
    """Every head that has this mode at the three shapes."""
    records = measured(name, "times", "mode", "provider", "shape")
    rows = {head: title for head, title in HEADS.items() if all((mode, head, shape) in records for shape in SHAPES)}
    return grid(f"{mode}: {header}", rows, SHAPES, lambda head, shape: cell(records[mode, head, shape], ratio))


def over_products() -> str:
    """Ours as multiples of the products that each way needs."""
    records = measured("head_h200", "times", "provider", "mode", "shape")
    rows = {("ours", "fwd", "over_products"): "forward without gradient, over F"}
    for mode in ("rl", "sft"):
        rows["ours", mode, "over_products_recomputed"] = f"{mode}, nothing cached, over 2F + dX + dW"
        rows["ours-cached", mode, "over_products"] = f"{mode}, everything cached, over F + dX + dW"
    return grid(
        "ms (over the products)", rows, SHAPES, lambda row, shape: cell(records[*row[:2], shape], row[2], memory=False)
    )


def ignored_rows() -> str:
    """Time over the share of ignored rows, and its ratio to that of the other rows by themselves."""
    records = measured("rows_h200", "rows", "mode", "layout", "shape", "provider", "ignored")
    cases = itertools.product(("S1", "S3"), SKIPPING)
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
    """A whole step of a GPT at TP=2."""
    records = measured("megatron_step_tp2_h100", "steps", "variant", "tokens")
    sizes = {tokens: f"{tokens:,} tokens" for tokens in (8192, 16384)}
    return grid("ms / MiB over the resting state", VARIANTS, sizes, lambda *case: step_cell(records[case]))


def known_steps() -> str:
    """A whole step where the flag makes gradients in forward."""
    titles = VARIANTS | {"ours-known": "flag on, `known_loss=True`"}
    records = [measured(f"step_known_tp{tp}_h100", "steps", "variant") for tp in (1, 2)]
    rows = [[titles[name], *(step_cell(sized[name,]) for sized in records)] for (name,) in records[0]]
    return markdown(["ms / MiB over the resting state, H100, 8,192 tokens", "TP=1", "TP=2"], rows)


def masked_steps() -> str:
    """The same with masked tokens, at TP=2 and on one GPU."""
    records, rows = {}, {}
    for tp, gpu in ((2, "h100"), (1, "h200")):
        records |= measured(f"step_masked_tp{tp}_{gpu}", "steps", "tp", "variant", "masked")
        for name in ("native-fused", "ours", "ours-skip"):
            rows[tp, name] = f"TP={tp}, {gpu.upper()}: {VARIANTS.get(name, 'flag on, `skip_masked=True`')}"
    shares = {share: f"{share:.0%} masked" for share in SHARES}
    return grid("ms / MiB over the resting state", rows, shares, lambda row, share: step_cell(records[*row, share]))


def curves() -> str:
    """Training runs: speed and memory, the loss at the end, and how far all losses are from the native run's."""
    rows = []
    for record in measured("curves_h100", "curves", "run").values():
        title = ("masked prompts: " if record["masked"] else "") + curves_picture.TITLES[record["variant"]]
        title += "" if record["order"] == "blocks" else ", sums in another order"
        values = [f"{record['time_ms']:.1f} / {record['peak_mib']:,.0f}", f"{record['held_out_loss']:.4f}"]
        apart = (f"{record[field]:.1e}" for field in ("difference_rms", "difference_largest") if field in record)
        over = f" ({record['over_noise']:.2f})" if "over_noise" in record else ""
        rows.append([title, *values, (" / ".join(apart) or "-") + over])
    header = ["", "ms a step / MiB over the resting state", "loss of held-out text"]
    return markdown([*header, "difference to the native run: root mean square / largest (over the noise)"], rows)


def heads_tp() -> str:
    """The head alone at TP=1 and 2, communication included."""
    keys = ("provider", "mode", "tp", "tokens")
    records = measured("head_tp_1xh100", "times", *keys) | measured("head_tp_2xh100", "times", *keys)
    rows = {(name, "rl"): HEADS[name] for name in ("ours", "ours-cached", "ours-token-640", "verl")}
    rows["megatron", "logprob"] = f"{HEADS['megatron']}, no entropy"
    sizes = {(tp, tokens): f"TP={tp}, {tokens:,} tokens" for tp in (1, 2) for tokens in (8192, 16384)}
    what = "ms (over F + dX + dW) / extra GiB"
    return grid(what, rows, sizes, lambda row, size: cell(records[*row, *size], "over_products"))


def errors() -> str:
    """Errors against fp64 of every head that was compared."""
    rows = []
    for (provider, mode), record in measured("head_h200", "errors", "provider", "mode").items():
        largest = record.get("logprobs_max_error", record.get("loss_max_error"))
        values = largest, record["grad_hidden_relative_error"], record["grad_weight_relative_error"]
        rows.append([HEADS[provider], mode, *(f"{value:.1e}" for value in values)])
    return markdown(["", "mode", "logprob (sft: loss), largest error", "dX, relative", "dW, relative"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "head_rl": partial(head, "head_h200", "rl", "ms / extra GiB"),
    "head_sft": partial(head, "head_h200", "sft", "ms / extra GiB"),
    "over_products": over_products,
    "known_rl": partial(head, "known_loss_h200", "rl", "ms (over F + dX + dW) / extra GiB", "over_products"),
    "known_sft": partial(head, "known_loss_h200", "sft", "ms (over F + dX + dW) / extra GiB", "over_products"),
    "ignored_rows": ignored_rows,
    "jsd": jsd,
    "errors": errors,
    "heads_tp": heads_tp,
    "steps": steps,
    "known_steps": known_steps,
    "masked_steps": masked_steps,
    "curves": curves,
}


def fill(page: str) -> str:
    """The page with its tables made anew."""
    return PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]]()}\n{place[3]}", page)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def build_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog="python -m benchmark.tables", description=__doc__.splitlines()[0])


if __name__ == "__main__":
    build_parser().parse_args()
    for path in pages():
        path.write_text(fill(path.read_text()))
