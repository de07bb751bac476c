"""What `megatron_lce.token_loss` does with a block of tokens, which goes all the way to its gradients at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_lce.core.call import Call
from megatron_lce.core.candidates import candidate_logits, candidate_logprobs
from megatron_lce.core.group_stats import stats_of_tokens
from megatron_lce.core.head_gradients import Slab
from megatron_lce.core.known_loss import KnownLossPass, scales_a_sum
from megatron_lce.core.logit_gradients import grad_logits_slabs, gradients_of_cache, logit_gradients
from megatron_lce.core.logits_cache import new_cache
from megatron_lce.core.options import DIFFERENTIABLE, LinearCrossEntropyOutput
from megatron_lce.core.plan import plan_known_loss
from megatron_lce.core.rows import Rows, Saved
from megatron_lce.core.tokens import Counted, TokenBlock, counted_rows, in_order, new_outputs, to_every_row
from megatron_lce.core.upstream import OneNumber, Promise

_EVERYTHING = 2**62  # bytes of a cache that holds what there is

Metrics = dict[str, Tensor]
TokenLossFunction = Callable[..., Tensor | tuple[Tensor, Metrics]]


class TokenLossPass(KnownLossPass):
    """One pass over the tokens: their outputs, losses and metrics, and what their gradients are made of."""

    name = "linear_token_loss"

    def __init__(
        self,
        call: Call,
        loss: TokenLossFunction,
        per_token: Sequence[Tensor],  # [N, ...] each
        with_gradient: bool,
    ) -> None:
        self._loss, self._with_gradient = loss, with_gradient
        options, num_tokens = call.options, call.labels.shape[0]
        rows = call.backend.prepare_rows(call.labels, call.temperature, options, call.shard)
        counted = counted_rows(call.labels, options)
        computed, plan, self._cache = counted.of(num_tokens), None, None
        if with_gradient:
            size = call.size._replace(sums_weight=call.size.sums_weight and call.weight.requires_grad)
            plan = plan_known_loss(size, computed, options.workspace_bytes, single_is_sum=scales_a_sum(call))
        if plan is not None:
            kept = min(plan.tokens, computed)
            self._cache = new_cache(call.size, kept, call.shard.columns, _EVERYTHING, call.hidden)
        block = max(computed, 1) if plan is None else plan.tokens
        left = options.workspace_bytes if plan is None else plan.workspace_bytes
        self._block_call = replace(call, options=replace(options, workspace_bytes=left))
        super().__init__(call, rows, counted, block)
        self._per_token = [in_order(tensor, self.order) for tensor in per_token]
        self._total = torch.zeros((), dtype=torch.float32, device=call.hidden.device)
        self._outputs: list[LinearCrossEntropyOutput] = []
        self._metrics: list[Metrics] = []

    def slabs(self, block: TokenBlock, bytes_per_column: int) -> Iterator[Slab]:
        """A block's outputs and losses, then the gradients of its logits."""
        call, hidden, rows = self._block_call, block.hidden.wait(), self.rows.select(block.rows)
        options, backend = call.options, call.backend
        cache = None if self._cache is None else self._cache.select(slice(0, hidden.shape[0]))
        extremes, sums = stats_of_tokens(hidden, rows, call, cache)
        outputs = new_outputs(rows.labels.shape, Counted(None), options, hidden.device)
        saved = backend.finish(extremes, sums, rows, options, outputs, None)
        kept = self._take_candidates(hidden, rows, block, saved, outputs)
        upstream = self._losses(outputs, rows, block)
        if not self._with_gradient:
            return
        gradients, _ = logit_gradients(call, rows, saved, upstream, None, kept)
        ready = None if cache is None else gradients_of_cache(gradients, cache, hidden)
        whole = block._replace(rows=slice(0, hidden.shape[0]))
        yield from grad_logits_slabs(gradients, whole, bytes_per_column, ready)

    def _take_candidates(
        self, hidden: Tensor, rows: Rows, block: TokenBlock, saved: Saved, outputs: LinearCrossEntropyOutput
    ) -> Sequence[Tensor]:
        """Fill the outputs' `candidate_logprobs`, if any, and return what their gradient needs."""
        ids, out = self.call.candidates, outputs.candidate_logprobs
        if ids is None or out is None:
            return ()
        rows_of_block = block.rows if self.order is None else self.order[block.rows]
        ids, labels = ids[rows_of_block], self.call.labels[rows_of_block]
        logits = candidate_logits(hidden, ids, rows, self._block_call)
        return ids, candidate_logprobs(logits, ids, labels, rows, saved, out, None)

    def result(self) -> Tensor:
        """The sum of the losses."""
        return self.unless_nan(self._total)

    def results(self) -> tuple[LinearCrossEntropyOutput, Metrics]:
        """The outputs and metrics of every token: 0 in skipped rows."""
        if not self._outputs:
            self._losses_of_no_token()
        parts = zip(*self._outputs, strict=True)
        outputs = (None if part[0] is None else self.to_every_row(torch.cat(part)) for part in parts)
        metrics = {name: torch.cat([part[name] for part in self._metrics]) for name in self._metrics[0]}
        spread = {n: to_every_row(m, Counted(self.order), self.call.labels.shape[0]) for n, m in metrics.items()}
        return LinearCrossEntropyOutput(*outputs), spread  # type: ignore[arg-type]

    def _losses(self, outputs: LinearCrossEntropyOutput, rows: Rows, block: TokenBlock) -> dict[str, Tensor | None]:
        """Call the caller's loss; the gradient of its sum by each of the outputs that have one."""
        names = (*DIFFERENTIABLE, "candidate_logprobs")
        given = {name: getattr(outputs, name) for name in names}
        leaves = {name: o.detach().requires_grad_(self._with_gradient) for name, o in given.items() if o is not None}
        self._outputs.append(outputs)
        # Not by the hooks of a checkpoint around the call, which would make all of it again for each block.
        saved_as_it_is = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        with torch.set_grad_enabled(self._with_gradient), saved_as_it_is:
            result = self._loss(
                outputs._replace(**leaves),
                *(tensor[block.rows] for tensor in self._per_token),
            )
            losses, metrics = checked_losses(result, outputs.logprobs.shape[0])
            total = torch.where(rows.ignored, 0.0, losses).sum()
        self._total += total.detach()
        if self._metrics and metrics.keys() != self._metrics[0].keys():
            raise ValueError(
                "loss must return the same metrics for any tokens, "
                f"got {sorted(self._metrics[0])} and {sorted(metrics)}"
            )
        self._metrics.append({name: self._unless_ignored(metric, rows) for name, metric in metrics.items()})
        if not self._with_gradient:
            return {}
        check_graph(total, list(leaves.values()))
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        upstream = dict(zip(leaves, found, strict=True))
        return {name: upstream.get(name) for name in names}

    def _losses_of_no_token(self) -> None:
        """Where no token is computed the caller's loss is asked about none, for the names of its metrics."""
        outputs = new_outputs((0,), Counted(None), self.call.options, self.call.hidden.device)
        result = self._loss(outputs, *(tensor[:0] for tensor in self._per_token))
        _, metrics = checked_losses(result, 0)
        self._outputs.append(outputs)
        self._metrics.append({name: metric.detach() for name, metric in metrics.items()})

    @staticmethod
    def _unless_ignored(metric: Tensor, rows: Rows) -> Tensor:
        ignored = rows.ignored.view(-1, *(1,) * (metric.dim() - 1))
        return metric.detach().masked_fill(ignored, 0)


class TokenLossesPass(TokenLossPass):
    """The same of each token's negative log-likelihood, where one number will be the upstream of all that count."""

    name = "linear_token_losses"

    def __init__(self, call: Call, promise: Promise, with_gradient: bool) -> None:
        super().__init__(call, lambda outputs: -outputs.logprobs, (), with_gradient)
        self.factor = OneNumber(call.labels != call.options.ignore_index, promise)  # type: ignore[assignment]
        self._all: LinearCrossEntropyOutput | None = None

    def result(self) -> Tensor:
        """The loss of every token, [N]: 0 where it is ignored."""
        return -self.outputs().logprobs

    def outputs(self) -> LinearCrossEntropyOutput:
        """Those of every token, once all blocks have been there."""
        if self._all is None:
            self._all, _ = self.results()
        return self._all


def checked_losses(result: Any, num_tokens: int) -> tuple[Tensor, Metrics]:
    """What the caller's loss returned, as losses and metrics."""
    if isinstance(result, tuple) and len(result) != 2:
        raise TypeError(f"loss must return a tensor [n], or a pair of it and a dict, got a tuple of {len(result)}")
    losses, metrics = result if isinstance(result, tuple) else (result, {})
    if not isinstance(losses, Tensor):
        raise TypeError(f"loss must return a tensor [n], or a pair of it and a dict, got {type(losses).__name__}")
    if losses.shape != (num_tokens,):
        raise ValueError(
            f"loss must return one number for each of its {num_tokens} tokens, [n], got {tuple(losses.shape)}: "
            "the sum is taken outside, and a token's loss must not depend on other tokens"
        )
    if losses.dtype != torch.float32:
        raise TypeError(f"loss must return float32, got {losses.dtype}")
    if not isinstance(metrics, dict):
        raise TypeError(f"loss must return a dict of metrics beside its losses, got {type(metrics).__name__}")
    for name, metric in metrics.items():
        if not isinstance(metric, Tensor) or metric.shape[:1] != (num_tokens,):
            got = type(metric).__name__ + (f" of shape {tuple(metric.shape)}" if isinstance(metric, Tensor) else "")
            raise ValueError(f"metric {name!r} must be a tensor [n, ...] for n = {num_tokens} tokens, got {got}")
    return losses, metrics


def check_graph(total: Tensor, outputs: Sequence[Tensor]) -> None:
    """Only the outputs get a gradient: any other leaf's would be lost."""
    if not total.requires_grad:
        raise ValueError(
            f"loss must return losses that depend on the outputs' {', '.join(DIFFERENTIABLE[:-1])} or "
            f"{DIFFERENTIABLE[-1]}, got one without a graph"
        )
    known = {id(output) for output in outputs}
    nodes, seen = [total.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise ValueError(
                f"loss must not depend on other tensors that require grad, got one of shape {tuple(leaf.shape)}: "
                "only hidden and weight get a gradient"
            )
        nodes += [following for following, _ in node.next_functions]
