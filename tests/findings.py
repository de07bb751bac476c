"""What the checks of a case share."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tests.cases import Case, Share
from tests.problems import wide_blocks_of

# What may be added to each result's budget: random calls find inputs that need it.
Floors = Callable[[Share, Any], dict[str, float]]


class Findings(Protocol):
    """Notes what was compared and raises nothing, so that a rank that finds something still takes part."""

    def check(self, name: str, passed: bool, detail: str = "") -> None: ...


class Asserted:
    """What a test on one rank notes: it fails at once."""

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        assert passed, f"{name}: {detail}"


class Noted(list[str]):
    """What is wrong on this rank, which goes on."""

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        self += [] if passed else [f"{name}: {detail}"]


def title(share: Share, name: str) -> str:
    return f"{share.ranks.backend}: {share.case.name}: {name}" if share.case.name else name


def check_error(share: Share, name: str, error: float, allowed: float, findings: Findings) -> None:
    findings.check(title(share, name), error <= allowed < math.inf, f"error {error:.2e}, allowed {allowed:.1e}")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


def check_same_bits_on_every_rank(share: Share, tensors: list[Tensor], findings: Findings) -> None:
    if share.ranks.number == 1:
        return
    mine = torch.cat([tensor.detach().double().reshape(-1).nan_to_num(nan=12345.0) for tensor in tensors])
    everyone = [torch.empty_like(mine) for _ in range(share.ranks.number)]
    if mine.numel():
        dist.all_gather(everyone, mine, group=share.ranks.group)
    different = sum(int((other != mine).sum()) for other in everyone)
    findings.check(title(share, "same bits on every rank"), different == 0, f"{different} numbers differ")


@contextlib.contextmanager
def surroundings(case: Case) -> Iterator[None]:
    """What a call may not depend on."""
    torch.set_default_dtype(case.default_dtype)
    try:
        with wide_blocks_of(case.wide_block):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
