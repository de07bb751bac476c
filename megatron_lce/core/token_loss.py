"""The pass of `linear_token_loss`: each block of tokens goes from statistics to gradients at once.

1. The backend computes the statistics of a block and caches all its exponentials; the ranks merge the statistics.
2. `write_outputs` computes what the caller's loss is called with. Autograd gives the outputs' upstream gradients.
3. Cached exponentials become gradients in place; two matrix products add them to the gradients of hidden and weight.
   The block's hidden gradient is reduced over the group while the second one runs; forward waits for it.

If no block of exponentials fits in the workspace, all tokens are one block, whose logits are recomputed. Afterwards
the loss runs twice more on a sample, until its code has passed once. `known_loss` scales the gradients in backward.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from megatron_lce.core.call import Call
from megatron_lce.core.call_plan import plan_token_loss
from megatron_lce.core.group_statistics import outputs_over_group
from megatron_lce.core.head_gradients import HeadGradients
from megatron_lce.core.known_loss import (
    KnownTokenLosses,
    UpstreamCheck,
    attach_gradients,
    keeps_fp32_weight_sum,
    unscaled_dtype,
    unscaled_gradients,
)
from megatron_lce.core.logit_gradients import grad_logits_inputs
from megatron_lce.core.logits_cache import new_cache
from megatron_lce.core.matmul import without_autocast
from megatron_lce.core.options import DIFFERENTIABLE_OUTPUTS, LinearCrossEntropyOutput, new_outputs
from megatron_lce.core.row_index import RowIndex
from megatron_lce.core.tokens import tokens_in_blocks

_MAX_SAMPLE_TOKENS = 2048  # the most tokens whose losses are compared

Metrics = dict[str, Tensor]
TokenLossFunction = Callable[..., Tensor | tuple[Tensor, Metrics]]


class TokenLossResults(NamedTuple):
    """The sum of the losses, and outputs and metrics of every token without gradient: 0 in skipped rows."""

    loss_sum: Tensor  # [] fp32
    head_grads: HeadGradients | None  # of the sum
    outputs: Any  # `LinearCrossEntropyOutput` or `LinearDivergenceOutput`, [N, ...] each
    metrics: Metrics  # [N, ...] each
    sample: Callable[[], tuple[Tensor, Tensor, Tensor]]  # losses of some tokens among all, and twice among others


@torch.no_grad()
def summed_token_loss(
    call: Call,
    loss: TokenLossFunction,
    per_token: Sequence[Tensor],  # [N, ...] each
    needs_grad: bool,
) -> TokenLossResults:
    """Compute the statistics, the losses and, if requested, the gradients, block by block."""
    options = call.options
    # Launched before the host waits for the number of rows, if it does.
    all_rows = call.backend.prepare_rows(call.labels, call.temperature, options, call.shard)
    row_index = RowIndex.from_labels(call.labels, options)
    plan = plan_token_loss(
        call.size,
        row_index.count,
        call.shard.num_columns,
        options.workspace_bytes,
        needs_grad=needs_grad,
        needs_weight=call.weight.requires_grad,
        keeps_fp32_sum=keeps_fp32_weight_sum(call),
    )
    cache_tokens, num_columns = min(plan.block_tokens, row_index.count), call.shard.num_columns
    cache = new_cache(call.size, cache_tokens, num_columns, call.hidden) if plan.caches else None
    tokens = tokens_in_blocks(call.hidden, row_index, plan.block_tokens, options, unscaled_dtype(call))
    row_index = tokens.row_index
    all_rows = row_index.select_rows(all_rows)
    labels = row_index.select(call.labels)
    ids = None if call.candidates is None else row_index.select(call.candidates)
    selected = [row_index.select(tensor) for tensor in per_token]
    no_outputs = partial(new_outputs, 0, options, call.hidden, call.candidates)
    losses = Losses(loss, selected, no_outputs, all_rows.scale.device, needs_grad)
    head_grads = unscaled_gradients(tokens, call, plan) if needs_grad else None
    for block in tokens.blocks():
        # `block.row_slice` are of all computed rows; what is selected here is this block's, whose rows start at 0.
        rows, local_block = all_rows.select(block.row_slice), block._replace(row_slice=slice(0, block.num_tokens))
        block_cache = None if cache is None else cache.select(local_block.row_slice)
        block_labels, block_ids = labels[block.row_slice], None if ids is None else ids[block.row_slice]
        outputs, softmax, log_p = outputs_over_group(
            [local_block], rows, block_labels, block_ids, call, plan, block_cache
        )
        upstream = losses.add(outputs, rows.ignored, block.row_slice)
        if head_grads is not None:
            inputs, _ = grad_logits_inputs(call, rows, softmax, upstream, block_ids, log_p)
            inputs.hidden = block.hidden
            inputs.use_cache(block_cache)
            head_grads.add_block(block, inputs)
    outputs, metrics = losses.all_tokens(row_index)
    return TokenLossResults(row_index.nan_if_wrong(losses.loss_sum), head_grads, outputs, metrics, losses.sample)


def token_losses(
    name: str, call: Call, loss: TokenLossFunction, per_token: Sequence[Tensor]
) -> tuple[Tensor, TokenLossResults]:
    """Return the sum of the losses, with gradients if they are wanted, and per-token results."""
    needs_grad = torch.is_grad_enabled() and (call.hidden.requires_grad or call.weight.requires_grad)
    with without_autocast(call.hidden.device, name):
        results = summed_token_loss(call, loss, per_token, needs_grad)
    return attach_gradients(results.loss_sum, results.head_grads, call, name), results


def known_losses(
    name: str, call: Call, loss: Callable[[LinearCrossEntropyOutput], Tensor], upstream_check: UpstreamCheck
) -> tuple[Tensor, LinearCrossEntropyOutput]:
    """Return the loss of each token, [N], with one upstream gradient for all, and the outputs, without gradient."""
    loss_sum, results = token_losses(name, call, loss, ())
    valid_mask = call.labels != call.options.ignore_index
    return KnownTokenLosses.apply(loss_sum, loss(results.outputs), valid_mask, upstream_check), results.outputs


class Losses:
    """The caller's loss of some tokens after others."""

    def __init__(
        self,
        loss: TokenLossFunction,
        per_token: Sequence[Tensor],
        no_outputs: Callable[[], Any],  # of no tokens
        device: torch.device,
        needs_grad: bool,
        names: tuple[str, ...] = DIFFERENTIABLE_OUTPUTS,  # outputs that have a gradient
    ) -> None:
        self._loss, self._per_token, self._no_outputs, self._names = loss, per_token, no_outputs, names
        self._needs_grad = needs_grad
        self.loss_sum = torch.zeros((), dtype=torch.float32, device=device)
        self._losses: list[Tensor] = []
        self._ignored: list[Tensor] = []
        self._outputs: list[Any] = []
        self._metrics: list[Metrics] = []

    def add(self, outputs: Any, ignored: Tensor, row_slice: slice) -> dict[str, Tensor | None]:
        """Call the caller's loss for some tokens; return the gradients of its sum with respect to outputs."""
        by_name = {name: getattr(outputs, name) for name in self._names}
        leaves = {name: o.detach().requires_grad_(self._needs_grad) for name, o in by_name.items() if o is not None}
        # The hooks of a checkpoint around the call would recompute the whole call for each block.
        no_hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        with torch.set_grad_enabled(self._needs_grad), no_hooks:
            result = self._loss(outputs._replace(**leaves), *(tensor[row_slice] for tensor in self._per_token))
            losses, metrics = checked_losses(result, ignored.shape[0])
            loss_sum = torch.where(ignored, 0.0, losses).sum()
        if self._metrics and metrics.keys() != self._metrics[0].keys():
            names_of_both = f"{sorted(self._metrics[0])} and {sorted(metrics)}"
            raise ValueError(f"loss must return the same metrics for any tokens, got {names_of_both}")
        self.loss_sum += loss_sum.detach()
        self._losses.append(losses.detach())
        self._ignored.append(ignored)
        self._outputs.append(outputs)
        self._metrics.append(
            {name: m.detach().masked_fill(ignored.view(-1, *(1,) * (m.dim() - 1)), 0) for name, m in metrics.items()}
        )
        if not self._needs_grad or not ignored.shape[0]:
            return {}
        check_graph(loss_sum, leaves)
        grads = torch.autograd.grad(loss_sum, list(leaves.values()), allow_unused=True)
        return dict.fromkeys(self._names) | dict(zip(leaves, grads, strict=True))

    def sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses of some tokens: as computed, and as the loss gives them beside other tokens, twice.

        The others are tokens of the lower half of the first output, logprobs or a divergence, then of the upper half.
        The tokens themselves are neither the lowest nor the highest. So no mean, maximum or minimum over the tokens is
        the same in both calls.
        """
        losses, outputs = torch.cat(self._losses), self._cat_outputs()
        num_tokens = losses.shape[0]
        if not num_tokens:
            return losses, losses, losses
        num_sample = min((num_tokens + 1) // 2, _MAX_SAMPLE_TOKENS)
        num_others = num_sample + (2 * num_sample == num_tokens)  # a loss may also depend on the number of tokens
        # Ignored and NaN tokens come last, and take part only if there is no other.
        first = getattr(outputs, self._names[0])
        usable = ~(torch.cat(self._ignored) | first.isnan())
        order, count = first.where(usable, torch.inf).argsort(), usable.sum()
        step = torch.arange(num_others, dtype=torch.int64, device=losses.device)
        lower = step * ((count + 1) // 2) // num_others
        ranks = 1 + step[:num_sample] * (count - 2) // num_sample, lower, count - 1 - lower
        sample_index, *others = (order.index_select(0, rank.clamp(0, num_tokens - 1)) for rank in ranks)

        def among(other: Tensor) -> Tensor:
            index, every_token = torch.cat([sample_index, other]), (outputs, self._per_token)
            sample, per_token = tree_map_only(Tensor, lambda x: x.index_select(0, index), every_token)
            return checked_losses(self._loss(sample, *per_token), num_sample + num_others)[0].detach()[:num_sample]

        return losses.index_select(0, sample_index), among(others[0]), among(others[1])

    def _cat_outputs(self) -> Any:
        return tree_map(lambda *parts: None if parts[0] is None else torch.cat(parts), *self._outputs)

    def all_tokens(self, row_index: RowIndex) -> tuple[Any, Metrics]:
        """Return the outputs and metrics of all tokens: 0 in skipped rows."""
        if not self._outputs:  # a call of the loss with no tokens gives the names of its metrics
            self.add(self._no_outputs(), torch.empty(0, dtype=torch.bool, device=self.loss_sum.device), slice(0, 0))
        outputs, names = row_index.scatter_outputs(self._cat_outputs()), self._metrics[0]
        return outputs, {name: row_index.scatter(torch.cat([part[name] for part in self._metrics])) for name in names}


def checked_losses(result: Any, num_tokens: int) -> tuple[Tensor, Metrics]:
    """Check what the caller's loss returned."""
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


def check_graph(loss_sum: Tensor, outputs: Mapping[str, Tensor]) -> None:
    """Check that the loss depends on outputs only: the gradients of other leaves would be lost."""
    if not loss_sum.requires_grad:
        names = ", ".join(outputs)
        raise ValueError(f"loss must return losses that depend on one of the outputs {names}, got one without a graph")
    output_ids = {id(output) for output in outputs.values()}
    nodes, seen = [loss_sum.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in output_ids:
            raise ValueError(
                f"loss must not depend on other tensors that require grad, got one of shape {tuple(leaf.shape)}: "
                "only hidden and weight get a gradient"
            )
        nodes += [next_node for next_node, _ in node.next_functions]
