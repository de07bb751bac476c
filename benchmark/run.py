"""Measures one case of the table below: `python -m benchmark.run head --shapes S1,S2,S3 --providers all`.

Cases of several ranks are started by torchrun: `torchrun --nproc-per-node 2 -m benchmark.run head_tp`. Prints tables;
with `--json FILE` also writes every measurement there, at once, so that a run that is stopped loses nothing. What a
provider cannot do, is not installed or fails at is a result too and stands in both.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmark import head_tp, jsd, pictures, providers, report, results, rows
from benchmark.shapes import DTYPES, choose, parse_heads, parse_shape
from scripts.arguments import HelpFormatter
from scripts.ranks import device_of_rank

VARIANTS = ("native", "native-fused", "ours", "ours-skip", "ours-512-mib", "ours-cached", "ours-main-grad")
VARIANTS += ("ours-known", "ours-known-skip", "ours-main-grad-512-mib", "ours-token-640", "ours-token-main-grad")
VARIANTS += ("own-flag",)
EXTRAS = {"rich": "benchmark", "matplotlib": "benchmark", "megatron": "megatron"}  # where setup.py names a package


@dataclass(frozen=True)
class Case:
    """What one case measures, the module that does it, and its options: (help, default, how a text becomes a value).

    A default of two is that of a GPU and that of a CPU. `defaults` are the case's own for options of another.
    """

    about: str
    module: str
    options: dict[str, tuple[str, Any, Callable[[str], Any]]]
    defaults: dict[str, Any] = field(default_factory=dict)


def several(parse: Callable[[str], Any]) -> Callable[[str], list]:
    return lambda text: [parse(part) for part in text.split(",") if part]


def names(what: str, allowed: Any) -> Callable[[str], list[str]]:
    return lambda text: choose(what, text, allowed) if text else []


def number_from(lowest: float, highest: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not lowest <= number <= highest:
            raise ValueError(f"must be comma-separated numbers from {lowest:g} to {highest:g}, got {text!r}")
        return number

    return parse


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"must be at least 1, got {text}")
    return int(text)


def optional_shape(text: str) -> Any:
    return parse_shape(text) if text else None


# fmt: off
MODES, SHAPES, SHARES = names("a mode", providers.MODES), several(parse_shape), several(number_from(0, 1))
SIZES = {
    "hidden": ("Hidden size.", 4096, count),
    "vocab": ("Vocabulary of all ranks together.", 151936, count),
    "tokens": ("Comma-separated token counts.", "16384,8192", several(count)),
}
ROUNDS = {"rounds": ("Rounds of turns; a difference of a hundredth takes more.", results.ROUNDS, count)}
BUDGET = ROUNDS | {"budget_ms": ("Time of a head's repeats in each round, in ms.", 100.0, float)}
PICTURES = BUDGET | {"pictures": ("Folder for the pictures; None: no pictures.", None, Path)}
HEAD = PICTURES | {
    "shapes": ("Comma-separated: S1, S2, S3 or NxHxV.", ("S1,2048x1024x32768", "64x128x1000"), SHAPES),
    "providers": (  # compiling takes minutes on a CPU
        f"Comma-separated: all, {', '.join(providers.PROVIDERS)}.",
        ("ours,ours-cached,eager,compile", "ours,eager"), providers.select_providers,
    ),
    "modes": ("Comma-separated kinds of a step.", ",".join(providers.MODES), MODES),
    "error_shape": (
        "Shape of the comparison with fp64, '' for none.", ("2048x1024x32768", "64x128x1000"), optional_shape,
    ),
    "cache_fractions": ("Cache budgets as parts of the 16-bit logits, such as 0,0.25,0.5,1.", "", SHARES),
    "workspace_mib": ("Workspaces of linear_token_loss in MiB, such as 192,640,1280.", "", several(count)),
    "host_shapes": ("Shapes at which the host's time of a call is taken, such as S3.", "", SHAPES),
    "memory_tokens": ("Token counts of the memory curve, such as 1024,8192.", "", several(count)),
    "memory_modes": ("Kinds of its steps; empty: each head's first with gradients.", "", MODES),
}
KNOWN_LOSS = {
    "modes": "rl,sft", "error_shape": "", "shapes": ("S1,S2,S3", "64x128x1000"),
    "providers": (
        "ours,ours-cached,ours-token-640,ours-token-1280,ours-known-640,compile,liger,quack",
        "ours,ours-token-640,ours-known-640",
    ),
}
JSD_PROVIDERS = f"Comma-separated: all, {', '.join(jsd.PROVIDERS)}.", ("all", "ours,ours-weights-512,liger,eager")
JSD = PICTURES | {
    "shape": (
        "Tokens x student's H x teacher's H x vocab of the times.", ("8192x2048x4096x151936", "64x32x48x1000"),
        parse_heads,
    ),
    "error_shape": (
        "The same of the comparison with fp64.", ("1024x512x1024x32768", "64x32x48x1000"), parse_heads,
    ),
    "betas": ("Comma-separated: 0 is forward KL, 1 reverse KL, between them JSD.", "0.5,0,1", SHARES),
    "providers": (*JSD_PROVIDERS, names("a provider", jsd.PROVIDERS)),
}
ROW_MODES = f"Comma-separated: {', '.join(rows.MODES)}; only the last has a peer."
ROWS = PICTURES | {
    "shapes": HEAD["shapes"],
    "shares": ("Comma-separated shares of ignored rows.", "0,0.3,0.6,0.9", SHARES),
    "layouts": ("Comma-separated places of the ignored rows.", "all", names("a layout", rows.LAYOUTS)),
    "modes": (ROW_MODES, "rl,rl-cached,backward", names("a mode", rows.MODES)),
}
HEAD_TP = BUDGET | SIZES | {
    "tp": ("Comma-separated group sizes; None: the powers of two up to the number of ranks.", None, several(count)),
    "heads": (f"Comma-separated: all, {', '.join(head_tp.HEADS)}.", "all", names("a head", head_tp.HEADS)),
}
MASKED = "Comma-separated shares of masked tokens, such as 0,0.3,0.6,0.9."
STEP = ROUNDS | SIZES | {
    "tp": ("Tensor-parallel size; sequence parallel from 2 on.", 2, count),
    "pp": ("Pipeline stages; also the number of microbatches.", 1, count),
    "masked": (MASKED, "0", several(number_from(0, 0.999))),
    "variants": (
        f"Comma-separated: all, {', '.join(VARIANTS)}.", ",".join(VARIANTS[:-1]), names("a variant", VARIANTS),
    ),
    "sequence_length": ("Tokens of a sequence.", 4096, count),
    "layers": ("Transformer layers.", 4, count),
    "heads": ("Attention heads.", 32, count),
}
ORDERS = range(1, 6)  # of training_curves, which needs Megatron
RUNS = ("native", *(f"native-{order}" for order in ORDERS), "flag", "known")
RUNS += tuple(f"masked-{name}" for name in RUNS)
CURVES = {
    "pictures": PICTURES["pictures"],
    "text": ("File that benchmark.training_text wrote.", "tokens.bin", Path),
    "runs": (f"Comma-separated: all, {', '.join(RUNS)}.", "all", names("a run", RUNS)),
    "steps": ("Optimizer steps of each run.", ("200", "8"), count),
    "tokens": ("Tokens of a microbatch.", ("8192", "64"), count),
    "microbatches": ("Microbatches of a step.", 4, count),
    "lr": ("Largest learning rate of Adam.", 1e-4, float),
    "sequence_length": ("Tokens of a sequence.", ("2048", "16"), count),
    "tp": ("Tensor-parallel size; sequence parallel from 2 on.", 1, count),
    "vocab": ("Vocabulary of all ranks together.", ("131072", "512"), count),
    "hidden": ("Hidden size.", ("1024", "32"), count),
    "layers": ("Transformer layers.", ("8", "2"), count),
    "heads": ("Attention heads.", ("16", "4"), count),
}
ROUNDING = {name: option for name, option in CURVES.items() if name not in ("pictures", "runs", "tp")}
SMALL = {"steps": "500", "tokens": "1024", "microbatches": "1", "lr": 1e-3, "sequence_length": "256"}
SMALL |= {"vocab": "16384", "hidden": "512", "layers": "4", "heads": "8"}  # ten minutes on two cores

CASES = {
    "head": Case("Our head beside its peers in one process.", "heads", HEAD),
    "known_loss": Case("A loss that is known in forward, beside heads that are not told.", "heads", HEAD, KNOWN_LOSS),
    "jsd": Case("Fused linear JSD beside its peers in one process.", "jsd", JSD, {"budget_ms": 150.0}),
    "rows": Case(
        "Time over the share of ignored rows.", "rows", ROWS,
        {"budget_ms": 50.0, "shapes": ("S1,S2,S3", "64x128x1000")},
    ),
    "head_tp": Case(
        "The head alone under tensor parallelism, communication included; by torchrun.", "head_tp", HEAD_TP,
        {"budget_ms": 130.0},
    ),
    "megatron_step": Case(
        "A whole training step of a Megatron GPT, flag on and off; by torchrun.", "megatron_step", STEP,
        {"tokens": "8192,16384"},
    ),
    "curves": Case("A GPT trained on real text, flag on and off, beside the noise of sums.", "training_curves", CURVES),
    "rounding": Case(
        "Logprobs of a trained GPT as a sampler and as its trainer compute them, logits rounded or not.", "rounding",
        ROUNDING, SMALL,
    ),
}
# fmt: on


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.run", description=__doc__.splitlines()[0], formatter_class=HelpFormatter
    )
    subparsers = parser.add_subparsers(dest="case", required=True, help="What is measured.")
    for name, case in CASES.items():
        add = subparsers.add_parser(
            name, help=case.about, description=case.about, formatter_class=HelpFormatter
        ).add_argument
        for option, (text, _, _) in case.options.items():
            default = _default(case, option)
            if isinstance(default, tuple):
                text = f"{text.rstrip('.')}; None: {default[not torch.cuda.is_available()]}."
            add(f"--{option.replace('_', '-')}", help=text, default=None if isinstance(default, tuple) else default)
        add("--dtype", choices=DTYPES, default="bf16", help="Type of hidden and weight.")
        add("--device", choices=("cuda", "cpu"), help="Where to run; None: cuda where every rank has a GPU.")
        add("--json", type=Path, help="File to write; None: tables only.")
    return parser


def _default(case: Case, option: str) -> Any:
    return case.defaults.get(option, case.options[option][1])


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    case = CASES[arguments.case]
    arguments.on = device_of_rank(arguments.device)
    arguments.dtype = DTYPES[arguments.dtype]
    for option, (_, _, parse) in case.options.items():
        value, default = getattr(arguments, option), _default(case, option)
        if value is None and isinstance(default, tuple):
            value = default[arguments.on.type != "cuda"]
        try:
            setattr(arguments, option, parse(value) if isinstance(value, str) else value)
        except ValueError as error:
            parser.error(f"{option.replace('_', '-')}: {error}")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if arguments.case == "head_tp":
        arguments.tp = arguments.tp or [2**i for i in range(ranks.bit_length())]
        for tp in arguments.tp:
            if ranks % tp or arguments.vocab % tp:
                parser.error(f"tp: must divide {ranks} processes and {arguments.vocab} columns, got {tp}")
    if "sequence_length" in case.options:
        for tokens in arguments.tokens if arguments.case == "megatron_step" else [arguments.tokens]:
            if tokens % arguments.sequence_length:
                parser.error(f"tokens: must be multiples of sequence-length {arguments.sequence_length}, got {tokens}")
    return arguments


def main(argv: list[str] | None = None) -> dict:
    """Runs what the arguments ask for and returns the document."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse_arguments(argv)
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    try:
        module = importlib.import_module(f"benchmark.{CASES[arguments.case].module}")
        importlib.import_module("rich")
        if getattr(arguments, "pictures", None):
            importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        sys.exit(f"{error.name} is not installed: pip install '.[{extra}]'")
    # The last rank has the losses of a pipeline; of other cases every rank has the same.
    path = arguments.json if rank == ranks - 1 else None
    settings = {"command": argv} | ({"ranks": ranks} if ranks > 1 else {})
    found = results.Results(arguments.on, arguments.dtype, path, settings)
    found.rounds, found.quiet = getattr(arguments, "rounds", results.ROUNDS), rank != ranks - 1
    module.measure_case(found, arguments)
    found.save()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if not found.quiet:
        report.print_tables(found.document)
        if getattr(arguments, "pictures", None):
            pictures.draw(found.document, arguments.pictures)
        if path:
            print(f"Report: {path}")
    return found.document


if __name__ == "__main__":
    main()
