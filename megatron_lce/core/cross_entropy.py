"""The autograd function of `linear_cross_entropy`: the order of launches and collectives, and what is saved.

Forward:

1. `ComputedRows` selects the rows to compute; `skip_ignored=True` takes a collective and a host wait. Their labels and
   temperatures become `Rows`.
2. For each block of hidden states that `Tokens` yields (under sequence parallel, gathered), and for each range of
   `stats_tokens` in it,
   a. the backend computes statistics of chunks of at most 128 columns, and fills the `LogitsCache`;
   b. the ranks exchange extremes, then sums.
3. `finish` computes the outputs of all blocks at once. They are spread over all rows.

Backward:

1. Upstream gradients and saved tensors become `RowTerms`, which determine the gradient of every logit of a row.
2. Cached exponentials become gradients in place.
3. With `skip_ignored=True`, rows without an upstream gradient are dropped, which takes a collective and a host wait
   again.
4. For each block, under sequence parallel gathered again, and for each `Slab` of it,
   a. logits that are not cached are recomputed and become gradients;
   b. two matrix products add to the gradients of hidden and weight.
5. A block's hidden gradient is reduced over the group while its last product for the weight runs.

`plan` decides how many tokens and columns are processed at once, before anything runs.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from megatron_lce.core.call import Call, check_backward
from megatron_lce.core.candidates import candidate_logprobs
from megatron_lce.core.computed_rows import ComputedRows
from megatron_lce.core.group_statistics import stats_over_group
from megatron_lce.core.head_gradients import HeadGradients
from megatron_lce.core.logit_gradients import grad_logits_slabs, gradient_inputs, gradients_of_cache
from megatron_lce.core.logits_cache import new_cache
from megatron_lce.core.options import WITH_GRADIENT, LinearCrossEntropyOutput, new_outputs
from megatron_lce.core.plan import backward_tokens, smallest_workspace
from megatron_lce.core.products import own_arithmetic
from megatron_lce.core.rows import Rows, SoftmaxOfRow
from megatron_lce.core.tokens import Tokens, tokens_in_blocks


class SavedForBackward(NamedTuple):
    """Tensors of the computed rows that forward saves, in addition to hidden and weight."""

    computed: Tensor | None  # `ComputedRows.index`
    rows: Rows
    softmax: SoftmaxOfRow
    candidates: Tensor | None  # [N, K] ids of all rows
    candidate_log_p: Tensor | None  # [n, K] base 2

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.computed, *self.rows, *self.softmax, self.candidates, self.candidate_log_p

    @classmethod
    def of(cls, tensors: Iterable[Any]) -> Self:
        each = iter(tensors)
        rows, softmax = len(Rows._fields), len(SoftmaxOfRow._fields)
        return cls(next(each), Rows(*islice(each, rows)), SoftmaxOfRow(*islice(each, softmax)), *each)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Per-token logprobs, entropy and lse over a vocab-sharded weight.

    hidden  replicated, or sharded along the sequence  -> its gradient is summed over the group
    weight  this rank's shard                          -> its gradient is complete on this rank
    Saves a few floats per token, and a cache of `logits_cache_bytes`, instead of N x V logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, call: Call, grad_enabled: bool) -> tuple[Tensor | None, ...]:
        options, backend = call.options, call.backend
        needs = ctx.needs_input_grad if grad_enabled else (False, False)
        check_workspace(call, needs[0] or needs[1], needs[1])
        with own_arithmetic(hidden.device, "linear_cross_entropy forward"):
            in_order = ComputedRows.of(call.labels, options)
            tokens = _tokens(call, in_order)
            computed = tokens.computed  # in the order of the blocks
            rows = computed.select_rows(backend.prepare_rows(call.labels, call.temperature, options, call.shard))
            cache = None
            if grad_enabled:
                cache = new_cache(call.size, computed.count, call.shard.columns, options.logits_cache_bytes, hidden)
            ids = None if call.candidates is None else computed.select(call.candidates)
            extremes, sums, logits = stats_over_group(tokens, rows, call, cache, ids)
            outputs = new_outputs(computed.count, options, hidden.device)
            softmax, log_p = backend.finish(extremes, sums, rows, options, outputs), None
            if ids is not None and logits is not None and (out := outputs.candidate_logprobs) is not None:
                log_p = candidate_logprobs(logits, ids, computed.select(call.labels), rows, softmax, out)
            outputs = computed.spread_outputs(outputs)
        for output in outputs:
            if output is not None:
                output.resize_((*call.shape, *output.shape[1:]))  # a view could not be changed in place
        ctx.set_materialize_grads(False)
        if grad_enabled:
            saved = SavedForBackward(in_order.index, rows, softmax, call.candidates, log_p)
            ctx.save_for_backward(hidden, weight, *saved.tensors())
            ctx.num_tokens, ctx.call = in_order.num_tokens, call.without_tensors()
            ctx.cache, ctx.cached = cache, cache is not None
        others = (output for name, output in outputs._asdict().items() if name not in WITH_GRADIENT)
        ctx.mark_non_differentiable(*(output for output in others if output is not None))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        check_backward("linear_cross_entropy", *grad_outputs)
        if ctx.cached and ctx.cache is None:
            raise RuntimeError(
                "a second backward through linear_cross_entropy needs logits_cache_bytes=0: "
                "the first one turned the kept logits into gradients in place"
            )
        hidden, weight, *others = ctx.saved_tensors
        index, rows, softmax, ids, log_p = SavedForBackward.of(others)
        call = ctx.call.with_tensors(hidden, weight)
        cache, ctx.cache = ctx.cache, None
        with own_arithmetic(hidden.device, "linear_cross_entropy backward"):
            num_tokens, dims = ctx.num_tokens, len(call.shape)
            tokens = _tokens(call, ComputedRows(num_tokens, index))
            computed = tokens.computed
            ids = None if ids is None else computed.select(ids)
            flat = (None if grad is None else grad.reshape(num_tokens, *grad.shape[dims:]) for grad in grad_outputs)
            selected = (None if grad is None else computed.select(grad) for grad in flat)
            upstream = dict(zip(LinearCrossEntropyOutput._fields, selected, strict=True))
            gradients, counts = gradient_inputs(call, rows, softmax, upstream, ids, log_p)
            of_cache = None if cache is None else gradients_of_cache(gradients, cache)
            del cache
            if call.options.skip_ignored is True:
                with_gradient = ComputedRows.where(counts, call.options.tp_group).index
                if with_gradient is not None:
                    tokens = _tokens(call, computed.subset(with_gradient))
                    gradients = gradients.select(with_gradient)
                    of_cache = None if of_cache is None else replace(of_cache, rows=with_gradient)
            needs_hidden, needs_weight = ctx.needs_input_grad[:2]
            grads = HeadGradients(tokens, call, needs_hidden=needs_hidden, needs_weight=needs_weight)
            for block in tokens.blocks():
                grads.add(block, grad_logits_slabs(gradients, block, grads.bytes_per_column, of_cache))
            return *grads.results(), None, None


def linear_cross_entropy_autograd(call: Call) -> LinearCrossEntropyOutput:
    """Return outputs of `call.shape` with a gradient."""
    grad_enabled = torch.is_grad_enabled() and (call.hidden.requires_grad or call.weight.requires_grad)
    return LinearCrossEntropyOutput(*LinearCrossEntropyFunction.apply(call.hidden, call.weight, call, grad_enabled))


def check_workspace(call: Call, needs_grad: bool, needs_weight: bool) -> None:
    """Raise ValueError if the workspace is too small for the smallest block of forward or backward."""
    smallest = smallest_workspace(call.size, needs_grad, needs_weight)
    if call.options.workspace_bytes < smallest:
        raise ValueError(
            f"workspace_bytes must be at least {smallest} for this head, got {call.options.workspace_bytes}"
        )


def _tokens(call: Call, computed: ComputedRows) -> Tokens:
    """Return the computed rows in the blocks of the outer loop of backward."""
    block_tokens = backward_tokens(call.size, computed.count, call.options.workspace_bytes)
    return tokens_in_blocks(call.hidden, computed, block_tokens, call.options)
