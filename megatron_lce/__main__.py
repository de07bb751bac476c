"""The command `megatron-lce`, also `python -m megatron_lce`: `doctor` and `estimate`."""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_lce import __version__, doctor
from megatron_lce.core.options import WORKSPACE_BYTES
from megatron_lce.core.plan import ALIGNED_COLUMNS, ceil_div, round_up
from megatron_lce.estimate import TERABYTES, estimate_table, format_estimates
from megatron_lce.head_memory import HeadStep
from megatron_lce.model_shapes import MODEL_SHAPES, find_model, read_config

MIB, GIB = 2**20, 2**30
MEGATRON_PADS_TO = 128  # columns of each rank: its --make-vocab-size-divisible-by
ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-lce", description="Fused linear cross-entropy for Megatron-LM.")
    parser.add_argument("--version", action="version", version=f"megatron-lce {__version__}")
    commands = parser.add_subparsers(required=True)
    text = (
        "Prints the versions of what is installed, which backend would run and why others would not, and runs that "
        "backend against fp64. Exits with 0 if all is well, with 1 if there is a problem."
    )
    command = commands.add_parser("doctor", help="check this machine", description=text)
    what = "Device to check (default: cuda where there is one)."
    command.add_argument("--device", choices=("cpu", "cuda"), help=what)
    command.add_argument("--json", action="store_true", help="Print one JSON object instead of text.")
    command.set_defaults(run=_doctor)
    _add_estimate(commands)
    return parser


def _add_estimate(commands: Any) -> None:
    text = (
        "Memory and time of the head's forward and backward on one rank, for Megatron's own paths and for this "
        "package. Hidden, weight and main_grad are there anyway and are not counted; both gradients are."
    )
    command = commands.add_parser("estimate", help="memory and time by formula, without a GPU", description=text)
    add = command.add_argument
    count = _number(int, lambda value: value >= 1, "a whole number, at least 1")
    models = f"Public model that gives hidden size and vocabulary: {', '.join(MODEL_SHAPES)}."
    model = command.add_mutually_exclusive_group().add_argument
    model("--model", type=_parsed_by(find_model, "; --hidden and --vocab describe any other"), help=models)
    config = _parsed_by(lambda path: read_config(Path(path)))
    model(
        "--config", dest="model", type=config, help="A Hugging Face config.json that gives them, in place of --model."
    )
    add("--hidden", type=count, help=f"Hidden size, a multiple of {ALIGNED_COLUMNS}; with --vocab for any other model.")
    add("--vocab", type=count, help="Vocabulary of all ranks together, padding included (default: the model's own).")
    add("--tokens", type=count, default=8192, help="Tokens of a microbatch, whole sequences (default: %(default)s).")
    add("--tp", type=count, default=1, help="Tensor-parallel size (default: %(default)s).")
    add("--sequence-parallel", action="store_true", help="Hidden is sharded along the sequence.")
    add("--dtype", choices=ITEMSIZES, default="bf16", help="Of hidden and weight (default: %(default)s).")
    add("--main-grad", action="store_true", help="The head has gradient_accumulation_fusion set.")
    add("--no-entropy", action="store_true", help="Log-probabilities only, as a loss needs them.")
    workspace = "The argument workspace_bytes (default: %(default)s MiB)."
    add("--workspace-mib", type=count, default=WORKSPACE_BYTES // MIB, help=workspace)
    kept = _number(int, lambda value: value >= 0, "a whole number, at least 0")
    add("--cache-mib", type=kept, help="Add a row with this logits_cache_bytes.")
    share = _number(float, lambda value: 0 <= value <= 1, "a share, between 0 and 1")
    add("--ignored", type=share, default=0.0, help="Share of ignored rows, for skip_ignored (default: %(default)s).")
    size = _number(float, lambda value: 0 < value < math.inf, "a number, positive and finite")
    add("--tflops", type=size, help="TFLOP/s that the GPU's products reach: adds the time in ms.")
    add("--bandwidth", type=size, default=TERABYTES, help="TB/s of its memory, for that time (default: %(default)s).")
    add("--memory-gib", type=size, help="Add the largest number of tokens whose head fits in so much memory.")
    add("--json", action="store_true", help="Print one JSON object instead of a table.")
    command.set_defaults(run=_estimate, fail=command.error)


def _parsed_by(parse: Callable[[str], Any], hint: str = "") -> Callable[[str], Any]:
    """A type for argparse, which shows no other error's message."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{error}{hint}") from None

    return parsed


def _number(kind: type, is_right: Callable[[Any], bool], what: str) -> Callable[[str], Any]:
    def parse(text: str) -> int | float:
        with contextlib.suppress(ValueError):
            if is_right(value := kind(text)):
                return value
        raise ValueError(f"must be {what}, got {text}")

    return _parsed_by(parse)


def _doctor(arguments: argparse.Namespace) -> int:
    report = doctor.examine(arguments.device)
    print(json.dumps(report, indent=1) if arguments.json else doctor.format_report(report))
    return 1 if report["problems"] else 0


def _estimate(arguments: argparse.Namespace) -> int:
    cache_bytes = None if arguments.cache_mib is None else arguments.cache_mib * MIB
    memory_bytes = None if arguments.memory_gib is None else int(arguments.memory_gib * GIB)
    title, step = _head_step(arguments)
    try:
        rows = estimate_table(
            step,
            cache_bytes=cache_bytes,
            tflops=arguments.tflops,
            terabytes=arguments.bandwidth,
            memory_bytes=memory_bytes,
        )
    except ValueError as error:  # of a workspace that is too small for the head
        arguments.fail(f"--workspace-mib {arguments.workspace_mib}: {error}")
    print(json.dumps({"head": title, "ways": rows}, indent=1) if arguments.json else format_estimates(title, rows))
    if arguments.model and arguments.vocab is None and not arguments.json:
        vocab = arguments.model[1].vocab
        padded = round_up(vocab, MEGATRON_PADS_TO * arguments.tp)
        if padded > vocab:
            told = f"--vocab {padded}"
            print(f"\nMegatron pads this vocabulary of {vocab:,} to {padded:,}, unless told otherwise: {told}")
    return 0


def _head_step(arguments: argparse.Namespace) -> tuple[str, HeadStep]:
    hidden, vocab, name = arguments.hidden, arguments.vocab, ""
    if arguments.model:
        name, shape = arguments.model
        if hidden is not None:
            arguments.fail(f"--hidden must not be given beside --model or --config, got {hidden}")
        hidden, vocab = shape.hidden, shape.vocab if vocab is None else vocab
        name += " (tied head): " if shape.tied else ": "
    if hidden is None or vocab is None:
        arguments.fail("--model, --config, or both --hidden and --vocab must be given")
    if hidden % ALIGNED_COLUMNS:
        arguments.fail(f"--hidden must be a multiple of {ALIGNED_COLUMNS} for an estimate, got {hidden}")
    if arguments.cache_mib and arguments.dtype == "fp32":
        kept = arguments.cache_mib
        arguments.fail(f"--cache-mib must be 0 with --dtype fp32, of which nothing is kept, got {kept}")
    columns = ceil_div(vocab, arguments.tp)
    step = HeadStep(
        arguments.tokens,
        hidden,
        columns,
        tp=arguments.tp,
        sequence_parallel=arguments.sequence_parallel,
        itemsize=ITEMSIZES[arguments.dtype],
        main_grad=arguments.main_grad,
        entropy=not arguments.no_entropy,
        ignored=arguments.ignored,
        workspace_bytes=arguments.workspace_mib * MIB,
    )
    parallel = f"one rank of TP={step.tp}{' with sequence parallel' if step.gathers else ''}, " if step.tp > 1 else ""
    return f"{name}{parallel}{step.tokens} tokens x {hidden} x {columns}, {arguments.dtype}", step


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
