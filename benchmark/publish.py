"""Tables and pictures of README and docs, from committed results: `python -m benchmark.publish` writes all of them.

A page has a table's place between `<!-- table: NAME -->` and `<!-- end -->`; NAME is an entry of `TABLES`, or
`commands`. Pictures go to docs/images/NAME.png; NAME is an entry of `PICTURES`. Each entry names its file of
benchmark/results. To publish a new measurement, commit its JSON and run
this program; `tests/test_docs.py` fails if a page differs from its results.
"""

import argparse
import itertools
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmark import pictures
from benchmark.results import extra_gib, grouped, limits_ms, load, measured, products_ms

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "benchmark" / "results", ROOT / "docs" / "images"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

ALL_STEPS = ("steps", "steps_tp", "steps_tp4")
MASKED = {0.0: "", 0.6: ", 60 % masked"}  # of columns' titles

Titles = dict[Any, str]  # by the value of a record's field
Cell = Callable[[dict], str]
Column = tuple[dict[str, Any], Cell]  # the fields of the records in it, and their text

STEPS = {  # without `te-overwrite`, which needs a patched Megatron
    "native": "Megatron",
    "native-fused": "Megatron, fused cross-entropy",
    "te": "Megatron, TransformerEngine's cross-entropy",
    "ours": "megatron-lce",
    "ours-0": "megatron-lce, `logits_cache_bytes=0`",
    "ours-skip": "megatron-lce, `skip_masked=True`",
}
HEADS = {
    "megatron": "Megatron, fused cross-entropy",
    "te": "Megatron, TransformerEngine's cross-entropy",
    "compile": "torch.compile",
    "liger": "Liger, portable Triton head",
    "verl": "verl's fused kernel",
    "ours": "megatron-lce",
    "ours-0": "megatron-lce, `logits_cache_bytes=0`",
    "ours-token-640": "megatron-lce, `linear_token_loss`",
}
JSD_HEADS = {
    "compile": "torch.compile",
    "ours": "`linear_jsd`",
    "ours-loss-1024": "`linear_divergence_loss`",
    "ours-3-loss-1024": "`linear_divergence_loss`, three kinds",
}
POLICY = {
    "verl": "verl's Megatron engine, logits (`use_fused_kernels=False`)",
    "verl-kernel": "verl's fused kernel (`use_fused_kernels=True`)",
    "ours-skip": "verl with the plugin (`use_fused_kernels=False`)",
    "ours-token-skip": "`linear_token_loss` in your own loop",
}
VERL = {
    "engine": "logits (`use_fused_kernels=False`)",
    "kernel": "verl's fused kernel (`use_fused_kernels=True`)",
    "plugin": "our plugin (`use_fused_kernels=False`)",
    "plugin in fused forward": "our plugin (`use_fused_kernels=True`)",
}
CHUNKED = {
    "skyrl, logits": "SkyRL's chunks, behind bf16 logits",
    "skyrl, fused": "SkyRL, `fused_lm_head_logprob`",
    "skyrl, fused, verl's kernel": "SkyRL, `fused_lm_head_logprob` with verl's kernel",
    "skyrl, plugin": "SkyRL with the plugin",
    "slime": "slime's chunks, behind fp32 logits",
    "slime, plugin": "slime with the plugin",
}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |\n" for line in (header, *rows)]
    return "".join([lines[0], f"|{'---|' * len(header)}\n", *lines[1:]])


def table(document: dict, corner: str, section: str, row: str, titles: Titles, columns: dict[str, Column]) -> str:
    """One row for each value of the field `row`, of equal records the first; a row without a record is left out."""
    lines = []
    for value, title in titles.items():
        cells = []
        for fields, cell in columns.values():
            records = [x for x in document.get(section, []) if {row: value, **fields}.items() <= x.items()]
            cells.append(cell(records[0]) if records else "-")
        if {*cells} != {"-"}:
            lines.append([title, *cells])
    return markdown([corner, *columns], lines)


def if_measured(cell: Cell) -> Cell:
    """What stands for a record without a result: out of memory is one, too."""
    return lambda x: cell(x) if x["status"] == "ok" else "out of memory" if x["status"] == "out of memory" else "-"


@if_measured
def step_ms(record: dict) -> str:
    return f"{record['time_ms']:.1f}"


@if_measured
def step_gib(record: dict) -> str:
    return f"{record['peak_mib'] / 1024:.1f}"


@if_measured
def step_both(record: dict) -> str:
    return f"{record['time_ms']:.1f}, {record['peak_mib'] / 1024:.1f}"


@if_measured
def head_gib(record: dict) -> str:
    return f"{extra_gib(record):.1f}"


@if_measured
def head_both(record: dict) -> str:
    return f"{record['time_ms']:.1f}, {head_gib(record)}"


def first_step(document: dict) -> str:
    """The README's: time and memory at 16,384 tokens, and the same with 60 % of them masked."""
    names = ("native", "native-fused", "te", "ours", "ours-skip")
    tp = document["steps"][0]["tp"]
    columns: dict[str, Column] = {}
    for masked, suffix in MASKED.items():
        fields = {"tp": tp, "tokens": 16384, "masked": masked}
        columns |= {f"ms{suffix}": (fields, step_ms), f"GiB{suffix}": (fields, step_gib)}
    titles = {x: STEPS[x] for x in names} | {"te": f"{STEPS['te']} \\*"}
    return table(document, f"training step, TP={tp}", "steps", "variant", titles, columns)


def steps(document: dict, what: str, cell: Cell) -> str:
    """Of 16,384 tokens, at all sizes."""
    document, columns = {"steps": [x for name in ALL_STEPS for x in result(name)["steps"]]}, {}
    for tp, (masked, suffix) in itertools.product((1, 2, 4), MASKED.items()):
        columns[f"TP={tp}{suffix}"] = ({"tp": tp, "tokens": 16384, "masked": masked}, cell)
    return table(document, f"training step: {what}", "steps", "variant", STEPS, columns)


def policy(document: dict) -> str:
    """The head of a policy update without entropy, without and with masked tokens, at all sizes."""
    document, columns = {"policy": document["policy"] + result("policy_tp4")["policy"]}, {}
    for tp, (masked, suffix) in itertools.product((2, 4), MASKED.items()):
        columns[f"TP={tp}{suffix}"] = ({"tp": tp, "masked": masked, "entropy_coeff": 0}, head_both)
    return table(document, "head, logprobs: ms, GiB", "policy", "provider", POLICY, columns)


def first_verl(document: dict) -> str:
    """The README's: an update of verl's worker."""
    columns: dict[str, Column] = {}
    for masked, suffix in MASKED.items():
        fields = {"pass": "update", "masked": masked, "entropy_coeff": 0.0}
        columns |= {f"ms{suffix}": (fields, step_ms), f"GiB{suffix}": (fields, step_gib)}
    titles = {name: VERL[name] for name in ("engine", "kernel", "plugin")}
    corner = f"verl's policy update, TP={document['verl'][0]['tp']}"
    return table(document, corner, "verl", "variant", titles, columns)


def verl(document: dict) -> str:
    """An update and a log-prob pass of verl's worker, without and with masked tokens."""
    columns: dict[str, Column] = {}
    for (what, title), (masked, suffix) in itertools.product(
        (("update", "update"), ("logprobs", "log-prob pass")), MASKED.items()
    ):
        columns[f"{title}{suffix}"] = {"pass": what, "masked": masked, "entropy_coeff": 0.0}, step_both
    corner = f"verl, TP={document['verl'][0]['tp']}: ms, GiB"
    return table(document, corner, "verl", "variant", VERL, columns)


def chunked(document: dict) -> str:
    """One head of many tokens: other ways out of memory."""
    columns: dict[str, Column] = {}
    for masked, suffix in MASKED.items():
        columns[f"logprobs{suffix}"] = {"masked": masked}, head_both
    first = document["chunked"][0]
    return table(document, f"{first['shape']}, TP={first['tp']}: ms, GiB", "chunked", "variant", CHUNKED, columns)


def heads(document: dict, shape: str, title: str) -> str:
    """Of one shape; in front the sum of its three products."""
    columns: dict[str, Column] = {}
    for mode in ("rl", "sft"):
        columns[f"{title}, {mode.upper()}"] = ({"shape": shape, "mode": mode}, head_both)
    products = f"{limits_ms(document, {'shape': shape})[0]:.1f}"
    header, rule, *rows = table(document, "ms, GiB", "times", "provider", HEADS, columns).splitlines(keepends=True)
    return "".join([header, rule, f"| the three matmuls, cuBLAS | {products} | {products} |\n", *rows])


def errors(document: dict) -> str:
    """Of logprobs and gradients, against fp64; heads of bf16 logits beside ours."""
    columns: dict[str, Column] = {
        "largest logprob error": ({"mode": "rl"}, if_measured(lambda x: f"{x['logprobs_max_error']:.1e}")),
        "relative gradient error": ({"mode": "rl"}, if_measured(lambda x: f"{x['grad_hidden_relative_error']:.1e}")),
    }
    titles = {name: HEADS[name] for name in ("ours", "compile", "verl")}
    return table(document, "H = 1,024, bf16", "errors", "provider", titles, columns)


def distillation(document: dict) -> str:
    names = {0.5: "JSD, beta 0.5", 0.0: "forward KL, beta 0", 1.0: "reverse KL, beta 1"}
    columns: dict[str, Column] = {title: ({"beta": beta}, head_both) for beta, title in names.items()}
    return table(document, "ms, GiB", "jsd", "provider", JSD_HEADS, columns)


TABLES: dict[str, tuple[str, Callable[[dict], str]]] = {  # the results' file, and what makes the table
    "first_step": ("steps_tp", first_step),
    "first_verl": ("verl", first_verl),
    "steps": ("steps", partial(steps, what="ms", cell=step_ms)),
    "steps_memory": ("steps", partial(steps, what="transient GiB", cell=step_gib)),
    "verl": ("verl", verl),
    "policy": ("policy", policy),
    "chunked": ("chunked", chunked),
    "heads": ("heads", partial(heads, shape="S1", title="TP=1")),
    "heads_tp4": ("heads_tp4", partial(heads, shape="16384x4096x151936 TP=4", title="TP=4")),
    "errors": ("heads", errors),
    "distillation": ("jsd", distillation),
}


def result(name: str) -> dict:
    return load(RESULTS / f"{name}.json")


def fill(page: str) -> str:
    """The page with its tables made anew."""

    def made(place: re.Match[str]) -> str:
        if place[2] == "commands":
            return f"{place[1]}\n{commands()}\n{place[3]}"
        file, make = TABLES[place[2]]
        return f"{place[1]}\n{make(result(file))}\n{place[3]}"

    return PLACE.sub(made, page)


def commands() -> str:
    """The commands that made the committed results, as these record them."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        document = load(path)
        settings = document.get("settings", {})
        if text := document.get("text"):
            size = f"--vocab {text['vocab']} --tokens {text['tokens']}"
            lines.append(f"python -m benchmark.training_text tokens.bin {size}")
        for run in (x for x in (settings, *settings.get("appended", [])) if "command" in x):
            launcher = f"torchrun --nproc-per-node {run['ranks']}" if "ranks" in run else "python"
            lines.append(f"{launcher} {run.get('program', '-m benchmark.run')} {shlex.join(run['command'])}")
    wrap = partial(textwrap.wrap, width=116, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    return "```bash\n" + "".join(" \\\n".join(wrap(line)) + "\n" for line in lines) + "```\n"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmark" / "README.md"]


# What tells records apart, in front of what was measured when a run prints its tables.
KEYS = ("tp", "pp", "shape", "tokens", "microbatches", "hidden", "vocab", "layers", "masked", "mode", "beta", "run")
KEYS += ("entropy_coeff", "pass", "variant", "provider")
NO_COLUMNS = ("status", "reason", "fastest_ms", "slowest_ms", "repeats", "losses", "order", "times_ms")


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
            print(f"Picture: {pictures.draw(name, result(file), IMAGES)}")


if __name__ == "__main__":
    main()
