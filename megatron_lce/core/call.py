"""One call of an operation: its tensors and options."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.core.backend import Backend
from megatron_lce.core.lm_head import LMHead
from megatron_lce.core.matmul import matmul
from megatron_lce.core.options import Options, Shard
from megatron_lce.core.plan import ALIGNED_COLUMNS, HeadSize
from megatron_lce.core.statistics import row_counts

Telling = Callable[[], AbstractContextManager[None, None]]
SOFTCAP_TEMPERATURES = 8  # the least softcap / temperature under which logits are cached


@dataclass(frozen=True)
class Call:
    """Tensors and options of one call, checked and compared over the group.

    head        the head, of two the student's
    labels      [N] int64 global ids
    candidates  [N, K] int64 global ids
    options     without tensors; tp_group is None on one rank, sequence_parallel is True only with a tp_group
    shape       the caller's shape of labels, N elements
    telling     a context around code of the caller: in the first call of a kind, what it raises is raised on all ranks
    """

    head: LMHead
    labels: Tensor
    candidates: Tensor | None
    options: Options
    shard: Shard
    backend: Backend
    shape: tuple[int, ...]
    matmul: Callable[..., None] = matmul  # for gradients; an fp32 weight's may make copies that `size` accounts for
    telling: Telling = nullcontext
    group: ref[ProcessGroup] | None = None  # of a saved call: a group that a live graph kept could abort at exit

    @cached_property
    def size(self) -> HeadSize:
        """Sizes for plans, the same on every rank."""
        options, (hidden, weight, *_) = self.options, self.head
        num_extremes, _, num_stats = row_counts(options.entropy, options.telemetry)
        scratch, temperature = self.backend.scratch_bytes(hidden, weight, options.telemetry), self.head.temperature
        if (softcap := self.head.softcap) is not None:
            # Cached exponentials must give the slope of a softcap, 1 - tanh^2, as well as they give p. Their error,
            # relative to the logit's range, grows with temperature / softcap. The mean logit's gradient needs the slope
            # also where an exponential underflowed.
            is_cool = isinstance(temperature, float) and SOFTCAP_TEMPERATURES * temperature <= softcap
            scratch = scratch._replace(caches=scratch.caches and is_cool and not options.telemetry)
        return HeadSize(
            hidden_size=hidden.shape[1],
            max_columns=self.shard.max_columns,
            itemsize=weight.element_size(),
            stats_rows=num_stats + num_extremes - 2,
            scratch=scratch,
            needs_weight_acc=weight.dtype != torch.float32 and options.weight_grad_sink is None,
            shards_aligned=not any(n % ALIGNED_COLUMNS for n in (self.shard.max_columns, options.vocab_size or 0)),
        )

    def without_tensors(self) -> Self:
        """Return a copy without tensors, which an autograd node saves separately, and without a hold on the group."""
        empty, group = torch.empty(0, dtype=torch.uint8, device="cpu"), self.options.tp_group
        temperature = 1.0 if isinstance(self.head.temperature, Tensor) else self.head.temperature
        return replace(
            self,
            head=self.head._replace(hidden=empty, weight=empty, temperature=temperature),
            labels=empty,
            candidates=None,
            options=self.options if group is None else replace(self.options, tp_group=None),
            telling=nullcontext,
            group=None if group is None else ref(group),
        )

    def with_tensors(self, hidden: Tensor, weight: Tensor) -> Self:
        """Return a copy with the tensors that an autograd node saved, and the group."""
        head = self.head._replace(hidden=hidden, weight=weight)
        if self.group is None:
            return replace(self, head=head)
        if (group := self.group()) is None:
            raise RuntimeError("backward needs tp_group, which was destroyed after forward")
        return replace(self, head=head, options=replace(self.options, tp_group=group))


def check_backward(operation: str, *upstream: Tensor | None) -> None:
    """Refuse create_graph=True, because gradients have no graph, and batched upstream gradients."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"create_graph must be False: {operation} has no double backward")
    functorch = torch._C._functorch
    tests = functorch.is_legacy_batchedtensor, functorch.is_functorch_wrapped_tensor
    if any(is_batched(grad) for is_batched in tests for grad in upstream if grad is not None):
        raise TypeError(
            f"upstream gradients of {operation} must be plain tensors, got batched ones (is_grads_batched, "
            "torch.func): call torch.autograd.grad once for each"
        )
