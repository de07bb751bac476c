"""What an output layer returns in place of logits, and the fused loss of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map

from megatron_lce.compat_arguments import Reduction, reduce_loss
from megatron_lce.core.options import IGNORE_INDEX
from megatron_lce.core.validation import as_int64, refuse_double_backward
from megatron_lce.megatron_integration.head_call import HeadCall, swap, version_of
from megatron_lce.megatron_integration.heads import form_of

_SCALE = {Tensor.mul, torch.mul}
_MAX = {Tensor.max, torch.max}
_ARGMAX = {Tensor.argmax, torch.argmax}
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
# What the wrapper answers as the logits would.
_DESCRIPTIONS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "is_cuda", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn")),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex),
}


class _Values:
    """The logits themselves, which the first use that needs them computes, with Megatron's graph."""

    def __init__(self, call: HeadCall, compute: Callable[[HeadCall], Tensor]):
        self.call, self.compute = call, compute
        self.computed: Tensor | None = None
        self._when_computed = (0, 0)
        self.made_by: tuple[HeadCall, GradientEdge] | None = None  # what their gradient goes back to
        device = call.hidden.device.type
        self._grad_enabled = torch.is_grad_enabled()
        self.autocast_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def get(self) -> Tensor:
        """What the head's caller would have had, whoever asks, in whatever mode: without autograd, say, for a log."""
        if self.computed is None:
            autocast = torch.autocast(
                self.call.hidden.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None
            )
            # Not of inference mode, whose tensors count no changes.
            with torch.inference_mode(False), torch.set_grad_enabled(self._grad_enabled), autocast, self._own_saving():
                computed = self.compute(self.call)
            self.set(computed, (self.call, get_gradient_edge(computed)) if computed.requires_grad else None)
        assert self.computed is not None
        return self.computed

    def set(self, computed: Tensor, made_by: tuple[HeadCall, GradientEdge] | None) -> None:
        self.computed, self._when_computed, self.made_by = computed, _state(computed), made_by

    def _own_saving(self) -> AbstractContextManager:
        """No hooks that count what is saved, inside a checkpointed loss: recomputed, it finds the logits there."""
        if self.call.head.gradient_accumulation_fusion:  # which reads attributes of the weight that hooks would drop
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)

    def check_untouched(self) -> None:
        """Refuses to go on to a fused loss, which would not see what was done to the logits."""
        if self.computed is None:
            return
        if _state(self.computed) != self._when_computed:
            raise RuntimeError(
                "the logits were changed in place, or through .data, in front of a fused loss, which is not computed "
                "of them: call the model without labels and compute a loss of the changed logits, or remove() the "
                "handle of enable_fused_linear_ce"
            )
        if self.computed._backward_hooks or self.computed.retains_grad:
            raise RuntimeError(
                "the gradient of the logits was asked for, by register_hook or retain_grad, in front of a fused loss, "
                "which makes none: call the model without labels and compute a loss of its logits, or remove() the "
                "handle of enable_fused_linear_ce"
            )


class UncomputedLogits(Tensor):
    """The logits [s, b, V/tp] of one head call, as a tensor without storage.

    Between Megatron's output layer and its loss only MuP's scaling happens, which is kept as a number. Any other
    operation is done on the logits themselves, computed at the first of them: a model asked for logits gives logits.
    """

    call: HeadCall
    largest: tuple[Tensor, Tensor] | None  # over the vocabulary and its id, [s, b], once a loss with telemetry is done
    _values: _Values
    _unscaled: UncomputedLogits | None  # what they are a multiple of

    @staticmethod
    def __new__(cls, values: _Values, _: UncomputedLogits | None = None):
        batch, sequence = values.call.tokens
        shape = (sequence, batch, values.call.weight.shape[0])
        dtype = form_of(values.call.head).logits_dtype or values.autocast_dtype or values.call.hidden.dtype
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=values.call.hidden.device)

    def __init__(self, values: _Values, unscaled: UncomputedLogits | None = None):
        self.call, self.largest, self._values, self._unscaled = values.call, None, values, unscaled

    @classmethod
    def of(cls, call: HeadCall, compute: Callable[[HeadCall], Tensor]) -> UncomputedLogits:
        """The logits of a call, which `compute` makes if they are asked for."""
        return _InGraph.apply(call.hidden, call.weight, _Values(call, compute), None)

    def compute_loss(
        self,
        labels: Tensor,
        telemetry: bool = False,
        *,
        reduction: Reduction = "none",
        ignore_index: int = IGNORE_INDEX,
        **options: Any,
    ) -> Tensor:
        """The fused cross-entropy [b, s] of labels [b, s] of any integer dtype, its sum, or its mean; fp32.

        Rows whose label is negative or `ignore_index` are ignored, and no part of the mean.

        Raises:
            RuntimeError: the logits were changed, or their gradient was asked for.
        """
        logits: UncomputedLogits | None = self
        while logits is not None:
            logits._values.check_untouched()
            logits = logits._unscaled
        labels = as_int64(labels)
        labels = labels.masked_fill((labels < 0) | (labels == ignore_index), IGNORE_INDEX)
        out = self.call.linear_cross_entropy(
            labels, **options, ignore_index=IGNORE_INDEX, entropy=False, telemetry=telemetry
        )
        if out.max_logit is not None and out.argmax is not None:
            self.largest = swap(out.max_logit), swap(out.argmax)
        if out.logprobs.requires_grad and self.call.backward_passes is not None:
            out.logprobs.register_hook(self.call.backward_passes.note)
        return reduce_loss(-out.logprobs, labels != IGNORE_INDEX, reduction)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        logits = args[0] if args and isinstance(args[0], cls) else None
        if logits is not None:
            if func in _DESCRIPTIONS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in _SCALE and not kwargs and _is_scale(args[1], logits.call.logits_scale):
                return logits._times(args[1])
            # Megatron's acceptance metrics ask which token the MTP head would have chosen, after its loss.
            asks_for_largest = func in _MAX | _ARGMAX and _over_last_dimension(*args[1:], **kwargs)
            if asks_for_largest and logits.largest is not None and logits._values.computed is None:
                return logits._local_max() if func in _MAX else logits.largest[1]
            if func == _DATA:  # which would hide what is done to it
                return logits._values.get().detach()
        args, kwargs = tree_map(lambda x: x._values.get() if isinstance(x, cls) else x, (args, kwargs))
        result = func(*args, **kwargs)
        # Of an operation in place, so that whoever goes on with its result finds what was done.
        return logits if logits is not None and result is logits._values.computed else result

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        """What comes past `__torch_function__`: operations of autograd's own, for a custom function that takes them."""
        plain = tree_map(lambda x: x._values.get().detach() if isinstance(x, cls) else x, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        written = func._schema.arguments[0].alias_info
        return args[0] if written is not None and written.is_write else result

    def _times(self, factor: float) -> UncomputedLogits:
        call = replace(self.call, logits_scale=self.call.logits_scale * factor)
        values = _Values(call, self._values.compute)
        if self._values.computed is not None:
            values.set(self._values.computed * factor, self._values.made_by)
        return _InGraph.apply(call.hidden, call.weight, values, self)

    def _local_max(self) -> tuple[Tensor, Tensor]:
        """Value and local id of this shard's largest logit [s, b]; -inf where another shard has the largest."""
        assert self.largest is not None
        value, argmax = self.largest
        columns = self.call.weight.shape[0]
        local = argmax - self.call.tp_group.rank() * columns
        owned = (local >= 0) & (local < columns)
        return value.masked_fill(~owned, -torch.inf), local.masked_fill(~owned, 0)


class _InGraph(torch.autograd.Function):
    """Hidden and weight to logits that are not computed.

    A custom autograd function takes a tensor as it is, past `__torch_function__`. The gradient that it gives back goes
    through all that was done to the logits, and then, after their product is made once more, through the head alone:
    the graph that they have reaches the weight of tied embeddings by the whole model, too.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, values: _Values, unscaled: UncomputedLogits | None):
        ctx.save_for_backward(hidden, weight)
        ctx.values = values
        return UncomputedLogits(values, unscaled)

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor):
        refuse_double_backward("an enabled head")
        hidden, weight = ctx.saved_tensors
        computed = ctx.values.get()
        call, edge = ctx.values.made_by
        (grad_logits,) = torch.autograd.grad(computed, [edge], grad_logits, retain_graph=True)
        with torch.enable_grad():
            # The weight itself, not a copy: Megatron adds to its main_grad.
            inputs = [hidden.detach().requires_grad_(ctx.needs_input_grad[0]), weight]
            logits = replace(call, hidden=inputs[0]).logits()
            wanted = [x for x, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
            gradients = iter(torch.autograd.grad(logits, wanted, grad_logits))
        return *(next(gradients) if needed else None for needed in ctx.needs_input_grad[:2]), None, None


def _state(tensor: Tensor) -> tuple[int, int]:
    """What changes where the tensor is changed in place, and where another takes its place."""
    return version_of(tensor), tensor.data_ptr()


def _is_scale(factor: object, scale: float) -> bool:
    """Whether a product with it can be noted as one fp32 number; with inf or NaN, or past fp32, it is computed."""
    largest = torch.finfo(torch.float32).max
    return isinstance(factor, int | float) and abs(factor) <= largest and abs(scale * factor) <= largest


def _over_last_dimension(*args: Any, **kwargs: Any) -> bool:
    dimensions = (*args, *kwargs.values()) if kwargs.keys() <= {"dim"} else ()
    return len(dimensions) == 1 and isinstance(dimensions[0], int) and dimensions[0] == -1
