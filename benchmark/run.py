"""Measures one case of the table below: `python -m benchmark.run head --shapes S1,S2,S3 --providers all`.

Several ranks are started by torchrun: `torchrun --nproc-per-node 2 -m benchmark.run megatron_step --tp 2`. Prints
tables; `--json FILE` also writes each measurement as soon as it is taken, so that a stopped run loses nothing. A
provider that is not installed, fails or lacks a mode is a result too, and stands in both.
"""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmark import jsd, providers, publish, results
from benchmark.shapes import DTYPES, WrongArgument, choose, parse_heads, parse_shape
from scripts.arguments import TRANSFORMER_IMPLS, HelpFormatter
from scripts.ranks import device_of_rank

VARIANTS = ("native", "native-fused", "te", "te-overwrite", "ours", "ours-skip", "ours-0")
VARIANTS += ("ours-known", "ours-known-skip", "ours-cached")
POLICY_HEADS = ("verl", "verl-kernel", "ours-skip", "ours-token-skip")
EXTRAS = {"megatron": "megatron", "tokenizers": "scripts"}  # where pyproject.toml names a package


class Run(NamedTuple):
    """A training run: the variant, and the order of sums."""

    variant: str
    order: int = 0  # the text's and the weights' own; else the seed of a shuffle


RUNS = {"native": Run("native-fused"), "flag": Run("ours")}
RUNS["native-again"] = Run("native-fused", order=1)


@dataclass(frozen=True)
class Case:
    """What one case measures, the function `module.name` that does it, and its options with their defaults as texts.

    A default of two is that of a GPU and that of a CPU.
    """

    about: str
    program: str
    options: dict[str, str | tuple[str, str] | None]


def several(parse: Callable[[str], Any]) -> Callable[[str], list]:
    return lambda text: [parse(part) for part in text.split(",") if part]


def names(what: str, allowed: Any) -> Callable[[str], list[str]]:
    return lambda text: choose(what, text, allowed)


def share(text: str, highest: float = 1) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= highest:
            return float(text)
    raise WrongArgument(f"must be comma-separated numbers from 0 to {highest:g}, got {text!r}")


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise WrongArgument(f"must be at least 1, got {text}")
    return int(text)


def kind_of_layers(text: str) -> str:
    if text not in TRANSFORMER_IMPLS:
        raise WrongArgument(f"must be {' or '.join(TRANSFORMER_IMPLS)}, got {text!r}")
    return text


def all_of(allowed: Iterable[str]) -> str:
    return f"Comma-separated: all, {', '.join(allowed)}."


# fmt: off
MODES, SHAPES, COUNTS, SHARES = names("a mode", providers.MODES), several(parse_shape), several(count), several(share)
OPTIONS = {  # how a text becomes a value, and what `--help` says; of a case's own where another has the same name
    "rounds": (count, "Rounds of turns; a difference of a hundredth takes more."),
    "budget_ms": (float, "Time of a head's repeats in each round, in ms."),
    "shapes": (SHAPES, "Comma-separated: S1, S2, S3 or NxHxV."),
    "providers": (providers.select_providers, all_of(providers.PROVIDERS)),
    "modes": (MODES, "Comma-separated kinds of a step."),
    "error_shape": (SHAPES, "Shapes of the comparison with fp64, '' for none."),
    "memory_tokens": (COUNTS, "Token counts of the memory curve, such as 1024,8192."),
    "memory_modes": (MODES, "Kinds of its steps; empty: each head's first with gradients."),
    "jsd shape": (parse_heads, "Tokens x student's H x teacher's H x vocab of the times."),
    "jsd error_shape": (parse_heads, "The same of the comparison with fp64."),
    "betas": (SHARES, "Comma-separated: 0 is forward KL, 1 reverse KL, between them JSD."),
    "jsd providers": (names("a provider", jsd.PROVIDERS), all_of(jsd.PROVIDERS)),
    "megatron_step tokens": (COUNTS, "Comma-separated token counts."),
    "tp": (count, "Tensor-parallel size; sequence parallel from 2 on."),
    "pp": (count, "Pipeline stages; also the number of microbatches."),
    "masked": (several(partial(share, highest=0.999)), "Comma-separated shares of masked tokens, such as 0,0.6."),
    "variants": (names("a variant", VARIANTS), all_of(VARIANTS)),
    "te": (Path, "Folder with transformer_engine's Python files; None: the installed one's."),
    "transformer_impl": (kind_of_layers, f"Layers: {' or '.join(TRANSFORMER_IMPLS)}."),
    "text": (Path, "File that benchmark.training_text wrote."),
    "runs": (names("a run", RUNS), all_of(RUNS)),
    "steps": (count, "Optimizer steps of each run."),
    "tokens": (count, "Tokens of a microbatch."),
    "microbatches": (count, "Microbatches of a step."),
    "lr": (float, "Largest learning rate of Adam."),
    "sequence_length": (count, "Tokens of a sequence."),
    "policy providers": (names("a provider", POLICY_HEADS), all_of(POLICY_HEADS)),
    "entropy_coeffs": (SHARES, "Comma-separated coefficients of the entropy; 0 leaves it out."),
    "rows": (COUNTS, "Comma-separated numbers of rows of a sampler's step."),
    "vocab": (count, "Vocabulary of all ranks together."),
    "hidden": (count, "Hidden size."),
    "layers": (count, "Transformer layers."),
    "heads": (count, "Attention heads."),
}

TURNS = {"rounds": str(results.ROUNDS), "budget_ms": "100"}
HEAD = TURNS | {
    "shapes": ("S1,S2,S3", "64x128x1000"), "modes": "rl,sft",
    "providers": ("ours,ours-0,ours-token-640,ours-known-640,megatron,te,compile", "ours,eager"),
    "error_shape": ("2048x1024x32768", "64x128x1000"),
    "memory_tokens": "", "memory_modes": "", "tp": "1",
}
TRAINING = {
    "text": "tokens.bin", "steps": ("2000", "8"), "tokens": ("8192", "64"), "microbatches": "1", "lr": "3e-4",
    "sequence_length": ("2048", "16"), "vocab": ("65536", "512"), "hidden": ("1024", "32"), "layers": ("4", "2"),
    "heads": ("8", "4"), "runs": "all", "tp": "1",
}

CASES = {
    "head": Case("Our head beside its peers in one process.", "heads.measure_heads", HEAD),
    "jsd": Case("Fused linear JSD beside its peers in one process.", "jsd.measure_case", TURNS | {
        "budget_ms": "150", "shape": ("8192x2048x4096x151936", "64x32x48x1000"), "betas": "0.5,0,1",
        "error_shape": ("1024x512x1024x32768", "64x32x48x1000"),
        "providers": ("ours,ours-3,ours-loss-1024,ours-3-loss-1024,compile", "ours,ours-loss-1024,eager"),
    }),
    "policy": Case("The head of a policy update under tensor parallelism.", "policy.measure_case", TURNS | {
        "shapes": ("16384x4096x151936", "64x32x512"), "error_shape": ("2048x1024x32768", "32x32x512"), "tp": "1",
        "masked": "0,0.6", "entropy_coeffs": "0,0.001", "providers": ("all", "ours-skip,ours-token-skip"),
    }),
    "sampler": Case("Logprobs of a sampler's few rows, replayed beside the product.", "sampler.measure_case", TURNS | {
        "rows": ("1,16,64,256,512", "1,5,16"), "hidden": ("4096", "128"), "vocab": ("151936", "1000"),
    }),
    "megatron_step": Case(
        "A whole training step of a Megatron GPT, with its own losses and with the flag.",
        "megatron_step.measure_case",
        {
            "hidden": "4096", "vocab": "151936", "tokens": "8192,16384", "rounds": TURNS["rounds"], "tp": "1",
            "pp": "1", "masked": "0", "variants": "all", "te": None,
            "sequence_length": "4096", "layers": "4", "heads": "32", "transformer_impl": "local",
        },
    ),
    "training": Case(
        "A GPT trained on real text, flag on and off, beside another order of sums.", "training_curves.measure_case",
        TRAINING,
    ),
}
# fmt: on


def build_parser(device: str | None = None) -> argparse.ArgumentParser:
    """Its defaults are those of the device; None: a GPU where there is one."""
    on_cpu = device == "cpu" or (device is None and not torch.cuda.is_available())
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.run", description=__doc__.splitlines()[0], formatter_class=HelpFormatter
    )
    subparsers = parser.add_subparsers(dest="case", required=True, help="What is measured.")
    for name, case in CASES.items():
        add = subparsers.add_parser(
            name, help=case.about, description=case.about, formatter_class=HelpFormatter
        ).add_argument
        for option, default in case.options.items():
            parse, text = OPTIONS.get(f"{name} {option}") or OPTIONS[option]
            default = default[on_cpu] if isinstance(default, tuple) else default
            add(f"--{option.replace('_', '-')}", help=text, default=default, type=parse)
        add("--dtype", choices=DTYPES, default="bf16", help="Type of hidden and weight.")
        add("--device", choices=("cuda", "cpu"), help="Where to run; None: cuda where every rank has a GPU.")
        add("--json", type=Path, help="File to write; None: tables only.")
        add("--append", action="store_true", help="Add to the records of that file.")
    return parser


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    on = device_of_rank(build_parser().parse_args(argv).device)
    parser = build_parser(on.type)
    arguments = parser.parse_args(argv)
    arguments.on, arguments.dtype = on, DTYPES[arguments.dtype]
    if "sequence_length" in arguments:
        for tokens in arguments.tokens if arguments.case == "megatron_step" else [arguments.tokens]:
            if tokens % arguments.sequence_length:
                parser.error(f"tokens: must be multiples of sequence-length {arguments.sequence_length}, got {tokens}")
    return arguments


def main(argv: list[str] | None = None) -> dict:
    """Runs what the arguments ask for and returns the document."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse_arguments(argv)
    module, _, program = CASES[arguments.case].program.partition(".")
    try:
        measure_case = getattr(importlib.import_module(f"benchmark.{module}"), program)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        sys.exit(f"{error.name} is not installed: pip install '.[{extra}]'")
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    last = rank == ranks - 1  # it has the losses of a pipeline; of other cases every rank has the same
    settings = {"command": argv} | ({"ranks": ranks} if ranks > 1 else {})
    path, rounds = arguments.json if last else None, getattr(arguments, "rounds", results.ROUNDS)
    more = {"quiet": not last, "append": arguments.append}
    found = results.Results(arguments.on, arguments.dtype, path, settings, rounds, **more)
    measure_case(found, arguments)
    found.save()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if last:
        publish.print_tables(found.document)
        if path:
            print(f"Report: {path}")
    return found.document


if __name__ == "__main__":
    main()
