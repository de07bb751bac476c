"""Where a drawn call runs, and what every check of it needs."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Drawn = Callable[[Tensor], Tensor]  # a tensor as its case has it


@dataclass
class Setting:
    """Where a case runs."""

    operation: str
    backend: str
    ranks: int
    group: ProcessGroup | None  # of the ranks that take part in a case; None: this one does not
    device: torch.device


class Findings(list[str]):
    """What is wrong. Noted, not raised, so that a rank that finds something still takes part in what follows."""

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            self.append(message)


@dataclass
class Share:
    """This rank's part of the case."""

    rows: slice  # of the first dimension of hidden
    columns: slice  # of the vocabulary
    keywords: dict[str, Any]  # of the call


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's, on which nothing may depend."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def tensors_drawn(keywords: dict[str, Any], drawn: Drawn) -> dict[str, Any]:
    return {name: drawn(value) if isinstance(value, Tensor) else value for name, value in keywords.items()}


def check_same_bits_on_every_rank(tensors: list[Tensor], setting: Setting, findings: Findings) -> None:
    mine = torch.cat([tensor.double().reshape(-1).nan_to_num(nan=12345.0) for tensor in tensors])
    everyone = [torch.empty_like(mine) for _ in range(setting.ranks)]
    if mine.numel():
        dist.all_gather(everyone, mine, group=setting.group)
    findings.require(all(torch.equal(other, mine) for other in everyone), "outputs differ between ranks")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))
