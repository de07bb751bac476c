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
from megatron_lce.core.validation import as_int64
from megatron_lce.cross_entropy import linear_cross_entropy
from megatron_lce.megatron_integration.head_call import HeadCall, swap
from megatron_lce.megatron_integration.method_overrides import uncompiled
from megatron_lce.token_loss import linear_token_losses

_SCALE = {Tensor.mul, torch.mul}
_MAX = {Tensor.max, torch.max}
_ARGMAX = {Tensor.argmax, torch.argmax}
_GET_BASE = Tensor._base.__get__  # type: ignore[attr-defined, union-attr]


class UncomputedLogits(Tensor):
    """The logits [s, b, V/tp] of one head call on their way to the fused loss, as a tensor without storage.

    Megatron scales them (MuP), which is kept as a number, and asks for the largest after an MTP loss. Whatever else
    needs their values raises: an enabled model that is given labels computes no logits.
    """

    call: HeadCall
    largest: tuple[Tensor, Tensor] | None  # over the vocabulary and its id, [s, b], once a loss with telemetry is done
    _instead: Callable[[HeadCall], Tensor] | None  # gives what stands for their values

    @staticmethod
    def __new__(cls, call: HeadCall, *_: Any):
        batch, sequence = call.tokens
        shape = (sequence, batch, call.weight.shape[0])
        return Tensor._make_wrapper_subclass(cls, shape, dtype=call.logits_dtype, device=call.hidden.device)

    def __init__(self, call: HeadCall, instead: Callable[[HeadCall], Tensor] | None = None):
        self.call, self._instead, self.largest = call, instead, None

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
        """
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
        return reduced(losses, reduction, labels != IGNORE_INDEX)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return uncompiled()(cls._run, func, args, kwargs or {})

    @classmethod
    def _run(cls, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A function of torch's with such logits among its arguments."""
        logits = args[0] if args and isinstance(args[0], cls) else None
        if logits is not None and func in _SCALE and not kwargs and _is_scale(args[1], logits.call.logits_scale):
            return cls(replace(logits.call, logits_scale=logits.call.logits_scale * args[1]), logits._instead)
        # Megatron's acceptance metrics ask which token the MTP head would have chosen, after its loss.
        asks_for_largest = func in _MAX | _ARGMAX and _over_last_dimension(*args[1:], **kwargs)
        if asks_for_largest and logits is not None and logits.largest is not None:
            return logits._local_max() if func in _MAX else logits.largest[1]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        return func(*tree_map(cls._value, args), **tree_map(cls._value, kwargs or {}))

    @classmethod
    def _value(cls, x: Any) -> Any:
        if not isinstance(x, cls):
            return x
        if x._instead is None:
            raise RuntimeError(
                "the logits of an enabled model are not computed where it is given labels: call the model without "
                "labels for logits, or take its own loss by enable_fused_linear_ce(model, use_fused_linear_ce=False)"
            )
        return x._instead(x.call)

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
            # A base that is a view, as this subclass's are, has a base again: torch.compile follows them to the end.
            return result.as_subclass(cls) if isinstance(result, Tensor) and func != _GET_BASE else result


def _is_scale(factor: object, scale: float) -> bool:
    """Whether a product with it can be noted as one fp32 number; with inf or NaN, or past fp32, it is computed."""
    largest = torch.finfo(torch.float32).max
    return isinstance(factor, int | float) and abs(factor) <= largest and abs(scale * factor) <= largest


def _over_last_dimension(*args: Any, **kwargs: Any) -> bool:
    dimensions = (*args, *kwargs.values()) if kwargs.keys() <= {"dim"} else ()
    return len(dimensions) == 1 and isinstance(dimensions[0], int) and dimensions[0] == -1
