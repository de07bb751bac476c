"""`capture_lm_head`: a Megatron model's hidden states and head weight, instead of its logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lce.backends.choice import describe_backend
from megatron_lce.core.options import LinearCrossEntropyOutput
from megatron_lce.megatron_integration.fused_loss import FusedLoss
from megatron_lce.megatron_integration.head_call import HeadCall, check_not_fixed
from megatron_lce.megatron_integration.method_overrides import MethodOverride, argument_names, overrides_of, with_labels
from megatron_lce.megatron_integration.output_hooks import keep_hooks_off_uncomputed_logits
from megatron_lce.megatron_integration.support import NO_HEAD, find_language_model, head_reasons, reasons_of_group
from megatron_lce.megatron_integration.uncomputed_logits import NoLogits, UncomputedLogits
from megatron_lce.token_loss import TokenLoss, TokenLossFunction
from megatron_lce.topk import TopK

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule

_capturable: WeakSet[nn.Module] = WeakSet()  # heads that all ranks of their group have agreed on


class CapturedHead:
    """What the LM head was given in the last forward pass, and the fused operations on it.

    Nothing is copied: `hidden` is the very tensor that the output layer was called with. (To hang the capture on a
    tensor take another, such as `hidden.view_as(hidden)`: a cycle would keep both until the garbage collector comes.)
    On a pipeline stage without a head, and before the forward pass, `hidden` and `weight` are None.
    """

    def __init__(self, language_model: LanguageModule | None):
        self._language_model = language_model
        self._call: HeadCall | None = None
        self._with_gradient = False
        self._in_pass = False  # of this model, of two that share the output layer
        self._mtp_losses_left = 0

    def __repr__(self) -> str:
        if self._call is None:
            return f"CapturedHead(nothing captured: {self._why_nothing()})"
        hidden, weight = self._call.hidden, self._call.weight
        parts = [f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, {hidden.dtype} on {hidden.device}"]
        parts += [f"tensor-parallel size {self._call.tp_group.size()}"]
        parts += ["sequence parallel"] * self.sequence_parallel + ["no graph"] * (not self._with_gradient)
        return f"CapturedHead({', '.join(parts)}, backend: {describe_backend('auto', hidden.device)})"

    @property
    def hidden(self) -> Tensor | None:
        """[s, b, H]; under sequence parallel this rank's [s/tp, b, H]."""
        return None if self._call is None else self._call.hidden

    @property
    def weight(self) -> Tensor | None:
        """[V/tp, H], this rank's rows of the vocabulary; the embedding's weight if tied."""
        return None if self._call is None else self._call.weight

    @property
    def tp_group(self) -> ProcessGroup | None:
        return None if self._call is None else self._call.tp_group

    @property
    def sequence_parallel(self) -> bool:
        return self._call is not None and self._call.sequence_parallel

    def linear_cross_entropy(
        self, labels: Tensor, temperature: float | Tensor = 1.0, **keywords: Any
    ) -> LinearCrossEntropyOutput:
        """`megatron_lce.linear_cross_entropy` of the captured head.

        Args:
            labels: [b, s] int64, as Megatron passes them; the full sequence also under sequence parallel. Only
                `ignore_index` is ignored, not every negative label as by `enable_fused_linear_ce`.
            temperature: a positive float, or a floating tensor [b, s].
            keywords: those of `megatron_lce.linear_cross_entropy` but tp_group, sequence_parallel, vocab_start,
                reduce_grad_hidden and weight_grad_sink, which the head fixes. `logits_scale` multiplies the model's own
                (MuP).

        Returns:
            fp32 outputs [b, s]. Padded columns of the vocabulary count, as they do in Megatron, unless `vocab_size`
            is given. Where the forward pass kept no graph, under no_grad or inside a reentrant checkpoint, the outputs
            have none.

        Raises:
            RuntimeError: this stage has no head, no forward pass has reached it, or hidden or weight was changed in
                place since (an optimizer's step).
            TypeError, ValueError: as `megatron_lce.linear_cross_entropy`.
        """
        check_not_fixed(keywords)
        call = self._captured_call()
        with self._gradient_where_captured():
            return call.linear_cross_entropy(labels, temperature, **keywords)

    def linear_token_loss(
        self, labels: Tensor, loss: TokenLossFunction, *per_token: Tensor, **keywords: Any
    ) -> TokenLoss:
        """`megatron_lce.linear_token_loss` of the captured head: three products where backward needs no logits again.

        Args:
            labels: as `linear_cross_entropy` takes them.
            loss: called with the outputs of n tokens and their part of each of `per_token`, see there.
            per_token: tensors [b, s, ...].
            keywords: those of `linear_cross_entropy`, temperature among them, but logits_cache_bytes.

        Returns:
            The summed loss; outputs and metrics [b, s, ...] without gradient.

        Raises:
            RuntimeError: this stage has no head, no forward pass has reached it, or hidden or weight was changed in
                place since (an optimizer's step).
            TypeError, ValueError: as `megatron_lce.linear_token_loss`.
        """
        check_not_fixed(keywords)
        call = self._captured_call()
        with self._gradient_where_captured():
            return call.linear_token_loss(labels, loss, *per_token, **keywords)

    def linear_jsd(
        self,
        teacher_head: CapturedHead,
        *,
        labels: Tensor | None = None,
        beta: float = 0.5,
        temperature: float | Tensor = 1.0,
        token_weights: Tensor | None = None,
        **keywords: Any,
    ) -> Tensor | tuple[Tensor, LinearCrossEntropyOutput]:
        """`megatron_lce.linear_jsd` of this captured head, the student's, and a teacher's.

        Args:
            teacher_head: what `capture_lm_head` left of the teacher's forward pass over the same tokens, its vocabulary
                sharded over the same ranks. It gets no gradient, so that its forward pass needs none.
            labels: [b, s] int64, as Megatron passes them; only tells which rows are ignored. `None`: no row is.
            beta: weight of the teacher in the mixture, in [0, 1].
            temperature: a positive float, or a floating tensor [b, s]; so is `teacher_temperature`.
            token_weights: floating [b, s]; `None`: each token's divergence is wanted.
            keywords: those of `megatron_lce.linear_jsd` but tp_group, sequence_parallel, vocab_start and
                weight_grad_sink, which the head fixes. `student_logits_scale` and `teacher_logits_scale` multiply the
                models' own (MuP).

        Returns:
            The divergence of each token, fp32 [b, s]; with `token_weights` their weighted sum, whose gradients are made
            in forward. Padded columns of the vocabulary count, as they do in Megatron,
            unless `vocab_size` is given. With `return_student` a tuple: that, and the student's outputs [b, s]. Where
            the student's forward pass kept no graph, under no_grad or inside a reentrant checkpoint, it has none.

        Raises:
            RuntimeError: this stage has no head, no forward pass has reached it or the teacher's, or a hidden or weight
                was changed in place since.
            TypeError, ValueError: as `megatron_lce.linear_jsd`; or the two heads' tokens or ranks differ.
        """
        check_not_fixed(keywords)
        if not isinstance(teacher_head, CapturedHead):
            raise TypeError(f"teacher_head must be a captured head, got {type(teacher_head).__name__}")
        call, teacher = self._captured_call(), teacher_head._captured_call(" of the teacher")
        with self._gradient_where_captured():
            return call.linear_jsd(
                teacher, labels=labels, beta=beta, temperature=temperature, token_weights=token_weights, **keywords
            )

    def linear_logits_at(self, ids: Tensor, offsets: Tensor | None = None, **keywords: Any) -> Tensor:
        """`megatron_lce.linear_logits_at` of the captured head: `ids` [b, s, K], or CSR over the b * s tokens."""
        check_not_fixed(keywords)
        call = self._captured_call()
        with self._gradient_where_captured():
            return call.linear_logits_at(ids, offsets, **keywords)

    def support_logprobs(
        self, labels: Tensor, ids: Tensor, offsets: Tensor, **keywords: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`megatron_lce.support_logprobs` of the captured head: labels [b, s], CSR over the b * s tokens."""
        check_not_fixed(keywords)
        call = self._captured_call()
        with self._gradient_where_captured():
            return call.support_logprobs(labels, ids, offsets, **keywords)

    def linear_topk(self, k: int, **keywords: Any) -> TopK:
        """`megatron_lce.linear_topk` of the captured head: [b, s, K], and [b, s]."""
        check_not_fixed(keywords)
        return self._captured_call().linear_topk(k, **keywords)

    def _captured_call(self, whose: str = "") -> HeadCall:
        if self._call is None:
            raise RuntimeError(f"nothing was captured{whose}: {self._why_nothing()}")
        return self._call

    def _why_nothing(self) -> str:
        return NO_HEAD if self._language_model is None else "no forward pass has reached the head"

    def _gradient_where_captured(self) -> AbstractContextManager:
        """A hidden without its graph would train the head alone, silently."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self._with_gradient)

    def _start_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Gives the model labels where it has none and no MTP would use them: then it makes nothing of the logits.

        So it does under torch.compile, which cannot trace what uncomputed logits are made into.
        """
        self._in_pass = model is self._language_model
        self._mtp_losses_left = self._mtp_layers()
        names = argument_names(type(model).forward)
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("labels") is not None or "labels" not in names or self._mtp_losses_left:
            return None
        return with_labels(names, args, kwargs, torch.empty(0, dtype=torch.int64))

    def _end_pass(self, *_: Any) -> None:
        self._in_pass = False

    def _forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        output_cross_entropy_loss: bool = False,
        **of_loss: Any,
    ) -> Tensor | tuple[Tensor, None]:
        """In place of ColumnParallelLinear's, and of LinearCrossEntropyModule's, which can be asked for the loss."""
        assert self._language_model is not None
        if not self._in_pass:  # of another model's pass
            if output_cross_entropy_loss:  # an argument that other heads do not have
                of_loss["output_cross_entropy_loss"] = True
            forward = self._below(self._language_model.output_layer, "forward")
            return forward(input_, weight, runtime_gather_output, **of_loss)
        self._call = HeadCall.of(self._language_model.output_layer, input_, weight)
        self._with_gradient = torch.is_grad_enabled()
        logits = UncomputedLogits(self._call, self._capture)
        return self._loss(logits, **of_loss) if output_cross_entropy_loss else (logits, None)

    def _below(self, module: nn.Module, name: str) -> Any:
        """What this method is without the capture."""
        mine = [override for override in overrides_of(module, name) if override.owner is self]
        return mine[0].below() if mine else MethodType(getattr(type(module), name), module)

    def _compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """In place of LanguageModule's."""
        assert self._language_model is not None
        if not isinstance(logits, UncomputedLogits):  # of a head that was called outside a pass
            return self._below(self._language_model, "compute_language_model_loss")(labels, logits)
        return self._loss(logits, labels, telemetry=self._language_model.training)

    def _loss(self, logits: UncomputedLogits, labels: Tensor, **arguments: Any) -> Tensor:
        """The fused loss for MTP's heads, which come first, and none, [b, s, 0], for the main one."""
        if self._mtp_losses_left == 0:
            return self._capture(logits.call).transpose(0, 1)
        self._mtp_losses_left -= 1
        return logits.compute_loss(labels, **arguments, **self._enabled_options())

    def _capture(self, call: HeadCall) -> Tensor:
        """The main head's logits are wanted: note what they are made of and give [s, b, 0], which is no memory."""
        self._call = call
        self._mtp_losses_left = self._mtp_layers()
        batch, sequence = call.tokens
        return call.hidden.new_empty((sequence, batch, 0)).as_subclass(NoLogits)

    def _enabled_options(self) -> dict[str, Any]:
        """Those of the enabled loss that the capture is open on: its softcap, say, is the MTP losses' too."""
        assert self._language_model is not None
        overrides = overrides_of(self._language_model.output_layer, "forward")
        fused = [one.owner.options_now() for one in overrides if one.is_open and isinstance(one.owner, FusedLoss)]
        return fused[0] if fused else {}

    def _mtp_layers(self) -> int:
        return 0 if self._language_model is None else self._language_model.config.mtp_num_layers or 0


class Capture(contextlib.AbstractContextManager["CapturedHead", None]):
    """What `capture_lm_head` returns, to be opened by `with`."""

    def __init__(self, model: nn.Module | Sequence[nn.Module]):
        self._opened = _opened(model)

    def __enter__(self) -> CapturedHead:
        return self._opened.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._opened.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a capture has no {name} before it is opened: `with capture_lm_head(model) as head:`")


def capture_lm_head(model: nn.Module | Sequence[nn.Module]) -> Capture:
    """While open, the model's forward pass stops before the logits and leaves what they are made of in the result.

        with capture_lm_head(model) as head:
            model(input_ids, position_ids, attention_mask)
        out = head.linear_cross_entropy(labels, temperature=0.7)

    The model returns an empty [b, s, 0] tensor; to read it as logits raises. With MTP, pass the labels: the MTP losses
    are computed, fused, and take effect on the hidden states as in Megatron; the main loss is left to the caller. Of
    several forward passes the last is kept. The result stays valid after the context; it holds hidden and its graph
    alive.

    All ranks of the head's tensor-parallel group must open its first capture: they agree there on whether it can be.

    Args:
        model: a megatron-core GPTModel, MambaModel or HybridModel in any nesting of DistributedDataParallel,
            Float16Module and VLM wrappers, or the list of virtual pipeline chunks that Megatron's schedules take.

    Raises:
        TypeError: `model` is nothing of Megatron's.
        ValueError: the head is one that hidden and weight do not describe, and the message lists the reasons; or
            `model` holds several heads.
    """
    return Capture(model)


@contextlib.contextmanager
def _opened(model: nn.Module | Sequence[nn.Module]) -> Iterator[CapturedHead]:
    language_model = find_language_model(model)
    head = CapturedHead(language_model)
    if language_model is None:
        yield head
        return
    _check_capturable(language_model)
    keep_hooks_off_uncomputed_logits(language_model.output_layer)
    with contextlib.ExitStack() as stack:
        stack.callback(language_model.register_forward_pre_hook(head._start_pass, with_kwargs=True).remove)
        stack.callback(language_model.register_forward_hook(head._end_pass, always_call=True).remove)
        stack.callback(MethodOverride(language_model.output_layer, "forward", head._forward).close)
        loss = MethodOverride(language_model, "compute_language_model_loss", head._compute_language_model_loss)
        stack.callback(loss.close)
        yield head


def _check_capturable(language_model: LanguageModule) -> None:
    """Raises on all ranks alike at a head's first capture; asking the others each time would wait for the device."""
    output_layer = language_model.output_layer
    reasons = head_reasons(language_model)
    if output_layer not in _capturable:
        reasons = reasons_of_group(language_model, reasons)
    if reasons:
        raise ValueError(f"the LM head cannot be captured: {'; '.join(reasons)}")
    _capturable.add(output_layer)
