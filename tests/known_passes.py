"""Passes of one loss over one head, on one rank or several, beside fp64: `model_loss` with an `UpstreamCheck`."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megatron_lce.api.model_loss import model_loss
from megatron_lce.core.known_loss import UpstreamCheck
from megatron_lce.core.losses import TokenCrossEntropy
from megatron_lce.core.options import IGNORE_INDEX
from tests.live_bytes import Products
from tests.oracle import Comparison, error_of_sum, largest_error, relative_error
from tests.problems import Problem

ROUNDINGS = 3 * 2.0**-9  # of the cache, of a gradient, and of its scaling, in 16 bits
PLAIN = TokenCrossEntropy()


class Passes:
    def __init__(
        self,
        problem: Problem,
        known: bool | None = None,
        formula: TokenCrossEntropy = PLAIN,
        group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.problem, self.formula, self.upstream = problem, formula, UpstreamCheck(known)
        self.checkpointed = False  # backward runs forward again
        self.options = {"backend": "triton", "entropy": False, "tp_group": group} | options
        if formula.label_smoothing:
            self.options["telemetry"] = "mean_logit"
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        width, length = len(problem.weight) // ranks, len(problem.labels) // ranks
        self.shards = [slice(width * i, width * (i + 1)) for i in range(ranks)]
        self.columns, self.rows = self.shards[rank], slice(None)
        if options.get("sequence_parallel"):
            self.rows = slice(length * rank, length * (rank + 1))

    def run(self, upstream: Tensor, counted: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...], bool]:
        """Losses, this rank's gradients, and whether forward made them."""
        self.upstream.check_last_passes()
        parts = self.problem.hidden[self.rows], self.problem.weight[self.columns]
        hidden, weight = (tensor.clone().requires_grad_() for tensor in parts)
        counted = None if counted is None else counted.to(hidden.device)
        with Products() as products:
            given = hidden, weight, self.problem.labels, self.formula, self.upstream, counted
            forward = partial(model_loss, *given, **self.options)
            losses, _ = checkpoint(forward, use_reentrant=False) if self.checkpointed else forward()
            in_forward = products.logits_in_gradients(hidden.shape[1]) > 0
            gradients = torch.autograd.grad(losses, (hidden, weight), upstream.to(losses))
        return losses.detach(), gradients, in_forward

    def compare(self, upstream: Tensor, counted: Tensor | None = None) -> Iterator[Comparison]:
        """Losses and gradients of a pass with those of fp64."""
        losses, gradients, self.in_forward = self.run(upstream, counted)
        hidden, weight = (tensor.double() for tensor in self.problem[:2])
        logits = (hidden @ weight.T).requires_grad_()
        exact = self.losses_of(logits)
        (of_logits,) = torch.autograd.grad(exact, logits, upstream.to(exact))
        exact = exact.detach()
        allowed = 1e-5 + 1e-4 * exact.abs()
        yield Comparison("losses", largest_error(losses / allowed, exact / allowed), 1.0)
        of_ranks = [(of_logits[:, columns] @ weight[columns])[self.rows] for columns in self.shards]
        found = zip(gradients, (sum(of_ranks), (of_logits.T @ hidden)[self.columns]), strict=True)
        roundings = ROUNDINGS + error_of_sum(of_ranks, torch.bfloat16), ROUNDINGS
        for name, (gradient, of_fp64), allowed in zip(("grad_hidden", "grad_weight"), found, roundings, strict=True):
            yield Comparison(name, relative_error(gradient, of_fp64), allowed)

    def losses_of(self, logits: Tensor) -> Tensor:
        all_logprobs, labels = logits.log_softmax(dim=-1), self.problem.labels
        logprobs = all_logprobs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        e, z = self.formula.label_smoothing, self.formula.z_loss
        losses = -(1 - e) * logprobs - e * all_logprobs.mean(dim=-1) + z * logits.logsumexp(dim=-1) ** 2
        return torch.where(labels == IGNORE_INDEX, 0.0, losses)
