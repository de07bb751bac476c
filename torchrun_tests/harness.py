"""What the programs here share: the process group, and a report of what was compared that decides the exit code."""

import argparse
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `tests`, when started by hand from anywhere

from scripts.arguments import HelpFormatter  # found through the path above
from tests import interpreter

ALLOWED = 1e-5  # error, norm over norm, of fp32's tensors


class Report:
    """What this rank compared; rank 0 prints it, and every rank what failed there."""

    def __init__(self) -> None:
        self.compared = 0
        self.failures: list[str] = []

    def compare(self, name: str, actual: Tensor, expected: Tensor, allowed: float) -> None:
        """Error of `actual` against `expected`."""
        error = relative_error(actual, expected) if actual.shape == expected.shape else float("inf")
        self.check(name, error <= allowed, f"error {error:.2e}, allowed {allowed:.1e}")

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        self.compared += 1
        if not passed:
            self.failures.append(name)
            print(f"FAILED on rank {dist.get_rank()}: {name}: {detail}", flush=True)
        elif dist.get_rank() == 0:
            print(f"ok      {name}: {detail}", flush=True)

    def refused(self, name: str, call: Callable[[], Any], start: str) -> None:
        """How the message begins that the call is refused with."""
        message = message_of(call)
        self.check(name, message.startswith(start), message)

    def conclude(self) -> bool:
        """Whether anything failed on any rank; every rank calls it, at the end."""
        everywhere: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everywhere, self.failures)
        failed = {name for failures in everywhere for name in failures}
        if dist.get_rank() == 0:
            print(f"{self.compared} compared, {len(failed)} failed on {dist.get_world_size()} ranks", flush=True)
        return bool(failed)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm over norm; infinite for NaN, and for anything but zeros where zeros are expected."""
    difference, scale = float((actual.double() - expected.double()).norm()), float(expected.double().norm())
    if difference == 0:
        return 0.0
    return difference / scale if difference < float("inf") and scale > 0 else float("inf")


def compare_all(report: Report, name: str, actual: dict, expected: dict) -> None:
    """One line for a whole set of tensors."""
    assert actual.keys() == expected.keys()
    count, worst, error = worst_of_all_ranks({str(key): relative_error(actual[key], expected[key]) for key in expected})
    report.check(name, error <= ALLOWED, f"{count} tensors, worst {worst}: error {error:.1e}, allowed {ALLOWED:.0e}")


def compare_step(report: Report, name: str, found: Sequence[dict], expected: Sequence[dict]) -> None:
    """Of a step the losses and the gradients."""
    for what, actual, native in zip(("losses", "gradients"), found[:2], expected[:2], strict=True):
        compare_all(report, f"{name}: {what}", actual, native)


def worst_of_all_ranks(values: dict[str, float]) -> tuple[int, str, float]:
    """How many there are on all ranks, and the largest with its name. Stages hold different ones."""
    everywhere: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, values)
    name, largest = max((pair for rank in everywhere for pair in rank.items()), key=lambda pair: pair[1])
    return sum(map(len, everywhere)), name, largest


def message_of(call: Callable[[], Any]) -> str:
    """What the call is refused with."""
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        return str(error)
    return "no error"


def available_backends() -> list[str]:
    return ["torch"] if importlib.util.find_spec("triton") is None else ["torch", "triton"]


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """With the option that every program has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="Device of all ranks; None: cuda where every rank has a GPU."
    )
    return parser


def start(device: torch.device) -> None:
    """Starts the process group for this rank's device; uninitialised memory is NaN, as in the tests."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
    if device.type == "cpu":
        torch.set_num_threads(1)
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
        interpreter.hasten()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=120),
        device_id=device if device.type == "cuda" else None,
    )


def end(failed: bool) -> NoReturn:
    """Ends the process group and the program."""
    gc.collect()  # a live autograd graph holds the group, and gloo aborts when it outlives the process
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)
