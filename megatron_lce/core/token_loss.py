"""The pass of `linear_token_loss`: each block of tokens goes from statistics to gradients at once.

1. The backend takes a block's statistics and keeps all its exponentials; the ranks merge the statistics.
2. `finish` makes the outputs, the caller's loss is called with them, and autograd gives their upstream gradients.
3. Kept exponentials become gradients in place; two matrix products add them to the sums of both gradients.

If the plan has no room for a block's exponentials, all tokens are one block, whose logits are recomputed. `known_loss`
scales the sums in backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_lce.core.call import Call
from megatron_lce.core.candidates import candidate_logits, candidate_logprobs
from megatron_lce.core.computed_rows import ComputedRows
from megatron_lce.core.group_statistics import stats_of_tokens
from megatron_lce.core.head_gradients import HeadGradients
from megatron_lce.core.known_loss import scales_a_sum, unscaled_dtype, unscaled_gradients
from megatron_lce.core.logit_gradients import grad_logits_slabs, gradient_inputs, gradients_of_cache
from megatron_lce.core.logits_cache import new_cache
from megatron_lce.core.options import DIFFERENTIABLE, WITH_GRADIENT, LinearCrossEntropyOutput, new_outputs
from megatron_lce.core.plan import plan_known_loss
from megatron_lce.core.tokens import tokens_in_blocks

_EVERYTHING = 2**62  # bytes of a cache that holds what there is
_SAMPLE = 4096  # tokens, or fewer than twice as many, whose losses are computed again

Metrics = dict[str, Tensor]
TokenLossFunction = Callable[..., Tensor | tuple[Tensor, Metrics]]


class TokenLossResults(NamedTuple):
    """The sum of the losses, and what every token has without gradient: 0 in skipped rows."""

    total: Tensor  # [] fp32
    gradients: HeadGradients | None  # of the sum
    outputs: LinearCrossEntropyOutput  # [N, ...] each
    metrics: Metrics  # [N, ...] each
    sample: Callable[[], tuple[Tensor, Tensor]]  # losses of some tokens: among all, and by themselves


@torch.no_grad()
def summed_token_loss(
    call: Call,
    loss: TokenLossFunction,
    per_token: Sequence[Tensor],  # [N, ...] each
    with_gradient: bool,
) -> TokenLossResults:
    """Take each block of tokens from its statistics to its losses and, if wanted, to its gradients at once."""
    options, backend, computed = call.options, call.backend, ComputedRows.of(call.labels, call.options)
    count, plan, cache = computed.count, None, None
    if with_gradient:
        size = call.size._replace(sums_weight=call.size.sums_weight and call.weight.requires_grad)
        plan = plan_known_loss(size, count, options.workspace_bytes, single_is_sum=scales_a_sum(call))
    block_tokens, workspace_bytes = (count, options.workspace_bytes) if plan is None else plan
    if plan is not None:
        cache = new_cache(call.size, min(plan.tokens, count), call.shard.columns, _EVERYTHING, call.hidden)
    block_call = replace(call, options=replace(options, workspace_bytes=workspace_bytes))
    tokens = tokens_in_blocks(call.hidden, computed, block_tokens, options, unscaled_dtype(call))
    computed = tokens.computed
    all_rows = computed.select_rows(backend.prepare_rows(call.labels, call.temperature, options, call.shard))
    labels = computed.select(call.labels)
    ids = None if call.candidates is None else computed.select(call.candidates)
    losses = _Losses(loss, [computed.select(tensor) for tensor in per_token], call, with_gradient)
    gradients = unscaled_gradients(tokens, call) if with_gradient else None
    for block in tokens.blocks():
        hidden, rows = block.hidden.wait(), all_rows.select(block.rows)
        own_rows = slice(0, hidden.shape[0])
        block_cache = None if cache is None else cache.select(own_rows)
        extremes, sums = stats_of_tokens(hidden, rows, block_call, block_cache)
        outputs = new_outputs(hidden.shape[0], options, hidden.device)
        softmax = backend.finish(extremes, sums, rows, options, outputs)
        own_ids = log_p = None
        if ids is not None and (out := outputs.candidate_logprobs) is not None:
            own_ids = ids[block.rows]
            logits = candidate_logits(hidden, own_ids, rows, block_call)
            log_p = candidate_logprobs(logits, own_ids, labels[block.rows], rows, softmax, out)
        upstream = losses.add(outputs, rows.ignored, block.rows)
        if gradients is not None:
            logits_grad, _ = gradient_inputs(block_call, rows, softmax, upstream, own_ids, log_p)
            ready = None if block_cache is None else gradients_of_cache(logits_grad, block_cache, hidden)
            whole = block._replace(rows=own_rows)
            gradients.add(block, grad_logits_slabs(logits_grad, whole, gradients.bytes_per_column, ready))
    del cache
    outputs, metrics = losses.of_every_token(computed)
    return TokenLossResults(computed.nan_if_wrong(losses.total), gradients, outputs, metrics, losses.sample)


class _Losses:
    """The caller's loss, block by block."""

    def __init__(self, loss: TokenLossFunction, per_token: Sequence[Tensor], call: Call, with_gradient: bool) -> None:
        self._loss, self._per_token, self._call, self._with_gradient = loss, per_token, call, with_gradient
        self.total = torch.zeros((), dtype=torch.float32, device=call.hidden.device)
        self._losses: list[Tensor] = []
        self._outputs: list[LinearCrossEntropyOutput] = []
        self._metrics: list[Metrics] = []

    def add(self, outputs: LinearCrossEntropyOutput, ignored: Tensor, rows: slice) -> dict[str, Tensor | None]:
        """Call the caller's loss of a block; the gradient of its sum by each of the outputs that have one."""
        given = {name: getattr(outputs, name) for name in WITH_GRADIENT}
        leaves = {name: o.detach().requires_grad_(self._with_gradient) for name, o in given.items() if o is not None}
        # Not by the hooks of a checkpoint around the call, which would make all of it again for each block.
        saved_as_it_is = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        with torch.set_grad_enabled(self._with_gradient), saved_as_it_is:
            result = self._loss(outputs._replace(**leaves), *(tensor[rows] for tensor in self._per_token))
            losses, metrics = checked_losses(result, outputs.logprobs.shape[0])
            total = torch.where(ignored, 0.0, losses).sum()
        if self._metrics and metrics.keys() != self._metrics[0].keys():
            names_of_both = f"{sorted(self._metrics[0])} and {sorted(metrics)}"
            raise ValueError(f"loss must return the same metrics for any tokens, got {names_of_both}")
        self.total += total.detach()
        self._losses.append(losses.detach())
        self._outputs.append(outputs)
        self._metrics.append(
            {name: m.detach().masked_fill(ignored.view(-1, *(1,) * (m.dim() - 1)), 0) for name, m in metrics.items()}
        )
        if not self._with_gradient or not ignored.shape[0]:
            return {}
        check_graph(total, list(leaves.values()))
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return dict.fromkeys(WITH_GRADIENT) | dict(zip(leaves, found, strict=True))

    def sample(self) -> tuple[Tensor, Tensor]:
        """Return the losses of a token of each few, and the same when the loss is called with these tokens alone."""
        losses = torch.cat(self._losses)
        few = max(2, losses.shape[0] // _SAMPLE)
        numbers = torch.arange(losses.shape[0] // few, dtype=torch.int64, device=losses.device)
        # Evenly spaced tokens might all be one sequence's, so the choice is hashed (Fibonacci hashing's factor).
        chosen = numbers * few + (numbers * 2654435769 >> 16) % few
        parts = (None if part[0] is None else torch.cat(part) for part in zip(*self._outputs, strict=True))
        every_token = LinearCrossEntropyOutput(*parts), self._per_token  # type: ignore[arg-type]
        outputs, per_token = tree_map_only(Tensor, lambda x: x.index_select(0, chosen), every_token)
        among_all = losses.index_select(0, chosen)
        if not numbers.shape[0]:
            return among_all, among_all
        return among_all, checked_losses(self._loss(outputs, *per_token), numbers.shape[0])[0].detach()

    def of_every_token(self, computed: ComputedRows) -> tuple[LinearCrossEntropyOutput, Metrics]:
        """The outputs and metrics of all blocks: 0 in skipped rows."""
        if not self._outputs:  # the caller's loss is asked about no token, for the names of its metrics
            device = self._call.hidden.device
            no_outputs = new_outputs(0, self._call.options, device)
            self.add(no_outputs, torch.empty(0, dtype=torch.bool, device=device), slice(0, 0))
        parts = (None if part[0] is None else torch.cat(part) for part in zip(*self._outputs, strict=True))
        outputs = computed.spread_outputs(LinearCrossEntropyOutput(*parts))  # type: ignore[arg-type]
        names = self._metrics[0]
        return outputs, {name: computed.spread(torch.cat([part[name] for part in self._metrics])) for name in names}


def checked_losses(result: Any, num_tokens: int) -> tuple[Tensor, Metrics]:
    """Return the losses and metrics in what the caller's loss returned."""
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
