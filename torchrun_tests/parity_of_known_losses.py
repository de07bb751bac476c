"""The loss of an enabled model over ranks, which find out alike whether its upstream gradient is one number."""

from dataclasses import dataclass

import harness
import torch
import torch.distributed as dist
from harness import Report
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.api.model_loss import model_loss
from megatron_lce.core.known_loss import UpstreamCheck
from megatron_lce.core.losses import TokenCrossEntropy
from tests.cases import BF16
from tests.oracle import Upstream, error_of_sum, grad_of_products, oracle, relative_error
from tests.problems import Problem, make_problem

ROUNDINGS = 3 * 2.0**-9  # of the cache, of a gradient, and of its scaling
COLUMNS = 140  # of a shard


@dataclass
class Passes:
    """Passes of one loss, with or without sequence parallelism and skipping."""

    problem: Problem
    group: ProcessGroup
    sequence_parallel: bool
    skip: bool

    def __post_init__(self) -> None:
        self.upstream, rank, ranks = UpstreamCheck(None), dist.get_rank(self.group), dist.get_world_size(self.group)
        self.shards = [slice(COLUMNS * i, COLUMNS * (i + 1)) for i in range(ranks)]
        tokens = len(self.problem.labels) // ranks
        self.columns = self.shards[rank]
        self.rows = slice(tokens * rank, tokens * (rank + 1)) if self.sequence_parallel else slice(None)

    def run(self, upstream: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Both gradients."""
        self.upstream.check_last_passes()
        leaves = [self.problem.hidden[self.rows], self.problem.weight[self.columns]]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        options = {"tp_group": self.group, "sequence_parallel": self.sequence_parallel, "skip_ignored": self.skip}
        options |= {"entropy": False, "backend": "triton"}
        losses, _ = model_loss(*leaves, self.problem.labels, TokenCrossEntropy(), self.upstream, mask, **options)
        return torch.autograd.grad(losses, leaves, upstream)

    def compare(self, report: Report, name: str, upstream: Tensor, mask: Tensor | None = None) -> None:
        gradients = self.run(upstream, mask)
        of_logprobs = Upstream(-upstream)

        def exact(hidden: Tensor, weight: Tensor):
            return oracle(hidden, weight, self.problem.labels, of_logprobs, entropy=False)

        expected = exact(*self.problem[:2])
        hidden, weight = (tensor.double() for tensor in self.problem[:2])
        products = grad_of_products(exact, hidden, weight)
        parts = [products[:, columns] @ weight[columns] for columns in self.shards]
        allowed = ROUNDINGS + error_of_sum([part[self.rows] for part in parts], BF16)
        pairs = (expected.grad_hidden[self.rows], expected.grad_weight[self.columns])
        for what, gradient, of_fp64, most in zip(
            ("grad_hidden", "grad_weight"), gradients, pairs, (allowed, ROUNDINGS), strict=True
        ):
            title = f"known loss, {name}, sequence_parallel={self.sequence_parallel}, skip={self.skip}: {what}"
            error = relative_error(gradient, of_fp64) if of_fp64.any() else float(gradient.abs().max())
            report.check(title, error <= most, f"error {error:.2e}, allowed {most:.1e}")


def run_known_losses(group: ProcessGroup, device: torch.device, report: Report) -> None:
    """Microbatches whose masks differ, the first one all masked; then a loss that weights its tokens."""
    ranks = dist.get_world_size(group)
    tokens = 48 * ranks
    problem = make_problem(tokens, 8, COLUMNS * ranks, device, BF16)
    problem.labels[::7] = -100
    index, one = torch.arange(tokens, device=device), torch.full((tokens,), 0.5, device=device)
    weights, nothing = torch.linspace(0.5, 1.5, tokens, device=device), index < 0
    for sequence_parallel in (False, True):
        for skip in (False, True):
            passes = Passes(problem, group, sequence_parallel, skip)
            passes.compare(report, "all masked", one * 0, nothing)
            passes.compare(report, "found out", one * (index % 3 > 0), index % 3 > 0)
            report.check("known loss: known", passes.upstream.known is True)
            passes.compare(report, "in forward", one * (index % 2 > 0), index % 2 > 0)
            broken = all(gradient.isnan().all() for gradient in passes.run(weights))
            message = harness.message_of(lambda passes=passes: passes.run(weights))
            report.check("known loss, weighted later", broken and "the last backward pass are NaN" in message, message)
            passes.compare(report, "any upstream", weights)
