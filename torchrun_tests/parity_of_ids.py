"""What has to do with some ids of the vocabulary, over any number of ranks, against fp64 on materialised logits."""

import re
from typing import Any

import torch
import torch.distributed as dist
from harness import Report
from parity_cases import BF16, Case, Problem, sequence_shard, uneven, verdict
from torch import Tensor
from torch.distributed import ProcessGroup

import megatron_lce
from tests.oracle import largest_error, relative_error

CASES = [
    Case("even shards"),
    Case("uneven, padded, per token", (12, 2), shards=uneven, pass_vocab_start=True, vocab_size=lambda n: 13 * n - 2),
    Case("a shard that is all padding, sequence parallel", vocab_size=lambda n: 5, sequence_parallel=True),
    Case("bf16, sequence parallel", (12, 3), dtype=BF16, sequence_parallel=True, keywords={"softcap": 4.0}),
]


class Part:
    """This rank's part of a case, and the materialised logits of the whole in fp64."""

    def __init__(self, case: Case, backend: str, group: ProcessGroup, device: torch.device) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.case, self.problem, self.group = case, Problem(case, ranks, device), group
        problem = self.problem
        self.columns = slice(problem.starts[rank], problem.starts[rank + 1])
        self.rows = sequence_shard(case, rank, ranks)
        self.hidden = problem.hidden[self.rows].clone().requires_grad_()
        self.weight = problem.weight[self.columns].clone().requires_grad_()
        temperature = torch.linspace(0.5, 2.0, problem.labels.numel(), device=device).view_as(problem.labels)
        self.keywords: dict[str, Any] = {
            **case.keywords,
            "tp_group": group,
            "sequence_parallel": case.sequence_parallel,
            "vocab_start": self.columns.start if case.pass_vocab_start else None,
            "vocab_size": problem.vocab_size,
            "temperature": temperature,
            "backend": backend,
        }
        self.exact_hidden = problem.hidden.double().requires_grad_()
        self.exact_weight = problem.weight.double().requires_grad_()
        logits = self.exact_hidden @ self.exact_weight[: problem.vocab_size].T
        if softcap := case.keywords.get("softcap"):
            logits = softcap * torch.tanh(logits / softcap)
        self.logits = logits / temperature[..., None]  # [..., V]
        self.generator = torch.Generator().manual_seed(5)

    def some_ids(self, width: int) -> Tensor:
        """[..., K] with duplicates, padding, and every rank's first column."""
        size, shape = self.logits.shape[-1], self.problem.labels.shape
        ids = torch.randint(size, (*shape, width), generator=self.generator)
        starts = torch.tensor(self.problem.starts[:-1])
        ids.view(-1)[: len(starts)] = starts.clamp(max=size - 1)
        ids[..., -1] = ids[..., 0]
        ids.view(-1)[3::7] = -1
        return ids.to(self.problem.labels.device)

    def upstream(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.problem.labels.device)

    def check(self, name: str, value: Tensor, exact: Tensor, report: Report) -> None:
        """A value of every rank, with the same bits on all, and then the gradients that are there."""
        largest = max(1.0, float(self.logits.detach().abs().max()))
        report.check(name, *verdict(largest_error(value.detach(), exact.detach()), 16 * 1.2e-7 * largest))
        mine = value.detach().nan_to_num(nan=12345.0).reshape(-1)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, mine, group=self.group)
        report.check(f"{name}: same bits on every rank", all(torch.equal(mine, other) for other in everyone))

    def check_gradients(self, name: str, report: Report) -> None:
        allowed = torch.finfo(self.hidden.dtype).eps * (8 if self.hidden.dtype == torch.float32 else 1)
        for what, found, exact in (
            ("hidden", self.hidden.grad, self.exact_hidden.grad[self.rows]),
            ("weight", self.weight.grad, self.exact_weight.grad[self.columns]),
        ):
            report.check(f"{name}: grad_{what}", *verdict(relative_error(found, exact), allowed))
        for leaf in (self.hidden, self.weight, self.exact_hidden, self.exact_weight):
            leaf.grad = None


def at(logits: Tensor, ids: Tensor) -> Tensor:
    """[..., K] of [..., V], 0 at padding."""
    return torch.where(ids < 0, 0.0, logits.gather(-1, ids.clamp(min=0)))


def run_logits_at(part: Part, name: str, report: Report) -> None:
    ids = part.some_ids(6)
    logits = megatron_lce.linear_logits_at(part.hidden, part.weight, ids, **part.keywords)
    upstream = part.upstream(ids.shape)
    logits.backward(upstream)
    exact = at(part.logits, ids)
    exact.backward(upstream.double(), retain_graph=True)
    part.check(f"{name}: logits_at", logits, exact, report)
    part.check_gradients(f"{name}: logits_at", report)


def run_candidates(part: Part, name: str, report: Report) -> None:
    """Beside the label's logprob; a shard's label is a candidate, too."""
    ids, labels = part.some_ids(6), part.problem.labels
    ids[..., 1] = labels
    out = megatron_lce.linear_cross_entropy(
        part.hidden, part.weight, labels, candidates=ids, skip_ignored=True, **part.keywords
    )
    upstream = part.upstream(ids.shape), part.upstream(labels.shape)
    torch.autograd.backward([out.candidate_logprobs, out.entropy], upstream)
    all_logprobs = part.logits.log_softmax(-1)
    exact = at(all_logprobs, ids), -(all_logprobs.exp() * all_logprobs).sum(-1)
    torch.autograd.backward(exact, [grad.double() for grad in upstream], retain_graph=True)
    part.check(f"{name}: candidates", out.candidate_logprobs, exact[0], report)
    report.check(f"{name}: candidates: the label's bits", torch.equal(out.candidate_logprobs[..., 1], out.logprobs))
    part.check_gradients(f"{name}: candidates", report)


def run_support(part: Part, name: str, report: Report) -> None:
    """Sets of 0 to 5 ids, the label among them, and a repeated one."""
    labels, size = part.problem.labels, part.logits.shape[-1]
    counts = torch.arange(labels.numel(), device=labels.device) % 6
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    rows = torch.arange(labels.numel(), device=labels.device).repeat_interleave(counts)
    ids = torch.randint(size, (len(rows),), generator=part.generator).to(labels.device)
    ids[offsets[:-1][counts > 0]] = labels.view(-1)[counts > 0]
    ids[offsets[1:][counts > 2] - 1] = labels.view(-1)[counts > 2]
    logprobs = megatron_lce.support_logprobs(part.hidden, part.weight, labels, ids, offsets, **part.keywords)
    upstream = part.upstream(labels.shape)
    logprobs.backward(upstream)
    logits = part.logits.view(-1, size)
    kept = (counts == 0)[:, None].expand(-1, size).clone()
    kept[rows, ids] = True
    all_logprobs = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    exact = all_logprobs.gather(1, labels.view(-1, 1)).view(labels.shape)
    exact.backward(upstream.double(), retain_graph=True)
    part.check(f"{name}: support", logprobs, exact, report)
    part.check_gradients(f"{name}: support", report)


def run_topk(part: Part, name: str, report: Report) -> None:
    """The ids of a stable sort, wherever they lie; all of the vocabulary if it holds fewer."""
    size, names = part.logits.shape[-1], ("logprobs", "lse", "mass")
    k = min(7, size)
    arguments = (part.hidden, part.weight, k)
    try:
        megatron_lce.linear_topk(*arguments, workspace_bytes=1, **part.keywords)
    except ValueError as error:
        smallest = int(re.search(r"at least (\d+) for", str(error))[1])
    found = megatron_lce.linear_topk(*arguments, workspace_bytes=smallest, **part.keywords)
    values, ids = part.logits.detach().sort(dim=-1, descending=True, stable=True)
    lse = part.logits.detach().logsumexp(-1)
    logprobs = (values - lse[..., None])[..., :k]
    report.check(f"{name}: topk: ids", torch.equal(found.ids, ids[..., :k]))
    for what, exact in zip(names, (logprobs, lse, logprobs.exp().sum(-1)), strict=True):
        part.check(f"{name}: topk: {what}", getattr(found, what), exact, report)


def run_ids(backend: str, group: ProcessGroup, device: torch.device, report: Report) -> None:
    for case in CASES:
        part, name = Part(case, backend, group, device), f"{backend}: ids: {case.name}"
        run_logits_at(part, name, report)
        run_candidates(part, name, report)
        run_support(part, name, report)
        run_topk(part, name, report)
