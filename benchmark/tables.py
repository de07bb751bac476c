"""The tables of README and docs, from committed results: `python -m benchmark.tables` writes them into the pages.

A page says where a table goes by a comment, `<!-- table: NAME -->`, and ends it by `<!-- end -->`; what stands between
is replaced. `tests/test_docs.py` fails where a page differs from the files.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmark import results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHAPES = ("S1", "S2", "S3")
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


def load(name: str) -> dict:
    return results.load(RESULTS / f"{name}.json")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def head(mode: str) -> str:
    """Time and extra memory of every head that has this mode, at the three shapes."""
    records = {(x["provider"], x["shape"]): x for x in load("head_h200")["times"] if x["mode"] == mode}
    rows = []
    for provider, title in HEADS.items():
        measured = [records.get((provider, shape), {}) for shape in SHAPES]
        if all(record.get("status") == "ok" for record in measured):
            rows.append([title, *(_time_and_memory(record) for record in measured)])
    return markdown([f"{mode}: ms / extra GiB", *SHAPES], rows)


def _time_and_memory(record: dict) -> str:
    return f"{record['time_ms']:.1f} / {_extra_gib(record):.2f}"


def _extra_gib(record: dict) -> float:
    return (record["peak_mib"] - record["gradients_mib"]) / 1024


def over_products() -> str:
    """Ours as multiples of the products that each way needs."""
    records = {(x["provider"], x["mode"], x["shape"]): x for x in load("head_h200")["times"] if x["status"] == "ok"}
    cases = {
        "forward without gradient, over F": ("ours", "fwd", "over_products"),
        "rl, nothing cached, over 2F + dX + dW": ("ours", "rl", "over_products_recomputed"),
        "rl, everything cached, over F + dX + dW": ("ours-cached", "rl", "over_products"),
        "sft, nothing cached, over 2F + dX + dW": ("ours", "sft", "over_products_recomputed"),
        "sft, everything cached, over F + dX + dW": ("ours-cached", "sft", "over_products"),
    }
    rows = []
    for title, (provider, mode, ratio) in cases.items():
        of_shapes = [records[provider, mode, shape] for shape in SHAPES]
        rows.append([title, *(f"{record['time_ms']:.1f} ({record[ratio]:.2f})" for record in of_shapes)])
    return markdown(["ms (over the products)", *SHAPES], rows)


def known_loss(mode: str) -> str:
    """A loss that is known in forward beside heads that wait for backward: time, its ratio to F + dX + dW, memory."""
    records = {(x["provider"], x["shape"]): x for x in load("known_loss_h200")["times"] if x["mode"] == mode}
    rows = []
    for provider in dict.fromkeys(provider for provider, _ in records):
        of_shapes = [records[provider, shape] for shape in SHAPES]
        if all(record["status"] == "ok" for record in of_shapes):
            rows.append([HEADS[provider], *(_time_ratio_memory(record, "over_products") for record in of_shapes)])
    return markdown([f"{mode}: ms (over F + dX + dW) / extra GiB", *SHAPES], rows)


def _time_ratio_memory(record: dict, ratio: str) -> str:
    return f"{record['time_ms']:.1f} ({record[ratio]:.2f}) / {_extra_gib(record):.2f}"


def ignored_rows() -> str:
    """Time over the share of ignored rows, and its ratio to that of the other rows by themselves."""
    records = {
        (x["shape"], x["provider"], x["ignored"]): x
        for x in load("rows_h200")["rows"]
        if x["mode"] == "rl" and x["layout"] == "scattered"
    }
    shares = (0.0, 0.3, 0.6, 0.9)
    rows = []
    for shape in ("S1", "S3"):
        for provider, title in SKIPPING.items():
            of_shares = [records[shape, provider, share] for share in shares]
            cells = [f"{record['time_ms']:.1f} ({record['over_alone']:.2f})" for record in of_shares]
            rows.append([f"{shape}, {title}", *cells])
    return markdown(["rl: ms (over the counted rows alone)", *(f"{share:.0%} ignored" for share in shares)], rows)


def jsd() -> str:
    """Distillation: time, its ratio to the products that each way needs, memory."""
    records = {(x["provider"], x["beta"]): x for x in load("jsd_h200")["jsd"]}
    betas = (0.5, 0, 1)
    rows = []
    for provider, (title, ratio) in JSD_HEADS.items():
        rows.append([title, *(_time_ratio_memory(records[provider, beta], ratio) for beta in betas)])
    return markdown(["ms (over the products) / extra GiB", *(f"beta {beta}" for beta in betas)], rows)


def steps() -> str:
    """A whole step of a GPT at TP=2."""
    records = {(x["variant"], x["tokens"]): x for x in load("megatron_step_tp2_h100")["steps"]}
    sizes = (8192, 16384)
    rows = []
    for variant, title in VARIANTS.items():
        of_sizes = [records[variant, tokens] for tokens in sizes]
        rows.append([title, *(f"{record['time_ms']:.1f} / {record['peak_mib']:,.0f}" for record in of_sizes)])
    return markdown(["ms / MiB over the resting state", *(f"{tokens:,} tokens" for tokens in sizes)], rows)


def masked_steps() -> str:
    """The same with masked tokens, at TP=2 and on one GPU."""
    titles = VARIANTS | {"ours-skip": "flag on, `ignore_masked=True, skip_ignored=True`"}
    shares, rows = (0.0, 0.3, 0.6, 0.9), []
    for tp, gpu in ((2, "h100"), (1, "h200")):
        records = {(x["variant"], x["masked"]): x for x in load(f"step_masked_tp{tp}_{gpu}")["steps"]}
        for variant in ("native-fused", "ours", "ours-skip"):
            of_shares = [records[variant, share] for share in shares]
            times = (f"{record['time_ms']:.1f} / {record['peak_mib']:,.0f}" for record in of_shares)
            rows.append([f"TP={tp}, {gpu.upper()}: {titles[variant]}", *times])
    return markdown(["ms / MiB over the resting state", *(f"{share:.0%} masked" for share in shares)], rows)


def heads_tp() -> str:
    """The head alone at TP=1 and 2, communication included."""
    modes = {"ours": "rl", "ours-cached": "rl", "ours-token-640": "rl", "verl": "rl", "megatron": "logprob"}
    sizes = [(tp, tokens) for tp in (1, 2) for tokens in (8192, 16384)]
    records = {
        (x["tp"], x["tokens"], x["provider"], x["mode"]): x
        for tp in (1, 2)
        for x in load(f"head_tp_{tp}xh100")["times"]
        if x["status"] == "ok"
    }
    rows = []
    for provider, mode in modes.items():
        of_sizes = [records[tp, tokens, provider, mode] for tp, tokens in sizes]
        cells = [_time_ratio_memory(record, "over_products") for record in of_sizes]
        rows.append([f"{HEADS[provider]}{', no entropy' if mode == 'logprob' else ''}", *cells])
    header = [f"TP={tp}, {tokens:,} tokens" for tp, tokens in sizes]
    return markdown(["ms (over F + dX + dW) / extra GiB", *header], rows)


def errors() -> str:
    """Errors against fp64 of every head that was compared."""
    rows = []
    for record in load("head_h200")["errors"]:
        if record["status"] == "ok":
            values = [record.get("logprobs_max_error", record.get("loss_max_error"))]
            values += [record["grad_hidden_relative_error"], record["grad_weight_relative_error"]]
            rows.append([HEADS[record["provider"]], record["mode"], *(f"{value:.1e}" for value in values)])
    return markdown(["", "mode", "logprob (sft: loss), largest error", "dX, relative", "dW, relative"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "head_rl": lambda: head("rl"),
    "head_sft": lambda: head("sft"),
    "over_products": over_products,
    "known_rl": lambda: known_loss("rl"),
    "known_sft": lambda: known_loss("sft"),
    "ignored_rows": ignored_rows,
    "jsd": jsd,
    "errors": errors,
    "heads_tp": heads_tp,
    "steps": steps,
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
