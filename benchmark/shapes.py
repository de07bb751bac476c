"""Problem sizes and the random inputs every provider gets."""

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class WrongArgument(argparse.ArgumentTypeError, ValueError):
    """A ValueError whose message argparse prints in place of its own."""


@dataclass(frozen=True)
class Shape:
    """N tokens, H hidden, V vocabulary columns."""

    name: str
    tokens: int
    hidden: int
    vocab: int


NAMED_SHAPES = {
    shape.name: shape
    for shape in (
        Shape("S1", 8192, 4096, 151936),  # a 7-8B model's head with Qwen's vocabulary
        Shape("S2", 16384, 2048, 131072),  # a 1-2B model's head, where everything but the products weighs more
        Shape("S3", 16384, 4096, 18992),  # one rank of S1's head at a tensor-parallel size of 8
    )
}


def parse_shape(text: str) -> Shape:
    """`S1`, `S2`, `S3`, or `NxHxV` in plain numbers."""
    if text in NAMED_SHAPES:
        return NAMED_SHAPES[text]
    if not re.fullmatch(r"\d+x\d+x\d+", text):
        raise WrongArgument(
            f"a shape must be one of {', '.join(NAMED_SHAPES)} or tokens x hidden x vocab such as "
            f"8192x4096x151936, got {text!r}"
        )
    return Shape(text, *(int(number) for number in text.split("x")))


def parse_heads(text: str) -> list[int]:
    """`NxHsxHtxV` in plain numbers."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", text):
        raise WrongArgument(
            f"a shape must be tokens x student's H x teacher's H x vocab such as 64x32x48x512, got {text!r}"
        )
    return [int(number) for number in text.split("x")]


def choose(what: str, text: str, allowed: Iterable[str]) -> list[str]:
    """Comma-separated names, each once; `all` is every one that is allowed."""
    names, chosen = list(allowed), dict[str, None]()
    for part in filter(None, text.split(",")):
        if part != "all" and part not in names:
            raise WrongArgument(f"{what} must be one of {', '.join(names)} or all, got {part!r}")
        chosen |= dict.fromkeys(names if part == "all" else [part])
    return list(chosen)


@dataclass(frozen=True)
class Inputs:
    """One problem. hidden and weight require grad; the upstream gradients are those of modes `rl` and `logprob`."""

    hidden: Tensor  # [N, H], a rank's [N / tp, H]
    weight: Tensor  # [V, H], a rank's [V / tp, H]
    labels: Tensor  # [N] int64
    grad_logprobs: Tensor  # [N] fp32
    grad_entropy: Tensor  # [N] fp32
    tp_group: ProcessGroup | None = None

    def of_rank(self, tp_group: ProcessGroup) -> "Inputs":
        """This rank's part of the problem under sequence parallelism."""
        part = partial(rows_of_rank, tp_group=tp_group)
        hidden, weight = (part(x.detach()).clone().requires_grad_() for x in (self.hidden, self.weight))
        return replace(self, hidden=hidden, weight=weight, tp_group=tp_group)


def rows_of_rank(whole: Tensor, tp_group: ProcessGroup) -> Tensor:
    return whole.chunk(tp_group.size())[tp_group.rank()]


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Inputs:
    """Normal random inputs whose logits have a standard deviation of 2."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = {"generator": generator, "device": device}
    hidden = torch.randn(shape.tokens, shape.hidden, dtype=dtype, **normal)
    weight = torch.randn(shape.vocab, shape.hidden, dtype=dtype, **normal).mul_(2 * shape.hidden**-0.5)
    return Inputs(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.randint(shape.vocab, (shape.tokens,), **normal),
        torch.randn(shape.tokens, **normal),
        torch.randn(shape.tokens, **normal),
    )
