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

from benchmark import ratios, results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHAPES = ("S1", "S2", "S3")
SHARES = (0.0, 0.3, 0.6, 0.9)
HEADS = {
    "ours": "**megatron_lce**, the default",
    "ours-cached": "**megatron_lce**, everything cached",
    "ours-token-640": "**megatron_lce**, `linear_token_loss`, 640 MiB",
    "ours-token-1280": "**megatron_lce**, `linear_token_loss`, 1.25 GiB",
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
JSD_HEADS = {  # and the products that each cannot do without
    "ours": ("per token, over 2 (Fs + Ft) + dX + dW", "over_products_recomputed"),
    "ours-weights-512": ("`token_weights`, 512 MiB, over Fs + Ft + dX + dW", "over_products"),
    "ours-weights-1024": ("`token_weights`, 1 GiB, over the same", "over_products"),
    "compile": ("torch.compile with all logits, over the same", "over_products"),
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
    records = measured(name, "times", "provider", "mode", "shape")
    rows = [
        [title, *(cell(records[provider, mode, shape], ratio) for shape in SHAPES)]
        for provider, title in HEADS.items()
        if all((provider, mode, shape) in records for shape in SHAPES)
    ]
    return markdown([f"{mode}: {header}", *SHAPES], rows)


def over_products() -> str:
    """Ours as multiples of the products that each way needs."""
    records = measured("head_h200", "times", "provider", "mode", "shape")
    cases = [("forward without gradient, over F", "ours", "fwd", "over_products")]
    for mode in ("rl", "sft"):
        cases.append((f"{mode}, nothing cached, over 2F + dX + dW", "ours", mode, "over_products_recomputed"))
        cases.append((f"{mode}, everything cached, over F + dX + dW", "ours-cached", mode, "over_products"))
    rows = [
        [title, *(cell(records[provider, mode, shape], ratio, memory=False) for shape in SHAPES)]
        for title, provider, mode, ratio in cases
    ]
    return markdown(["ms (over the products)", *SHAPES], rows)


def ignored_rows() -> str:
    """Time over the share of ignored rows, and its ratio to that of the other rows by themselves."""
    records = measured("rows_h200", "rows", "mode", "layout", "shape", "provider", "ignored")
    rows = [
        [
            f"{shape}, {title}",
            *(cell(records["rl", "scattered", shape, name, x], "over_alone", memory=False) for x in SHARES),
        ]
        for shape, (name, title) in itertools.product(("S1", "S3"), SKIPPING.items())
    ]
    return markdown(["rl: ms (over the counted rows alone)", *(f"{share:.0%} ignored" for share in SHARES)], rows)


def jsd() -> str:
    """Distillation: time, its ratio to the products that each way needs, memory."""
    records, betas = measured("jsd_h200", "jsd", "provider", "beta"), (0.5, 0, 1)
    rows = [
        [title, *(cell(records[name, beta], ratio) for beta in betas)] for name, (title, ratio) in JSD_HEADS.items()
    ]
    return markdown(["ms (over the products) / extra GiB", *(f"beta {beta}" for beta in betas)], rows)


def steps() -> str:
    """A whole step of a GPT at TP=2."""
    records, sizes = measured("megatron_step_tp2_h100", "steps", "variant", "tokens"), (8192, 16384)
    rows = [[title, *(step_cell(records[variant, size]) for size in sizes)] for variant, title in VARIANTS.items()]
    return markdown(["ms / MiB over the resting state", *(f"{tokens:,} tokens" for tokens in sizes)], rows)


def known_steps() -> str:
    """A whole step where the flag makes gradients in forward."""
    records = measured("step_known_tp2_h100", "steps", "variant")
    titles = VARIANTS | {"ours-known": "flag on, `known_loss=True`"}
    rows = [[titles[variant], step_cell(record)] for (variant,), record in records.items()]
    return markdown(["ms / MiB over the resting state", "TP=2, H100, 8,192 tokens"], rows)


def masked_steps() -> str:
    """The same with masked tokens, at TP=2 and on one GPU."""
    rows = []
    for tp, gpu in ((2, "h100"), (1, "h200")):
        records = measured(f"step_masked_tp{tp}_{gpu}", "steps", "variant", "masked")
        for name in ("native-fused", "ours", "ours-skip"):
            title = VARIANTS.get(name, "flag on, `skip_masked=True`")
            rows.append([f"TP={tp}, {gpu.upper()}: {title}", *(step_cell(records[name, share]) for share in SHARES)])
    return markdown(["ms / MiB over the resting state", *(f"{share:.0%} masked" for share in SHARES)], rows)


def heads_tp() -> str:
    """The head alone at TP=1 and 2, communication included."""
    modes = {"ours": "rl", "ours-cached": "rl", "ours-token-640": "rl", "verl": "rl", "megatron": "logprob"}
    keys = ("tp", "tokens", "provider", "mode")
    records = measured("head_tp_1xh100", "times", *keys) | measured("head_tp_2xh100", "times", *keys)
    sizes = [(tp, tokens) for tp in (1, 2) for tokens in (8192, 16384)]
    rows = [
        [
            f"{HEADS[name]}{', no entropy' if mode == 'logprob' else ''}",
            *(cell(records[*size, name, mode], "over_products") for size in sizes),
        ]
        for name, mode in modes.items()
    ]
    header = [f"TP={tp}, {tokens:,} tokens" for tp, tokens in sizes]
    return markdown(["ms (over F + dX + dW) / extra GiB", *header], rows)


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
