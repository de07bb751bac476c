"""What an output layer returns in place of logits: uncomputed ones, which give the fused loss, or none at all."""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_lce.api.model_loss import model_loss
from megatron_lce.checks.validation import as_int64, check_choice
from megatron_lce.compat import Reduction, reduced
from megatron_lce.core.eager import eager
from megatron_lce.core.known_loss import UpstreamCheck
from megatron_lce.core.losses import TokenCrossEntropy
from megatron_lce.core.options import IGNORE_INDEX
from megatron_lce.megatron.head_call import HeadCall, transpose_batch_sequence
from megatron_lce.megatron.heads import logits_dtype_of

_MUL_FUNCTIONS = {Tensor.mul, torch.mul}
_MAX, _ARGMAX = {Tensor.max, torch.max}, {Tensor.argmax, torch.argmax}
_GET_BASE = Tensor._base.__get__  # type: ignore[attr-defined, union-attr]
_FSDP_HOOK_FUNCTIONS = {Tensor.view_as, Tensor.to}  # what its hooks do to any output
# Functions that need no values; a tensor's attributes need none either.
_METADATA_FUNCTIONS = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point}


def _refuse(call: HeadCall) -> Tensor:
    raise RuntimeError(
        "the logits of an enabled model are not computed where it is given labels: call the model without labels, or "
        "give it its own loss back by handle.remove()"
    )


class UncomputedLogits(Tensor):
    """The logits [s, b, V/tp] of one head call on their way to the fused loss: a tensor without storage.

    They remember a factor (MuP), and know the largest logit after an MTP loss. Anything else that needs values gets
    `on_read(call)`, which raises by default.
    """

    @staticmethod
    def __new__(cls, call: HeadCall, *_: Any, loss: Tensor | None = None):
        batch, sequence = call.batch_and_sequence
        return Tensor._make_wrapper_subclass(
            cls,
            (sequence, batch, call.columns),
            dtype=logits_dtype_of(call.head) or call.autocast_dtype or call.hidden.dtype,
            device=call.hidden.device,
            # for backward hooks, unless these are on the loss
            requires_grad=call.with_gradient and call.hidden.requires_grad and loss is None,
        )

    def __init__(self, call: HeadCall, on_read: Callable[[HeadCall], Tensor] = _refuse, *, loss: Tensor | None = None):
        self.call, self._on_read = call, on_read
        self.max_and_argmax: tuple[Tensor, Tensor] | None = None  # logit and id, [s, b], after a loss with telemetry
        self.loss = loss  # [b, s], if it was computed in the head's call; as FSDP's hooks return it

    def compute_loss(
        self,
        labels: Tensor,
        telemetry: bool = False,
        *,
        upstream: UpstreamCheck | None = None,
        counted: Tensor | None = None,  # [b, s] bool, beside `upstream`
        reduction: Reduction = "none",
        ignore_index: int = IGNORE_INDEX,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> Tensor:
        """Return the fp32 loss [b, s] of labels [b, s] of any integer dtype, its sum or its mean.

        It is the cross-entropy with the terms of `enable_fused_linear_ce`. Rows whose label is negative or
        `ignore_index` are ignored. `upstream`: see `model_loss`.
        """
        check_choice("reduction", reduction, get_args(Reduction))
        labels = as_int64(labels)
        labels = labels.masked_fill((labels < 0) | (labels == ignore_index), IGNORE_INDEX)
        wanted = telemetry or (label_smoothing > 0 and "mean_logit")
        options |= {"ignore_index": IGNORE_INDEX, "entropy": False, "telemetry": wanted}
        counted = self.call.sequence_first("loss_mask", counted)
        formula = TokenCrossEntropy(z_loss, label_smoothing)
        losses, out = self.call.run(model_loss, labels, formula, upstream, counted, **options)
        if telemetry and out.max_logit is not None and out.argmax is not None:
            self.max_and_argmax = transpose_batch_sequence(out.max_logit), transpose_batch_sequence(out.argmax)
        return reduced(losses, reduction, labels != IGNORE_INDEX)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return cls._run(func, args, kwargs or {})

    @classmethod
    @eager
    def _run(cls, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a torch function that has such logits among its arguments."""
        logits = args[0] if args and isinstance(args[0], cls) else None
        if logits is not None and logits.loss is not None and func in _FSDP_HOOK_FUNCTIONS:
            return logits
        if logits is not None and logits.loss is None and func in _MUL_FUNCTIONS and isinstance(args[1], int | float):
            return cls(logits.call.scaled(args[1]), logits._on_read)
        # Megatron's MTP acceptance metrics ask for the predicted token after the loss.
        if logits is not None and logits.max_and_argmax is not None and (len(args), kwargs) == (1, {"dim": -1}):
            if func in _MAX:
                return logits._largest_of_shard(*logits.max_and_argmax)
            if func in _ARGMAX:
                return logits.max_and_argmax[1]
        if func in _METADATA_FUNCTIONS or func.__name__ == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return cls.__torch_dispatch__(func, (), args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        return func(*tree_map(cls._computed, args), **tree_map(cls._computed, kwargs or {}))

    @classmethod
    def _computed(cls, x: Any) -> Any:
        return x._on_read(x.call) if isinstance(x, cls) else x

    def _largest_of_shard(self, value: Tensor, argmax: Tensor) -> tuple[Tensor, Tensor]:
        """Return this shard's largest logit and its local id, [s, b]; -inf where another shard has the largest."""
        columns = self.call.columns
        local = argmax - self.call.head.tp_group.rank() * columns
        owned = (local >= 0) & (local < columns)
        return value.masked_fill(~owned, -torch.inf), local.masked_fill(~owned, 0)


class NoLogits(Tensor):
    """What a model returns inside a capture, [b, s, 0]; reading it as logits raises instead of giving NaN."""

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
            # torch.compile follows bases to the end, and a base of this subclass would have another base.
            return result.as_subclass(cls) if isinstance(result, Tensor) and func != _GET_BASE else result
