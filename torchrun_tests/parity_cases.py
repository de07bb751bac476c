"""The problems of `run_parity.py`: shapes, shards, options and what is done to the inputs."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.oracle import Upstream, random_upstream

BF16 = torch.bfloat16
HIDDEN_SIZE = 24
SEQUENCE = 12  # divisible by 1, 2, 3 and 4 ranks


@dataclass(frozen=True)
class Case:
    """One problem; functions take the number of ranks."""

    name: str
    shape: tuple[int, ...] = (SEQUENCE, 1)  # of labels
    shards: Callable[[int], list[int]] = lambda ranks: [20] * ranks
    vocab_size: Callable[[int], int] | None = None
    hidden_size: int = HIDDEN_SIZE
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    pass_vocab_start: bool = False
    workspace_bytes: int = 2**29
    logits_cache_bytes: int = 0
    skip_ignored: bool | str = False  # "count": the number that the labels have
    default_dtype: torch.dtype = torch.float32  # torch's, around the call
    wide_block: int | None = None  # how few tokens a block of backward's outer loop may hold
    change: Callable[["Problem"], None] | None = None  # edits the problem in place
    keywords: dict[str, Any] = field(default_factory=dict)


class Problem:
    """The whole problem, equal on every rank, and where its shards lie."""

    def __init__(self, case: Case, ranks: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1234)
        sizes = case.shards(ranks)
        self.starts = [0, *itertools.accumulate(sizes)]
        vocabulary = self.starts[-1]
        self.vocab_size = case.vocab_size(ranks) if case.vocab_size else None
        hidden = torch.randn(*case.shape, case.hidden_size, generator=generator)
        weight = torch.randn(vocabulary, case.hidden_size, generator=generator) * 0.5
        self.hidden = hidden.to(device, case.dtype)
        self.weight = weight.to(device, case.dtype)
        self.labels = torch.randint(self.vocab_size or vocabulary, case.shape, generator=generator).to(device)
        upstream = random_upstream(case.shape, generator, entropy=case.keywords.get("entropy", True))
        self.upstream = Upstream(*(None if u is None else u.to(device) for u in upstream))
        self.keywords: dict[str, Any] = {}
        if case.change is not None:
            case.change(self)


def sequence_shard(case: Case, rank: int, ranks: int) -> slice:
    if not case.sequence_parallel:
        return slice(None)
    length = case.shape[0] // ranks
    return slice(rank * length, (rank + 1) * length)


def first_columns(problem: Problem) -> None:
    """Every label is the first column of a shard: the next rank's labels lie just past this one's last tile."""
    starts = torch.tensor(problem.starts[:-1], device=problem.labels.device)
    problem.labels = starts.repeat(problem.labels.numel())[: problem.labels.numel()].view_as(problem.labels)


def very_negative(problem: Problem) -> None:
    problem.hidden[..., 0] = 100.0
    problem.weight[:, 0] = -100.0


def ignore_some(problem: Problem) -> None:
    problem.labels[::3] = -100


def ignore_all(problem: Problem) -> None:
    problem.labels.fill_(-100)


def no_upstream_for_some(problem: Problem) -> None:
    for grad in problem.upstream:
        if grad is not None:
            grad[::2] = 0.0


def token_temperature(problem: Problem) -> None:
    ramp = torch.linspace(0.5, 2.0, problem.labels.numel(), device=problem.labels.device)
    problem.keywords["temperature"] = ramp.view_as(problem.labels)


def unusable_temperature(problem: Problem) -> None:
    token_temperature(problem)
    problem.keywords["temperature"].view(-1)[:3] = torch.tensor([0.0, -1.0, float("nan")])


def unowned_labels(problem: Problem) -> None:
    end = problem.vocab_size or problem.starts[-1]
    problem.labels.view(-1)[:4] = torch.tensor([-1, end, problem.starts[-1], 2**40])


def tied_maxima(problem: Problem) -> None:
    """Two shards' first rows are equal and the largest by far."""
    for start in problem.starts[:-1]:
        problem.weight[start] = 3.0
    problem.hidden.abs_()


def exact_products(problem: Problem) -> None:
    """Few bits a number: fp32 holds every sum of products, so that all round them alike."""
    problem.hidden = (problem.hidden.float() * 8).round().div(8).to(problem.hidden.dtype)
    problem.weight = (problem.weight.float() * 64).round().clamp(-127, 127).div(64).to(problem.weight.dtype)


def hidden_in_bf16(problem: Problem) -> None:
    """Beside a weight in fp32."""
    problem.hidden = problem.hidden.to(BF16)


def uneven(ranks: int) -> list[int]:
    return [13 + 9 * (rank % 2) + rank for rank in range(ranks)]


TELEMETRY = {"telemetry": True}
ROUNDED = {"logits_dtype": BF16, "temperature": 0.7}
CASES = [
    Case("even shards"),
    Case("even shards, b=3", shape=(SEQUENCE, 3)),
    Case("one dimension of tokens", shape=(7,)),
    Case("uneven shards", (SEQUENCE, 3), shards=uneven, pass_vocab_start=True, change=ignore_some, keywords=TELEMETRY),
    Case("labels in the next rank's first column", shards=uneven, pass_vocab_start=True, change=first_columns),
    Case("labels in the next rank's first column, whole tiles", shards=lambda n: [256] * n, change=first_columns),
    Case("padded columns", vocab_size=lambda ranks: 20 * ranks - 3),
    Case("a shard that is all padding", vocab_size=lambda ranks: max(20 * (ranks - 1) - 3, 5), keywords=TELEMETRY),
    Case("all padding, default bf16", vocab_size=lambda n: 5, keywords=TELEMETRY, default_dtype=BF16),
    Case("all padding, default fp64", vocab_size=lambda n: 5, dtype=BF16, default_dtype=torch.float64),
    Case("a shard that is all padding, sequence parallel", vocab_size=lambda n: 5, sequence_parallel=True),
    Case("all logits near -10000", change=very_negative),
    Case("some rows ignored", change=ignore_some),
    Case("all rows ignored", change=ignore_all),
    Case("sequence parallel", sequence_parallel=True),
    Case("sequence parallel, b=3", (SEQUENCE, 3), sequence_parallel=True, change=ignore_some, keywords=TELEMETRY),
    Case("sequence parallel, uneven", shards=uneven, pass_vocab_start=True, sequence_parallel=True),
    Case("temperature per token", shape=(SEQUENCE, 3), change=token_temperature, keywords=TELEMETRY),
    Case("temperature per token, sequence parallel", change=token_temperature, sequence_parallel=True),
    Case("unusable temperatures", change=unusable_temperature),
    Case(
        "softcap, logits_scale, temperature",
        keywords={"softcap": 3.0, "logits_scale": 0.7, "temperature": 1.6, "telemetry": True},
    ),
    Case("without entropy", keywords={"entropy": False}),
    Case("telemetry", keywords=TELEMETRY),
    Case("telemetry, tied maxima across ranks", keywords=TELEMETRY, change=tied_maxima),
    Case("unowned labels", change=unowned_labels),
    Case("unowned labels, sequence parallel, padding", change=unowned_labels, vocab_size=lambda n: 5 * n),
    Case("no tokens", shape=(0, 3)),
    Case("no tokens, sequence parallel", shape=(0, 3), sequence_parallel=True),
    Case("one token, H=1, V_local=1", shape=(1,), hidden_size=1, shards=lambda ranks: [1] * ranks),
    Case("blocks of tokens", shape=(144,), shards=lambda n: [600] * n, workspace_bytes=2**17),
    Case("blocks of tokens, bf16", shape=(144,), shards=lambda n: [600] * n, workspace_bytes=2**16, dtype=BF16),
    Case("bf16", dtype=BF16),
    Case("bf16, sequence parallel", shape=(SEQUENCE, 3), dtype=BF16, sequence_parallel=True),
    Case("bf16, uneven, b=3", shape=(SEQUENCE, 3), dtype=BF16, shards=uneven, pass_vocab_start=True),
    Case("fp16", dtype=torch.float16),
    Case("a cache of one tile", shards=lambda n: [600] * n, logits_cache_bytes=12 * 256 * 3, dtype=BF16),
    Case("sequence parallel, cached", dtype=BF16, sequence_parallel=True, logits_cache_bytes=2**20),
    Case(
        "everything cached",
        shards=uneven,
        pass_vocab_start=True,
        logits_cache_bytes=2**20,
        dtype=BF16,
        keywords=TELEMETRY,
    ),
    Case("skipped", shards=uneven, pass_vocab_start=True, skip_ignored=True, change=ignore_some),
    Case("skipped, sequence parallel", (SEQUENCE, 3), skip_ignored=True, sequence_parallel=True, change=ignore_some),
    Case("counted, sequence parallel", skip_ignored="count", sequence_parallel=True, change=ignore_some, dtype=BF16),
    Case("skipped, cached", skip_ignored=True, logits_cache_bytes=2**20, dtype=BF16, change=ignore_some),
    Case(
        "skipped, cached, a tile at first",
        (40,),
        shards=lambda n: [600 - 400 * (rank == 1) for rank in range(n)],
        pass_vocab_start=True,
        skip_ignored=True,
        logits_cache_bytes=2**20,
        workspace_bytes=200_000,
        dtype=BF16,
        change=ignore_some,
    ),
    Case(
        "skipped, cached, a shard that is all padding",  # has no cache, and no slab to begin with
        vocab_size=lambda n: 5,
        sequence_parallel=True,
        skip_ignored=True,
        logits_cache_bytes=2**20,
        dtype=BF16,
        change=ignore_some,
    ),
    Case("skipped, all", skip_ignored=True, sequence_parallel=True, change=ignore_all),
    Case("skipped, no upstream", skip_ignored=True, change=no_upstream_for_some, keywords=TELEMETRY),
    Case(
        "blocks of tokens outside", (144,), workspace_bytes=2**17, wide_block=16, shards=uneven, pass_vocab_start=True
    ),
    Case("blocks of shards", (144,), sequence_parallel=True, workspace_bytes=2**16, wide_block=16, dtype=BF16),
    Case("fp32 weight, bf16 hidden", shards=uneven, pass_vocab_start=True, change=hidden_in_bf16, keywords=TELEMETRY),
    Case(
        "fp32 weight, sequence parallel", (144,), sequence_parallel=True, workspace_bytes=2**17, change=hidden_in_bf16
    ),
    Case("rounded", shards=uneven, pass_vocab_start=True, change=exact_products, keywords=ROUNDED),
    Case(
        "rounded, cached, sequence parallel",
        shards=lambda n: [300] * n,
        change=exact_products,
        dtype=BF16,
        sequence_parallel=True,
        logits_cache_bytes=12 * 300 * 2,
        keywords=ROUNDED,
    ),
]


def verdict(error: float, allowed: float) -> tuple[bool, str]:
    return error <= allowed, f"error {error:.2e}, allowed {allowed:.1e}"
