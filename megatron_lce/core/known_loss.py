"""Losses whose gradients are computed and reduced in forward. Backward scales them, without collectives."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.core import collectives
from megatron_lce.core.call import Call, check_backward
from megatron_lce.core.losses import KnownLosses, Losses, Metrics, TokenCrossEntropy, TokenLossFunction
from megatron_lce.core.one_head import OneHead
from megatron_lce.core.options import LinearCrossEntropyOutput
from megatron_lce.core.passes import Forward, Source, forward_with_gradient, needed_gradients, plan_of


def sum_of_losses(
    name: str, source: Source, loss: TokenLossFunction, per_token: Sequence[Tensor]
) -> tuple[tuple[Tensor, Any, Metrics], Losses]:
    """Return the sum of the losses, with gradients if they are wanted, and the losses of every token.

    The sum, [] fp32, comes with outputs and metrics of every token, of `call.shape` and without gradient.
    """
    call, needs_grad = source.call, any(needed_gradients(source.call))
    losses = Losses(loss, per_token, source.differentiable, needs_grad, call.head.hidden.device, call.telling)
    results = forward_with_gradient(source, losses, name)
    loss_sum, metrics = losses.totals(call.shape)
    if results.head_grads is not None:
        loss_sum = _scaled_in_backward(loss_sum, results, Tensor.float, name)
    return (loss_sum, results.outputs, metrics), losses


def token_cross_entropies(
    call: Call, formula: TokenCrossEntropy, upstream: "UpstreamCheck | None", counted: Tensor | None
) -> tuple[Tensor, LinearCrossEntropyOutput]:
    """Return the loss of each token, of `call.shape`, and the outputs.

    Without `upstream` any upstream gradient is right. `counted`, bool of `call.shape`: see `UpstreamCheck`; None: all.
    """
    source, needs, options = OneHead(call), needed_gradients(call), call.options
    if upstream is None or (upstream.finds_out and _is_in_checkpoint()) or not any(needs) or not call.labels.numel():
        out = forward_with_gradient(source).outputs
        return formula(out), out
    valid = call.labels != options.ignore_index
    counted = valid if counted is None else valid & counted.reshape(-1)
    known = KnownLosses(formula, counted, only_if_faster=upstream.finds_out)
    results = forward_with_gradient(source, known if upstream.known else None, "model_loss forward")
    if results.head_grads is not None:
        factor, way_out = partial(upstream.factor, counted=counted, valid=valid), ": enable with known_loss=False"
        losses = _scaled_in_backward(formula(results.outputs), results, factor, "a known loss", way_out)
        return losses, results.outputs
    out = results.outputs
    losses = formula(out)
    if upstream.known is None:
        plan = plan_of(source, results.row_index.count, needs, options.logits_cache_bytes, known)
        if plan.in_forward:
            group = None if options.tp_group is None else ref(options.tp_group)  # as in a saved call
            losses.register_hook(partial(upstream.find_out, counted=counted, valid=valid, group=group))
    return losses, out


def _scaled_in_backward(
    loss: Tensor, results: Forward, factor: Callable[[Tensor], Tensor], name: str, way_out: str = ""
) -> Tensor:
    """Return the loss with the gradients of forward, which backward scales by `factor(upstream gradient)`, []."""
    call = results.source.call
    refusal = f"a second backward through {name} is not possible: the first scaled its gradients in place{way_out}"
    return _KnownLoss.apply(call.head.hidden, call.head.weight, loss, results.head_grads, call, factor, name, refusal)


class _KnownLoss(torch.autograd.Function):
    """A loss with gradients from forward, which backward scales."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, loss: Tensor, *others: Any) -> Tensor:
        head_grads, call, ctx.factor, ctx.name, ctx.refusal = others
        ctx.save_for_backward(weight, *head_grads.results())  # `results` waits for the reductions
        ctx.sink, ctx.scaled = call.options.weight_grad_sink, False
        ctx.scale_rows, ctx.hidden_dtype = call.backend.scale_rows, hidden.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(ctx.name, upstream)
        if ctx.scaled:
            raise RuntimeError(ctx.refusal)
        factor, ctx.scaled = ctx.factor(upstream), True
        weight, grad_hidden, weight_acc = ctx.saved_tensors
        if (unscaled := grad_hidden) is not None:
            if unscaled.dtype != ctx.hidden_dtype:
                grad_hidden = torch.empty_like(unscaled, dtype=ctx.hidden_dtype)
            ctx.scale_rows(unscaled, factor, grad_hidden, accumulate=False)
        grad_weight = None
        if weight_acc is not None and ctx.sink is not None:
            ctx.scale_rows(weight_acc, factor, ctx.sink.buffer()[: weight_acc.shape[0]], accumulate=True)
            grad_weight = ctx.sink.finish()
        elif weight_acc is not None:
            num_columns, in_place = weight_acc.shape[0], weight_acc.dtype == weight.dtype
            grad_weight = weight_acc if in_place and num_columns == weight.shape[0] else torch.empty_like(weight)
            ctx.scale_rows(weight_acc, factor, grad_weight[:num_columns], accumulate=False)
            grad_weight[num_columns:].zero_()
        return grad_hidden, grad_weight, *(None,) * 6


class UpstreamCheck:
    """Whether all counted tokens of a loss have one upstream gradient, and others none, from pass to pass.

    Counted are the tokens that neither `ignore_index` nor the model's loss_mask leaves out. The host looks once, in the
    first backward pass with a counted token whose upstream gradient is neither 0 nor infinite: any loss has such ones
    times 0, or times a loss scale that overflowed. Where the gradients of a later pass are NaN, because it is not so,
    the next forward pass raises.
    """

    def __init__(self, known: bool | None) -> None:
        self.known = known  # None: not yet found out
        self.finds_out = known is None
        self._is_looked_at = False
        self._ranges: list[tuple[Tensor, torch.cuda.Event | None]] = []  # of later passes, on their way to the host

    def find_out(self, upstream: Tensor, counted: Tensor, valid: Tensor, group: ref[ProcessGroup] | None) -> None:
        """Find out, in a backward pass that takes any upstream gradient. The host waits, once."""
        if self.known is not None or collectives.is_cuda_graph_capturing():
            return
        low, high = _range(upstream, counted, valid)
        answer = torch.stack([low < high, (low == high) & (low != 0) & low.isfinite()])
        if group is not None and (alive := group()) is not None:
            answer = collectives.all_reduce_any(answer, alive)
        differs, is_one = answer.tolist()
        if differs or is_one:  # else nothing was said
            self.known, self._is_looked_at = not differs, True

    def factor(self, upstream: Tensor, counted: Tensor, valid: Tensor) -> Tensor:
        """Return the one upstream gradient, [] fp32; NaN if it is not one; 0 if no token is counted."""
        low, high = _range(upstream, counted, valid)
        if not collectives.is_cuda_graph_capturing():
            if self._is_looked_at:
                self._send(torch.stack([low, high]))
            else:
                least, most = float(low), float(high)
                self._is_looked_at = least == most != 0 and math.isfinite(most)
                if least < most:
                    raise RuntimeError(_refusal(least, most))
        return high.masked_fill(low != high, torch.nan).masked_fill(low > high, 0.0)

    def _send(self, numbers: Tensor) -> None:
        """Start copying what the next forward pass looks at; the host does not wait."""
        if not numbers.is_cuda:
            self._ranges.append((numbers, None))
            return
        on_host = torch.empty(2, dtype=torch.float32, pin_memory=True)
        on_host.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._ranges.append((on_host, event))

    def check_last_passes(self) -> None:
        """Raise RuntimeError if the gradients of an earlier pass were NaN for this reason; any upstream is right then.

        All ranks raise in the same pass: what they look at was computed at the start of a backward pass, behind which
        the rest of it is queued, so that the GPU has work left.
        """
        ranges, self._ranges = self._ranges, []
        for numbers, event in ranges:
            if event is not None:
                event.synchronize()
            low, high = numbers.tolist()
            if low < high:
                self.known = not self.finds_out
                raise RuntimeError(f"the gradients of the last backward pass are NaN: {_refusal(low, high)}")


def _is_in_checkpoint() -> bool:
    """Return whether a non-reentrant checkpoint is around.

    It runs forward again in backward and must save the same tensors, whatever is found out in between. Torch's and
    TransformerEngine's are told by the names of their hooks. Others must not count: one rank alone may have them.
    """
    pack = (torch._C._autograd._top_saved_tensors_default_hooks(True) or (None,))[0]
    return getattr(pack, "__qualname__", "").startswith(("_checkpoint_hook.", "_recomputation_hook."))


def _range(upstream: Tensor, counted: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the largest factor that upstream gradients call for, [] each; inf and -inf if none.

    Those of counted tokens; where another token, whose gradient was not computed, has one, also that and 0.
    """
    upstream = upstream.reshape(-1).float()
    is_stray = valid & ~counted & (upstream != 0)
    low, high = (upstream.masked_fill(~(counted | is_stray), -sign * torch.inf) for sign in (-1, 1))
    low, high = low.amin(), high.amax()
    strays = is_stray.any()  # their gradients are 0, so that 0 is among the factors
    return torch.where(strays, low.clamp(max=0.0), low), torch.where(strays, high.clamp(min=0.0), high)


def _refusal(low: float, high: float) -> str:
    return (
        f"known_loss needs one upstream gradient for all counted tokens, got {low:g} to {high:g}: the loss weights its "
        "tokens (a loss_mask that is not 0 or 1, a weight or a mean for each sequence). Pass a 0/1 loss_mask to the "
        "model's forward, if the loss has one, or enable with known_loss=False"
    )
