"""What an output layer returns in place of logits, and the fused loss of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_lce.compat_arguments import Reduction, check_reduction, reduced
from megatron_lce.core.options import IGNORE_INDEX
from megatron_lce.core.upstream import Promise
from megatron_lce.core.validation import as_int64, refuse_double_backward
from megatron_lce.cross_entropy import linear_cross_entropy
from megatron_lce.megatron_integration.head_call import HeadCall, swap, version_of
from megatron_lce.megatron_integration.method_overrides import uncompiled
from megatron_lce.token_loss import linear_token_losses

_SCALE = {Tensor.mul, torch.mul}
_MAX = {Tensor.max, torch.max}
_ARGMAX = {Tensor.argmax, torch.argmax}
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_INSTEAD = (
    "the fused loss is computed from hidden and weight: make a clone of the logits and a loss of that, "
    "or take the model's own loss by enable_fused_linear_ce(model, use_fused_linear_ce=False)"
)
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
    operation that needs their values computes them; autograd knows them as a result of hidden and weight from the
    start, so that what is made of them has its gradient. The fused loss takes none of this: it refuses logits that were
    changed, or whose gradient somebody wants.
    """

    call: HeadCall
    largest: tuple[Tensor, Tensor] | None  # over the vocabulary and its id, [s, b], once a loss with telemetry is done
    computed: Tensor | None
    _copy: Tensor | None  # of these, in inference mode, which counts no changes
    _compute: Callable[[HeadCall], Tensor]
    _unscaled: UncomputedLogits | None  # what they are a multiple of

    @staticmethod
    def __new__(cls, call: HeadCall, *_: Any):
        batch, sequence = call.tokens
        shape = (sequence, batch, call.weight.shape[0])
        return Tensor._make_wrapper_subclass(cls, shape, dtype=call.logits_dtype, device=call.hidden.device)

    def __init__(self, call: HeadCall, compute: Callable[[HeadCall], Tensor]):
        self.call, self._compute = call, compute
        self.largest = self.computed = self._copy = self._unscaled = None

    @classmethod
    def in_graph(cls, call: HeadCall, compute: Callable[[HeadCall], Tensor]) -> UncomputedLogits:
        """The logits as a result of hidden and weight, where gradients are on."""
        return _HeadOutput.apply(call.hidden, call.weight, call, compute)

    def check_untouched(self) -> None:
        """Raises where the loss would have to be another than that of hidden and weight, or give these a gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            if version_of(self) or not _same_bits(self.computed, self._copy):
                raise RuntimeError(
                    f"the logits of an enabled model were changed in place before their loss; {_INSTEAD}"
                )
            if self._backward_hooks or self.retains_grad:
                raise RuntimeError(f"the logits of an enabled model have a hook or retain their gradient; {_INSTEAD}")
        if self._unscaled is not None:
            self._unscaled.check_untouched()

    def compute_loss(
        self,
        labels: Tensor,
        telemetry: bool = False,
        *,
        promise: Promise | None = None,
        reduction: Reduction = "none",
        ignore_index: int = IGNORE_INDEX,
        **options: Any,
    ) -> Tensor:
        """Cross-entropy [b, s] of labels [b, s] of any integer dtype, its sum, or its mean over counted rows; fp32.

        Rows whose label is negative or `ignore_index` are ignored. With a promise that one number is the upstream of
        the others, gradients are made here, and backward scales them.

        Raises:
            RuntimeError: the logits were changed in place, have a hook or retain their gradient.
        """
        self.check_untouched()
        check_reduction(reduction)
        labels = as_int64(labels)
        labels = labels.masked_fill((labels < 0) | (labels == ignore_index), IGNORE_INDEX)
        options |= {"ignore_index": IGNORE_INDEX, "entropy": False, "telemetry": telemetry}
        if promise is None or not torch.is_grad_enabled():
            out = self.call.run(linear_cross_entropy, labels, **options)
            losses = -out.logprobs
        else:
            del options["logits_cache_bytes"]
            losses, out = self.call.run(linear_token_losses, labels, promise, **options)
        if out.max_logit is not None and out.argmax is not None:
            self.largest = swap(out.max_logit), swap(out.argmax)
        if losses.requires_grad and self.call.backward_passes is not None:
            losses.register_hook(self.call.backward_passes.note)
        return reduced(losses, reduction, labels != IGNORE_INDEX)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return uncompiled()(cls._run, func, args, kwargs or {})

    @classmethod
    def _run(cls, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A function of torch's with such logits among its arguments."""
        logits = args[0] if args and isinstance(args[0], cls) else None
        if logits is not None and func in _SCALE and not kwargs and _is_scale(args[1], logits.call.logits_scale):
            return logits._times(args[1])
        # Megatron's acceptance metrics ask which token the MTP head would have chosen, after its loss.
        asks_for_largest = func in _MAX | _ARGMAX and _over_last_dimension(*args[1:], **kwargs)
        if asks_for_largest and logits is not None and logits.largest is not None and logits.computed is None:
            return logits._local_max() if func in _MAX else logits.largest[1]
        with torch._C.DisableTorchFunctionSubclass():
            if logits is not None and func == _SET_DATA:
                raise RuntimeError(f"the data of an enabled model's logits cannot be replaced; {_INSTEAD}")
            if logits is not None and func == _GET_DATA:
                return logits.detach()  # counts its changes with the logits', as `data` does not
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
                self.computed = self._compute(self.call)
            if self.is_inference():
                self._copy = self.computed.clone()
        return self.computed

    def _times(self, factor: float) -> UncomputedLogits:
        """These times a number, uncomputed; the fused loss of the product is refused where one of these would be."""
        call = replace(self.call, logits_scale=self.call.logits_scale * factor)
        of_call = UncomputedLogits.in_graph if self.requires_grad else UncomputedLogits
        scaled = of_call(call, self._compute)
        scaled._unscaled = self
        return scaled

    def _local_max(self) -> tuple[Tensor, Tensor]:
        """Value and local id of this shard's largest logit [s, b]; -inf where another shard has the largest."""
        assert self.largest is not None
        value, argmax = self.largest
        columns = self.call.weight.shape[0]
        local = argmax - self.call.tp_group.rank() * columns
        owned = (local >= 0) & (local < columns)
        return value.masked_fill(~owned, -torch.inf), local.masked_fill(~owned, 0)


class NoLogits(Tensor):
    """What a model returns inside a capture, [b, s, 0]; to read it as logits raises instead of giving NaN."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            given = (x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor))
            reads, result = any(x.numel() for x in given), None
            if not reads:  # else an index past the end might end the CUDA context
                try:
                    result = func(*args, **(kwargs or {}))
                except IndexError:  # the largest of nothing
                    reads = True
            if reads or (isinstance(result, Tensor) and result.numel()):
                raise RuntimeError(
                    f"{func.__name__}: a model's output inside capture_lm_head holds no logits: call "
                    "head.linear_cross_entropy(labels) of the capture, or the model outside of it"
                )
            return result.as_subclass(cls) if isinstance(result, Tensor) else result


class _HeadOutput(torch.autograd.Function):
    """Hidden and weight to uncomputed logits.

    These get a gradient from any use but the fused loss. It goes on by Megatron's own backward of this head, after its
    product is made once more.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, call: HeadCall, compute: Callable[[HeadCall], Tensor]
    ) -> UncomputedLogits:
        ctx.save_for_backward(hidden, weight)
        ctx.call = call
        return UncomputedLogits(call, compute)

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor):
        refuse_double_backward("an enabled head")
        hidden, weight = ctx.saved_tensors
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[0])
            # The weight itself, not a copy: Megatron adds to its main_grad.
            logits = ctx.call.logits_of(hidden, weight)
            inputs = [x for x, needed in zip((hidden, weight), ctx.needs_input_grad, strict=False) if needed]
            gradients = iter(torch.autograd.grad(logits, inputs, grad_logits))
        return *(next(gradients) if needed else None for needed in ctx.needs_input_grad[:2]), None, None


def _is_scale(factor: object, scale: float) -> bool:
    """Whether a product with it can be noted as one fp32 number; with inf or NaN, or past fp32, it is computed."""
    largest = torch.finfo(torch.float32).max
    return isinstance(factor, int | float) and abs(factor) <= largest and abs(scale * factor) <= largest


def _same_bits(values: Tensor | None, copy: Tensor | None) -> bool:
    return values is None or copy is None or torch.equal(values.view(torch.uint8), copy.view(torch.uint8))


def _over_last_dimension(*args: Any, **kwargs: Any) -> bool:
    dimensions = (*args, *kwargs.values()) if kwargs.keys() <= {"dim"} else ()
    return len(dimensions) == 1 and isinstance(dimensions[0], int) and dimensions[0] == -1
