"""A search for wrong numbers: random calls on 1 to 3 ranks against the fp64 oracles, with the tests' own budgets.

    torchrun --nproc-per-node 3 torchrun_tests/run_fuzz.py --device cpu --cases 6000 --seed 0
    torchrun --nproc-per-node 3 torchrun_tests/run_fuzz.py --device cpu --repeat 'torch: Case(...)'
    torchrun --nproc-per-node 1 torchrun_tests/run_fuzz.py --device cuda --seconds 300   # the kernels, on one rank

The first rank has hypothesis draw the cases of `fuzz_cases.py`, and shrink those that fail, the others run what it
broadcasts. Searches side by side have seeds of their own.
Of a failure the smallest case is printed as --repeat takes it.
"""

import argparse
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

import fuzz_cases
import harness
import hypothesis
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from scripts.ranks import device_of_rank
from tests.cases import Case, Ranks
from tests.checks import check_case
from tests.findings import Noted

Groups = dict[tuple[int, ...], ProcessGroup | None]
Run = Callable[[Case], str]
OPERATIONS = ("linear_cross_entropy", "linear_token_loss", "linear_jsd", "linear_logits_at")
SMALL_WORKSPACE = "workspace_bytes too small"
EXCLUSIVE = "reduce_grad_hidden must be True with sequence_parallel"


class Setting(NamedTuple):
    """What cases are drawn for."""

    operation: str
    backend: str
    ranks: int


@dataclass
class Tally:
    """What became of one setting's cases."""

    cases: int = 0
    refused: Counter = field(default_factory=Counter)  # by message
    failure: str = ""


class Failed(Exception):
    """On any rank."""


class OutOfTime(BaseException):
    """Which hypothesis takes for no failure."""


def verdict(case: Case, ranks: Ranks) -> tuple[str, str]:
    """("right" or "wrong", or why it is refused; what is wrong) on this rank."""
    findings = Noted()
    try:
        was_small = check_case(case, ranks, findings, fuzz_cases.rounding)
    except Exception as error:  # whatever it is, the operation is not to raise it
        if isinstance(error, ValueError) and EXCLUSIVE in str(error):
            return EXCLUSIVE, ""
        return "wrong", traceback.format_exc(limit=-4)
    return ("wrong", "; ".join(findings)) if findings else (SMALL_WORKSPACE if was_small else "right", "")


def broadcast(case: Case | None) -> Case | None:
    box = [case]
    dist.broadcast_object_list(box)
    return box[0]


def make_groups() -> Groups:
    """Of every choice of ranks; None: this rank is not chosen. They time out sooner than the world, over which is told
    what a case does wrong."""
    size = dist.get_world_size()
    choices = [chosen for number in range(1, size + 1) for chosen in combinations(range(size), number)]
    groups = {chosen: dist.new_group(list(chosen), timeout=timedelta(seconds=60)) for chosen in choices}
    return {chosen: group if dist.get_rank() in chosen else None for chosen, group in groups.items()}


def shared_verdict(case: Case, backend: str, groups: Groups, device: torch.device) -> str:
    """Whether the case is right, or why it is refused: the same on every rank.

    Raises:
        Failed: it is wrong on some rank, or the ranks part.
        SystemExit: they parted so that they wait for each other; the group is of no more use.
    """
    group = groups[case.members]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, verdict(case, Ranks(backend, group, device)) if group is not None else None)
    found = [one for one in everyone if one is not None]
    wrong = [f"rank {rank}: {message}" for rank, (kind, message) in enumerate(found) if kind == "wrong"]
    if any("Timed out waiting" in message for message in wrong):
        raise SystemExit(f"ranks wait for each other: {backend}: {case}\n" + "\n".join(wrong))
    if wrong:
        raise Failed("\n".join(wrong))
    if len(set(found)) > 1:
        raise Failed(f"ranks part: {found}")
    return found[0][0]


def search(setting: Setting, run: Run, num_cases: int, deadline: float, seed: int) -> Tally:
    """On the first rank: cases as hypothesis draws them, until one fails; that one is shrunk and noted.

    `deadline` on the clock of `time.monotonic`: no case is drawn after it, but to shrink one that failed.
    """
    tally = Tally()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(fuzz_cases.cases(setting.operation, setting.ranks, dist.get_world_size()))
    def every_case(case: Case) -> None:
        if time.monotonic() > deadline and not tally.failure:
            raise OutOfTime
        broadcast(case)
        try:
            found = run(case)
        except Failed as failed:
            tally.failure = f"{setting.backend}: {case}\n{failed}"
            raise
        if not tally.failure:
            tally.cases += 1
            tally.refused[found] += 1

    try:
        every_case()
    except OutOfTime:
        pass
    except (Failed, hypothesis.errors.Flaky, ExceptionGroup) as error:
        tally.failure = tally.failure or str(error)
    finally:
        broadcast(None)
    return tally


def follow(run: Run) -> None:
    """On the others: what the first draws."""
    while (case := broadcast(None)) is not None:
        try:
            run(case)
        except Failed:
            continue  # the first notes it


def print_summary(tallies: dict[Setting, Tally]) -> None:
    """What became of the calls."""
    counts: dict[str, Counter] = {}
    for setting, tally in tallies.items():
        count = counts.setdefault(f"{setting.operation}, {setting.backend}", Counter())
        count += tally.refused + Counter(calls=tally.cases, failures=bool(tally.failure))
    for name, count in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        columns = ("calls", SMALL_WORKSPACE, EXCLUSIVE, "failures")
        print(f"{name}: {', '.join(f'{column}: {count[column]}' for column in columns)}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--cases", type=int, default=6000, help="Over all operations, backends and numbers of ranks.")
    parser.add_argument("--seconds", type=float, default=math.inf, help="Time limit; each setting has an equal share.")
    parser.add_argument("--seed", type=int, default=0, help="Of the first search.")
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="Comma-separated.")
    parser.add_argument("--repeat", help="One case, as a failure prints it; None: a search.")
    return parser.parse_args()


def repeat(text: str, groups: Groups, device: torch.device) -> bool:
    """Run a printed case; whether it fails."""
    backend, _, arguments = text.partition(": ")
    try:
        found = shared_verdict(eval(arguments), backend, groups, device)
    except Failed as failed:
        found = str(failed)
    if dist.get_rank() == 0:
        print(found, flush=True)
    return found.startswith("rank")


def main() -> None:
    arguments = parse_arguments()
    device = device_of_rank(arguments.device)
    harness.start(device)
    size, groups = dist.get_world_size(), make_groups()
    if arguments.repeat:
        harness.end(repeat(arguments.repeat, groups, device))
    choices = arguments.operations.split(","), harness.available_backends(), range(1, size + 1)
    settings = [Setting(*chosen) for chosen in product(*choices)]
    tallies, started = {}, time.monotonic()
    for number, setting in enumerate(settings):
        run = partial(shared_verdict, backend=setting.backend, groups=groups, device=device)
        if dist.get_rank() > 0:
            follow(run)
            continue
        deadline = started + arguments.seconds * (number + 1) / len(settings)
        tally = search(setting, run, -(-arguments.cases // len(settings)), deadline, arguments.seed + number)
        tallies[setting] = tally
        print(f"{', '.join(map(str, setting))} ranks: {tally.cases} cases {tally.failure}", flush=True)
    if dist.get_rank() == 0:
        print_summary(tallies)
    failed = [any(tally.failure for tally in tallies.values())]
    dist.broadcast_object_list(failed)
    harness.end(failed[0])


if __name__ == "__main__":
    main()
