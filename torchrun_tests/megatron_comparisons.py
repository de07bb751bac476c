"""Errors of whole sets of tensors, of which pipeline stages hold different ones."""

from collections.abc import Sequence

import harness
import torch.distributed as dist
from torch import Tensor

ALLOWED = 1e-5  # relative, per parameter, fp32


def compare_all(report: harness.Report, name: str, actual: dict, expected: dict) -> None:
    """One line for a whole set of tensors."""
    assert actual.keys() == expected.keys()
    count, worst, error = worst_of_all_ranks({str(key): relative_error(actual[key], expected[key]) for key in expected})
    report.check(name, error <= ALLOWED, f"{count} tensors, worst {worst}: error {error:.1e}, allowed {ALLOWED:.0e}")


def compare_step(report: harness.Report, name: str, found: Sequence[dict], expected: Sequence[dict]) -> None:
    """Of a step the losses and the gradients."""
    for what, actual, native in zip(("losses", "gradients"), found[:2], expected[:2], strict=True):
        compare_all(report, f"{name}: {what}", actual, native)


def worst_of_all_ranks(values: dict[str, float]) -> tuple[int, str, float]:
    """How many there are on all ranks, and the largest with its name. Stages hold different ones."""
    everywhere: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, values)
    name, largest = max((pair for rank in everywhere for pair in rank.items()), key=lambda pair: pair[1])
    return sum(map(len, everywhere)), name, largest


def error_ratio(error: float, native: float) -> float:
    """Our error over Megatron's own. Where Megatron's is 0, at a weight without a gradient, ours must be."""
    if native == 0:
        return 0.0 if error == 0 else float("inf")
    return error / native


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm over norm; infinite for NaN, and for anything but zeros where zeros are expected."""
    difference, scale = float((actual.double() - expected.double()).norm()), float(expected.double().norm())
    if difference == 0:
        return 0.0
    return difference / scale if difference < float("inf") and scale > 0 else float("inf")
