"""What an output layer returns in place of logits, and the fused loss of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from megatron_lce.compat import Reduction, reduce_loss
from megatron_lce.core.options import LinearCrossEntropyOutput
from megatron_lce.cross_entropy import linear_cross_entropy
from megatron_lce.jsd import linear_jsd
from megatron_lce.megatron_integration.heads import check_softcap, form_of
from megatron_lce.megatron_integration.main_grad import MainGradSink, main_grad_sink
from megatron_lce.token_loss import TokenLoss, TokenLossFunction, linear_token_loss

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import ColumnParallelLinear

IGNORE_INDEX = -100
_SCALE = {Tensor.mul, torch.mul}
_MAX = {Tensor.max, torch.max}
_ARGMAX = {Tensor.argmax, torch.argmax}


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
        output = linear_cross_entropy(
            self.hidden,
            self.weight,
            self._sequence_first("labels", labels),
            **self._keywords(temperature, logits_scale, keywords),
        )
        return _batch_first(output)

    def linear_token_loss(
        self,
        labels: Tensor,
        loss: TokenLossFunction,
        *per_token: Tensor,
        temperature: float | Tensor = 1.0,
        logits_scale: float = 1.0,
        **keywords: Any,
    ) -> TokenLoss:
        """`megatron_lce.linear_token_loss` of this call; labels, per_token, outputs and metrics are [b, s, ...]."""
        result = linear_token_loss(
            self.hidden,
            self.weight,
            self._sequence_first("labels", labels),
            loss,
            *(self._sequence_first(f"per_token[{i}]", tensor) for i, tensor in enumerate(per_token)),
            **self._keywords(temperature, logits_scale, keywords),
        )
        metrics = {name: _swap(metric) for name, metric in result.metrics.items()}
        return TokenLoss(result.loss, _batch_first(result.outputs), metrics)

    def _keywords(self, temperature: float | Tensor, logits_scale: float, keywords: dict[str, Any]) -> dict[str, Any]:
        """The caller's keywords and what this head fixes."""
        logits_scale *= self.logits_scale
        check_softcap(self.head, keywords.get("softcap"))
        softcap = form_of(self.head).softcap
        if softcap is not None:
            keywords = {**keywords, "softcap": softcap}
            if logits_scale != 1.0:  # after the head, so after its cap
                temperature, logits_scale = temperature / logits_scale, 1.0
        return {
            **keywords,
            "temperature": self._sequence_first("temperature", temperature),
            "logits_scale": logits_scale,
            "tp_group": self.tp_group,
            "sequence_parallel": self.sequence_parallel,
            "weight_grad_sink": self.weight_grad_sink,
        }

    def linear_jsd(
        self,
        teacher: HeadCall,
        *,
        labels: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        student_logits_scale: float = 1.0,
        teacher_logits_scale: float = 1.0,
        **keywords: Any,
    ) -> Tensor:
        """`megatron_lce.linear_jsd` of this call, the student's, and a teacher's; per token as above."""
        for name, mine, its in (
            ("sequence_parallel", self.sequence_parallel, teacher.sequence_parallel),
            ("tokens [b, s]", self.tokens, teacher.tokens),
            ("ranks in tp_group", _ranks(self.tp_group), _ranks(teacher.tp_group)),
        ):
            if mine != its:
                raise ValueError(f"teacher_head must have the student's {name}, {mine}, got {its}")
        loss = linear_jsd(
            self.hidden,
            self.weight,
            teacher.hidden,
            teacher.weight,
            labels=self._sequence_first("labels", labels),
            temperature=self._sequence_first("temperature", temperature),
            **self._form("student", student_logits_scale, keywords.pop("student_softcap", None)),
            **teacher._form("teacher", teacher_logits_scale, keywords.pop("teacher_softcap", None)),
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            weight_grad_sink=self.weight_grad_sink,
            **keywords,
        )
        return _swap(loss)

    def _form(self, role: str, logits_scale: float, softcap: float | None) -> dict[str, Any]:
        """The keywords of one of a divergence's two heads."""
        check_softcap(self.head, softcap)
        own, scale = form_of(self.head).softcap, logits_scale * self.logits_scale
        if own is not None and scale != 1.0:
            raise ValueError(f"{role}_logits_scale must be 1 where the head has a softcap before it, got {scale}")
        return {f"{role}_logits_scale": scale, f"{role}_softcap": softcap if own is None else own}

    def _sequence_first(self, name: str, per_token: Any) -> Any:
        """A tensor [b, s] as [s, b]; anything else as it is."""
        if not isinstance(per_token, Tensor):
            return per_token
        if tuple(per_token.shape[:2]) != self.tokens or (name in ("labels", "temperature") and per_token.dim() > 2):
            raise ValueError(f"{name} must be [b, s], {self.tokens} for this hidden, got {tuple(per_token.shape)}")
        return _swap(per_token)

    def logits(self) -> Tensor:
        """[s, b, V/tp] as Megatron computes them."""
        logits, _ = type(self.head).forward(self.head, self.hidden, self.weight)
        return logits if self.logits_scale == 1.0 else logits * self.logits_scale


def _batch_first(output: LinearCrossEntropyOutput) -> LinearCrossEntropyOutput:
    return output._replace(**{name: _swap(part) for name, part in output._asdict().items() if part is not None})


def _swap(per_token: Tensor) -> Tensor:
    return per_token.transpose(0, 1).contiguous()


def _ranks(group: ProcessGroup) -> list[int]:
    return torch.distributed.get_process_group_ranks(group)


class UncomputedLogits(Tensor):
    """The logits [s, b, V/tp] of one head call, as a tensor without storage.

    Between Megatron's output layer and its loss only MuP's scaling happens, which is kept as a number. The first
    operation that needs their values computes them: a model asked for logits gives logits. To autograd they are a
    result of hidden and weight from the start, so views of them, changes in place and hooks are what they always are.
    """

    call: HeadCall
    largest: tuple[Tensor, Tensor] | None  # over the vocabulary and its id, [s, b], once a loss with telemetry is done
    _compute: Callable[[UncomputedLogits], Tensor]
    _computed: Tensor | None

    @staticmethod
    def __new__(cls, call: HeadCall, compute: Callable[[UncomputedLogits], Tensor]):
        batch, sequence = call.tokens
        shape = (sequence, batch, call.weight.shape[0])
        dtype = form_of(call.head).logits_dtype or call.hidden.dtype
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=call.hidden.device)

    def __init__(self, call: HeadCall, compute: Callable[[UncomputedLogits], Tensor]):
        self.call, self.largest, self._compute, self._computed = call, None, compute, None

    @classmethod
    def in_graph(cls, call: HeadCall, compute: Callable[[UncomputedLogits], Tensor]) -> UncomputedLogits:
        """The logits as a result of hidden and weight, where gradients are on."""
        return _HeadOutput.apply(call.hidden, call.weight, call, compute)

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

        Rows whose label is negative or `ignore_index` are ignored.
        """
        if not (labels.is_floating_point() or labels.is_complex()):
            labels = labels.long()
        labels = labels.masked_fill((labels < 0) | (labels == ignore_index), IGNORE_INDEX)
        out = self.call.linear_cross_entropy(
            labels, ignore_index=IGNORE_INDEX, entropy=False, telemetry=telemetry, **options
        )
        if out.max_logit is not None and out.argmax is not None:
            self.largest = _swap(out.max_logit), _swap(out.argmax)
        return reduce_loss(-out.logprobs, labels != IGNORE_INDEX, reduction)

    def plain_if_changed(self) -> Tensor:
        """Themselves; or, if they were changed in place or given a hook, a plain tensor that has come of them."""
        with torch._C.DisableTorchFunctionSubclass():
            changed = self._computed is not None if self.is_inference() else self._version > 0
            return self.view_as(self) if changed or self._backward_hooks or self.retains_grad else self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and isinstance(args[0], cls) and func in _SCALE | _MAX | _ARGMAX:
            logits = args[0].plain_if_changed()
            if not isinstance(logits, cls):
                return func(logits, *args[1:], **kwargs)
            if func in _SCALE and not kwargs and isinstance(args[1], int | float):
                call = replace(logits.call, logits_scale=logits.call.logits_scale * args[1])
                return (cls.in_graph if logits.requires_grad else cls)(call, logits._compute)
            # Megatron's acceptance metrics ask which token the MTP head would have chosen, after its loss.
            if func not in _SCALE and logits.largest is not None and _over_last_dimension(*args[1:], **kwargs):
                return logits._local_max() if func in _MAX else logits.largest[1]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        """An operation that needs the values; autograd has taken its note."""
        plain_args, plain_kwargs = tree_map(lambda x: x._value() if isinstance(x, cls) else x, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        first = func._schema.arguments[0].alias_info
        return args[0] if first is not None and first.is_write else result

    def _value(self) -> Tensor:
        if self._computed is None:
            with torch.no_grad():
                self._computed = self._compute(self)
        return self._computed

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

    Where these get a gradient, from any use but the fused loss, it goes on by Megatron's own backward of this head,
    after its product is made once more.
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
