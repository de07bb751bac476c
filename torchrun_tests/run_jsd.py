"""`linear_jsd` over any number of ranks against the fp64 divergence of the whole problem.

    torchrun --nproc-per-node 2 torchrun_tests/run_jsd.py --device cuda|cpu

Every rank builds the same two whole heads, keeps its own part, and compares loss and the student's gradients with the
oracle's for the whole (`tests/jsd_oracle.py`).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from harness import Report, available_backends, main, refuse_deprecated_collectives
from torch import Tensor

from megatron_lce import linear_cross_entropy, linear_jsd
from tests.jsd_oracle import JsdInputs, JsdResult, evaluate_jsd, evaluate_weighted_jsd, jsd_comparisons

SEQUENCE = 12  # divisible by 1, 2, 3 and 4 ranks
BETWEEN = 0.3
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One problem; functions take the number of ranks.

    Between the ends of beta and at them ranks exchange other numbers, at either end the same ones.
    """

    name: str
    betas: tuple[float, ...]
    shape: tuple[int, ...] = (SEQUENCE, 2)
    shards: Callable[[int], list[int]] = lambda ranks: [20] * ranks
    vocab_size: Callable[[int], int] | None = None
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)  # student's, teacher's
    sequence_parallel: bool = False
    workspace_bytes: int = 2**29
    ignore_every: int | None = None
    token_temperature: bool = False
    nan_rows: int = 0  # rows whose temperature is unusable
    change: Callable[["Problem"], None] | None = None  # edits the problem in place
    weighted: bool = False  # the weighted sum, its gradients made in forward
    skip: bool | str = False  # `skip_ignored`; "count": the number of rows that are not ignored
    keywords: dict[str, Any] = field(default_factory=dict)


def uneven(ranks: int) -> list[int]:
    return [13 + 9 * (rank % 2) + rank for rank in range(ranks)]


def nan_in_one_teacher_column(problem: "Problem") -> None:
    """Only one rank computes with it; every rank's rows must be NaN."""
    problem.inputs.teacher_weight[1, 0] = torch.nan


def nan_in_one_teacher_row(problem: "Problem") -> None:
    problem.inputs.teacher_hidden[1, 0, 0] = torch.nan


FORMS = {
    "student_logits_scale": 0.7,
    "student_softcap": 3.0,
    "teacher_logits_scale": -1.5,
    "teacher_softcap": 5.0,
    "temperature": 1.6,
    "teacher_temperature": 0.8,
}
CASES = [
    Case("even shards", (0, BETWEEN, 1)),
    Case("uneven shards, temperature per token", (BETWEEN, 1), shards=uneven, token_temperature=True),
    Case("shards wider than a kernel's tile", (0, BETWEEN), shards=lambda ranks: [300] * ranks),
    Case("padded columns, some rows ignored", (BETWEEN, 1), vocab_size=lambda ranks: 20 * ranks - 3, ignore_every=3),
    Case("a shard that is all padding", (BETWEEN, 1), vocab_size=lambda ranks: max(20 * (ranks - 1) - 3, 5)),
    Case("all padding, sequence parallel", (0, BETWEEN), vocab_size=lambda ranks: 5, sequence_parallel=True),
    Case("all rows ignored", (BETWEEN,), ignore_every=1),
    Case("NaN rows", (BETWEEN, 1), token_temperature=True, nan_rows=5, ignore_every=4),
    Case("NaN in one shard of the teacher's weight", (0, BETWEEN), change=nan_in_one_teacher_column),
    Case("NaN in the teacher's hidden", (BETWEEN, 1), sequence_parallel=True, change=nan_in_one_teacher_row),
    Case("sequence parallel, uneven, ignored", (BETWEEN, 1), shards=uneven, sequence_parallel=True, ignore_every=3),
    Case("sequence parallel, NaN rows", (BETWEEN,), sequence_parallel=True, token_temperature=True, nan_rows=5),
    Case("skipped, uneven", (0, BETWEEN), shards=uneven, ignore_every=3, skip=True),
    Case("skipped, sequence parallel, counted", (BETWEEN, 1), sequence_parallel=True, ignore_every=4, skip="count"),
    Case("skipped, all ignored, all padding", (BETWEEN,), vocab_size=lambda _: 5, ignore_every=1, skip=True),
    Case("known weights, uneven", (0,), shards=uneven, ignore_every=3, weighted=True),
    Case("known weights, NaN in one shard of the teacher's", (0,), change=nan_in_one_teacher_column, weighted=True),
    Case("known weights, skipped, padding", (0, 1), vocab_size=lambda _: 5, ignore_every=3, skip=True, weighted=True),
    Case(
        "known weights, sequence parallel, blocks",
        (0, BETWEEN),
        (192,),
        lambda ranks: [60] * ranks,
        weighted=True,
        dtypes=(BF16, BF16),
        sequence_parallel=True,
        workspace_bytes=2**18 + 2**17,
    ),
    Case(
        "known weights, sequence parallel, skipped",
        (BETWEEN,),
        sequence_parallel=True,
        ignore_every=4,
        skip="count",
        workspace_bytes=2**14,
        weighted=True,
    ),
    Case("known weights, all ignored", (BETWEEN,), sequence_parallel=True, ignore_every=1, skip=True, weighted=True),
    Case("no tokens", (BETWEEN,), shape=(0, 3)),
    Case("no tokens, sequence parallel", (0, BETWEEN), shape=(0, 3), sequence_parallel=True),
    Case("blocks of tokens", (BETWEEN,), shape=(144,), shards=lambda ranks: [130] * ranks, workspace_bytes=2**16),
    Case("bf16, sequence parallel", (0, BETWEEN), dtypes=(BF16, BF16), sequence_parallel=True),
    Case("bf16, blocks", (1,), (144,), lambda ranks: [600] * ranks, dtypes=(BF16, BF16), workspace_bytes=2**18),
    Case("fp32 student, bf16 teacher, scale and softcap", (BETWEEN, 1), dtypes=(torch.float32, BF16), keywords=FORMS),
]


class Problem:
    """The whole problem, equal on every rank, and where its shards lie."""

    def __init__(self, case: Case, ranks: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1234)
        self.starts = [0, *itertools.accumulate(case.shards(ranks))]
        heads: list[Tensor] = []
        for hidden_size, dtype in zip((24, 40), case.dtypes, strict=True):
            hidden = torch.randn(*case.shape, hidden_size, generator=generator)
            weight = torch.randn(self.starts[-1], hidden_size, generator=generator) * (2 / hidden_size**0.5)
            heads += [hidden.to(device, dtype), weight.to(device, dtype)]
        self.inputs = JsdInputs(*heads, torch.randn(case.shape, generator=generator).to(device))
        count = self.inputs.upstream.numel()
        labels = torch.zeros(count, dtype=torch.int64, device=device)
        if case.ignore_every is not None:
            labels[:: case.ignore_every] = -100
        self.keywords: dict[str, Any] = {"labels": labels.view(case.shape), **case.keywords}
        if case.token_temperature:
            temperature = torch.linspace(0.5, 2.0, count, device=device)
            temperature[: case.nan_rows] = -1.0
            self.keywords["temperature"] = temperature.view(case.shape)
        if case.vocab_size is not None:
            self.keywords["vocab_size"] = case.vocab_size(ranks)
        if case.change is not None:
            case.change(self)


def run_case(case: Case, beta: float, backend: str, device: torch.device, report: Report) -> None:
    """Loss and gradients of this rank's part against the oracle's for the whole."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    problem = Problem(case, ranks, device)
    shard = slice(problem.starts[rank], problem.starts[rank + 1])
    length = case.shape[0] // ranks
    rows = slice(rank * length, (rank + 1) * length) if case.sequence_parallel else slice(None)
    whole = problem.inputs
    mine = whole._replace(
        student_hidden=whole.student_hidden[rows],
        student_weight=whole.student_weight[shard],
        teacher_hidden=whole.teacher_hidden[rows],
        teacher_weight=whole.teacher_weight[shard],
    )
    evaluate = evaluate_weighted_jsd if case.weighted else evaluate_jsd
    actual = evaluate(
        linear_jsd,
        mine,
        beta=beta,
        tp_group=dist.group.WORLD,
        sequence_parallel=case.sequence_parallel,
        vocab_start=shard.start if case.shards is uneven else None,
        workspace_bytes=case.workspace_bytes,
        skip_ignored=int((problem.keywords["labels"] != -100).sum()) if case.skip == "count" else bool(case.skip),
        backend=backend,
        **problem.keywords,
    )
    name = f"{backend}: beta {beta}: {case.name}"
    parts = {"hidden_rows": rows, "weight_rows": shard}
    for result in jsd_comparisons(actual, whole, beta=beta, **parts, **problem.keywords):
        passed = result.error <= result.allowed
        report.check(f"{name}: {result.name}", passed, f"error {result.error:.2e}, allowed {result.allowed:.1e}")
    check_same_bits(name, actual, case, report)


def check_same_bits(name: str, actual: JsdResult, case: Case, report: Report) -> None:
    """Every rank holds the same loss, and hidden gradient where that is whole."""
    tensors = [actual.loss] if case.sequence_parallel else [actual.loss, actual.grad_hidden]
    mine = torch.cat([t.double().reshape(-1).nan_to_num(nan=12345.0) for t in tensors])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    different = sum(int((other != mine).sum()) for other in everyone)
    report.check(f"{name}: same bits on every rank", different == 0, f"{different} numbers differ")


def check_refusals(backend: str, device: torch.device, report: Report) -> None:
    """What one rank finds wrong, or does otherwise, is an error on all of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return
    columns = 20 if rank < ranks - 1 else 300  # tiles of a kernel, which take workspace
    heads = [torch.ones(shape, device=device) for shape in ((4, 8), (columns, 8), (4, 8), (columns, 8))]
    for name, keywords, expected in (
        ("betas of two kinds", {"beta": 0.0 if rank == 0 else 0.5}, "beta must be the same on every rank"),
        ("rows skipped by one", {"skip_ignored": rank == 0}, "skip_ignored must be the same on every rank"),
        ("no vocab_start", {"vocab_start": None}, "vocab_start must be given on every rank where shards differ"),
        ("workspace", {"workspace_bytes": 1}, "workspace_bytes must be at least"),
    ):
        try:
            linear_jsd(*heads, tp_group=dist.group.WORLD, backend=backend, **{"vocab_start": 20 * rank, **keywords})
            message = "no error"
        except ValueError as error:
            message = str(error)
        messages: list[str] = [""] * ranks
        dist.all_gather_object(messages, message)
        report.check(f"{backend}: refused: {name}", {message} == set(messages) and expected in message, message)


def check_student_outputs(backend: str, device: torch.device, report: Report) -> None:
    """What `return_student` gives is what `linear_cross_entropy` gives, block by block, too."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = ["uneven shards, temperature per token", "a shard that is all padding", "skipped, uneven"]
    names += ["known weights, sequence parallel, blocks", "known weights, skipped, padding"]
    for case in (case for case in CASES if case.name in names):
        problem = Problem(case, ranks, device)
        shard = slice(problem.starts[rank], problem.starts[rank + 1])
        length = case.shape[0] // ranks
        rows = slice(rank * length, (rank + 1) * length) if case.sequence_parallel else slice(None)
        heads = [t[part] for t, part in zip(problem.inputs[:4], (rows, shard, rows, shard), strict=True)]
        labels = problem.keywords["labels"]
        ids = torch.arange(labels.numel(), device=device).view(labels.shape) * 7 % problem.starts[-1]
        keywords = problem.keywords | {
            "labels": torch.where(labels == -100, labels, ids),
            "tp_group": dist.group.WORLD,
            "sequence_parallel": case.sequence_parallel,
            "vocab_start": shard.start,
            "skip_ignored": bool(case.skip),
            "backend": backend,
        }
        expected = linear_cross_entropy(*heads[:2], **keywords)
        keywords |= {"token_weights": torch.ones_like(problem.inputs.upstream) if case.weighted else None}
        heads[0].requires_grad_()
        keywords |= {"workspace_bytes": case.workspace_bytes, "teacher_temperature": 1.5, "return_student": True}
        _, student = linear_jsd(*heads, **keywords)
        for name in ("logprobs", "entropy", "lse"):
            value = getattr(student, name)
            close = torch.allclose(value, getattr(expected, name), rtol=1e-5, atol=1e-5, equal_nan=True)
            gathered = [torch.empty_like(value) for _ in range(ranks)]
            dist.all_gather(gathered, value)
            same = all(torch.equal(value.nan_to_num(9.0), other.nan_to_num(9.0)) for other in gathered)
            report.check(
                f"{backend}: student's {name}: {case.name}", close and same, f"close {close}, same bits {same}"
            )


def program(device: torch.device, report: Report) -> None:
    refuse_deprecated_collectives()
    for backend in available_backends():
        check_refusals(backend, device, report)
        check_student_outputs(backend, device, report)
        for case in CASES:
            for beta in case.betas:
                run_case(case, beta, backend, device, report)


if __name__ == "__main__":
    main(program)
