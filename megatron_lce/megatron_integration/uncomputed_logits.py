"""What an output layer returns in place of logits, and the fused loss of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_lce.compat_arguments import Reduction, reduce_loss
from megatron_lce.core.options import IGNORE_INDEX, LinearCrossEntropyOutput
from megatron_lce.core.validation import as_int64, refuse_double_backward
from megatron_lce.megatron_integration.head_call import HeadCall, swap
from megatron_lce.megatron_integration.heads import form_of
from megatron_lce.megatron_integration.logits_loss import Logprobs, LossOfLogits, logprobs_of_logits

_SCALE = {Tensor.mul, torch.mul}
_MAX = {Tensor.max, torch.max}
_ARGMAX = {Tensor.argmax, torch.argmax}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
# What reads a tensor's memory, or keeps the tensor itself, past the dispatcher.
_PAST_DISPATCH = {
    Tensor.__array__,
    Tensor.__deepcopy__,
    Tensor.__dlpack__,
    Tensor.__reduce_ex__,
    Tensor.as_subclass,
    Tensor.data_ptr,
    Tensor.numpy,
    Tensor.share_memory_,
    Tensor.storage,
    Tensor.tolist,
    Tensor.untyped_storage,
}


class UncomputedLogits(Tensor):
    """The logits [s, b, V/tp] of one head call, as a tensor without storage.

    Between Megatron's output layer and its loss only MuP's scaling happens, which is kept as a number. The first
    operation that needs their values computes them: a model asked for logits gives logits. To autograd they are a
    result of hidden and weight from the start, so views of them, changes in place and hooks are what they always are.
    """

    call: HeadCall
    largest: tuple[Tensor, Tensor] | None  # over the vocabulary and its id, [s, b], once a loss with telemetry is done
    computed: Tensor | None
    losses: list[LossOfLogits]  # of them, or of multiples of them, once they were touched
    _compute: Callable[[UncomputedLogits], Tensor]
    _unscaled: UncomputedLogits | None  # what they are a multiple of

    @staticmethod
    def __new__(cls, call: HeadCall, *_: Any):
        batch, sequence = call.tokens
        shape = (sequence, batch, call.weight.shape[0])
        dtype = form_of(call.head).logits_dtype or call.hidden.dtype
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=call.hidden.device)

    def __init__(
        self,
        call: HeadCall,
        compute: Callable[[UncomputedLogits], Tensor],
        unscaled: UncomputedLogits | None = None,
    ):
        self.call, self.largest, self.computed = call, None, None
        self._compute, self._unscaled = compute, unscaled
        self.losses = [] if unscaled is None else unscaled.losses

    @classmethod
    def in_graph(cls, call: HeadCall, compute: Callable[[UncomputedLogits], Tensor]) -> UncomputedLogits:
        """The logits as a result of hidden and weight, where gradients are on."""
        return _HeadOutput.apply(call.hidden, call.weight, call, compute)

    @property
    def is_touched(self) -> bool:
        """Whether somebody computed them, and may so have changed them, or wants their gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            touched = self.computed is not None or bool(self._backward_hooks) or self.retains_grad
        return touched or (self._unscaled is not None and self._unscaled.is_touched)

    def compute_loss(
        self,
        labels: Tensor,
        telemetry: bool = False,
        *,
        reduction: Reduction = "none",
        ignore_index: int = IGNORE_INDEX,
        **options: Any,
    ) -> Tensor:
        """Cross-entropy [b, s] of labels [b, s] of any integer dtype, its sum, or its mean over counted rows; fp32.

        Rows whose label is negative or `ignore_index` are ignored. The loss is fused if nobody touched the logits, else
        of them; whichever it is on this rank, the collectives are the same.
        """
        labels = as_int64(labels)
        labels = labels.masked_fill((labels < 0) | (labels == ignore_index), IGNORE_INDEX)
        options |= {"ignore_index": IGNORE_INDEX, "entropy": False, "telemetry": telemetry}
        out: Logprobs | LinearCrossEntropyOutput
        if self.is_touched:
            out = logprobs_of_logits(self, labels, **options)
        else:
            out = self.call.linear_cross_entropy(labels, **options)
        if out.max_logit is not None and out.argmax is not None:
            self.largest = swap(out.max_logit), swap(out.argmax)
        if out.logprobs.requires_grad and self.call.backward_passes is not None:
            out.logprobs.register_hook(self.call.backward_passes.note)
        return reduce_loss(-out.logprobs, labels != IGNORE_INDEX, reduction)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        logits = args[0] if args and isinstance(args[0], cls) else None
        if logits is not None and func in _SCALE and not kwargs and _is_scale(args[1], logits.call.logits_scale):
            return _Scaled.apply(logits, args[1])
        # Megatron's acceptance metrics ask which token the MTP head would have chosen, after its loss.
        asks_for_largest = func in _MAX | _ARGMAX and _over_last_dimension(*args[1:], **kwargs)
        if asks_for_largest and logits is not None and logits.largest is not None and not logits.is_touched:
            return logits._local_max() if func in _MAX else logits.largest[1]
        with torch._C.DisableTorchFunctionSubclass():
            if logits is not None and func == _SET_DATA:
                return logits._replace_values(args[1])
            if logits is not None and func in _PAST_DISPATCH:
                return func(logits.view_as(logits), *args[1:], **kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        """An operation that needs the values; autograd has taken its note."""
        plain_args, plain_kwargs = tree_map(lambda x: x.values() if isinstance(x, cls) else x, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        first = func._schema.arguments[0].alias_info
        return args[0] if first is not None and first.is_write else result

    def values(self) -> Tensor:
        """Themselves as a plain tensor without a graph."""
        if self.computed is None:
            with torch.no_grad():
                self.computed = self._compute(self)
        return self.computed

    def _replace_values(self, values: Tensor) -> None:
        if (values.shape, values.dtype, values.device) != (self.shape, self.dtype, self.device):
            raise ValueError(
                f"the data of logits must stay {tuple(self.shape)} of {self.dtype} on {self.device}, "
                f"got {tuple(values.shape)} of {values.dtype} on {values.device}"
            )
        self.computed = values.detach()

    def _local_max(self) -> tuple[Tensor, Tensor]:
        """Value and local id of this shard's largest logit [s, b]; -inf where another shard has the largest."""
        assert self.largest is not None
        value, argmax = self.largest
        columns = self.call.weight.shape[0]
        local = argmax - self.call.tp_group.rank() * columns
        owned = (local >= 0) & (local < columns)
        return value.masked_fill(~owned, -torch.inf), local.masked_fill(~owned, 0)


class _HeadOutput(torch.autograd.Function):
    """Hidden and weight to uncomputed logits.

    These get a gradient from any use but the fused loss. Of a loss of touched logits it goes on as the fused one does,
    of all else by Megatron's own backward of this head, after its product is made once more.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, call: HeadCall, compute: Callable[[UncomputedLogits], Tensor]
    ) -> UncomputedLogits:
        ctx.save_for_backward(hidden, weight)
        logits = UncomputedLogits(call, compute)
        ctx.call, ctx.losses = call, logits.losses
        return logits

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor):
        refuse_double_backward("an enabled head")
        hidden, weight = ctx.saved_tensors
        for loss in ctx.losses:
            if loss.upstream is not None:
                return *loss.gradients(hidden, grad_logits), None, None
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[0])
            # The weight itself, not a copy: Megatron adds to its main_grad.
            logits, _ = type(ctx.call.head).forward(ctx.call.head, hidden, weight)
            inputs = [x for x, needed in zip((hidden, weight), ctx.needs_input_grad, strict=False) if needed]
            gradients = iter(torch.autograd.grad(logits, inputs, grad_logits))
        return *(next(gradients) if needed else None for needed in ctx.needs_input_grad[:2]), None, None


class _Scaled(torch.autograd.Function):
    """Uncomputed logits times a number, uncomputed."""

    @staticmethod
    def forward(ctx: Any, logits: UncomputedLogits, factor: float) -> UncomputedLogits:
        ctx.factor = factor
        call = replace(logits.call, logits_scale=logits.call.logits_scale * factor)
        scaled = UncomputedLogits(call, logits._compute, logits)
        if logits.computed is not None:
            scaled.computed = logits.computed * factor
        return scaled

    @staticmethod
    def backward(ctx: Any, grad_scaled: Tensor):
        refuse_double_backward("an enabled head")
        return grad_scaled * ctx.factor, None


def _is_scale(factor: object, scale: float) -> bool:
    """Whether a product with it can be noted as one fp32 number; with inf or NaN, or past fp32, it is computed."""
    largest = torch.finfo(torch.float32).max
    return isinstance(factor, int | float) and abs(factor) <= largest and abs(scale * factor) <= largest


def _over_last_dimension(*args: Any, **kwargs: Any) -> bool:
    dimensions = (*args, *kwargs.values()) if kwargs.keys() <= {"dim"} else ()
    return len(dimensions) == 1 and isinstance(dimensions[0], int) and dimensions[0] == -1
