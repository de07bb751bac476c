"""The command `megatron-lce`, also `python -m megatron_lce`: `doctor` and `estimate`.

Help and errors in arguments come without torch, whose import takes seconds: what needs it is imported where it runs.
"""

import argparse
import contextlib
import difflib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megatron_lce import __version__
from megatron_lce.command.estimate import WORKSPACE_BYTES, HeadStep, estimate_table, format_estimates, verdict
from megatron_lce.command.model_shapes import MODEL_SHAPES, find_model, read_config
from megatron_lce.core.plan import ALIGNED_COLUMNS, round_up

MIB = 2**20
MEGATRON_PADS_TO = 128  # columns of each rank: its --make-vocab-size-divisible-by
DTYPES = ("bf16", "fp16", "fp32")


class Parser(argparse.ArgumentParser):
    """Prints errors in one line, and the nearest name of an unknown option."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        for option in (text.partition("=")[0] for text in unknown if text.startswith("-")):
            similar = difflib.get_close_matches(option, self._option_string_actions, n=1)
            hint = f"did you mean {similar[0]}?" if similar else f"{self.prog} --help lists the options"
            self.error(f"unknown option {option}; {hint}")
        return found, unknown


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megatron-lce", description="Fused linear cross-entropy for Megatron-LM.")
    parser.add_argument("--version", action="version", version=f"megatron-lce {__version__}")
    commands = parser.add_subparsers()
    text = (
        "Print the installed versions and which backend runs here, and compare that backend with fp64. The exit status "
        "is 1 if there is a problem."
    )
    command = commands.add_parser("doctor", help="check this machine", description=text)
    command.add_argument("--device", choices=("cpu", "cuda"), help="Device to check (default: cuda if there is one).")
    command.add_argument("--json", action="store_true", help="Print one JSON object instead of text.")
    command.set_defaults(run=_doctor)
    text = (
        "Print peak memory and matmuls of the head's forward and backward on one rank, for Megatron's losses and for "
        "this package, and recommend one. Peaks include both gradients, but not hidden, weight and main_grad."
    )
    command = commands.add_parser("estimate", help="memory by formula, without a GPU", description=text)
    _add_estimate(command)
    return parser


def _add_estimate(command: argparse.ArgumentParser) -> None:
    add, models = command.add_argument, command.add_mutually_exclusive_group().add_argument
    count = _parsed_by(_whole, "a whole number such as 8192, 8,192 or 8k, at least 1", lambda value: value >= 1)
    share = _parsed_by(float, "a share, at least 0 and below 1", lambda value: 0 <= value < 1)
    text = f"Public model that gives hidden size and vocabulary: {', '.join(MODEL_SHAPES)}."
    models("--model", type=_parsed_by(find_model), help=text)
    text = "A Hugging Face config.json that gives both, in place of --model."
    models("--config", dest="model", metavar="FILE", type=_parsed_by(lambda path: read_config(Path(path))), help=text)
    add("--hidden", type=count, help=f"Hidden size, a multiple of {ALIGNED_COLUMNS}; with --vocab for any other model.")
    add("--vocab", type=count, help="Vocabulary of all ranks together, padding included (default: the model's own).")
    text = "Tokens of a microbatch, whole sequences; 16k is 16384 (default: %(default)s)."
    add("--tokens", type=count, default=8192, help=text)
    add("--tp", type=count, default=1, help="Tensor-parallel size (default: %(default)s).")
    add("--sequence-parallel", action="store_true", help="Hidden is sharded along the sequence.")
    add("--dtype", choices=DTYPES, default="bf16", help="Dtype of hidden and weight (default: %(default)s).")
    add("--main-grad", action="store_true", help="The head has gradient_accumulation_fusion set.")
    add("--no-entropy", action="store_true", help="Log-probabilities without entropy, as for a plain loss.")
    text = "The argument workspace_bytes (default: %(default)s MiB)."
    add("--workspace-mib", type=count, default=WORKSPACE_BYTES // MIB, help=text)
    text = "Share of masked tokens: adds rows that skip them (default: %(default)s)."
    add("--ignored", type=share, default=0.0, help=text)
    add("--json", action="store_true", help="Print one JSON object instead of a table.")
    command.set_defaults(run=_estimate, fail=command.error)


def _parsed_by(
    parse: Callable[[str], Any], what: str = "", is_right: Callable[[Any], bool] = lambda value: True
) -> Callable[[str], Any]:
    """Return a type whose message argparse shows; it hides those of other errors."""

    def parsed(text: str) -> Any:
        try:
            if is_right(value := parse(text)):
                return value
            raise ValueError
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"must be {what}, got {text}" if what else str(error)) from None

    return parsed


def _whole(text: str) -> int:
    """Return the value of 8192, 8,192 or 8k."""
    if not (found := re.fullmatch(r"(\d+|\d{1,3}(?:,\d{3})+)(k?)", text, re.IGNORECASE | re.ASCII)):
        raise ValueError
    return int(found[1].replace(",", "")) * (1024 if found[2] else 1)


def _doctor(arguments: argparse.Namespace) -> int:
    try:
        from megatron_lce.command import doctor
    except (ImportError, OSError) as error:
        problem = f"torch cannot be imported: {type(error).__name__}: {error}"
        print(json.dumps({"problems": [problem]}, indent=1) if arguments.json else f"PROBLEM: {problem}")
        return 1
    report = doctor.examine(arguments.device)
    print(json.dumps(report, indent=1) if arguments.json else doctor.format_report(report))
    return 1 if report["problems"] else 0


def _estimate(arguments: argparse.Namespace) -> int:
    hidden, vocab, tokens, tp, name, notes = arguments.hidden, arguments.vocab, arguments.tokens, arguments.tp, "", []
    if arguments.model:
        name, shape = arguments.model
        if hidden is not None:
            arguments.fail(f"--hidden must not be given beside --model or --config, got {hidden}")
        padded = round_up(shape.vocab, MEGATRON_PADS_TO * tp)
        if vocab is None and padded > shape.vocab:
            notes = [f"Megatron pads this vocabulary of {shape.vocab:,} to {padded:,} by default: --vocab {padded}"]
        hidden, vocab = shape.hidden, shape.vocab if vocab is None else vocab
        name += " (tied head): " if shape.tied else ": "
    if hidden is None or vocab is None:
        arguments.fail("--model, --config, or both --hidden and --vocab must be given")
    if hidden % ALIGNED_COLUMNS:
        arguments.fail(f"--hidden must be a multiple of {ALIGNED_COLUMNS} for an estimate, got {hidden}")
    if vocab % tp:
        padded = round_up(vocab, MEGATRON_PADS_TO * tp)
        arguments.fail(f"--vocab must be a multiple of --tp {tp}, got {vocab}; Megatron pads it to {padded}")
    if arguments.sequence_parallel and tokens % tp:
        arguments.fail(f"--tokens must be a multiple of --tp {tp} with --sequence-parallel, got {tokens}")
    same = {name: getattr(arguments, name) for name in ("tp", "sequence_parallel", "dtype", "main_grad", "ignored")}
    same |= {"entropy": not arguments.no_entropy, "workspace_bytes": arguments.workspace_mib * MIB}
    step = HeadStep(tokens, hidden, vocab // tp, **same)
    try:
        rows = estimate_table(step)
    except ValueError as error:  # the workspace is too small for the head
        arguments.fail(f"--workspace-mib {arguments.workspace_mib}: {error}")
    if arguments.json:
        print(json.dumps({"step": f"{name}{step}", "heads": rows, "verdict": verdict(rows)}, indent=1))
    else:
        print(format_estimates(f"{name}{step}", rows, notes))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if "run" not in arguments:
        parser.print_help()
        return 0
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough, as `head -1`
        with contextlib.suppress(BrokenPipeError):  # else the interpreter closes it at exit, and says so
            sys.stdout.close()
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
