"""What an output layer returns in place of logits, and the fused loss of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from megatron_lce.api import _linear_cross_entropy
from megatron_lce.integration.main_grad import MainGradSink, main_grad_sink
from megatron_lce.outputs import LinearCrossEntropyOutput
from megatron_lce.validation import check_label_tensor

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import ColumnParallelLinear

IGNORE_INDEX = -100
_SCALE = {Tensor.mul, torch.mul}
_MAX = {Tensor.max, torch.max}
_ARGMAX = {Tensor.argmax, torch.argmax}
# What asks about logits without needing them.
_METADATA = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point),
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_leaf", "is_cuda", "layout")
    ),
}


@dataclass(frozen=True)
class HeadCall:
    """One call of a model's output layer: all that its logits are made of."""

    hidden: Tensor  # [s, b, H], under sequence parallel this rank's [s/tp, b, H]
    weight: Tensor  # [V/tp, H]
    tp_group: ProcessGroup
    sequence_parallel: bool
    weight_grad_sink: MainGradSink | None
    head: ColumnParallelLinear
    logits_scale: float = 1.0

    @classmethod
    def of(cls, head: ColumnParallelLinear, hidden: Tensor, weight: Tensor | None) -> HeadCall:
        """The call of a ColumnParallelLinear; `weight` is the tied embedding's, or None for the head's own."""
        weight = head.weight if weight is None else weight
        return cls(
            hidden=hidden,
            weight=weight,
            tp_group=head.tp_group,
            sequence_parallel=bool(head.sequence_parallel),
            weight_grad_sink=main_grad_sink(weight, head),
            head=head,
        )

    @property
    def tokens(self) -> tuple[int, int]:
        """(b, s): the shape of labels as Megatron passes them."""
        shards = self.tp_group.size() if self.sequence_parallel else 1
        return self.hidden.shape[1], self.hidden.shape[0] * shards

    def linear_cross_entropy(
        self, labels: Tensor, temperature: float | Tensor = 1.0, logits_scale: float = 1.0, **keywords: Any
    ) -> LinearCrossEntropyOutput:
        """`megatron_lce.linear_cross_entropy` of this call; labels, a tensor of temperatures and outputs are [b, s]."""
        check_label_tensor(labels)
        for name, argument in (("labels", labels), ("temperature", temperature)):
            if isinstance(argument, Tensor) and tuple(argument.shape) != self.tokens:
                raise ValueError(f"{name} must be [b, s], {self.tokens} for this hidden, got {tuple(argument.shape)}")
        if isinstance(temperature, Tensor):
            temperature = _swap(temperature)
        output = _linear_cross_entropy(
            self.hidden,
            self.weight,
            _swap(labels),
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            temperature=temperature,
            logits_scale=logits_scale * self.logits_scale,
            weight_grad_sink=self.weight_grad_sink,
            **keywords,
        )
        return output._replace(**{name: _swap(part) for name, part in output._asdict().items() if part is not None})

    def logits(self) -> Tensor:
        """[s, b, V/tp] as Megatron computes them."""
        logits, _ = type(self.head).forward(self.head, self.hidden, self.weight)
        return logits if self.logits_scale == 1.0 else logits * self.logits_scale


def _swap(per_token: Tensor) -> Tensor:
    return per_token.transpose(0, 1).contiguous()


class UncomputedLogits(Tensor):
    """The logits [s, b, V/tp] of one head call, as a tensor without storage.

    Between Megatron's output layer and its loss only MuP's scaling happens, which is kept as a number. Whatever else
    is done with these logits computes them: a model asked for logits gives logits. From a change in place on they are
    what was computed then.
    """

    call: HeadCall
    largest: tuple[Tensor, Tensor] | None  # over the vocabulary and its id, [s, b], once a loss with telemetry is done
    changed: Tensor | None  # what they were computed to, once something has changed them in place
    _compute: Callable[[UncomputedLogits], Tensor]

    @staticmethod
    def __new__(cls, call: HeadCall, compute: Callable[[UncomputedLogits], Tensor]):
        batch, sequence = call.tokens
        shape = (sequence, batch, call.weight.shape[0])
        return Tensor._make_wrapper_subclass(cls, shape, dtype=call.hidden.dtype, device=call.hidden.device)

    def __init__(self, call: HeadCall, compute: Callable[[UncomputedLogits], Tensor]):
        self.call, self.largest, self.changed, self._compute = call, None, None, compute

    @classmethod
    def in_graph(cls, call: HeadCall, compute: Callable[[UncomputedLogits], Tensor]) -> UncomputedLogits:
        """The same, as a result of hidden and weight: what computes with them without gradient still passes it on."""
        return _HeadOutput.apply(call.hidden, call.weight, call, compute)

    def compute_loss(self, labels: Tensor, telemetry: bool, **options: Any) -> Tensor:
        """Cross-entropy [b, s] of labels [b, s] of any integer dtype, fp32; negative labels are ignored rows."""
        if not (labels.is_floating_point() or labels.is_complex()):
            labels = labels.long()
        labels = labels.masked_fill(labels < 0, IGNORE_INDEX)
        out = self.call.linear_cross_entropy(
            labels, ignore_index=IGNORE_INDEX, entropy=False, telemetry=telemetry, **options
        )
        if out.max_logit is not None and out.argmax is not None:
            self.largest = _swap(out.max_logit), _swap(out.argmax)
        return -out.logprobs

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], cls) and args[0].changed is None:
            logits = args[0]
            if func in _SCALE and not kwargs and isinstance(args[1], int | float):
                call = replace(logits.call, logits_scale=logits.call.logits_scale * args[1])
                return (cls.in_graph if logits.requires_grad else cls)(call, logits._compute)
            # Megatron's acceptance metrics ask which token the MTP head would have chosen, after its loss.
            if logits.largest is not None and func in _MAX | _ARGMAX and _over_last_dimension(*args[1:], **kwargs):
                return logits._local_max() if func in _MAX else logits.largest[1]
            if _changes_in_place(func.__name__):
                logits.changed = logits._compute(logits)
        args, kwargs = tree_map(lambda x: x._value() if isinstance(x, cls) else x, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        """What comes past `__torch_function__`, from C++: below autograd, whose graph begins at `_HeadOutput`."""
        with torch.no_grad():
            args, kwargs = tree_map(lambda x: x._value() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _value(self) -> Tensor:
        return self._compute(self) if self.changed is None else self.changed

    def _local_max(self) -> tuple[Tensor, Tensor]:
        """Value and local id of this shard's largest logit [s, b]; -inf where another shard has the largest."""
        assert self.largest is not None
        value, argmax = self.largest
        columns = self.call.weight.shape[0]
        local = argmax - self.call.tp_group.rank() * columns
        owned = (local >= 0) & (local < columns)
        return value.masked_fill(~owned, -torch.inf), local.masked_fill(~owned, 0)


class _HeadOutput(torch.autograd.Function):
    """Hidden and weight to uncomputed logits, whose gradient, where one arrives, is Megatron's own of this head.

    It arrives from custom autograd functions, which compute with the logits without gradient: a vocab-parallel
    cross-entropy, a gather, a reentrant checkpoint.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, call: HeadCall, compute: Callable[[UncomputedLogits], Tensor]
    ) -> UncomputedLogits:
        ctx.save_for_backward(hidden, weight)
        ctx.call = call
        return UncomputedLogits(call, compute)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logits: Tensor):
        hidden, weight = ctx.saved_tensors
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[0])
            # The weight itself, not a copy: Megatron adds to its main_grad.
            logits = replace(ctx.call, hidden=hidden, weight=weight).logits()
            inputs = [x for x, needed in zip((hidden, weight), ctx.needs_input_grad, strict=False) if needed]
            gradients = iter(torch.autograd.grad(logits, inputs, grad_logits))
        return *(next(gradients) if needed else None for needed in ctx.needs_input_grad[:2]), None, None


def _over_last_dimension(*args: Any, **kwargs: Any) -> bool:
    dimensions = (*args, *kwargs.values()) if kwargs.keys() <= {"dim"} else ()
    return len(dimensions) == 1 and isinstance(dimensions[0], int) and dimensions[0] == -1


def _changes_in_place(name: str) -> bool:
    return name in ("__setitem__", "register_hook", "retain_grad") or (name.endswith("_") and not name.endswith("__"))
