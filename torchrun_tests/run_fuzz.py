"""A search for wrong numbers: random calls on 1 to 3 ranks against the fp64 oracles, with the tests' own budgets.

    torchrun --nproc-per-node 3 torchrun_tests/run_fuzz.py --device cpu --cases 6000 --write docs/fuzz.md
    torchrun --nproc-per-node 3 torchrun_tests/run_fuzz.py --device cpu --repeat 'linear_jsd, torch: JsdCase(...)'

Rank 0 has hypothesis draw the cases of `fuzz_cases.py`, and shrink those that fail; the others run what it broadcasts.
Of a failure the smallest case is printed as --repeat takes it.
"""

import argparse
import re
import traceback
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import fuzz_cases
import harness
import hypothesis
import torch
import torch.distributed as dist
from fuzz_cases import Case, JsdCase  # noqa: F401  (names that --repeat is made of)
from fuzz_checks import Setting, check_case
from torch.distributed import ProcessGroup

from scripts.ranks import device_of_rank

OPERATIONS = ("linear_cross_entropy", "linear_token_loss", "linear_jsd")
MOST_RANKS = 3
WORKSPACE = re.compile(r"workspace_bytes must be at least (\d+) ")
SMALL_WORKSPACE = "workspace_bytes too small"
EXCLUSIVE = "reduce_grad_hidden must be True with sequence_parallel"


@dataclass
class Tally:
    """What became of one setting's cases."""

    cases: int = 0
    refused: Counter = field(default_factory=Counter)  # by message
    failure: str = ""


class Failed(Exception):
    """On any rank."""


def verdict(case: Case, setting: Setting) -> tuple[str, str]:
    """("right" or "wrong", or why it is refused; what is wrong) on this rank."""
    kind = "right"
    try:
        try:
            findings = check_case(case, setting)
        except ValueError as error:
            message = str(error)
            if smallest := WORKSPACE.search(message):
                kind = SMALL_WORKSPACE
                findings = check_case(case, setting, workspace_bytes=int(smallest[1]))
            elif EXCLUSIVE in message:
                return EXCLUSIVE, ""
            else:
                raise
    except Exception:  # whatever it is, the operation is not to raise it
        return "wrong", traceback.format_exc(limit=-4)
    return ("wrong", "; ".join(findings)) if findings else (kind, "")


def shared_verdict(case: Case, setting: Setting) -> str:
    """Whether the case is right, or why it is refused: the same on every rank of the world.

    Raises:
        Failed: it is wrong on some rank, or the ranks part.
        SystemExit: they parted so that they wait for each other; the group is of no more use.
    """
    mine = verdict(case, setting) if setting.group is not None else None
    everyone: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = [one for one in everyone if one is not None]
    wrong = [f"rank {rank}: {message}" for rank, (kind, message) in enumerate(found) if kind == "wrong"]
    if any("Timed out waiting" in message for message in wrong):
        raise SystemExit(f"ranks wait for each other: {name_of(setting)}: {case}\n" + "\n".join(wrong))
    if wrong:
        raise Failed("\n".join(wrong))
    if len(set(found)) > 1:
        raise Failed(f"ranks part: {found}")
    return found[0][0]


def broadcast(case: Case | None) -> Case | None:
    box = [case]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def search(setting: Setting, num_cases: int, seed: int) -> Tally:
    """On rank 0: cases as hypothesis draws them, until one fails; that one is shrunk and noted."""
    tally = Tally()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(fuzz_cases.cases(setting.operation, setting.ranks))
    def every_case(case: Case) -> None:
        broadcast(case)
        try:
            found = shared_verdict(case, setting)
        except Failed as failed:
            tally.failure = f"{name_of(setting)}: {case}\n{failed}"
            raise
        if not tally.failure:
            tally.cases += 1
            tally.refused[found] += 1

    try:
        every_case()
    except (Failed, hypothesis.errors.Flaky, ExceptionGroup) as error:
        tally.failure = tally.failure or str(error)
    finally:
        broadcast(None)
    return tally


def follow(setting: Setting) -> None:
    """On the other ranks: what rank 0 draws."""
    while (case := broadcast(None)) is not None:
        try:
            shared_verdict(case, setting)
        except Failed:
            continue  # rank 0 notes it


def name_of(setting: Setting) -> str:
    return f"{setting.operation}, {setting.backend}"


def summary(tallies: list[tuple[Setting, Tally]], seed: int) -> str:
    """What was run and what became of it, in Markdown."""
    total, failed = sum(tally.cases for _, tally in tallies), sum(bool(tally.failure) for _, tally in tallies)
    lines = [
        "# Random calls against the oracles",
        "",
        f"`make fuzz`, seed {seed}, torch {torch.__version__}: {total} calls, {failed} failures. Each call's shapes,"
        " dtypes, strides, shards, labels and",
        "keywords are drawn by hypothesis (`torchrun_tests/fuzz_cases.py`); outputs and both gradients are held to the"
        " tests' own budgets",
        "against fp64, and outputs to the same bits on every rank, without gradients, and on one rank"
        " (`torchrun_tests/fuzz_checks.py`).",
        "",
        "| operation | backend | ranks | calls | in the smallest workspace that the error names | refused | failures |",
        "|---|---|---|---|---|---|---|",
    ]
    for setting, tally in tallies:
        counts = (tally.cases, tally.refused[SMALL_WORKSPACE], tally.refused[EXCLUSIVE], int(bool(tally.failure)))
        columns = (setting.operation, setting.backend, setting.ranks, *counts)
        lines.append("| " + " | ".join(map(str, columns)) + " |")
    lines += ["", f"Refused: {EXCLUSIVE}.", ""]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="Default: cuda where every rank has a GPU.")
    parser.add_argument("--cases", type=int, default=6000, help="over all operations, backends and numbers of ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--write", type=Path, help="where to put the summary")
    parser.add_argument("--repeat", help="one case, as a failure prints it")
    return parser.parse_args()


def repeat(text: str, groups: dict[int, ProcessGroup | None], device: torch.device) -> bool:
    """Run a printed case; whether it fails."""
    where, _, arguments = text.partition(": ")
    case = eval(arguments)
    operation, backend = where.split(", ")
    setting = Setting(operation, backend, len(case.shards), groups[len(case.shards)], device)
    try:
        found = shared_verdict(case, setting)
    except Failed as failed:
        found = str(failed)
    if dist.get_rank() == 0:
        print(found, flush=True)
    return found.startswith("rank")


def main() -> None:
    arguments = parse_arguments()
    device = device_of_rank(arguments.device)
    harness.start(device)
    if dist.get_world_size() != MOST_RANKS:
        raise SystemExit(f"run_fuzz.py needs {MOST_RANKS} ranks, got {dist.get_world_size()}")
    timeout = timedelta(seconds=60)  # sooner than the world's: what a case does wrong is told over that
    groups = {ranks: dist.new_group(list(range(ranks)), timeout=timeout) for ranks in range(1, MOST_RANKS + 1)}
    groups = {ranks: group if dist.get_rank() < ranks else None for ranks, group in groups.items()}
    if arguments.repeat:
        harness.end(repeat(arguments.repeat, groups, device))
    settings = [
        Setting(operation, backend, ranks, groups[ranks], device)
        for operation in arguments.operations.split(",")
        for backend in harness.available_backends()
        for ranks in groups
    ]
    tallies = []
    for number, setting in enumerate(settings):
        if dist.get_rank() != 0:
            follow(setting)
            continue
        tally = search(setting, -(-arguments.cases // len(settings)), arguments.seed + number)
        tallies.append((setting, tally))
        print(f"{name_of(setting)}, {setting.ranks} ranks: {tally.cases} cases {tally.failure}", flush=True)
    failed = any(tally.failure for _, tally in tallies)
    if dist.get_rank() == 0:
        text = summary(tallies, arguments.seed)
        print(text, flush=True)
        if arguments.write:
            arguments.write.write_text(text)
    box = [failed]
    dist.broadcast_object_list(box, src=0)
    harness.end(box[0])


if __name__ == "__main__":
    main()
