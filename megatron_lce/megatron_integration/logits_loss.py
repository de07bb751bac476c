"""The loss of logits that somebody has touched, in a model whose other ranks may compute theirs fused.

A hook of one rank must not change what the ranks do together. So this is the fused operation itself, with its checks
and the collectives of both passes, on a backend to which this rank's logits, and then their gradient, are given:

    forward    logits -> the backend's statistics -> logprobs
    backward   logprobs -> the logits -> through what was done to them -> the head's output -> the backend's slabs
               -> hidden and weight
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron_lce.backends.choice import load_backend
from megatron_lce.backends.torch.primitives import chunk_stats
from megatron_lce.core.autograd import linear_cross_entropy_autograd
from megatron_lce.core.options import Backend, Options
from megatron_lce.core.plan import ceil_div, cut
from megatron_lce.core.products import product
from megatron_lce.core.protocols import CrossEntropyBackend
from megatron_lce.core.rows import NUM_TERMS, Rows, Saved
from megatron_lce.core.statistics import CHUNK_COLUMNS, LOG2_E, packed_rows
from megatron_lce.core.validation import refuse_double_backward
from megatron_lce.cross_entropy import Call, linear_cross_entropy, prepare_call
from megatron_lce.megatron_integration.head_call import HeadCall, swap
from megatron_lce.megatron_integration.heads import form_of

if TYPE_CHECKING:
    from megatron_lce.megatron_integration.uncomputed_logits import UncomputedLogits

_LOGITS_AT_ONCE = 2**26  # fp32 intermediates of 256 MiB each
_LOWEST = -1e30  # in place of -inf, which as a label's logit would be that of a label nobody owns


class Logprobs(NamedTuple):
    """What `linear_cross_entropy` gives, as far as a loss needs it: [b, s] each."""

    logprobs: Tensor
    max_logit: Tensor | None
    argmax: Tensor | None


def logprobs_of_logits(
    logits: UncomputedLogits,  # [s, b, V/tp]
    labels: Tensor,  # [b, s] int64
    softcap: float | None = None,  # of the loss; a head's own is in the logits
    **options: Any,  # as the other ranks give them to `linear_cross_entropy`, `entropy=False` among them
) -> Logprobs:
    """The logprobs of logits as they are now, and with telemetry the largest of each token."""
    loss = LossOfLogits(logits, labels, softcap, options)
    logits.losses.append(loss)
    outputs = _LogprobsOfLogits.apply(logits, loss, torch.is_grad_enabled())
    logprobs, *largest = (x if x is None else swap(x.view(labels.shape[::-1])) for x in outputs)
    return Logprobs(logprobs, *largest)  # type: ignore[arg-type]


class _LogprobsOfLogits(torch.autograd.Function):
    """Logits, in whatever graph they have come to be in, to logprobs [N]. Saves them: they are there anyhow."""

    @staticmethod
    def forward(ctx: Any, logits: UncomputedLogits, loss: LossOfLogits, grad_enabled: bool):
        values, *outputs = loss.forward(logits, grad_enabled)
        ctx.loss, ctx.shape = loss, logits.shape
        ctx.save_for_backward(values)
        ctx.mark_non_differentiable(*(x for x in outputs[1:] if x is not None))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, *_: None):
        refuse_double_backward("an enabled head")
        (values,) = ctx.saved_tensors
        return ctx.loss.grad_logits_of(values, grad_logprobs).view(ctx.shape), None, None


class LossOfLogits:
    """A fused call on a backend that knows this rank's logits, and in backward their gradient.

    What the call takes for labels are the indices of rows, by which the backend finds what is given.
    """

    def __init__(self, logits: UncomputedLogits, labels: Tensor, softcap: float | None, options: dict[str, Any]):
        arguments = logits.call.arguments(labels, softcap=softcap, **options)
        arguments = {**(linear_cross_entropy.__kwdefaults__ or {}), **arguments}
        self._call = prepare_call(**arguments)
        # The reference has no primitives; torch's are as good on its one rank.
        backend: Backend = "torch" if arguments["backend"] == "reference" else arguments["backend"]
        primitives = load_backend(backend, labels.device)
        self._given = _GivenLogits(primitives, self._call, logits.call, softcap)
        self.upstream: Tensor | None = None  # [N] of the logprobs, once backward has come to them

    def forward(self, logits: UncomputedLogits, grad_enabled: bool) -> tuple[Tensor | None, ...]:
        """The logits [N, V/tp], and logprobs, max_logit and argmax [N] of them."""
        call, given = self._call, self._given
        computed = None if logits.computed is None else logits.computed.flatten(0, 1)
        given.values, given.is_filled = computed, computed is not None
        if given.values is None:
            given.values = call.hidden.new_empty(call.labels.shape[0], call.weight.shape[0], dtype=logits.dtype)
        index, backend = torch.arange(call.labels.shape[0], device=call.labels.device), cast(CrossEntropyBackend, given)
        with torch.set_grad_enabled(grad_enabled):
            # Inputs of their own: what was made of the logits stands between their gradients and the loss's.
            hidden, weight = (x.detach().requires_grad_(x.requires_grad) for x in (call.hidden, call.weight))
            out = linear_cross_entropy_autograd(hidden, weight, index, 1.0, call.options, backend, index.shape)
        self._inputs, self._logprobs, values = (hidden, weight), out.logprobs, given.values
        given.values = None  # autograd keeps them for as long as it wants them
        if computed is None and call.options.num_columns:
            logits.computed = values.view(logits.shape)
        return values, out.logprobs.detach(), out.max_logit, out.argmax

    def grad_logits_of(self, values: Tensor, upstream: Tensor) -> Tensor:
        """Of the logits, from the gradient of the logprobs: [N, V/tp]."""
        self.upstream = upstream
        counted = torch.where(self._call.labels == self._call.options.ignore_index, 0.0, upstream)
        return self._given.grad_of(values, torch.where(self._logprobs.detach().isnan(), torch.nan, counted))

    def gradients(self, hidden: Tensor, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Of hidden and weight, from the gradient [s, b, V/tp] of the head's output: the fused call's backward."""
        self._given.grad_output = grad_output.flatten(0, 1)
        wanted = [x for x in self._inputs if x.requires_grad]
        upstream = torch.ones_like(self._logprobs)  # any: the logits' gradient is given
        found = iter(torch.autograd.grad(self._logprobs, wanted, upstream, retain_graph=True, allow_unused=True))
        self._given.grad_output = None
        grad_hidden, grad_weight = (next(found) if x.requires_grad else None for x in self._inputs)
        return None if grad_hidden is None else grad_hidden.view_as(hidden), grad_weight


class _GivenLogits:
    """A backend but for what it takes from the products: that is given, in rows that `rows.labels` are the indices of.

    `values` are the logits [N, V/tp], made here where they are not filled: where only their gradient is wanted.
    """

    counts_on_device = False  # rows are read and written by their indices, of which those that count must be known

    def __init__(self, backend: Any, call: Call, head_call: HeadCall, softcap: float | None):
        self._backend, self._head_call, self._softcap = backend, head_call, softcap
        self._labels, self._num_columns = call.labels, call.options.num_columns
        self._own_labels = torch.empty_like(call.labels)  # ids local to this shard, -1: another's
        self._log_sums = call.hidden.new_empty(2, call.labels.shape[0], dtype=torch.float32)  # max_logit and log_sum
        self.values: Tensor | None = None
        self.is_filled = False
        self.grad_output: Tensor | None = None  # [N, V/tp] of the head's output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def prepare_rows(self, index: Tensor, temperature: float, options: Options) -> Rows:
        rows = self._backend.prepare_rows(self._labels[index], temperature, options)
        self._own_labels[index] = rows.labels.long()
        return rows._replace(labels=index.int())

    def new_cache(self, *_: Any) -> None:
        """What it would spare is there."""

    def softmax_stats(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,
        index: Tensor,  # [N]
        row_scale: Tensor,
        *,
        entropy: bool,
        telemetry: bool,
        vocab_start: int,
        **_: Any,
    ) -> Tensor:
        assert self.values is not None
        rows, num_columns = index.long(), self._num_columns
        if not self.is_filled:
            self.values[rows] = self._head_call.logits_of(hidden)
        num_chunks = ceil_div(num_columns, CHUNK_COLUMNS)
        parts = hidden.new_empty(num_chunks, packed_rows(entropy, telemetry), rows.shape[0], dtype=torch.float32)
        even = num_columns // CHUNK_COLUMNS * CHUNK_COLUMNS
        for here, logits in self._blocks(self.values[rows]):
            labels = self._own_labels[rows[here], None]
            # All whole chunks at once, each a row of its own; then the narrower one that is left.
            for columns, width in ((slice(0, even), CHUNK_COLUMNS), (slice(even, num_columns), num_columns - even)):
                if columns.start == columns.stop:
                    continue
                starts = torch.arange(columns.start, columns.stop, width, device=labels.device)
                stats = chunk_stats(
                    logits[:, columns].reshape(-1, width).clamp_(min=_LOWEST),
                    (labels - starts).flatten(),
                    (vocab_start + starts).expand(labels.shape[0], -1).flatten(),
                    entropy,
                    telemetry,
                )
                chunks = slice(columns.start // CHUNK_COLUMNS, columns.start // CHUNK_COLUMNS + starts.shape[0])
                parts[chunks, :, here] = stats.unflatten(1, (-1, starts.shape[0])).permute(2, 0, 1)
        return parts

    def finish(self, extremes: Tensor, sums: Tensor, rows: Rows, *others: Any) -> Saved:
        saved = self._backend.finish(extremes, sums, rows, *others)
        self._log_sums[:, rows.labels.long()] = torch.stack([saved.max_logit, saved.log_sum])
        return saved

    def row_terms(self, rows: Rows, *_: Any) -> tuple[Tensor, Tensor]:
        """Of no use but that no rank leaves a row out: another use of the logits may want the gradient of any."""
        num_tokens = rows.scale.shape[0]
        return rows.scale.new_ones(NUM_TERMS, num_tokens), rows.scale.new_ones(num_tokens, dtype=torch.bool)

    def grad_of(self, values: Tensor, upstream: Tensor) -> Tensor:
        """upstream * (1[label] - p), through the softcap, in the logits' dtype: [N, V/tp]."""
        own_labels, upstream = self._own_labels[:, None], upstream[:, None]
        max_logit, log_sum = self._log_sums[:, :, None]
        grad = torch.zeros_like(values)
        for tokens, logits in self._blocks(values):
            block = logits.sub(max_logit[tokens]).sub_(log_sum[tokens]).exp2_().neg_()
            block.scatter_add_(1, own_labels[tokens].clamp(min=0), (own_labels[tokens] >= 0).float())
            if self._softcap is not None:
                block.mul_(1 - (logits / (self._softcap * LOG2_E)).square_())
            grad[tokens, : block.shape[1]] = torch.where(upstream[tokens] == 0, 0.0, block.mul_(upstream[tokens]))
        return grad

    def grad_logits(
        self, hidden: Tensor, weight: Tensor, rows: Rows, row_terms: Tensor, out: Tensor, *, first_column: int, **_: Any
    ) -> None:
        """Of the products: what was given, through the head's own softcap."""
        assert self.grad_output is not None
        grad = self.grad_output[rows.labels.long(), first_column : first_column + weight.shape[0]]
        softcap = form_of(self._head_call.head).softcap
        if softcap is not None:
            capped = hidden.new_empty(out.shape, dtype=torch.float32)
            product(hidden, weight.t(), capped, accumulate=False)
            grad = grad * (1 - capped.div_(softcap).tanh_().square_())
        out.copy_(grad)

    def _blocks(self, values: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """fp32 base-2 logits of the columns that count, some tokens at a time, in a tensor of their own."""
        for tokens in cut(values.shape[0], max(1, _LOGITS_AT_ONCE // max(1, self._num_columns))):
            logits = values[tokens, : self._num_columns].to(torch.float32, copy=True)
            if self._softcap is not None:
                logits = logits.div_(self._softcap).tanh_().mul_(self._softcap)
            yield tokens, logits.mul_(LOG2_E)
