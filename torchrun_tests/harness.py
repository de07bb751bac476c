"""What the programs here share: the process group, and a report of what was compared that decides the exit code."""

import argparse
import gc
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `tests`, when started by hand from anywhere

from scripts.arguments import HelpFormatter  # found through the path above
from scripts.ranks import device_of_rank
from tests import interpreter


class Report:
    """What this rank compared; rank 0 prints it, and every rank what failed there."""

    def __init__(self) -> None:
        self.compared = 0
        self.failures: list[str] = []

    def compare(self, name: str, actual: Tensor, expected: Tensor, allowed: float) -> None:
        """Error of `actual` against `expected`, norm over norm, NaN counting as failure."""
        if actual.shape != expected.shape:
            self.check(name, False, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
            return
        difference = actual.double() - expected.double()
        error = float(difference.norm() / expected.double().norm().clamp_min(1e-30))
        self.check(name, error <= allowed, f"error {error:.2e}, allowed {allowed:.1e}")

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        self.compared += 1
        if not passed:
            self.failures.append(name)
            print(f"FAILED on rank {dist.get_rank()}: {name}: {detail}", flush=True)
        elif dist.get_rank() == 0:
            print(f"ok      {name}: {detail}", flush=True)

    def conclude(self) -> bool:
        """Whether anything failed on any rank; every rank calls it, at the end."""
        everywhere: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everywhere, self.failures)
        failed = {name for failures in everywhere for name in failures}
        if dist.get_rank() == 0:
            print(f"{self.compared} compared, {len(failed)} failed on {dist.get_world_size()} ranks", flush=True)
        return bool(failed)


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


def refuse_deprecated_collectives() -> None:
    """For programs in which no one else, such as Megatron, calls collectives: torch's warning names no caller."""
    warnings.filterwarnings("error", r"`torch\.distributed\.", FutureWarning)


def end(failed: bool) -> NoReturn:
    """Ends the process group and the program."""
    gc.collect()  # a live autograd graph holds the group, and gloo aborts when it outlives the process
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


def main(program: Callable[[torch.device, Report], None]) -> None:
    """Start the process group, run `program(device, report)`, and exit non-zero if a comparison failed."""
    parser = argument_parser(sys.modules[program.__module__].__doc__)
    device = device_of_rank(parser.parse_args().device)
    start(device)
    report = Report()
    program(device, report)
    end(report.conclude())
