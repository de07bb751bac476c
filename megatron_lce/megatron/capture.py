"""`capture_lm_head`: a Megatron model's hidden states and head weight, and the fused operations on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lce.api import keywords as kw
from megatron_lce.api.linear_cross_entropy import linear_cross_entropy
from megatron_lce.api.linear_jsd import linear_jsd
from megatron_lce.api.linear_logits_at import linear_logits_at
from megatron_lce.api.linear_token_loss import TokenLoss, TokenLossFunction, linear_token_loss
from megatron_lce.api.linear_topk import TopK, linear_topk
from megatron_lce.api.support_logprobs import support_logprobs
from megatron_lce.backends.choice import describe_backend
from megatron_lce.checks import validation
from megatron_lce.checks.validation import check_same
from megatron_lce.core.eager import eager
from megatron_lce.core.options import IGNORE_INDEX, LinearCrossEntropyOutput
from megatron_lce.megatron.head_call import HeadCall, batch_first, csr_sequence_first
from megatron_lce.megatron.logits import NoLogits, UncomputedLogits
from megatron_lce.megatron.loss import FusedLoss
from megatron_lce.megatron.mtp import discard_metrics, restore_metrics, sequence_ends
from megatron_lce.megatron.reasons import NO_HEAD, capturing_reasons, find_language_model, reasons_of_group
from megatron_lce.megatron.replace import ReplacedHead, owners_on

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule

_capturable: WeakSet[nn.Module] = WeakSet()  # heads that all ranks of their group have agreed on


class CapturedHead:
    """Inputs of the LM head in the last forward pass, and the fused operations on them.

    An operation is the function of the same name in `megatron_lce`, on the captured hidden states and weight. Tensors
    per token, such as labels, are [b, s], as Megatron passes them and under sequence parallel the full sequence; so are
    results. The head fixes tp_group, sequence_parallel, vocab_start, reduce_grad_hidden and weight_grad_sink, and
    scales of logits multiply the model's own (MuP). If the forward pass kept no graph (under no_grad, inside a
    reentrant checkpoint), results have none. Errors are those of the function, and RuntimeError if nothing was
    captured, or if hidden or weight was changed in place since, as by an optimizer's step.

    Nothing is copied: `hidden` is the tensor that the output layer was called with. To attach the capture to a tensor,
    take another one, such as `hidden.view_as(hidden)`: a cycle would keep both until the garbage collector runs.

    Attributes, None on a pipeline stage without a head, and before the forward pass:
        hidden: [s, b, H]; under sequence parallel this rank's [s/tp, b, H].
        weight: [V/tp, H], this rank's rows of the vocabulary; the embedding's weight if tied.

    With `mtp="capture"`, `mtp_heads` holds a captured head for each depth of multi-token prediction. Row t of
    `mtp_heads[d]` predicts the token that row t + d + 1 of the main head predicts, and takes that row's label: labels
    are the main head's, other tensors per token and results its own. Rows without such a row in their sequence are
    ignored.

        loss = head.mtp_heads[0].linear_jsd(head, labels=labels, beta=0)  # row t with row t + 1 of the main head
    """

    hidden: Tensor | None = None
    weight: Tensor | None = None
    tp_group: ProcessGroup | None = None
    sequence_parallel = False
    mtp_heads: tuple[CapturedHead, ...] = ()

    def __init__(self, why_nothing: str = "no forward pass has reached the head"):
        self._why_nothing = why_nothing
        self._call: HeadCall | None = None

    def __repr__(self) -> str:
        if self._call is None:
            return f"CapturedHead(nothing captured: {self._why_nothing})"
        hidden, weight = self._call.hidden, self._call.weight
        parts = [f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, {hidden.dtype} on {hidden.device}"]
        parts += [f"tensor-parallel size {self._call.head.tp_group.size()}"]
        parts += ["sequence parallel"] * self.sequence_parallel + ["no graph"] * (not self._call.with_gradient)
        return f"CapturedHead({', '.join(parts)}, backend: {describe_backend('auto', hidden.device)})"

    def _record(self, call: HeadCall) -> None:
        self._call, self.hidden, self.weight = call, call.hidden, call.weight
        self.tp_group, self.sequence_parallel = call.head.tp_group, call.sequence_parallel

    def chain_mask(self, labels: Tensor | None = None, ignore_index: int = IGNORE_INDEX) -> Tensor:
        """Return which tokens have a whole chain, bool [b, s]: a row of the main head for each of the `mtp_heads`.

        With the main head's labels, none of the rows may be ignored, its own at the token included.
        """
        call = self._captured_call()
        if labels is None:
            labels = call.hidden.new_full(call.tokens, int(ignore_index == 0), dtype=torch.int64)
        validation.check_label_tensor(labels)
        validation.check_same("labels", "be [b, s]", call.tokens, tuple(labels.shape))
        given = {"ignore_index": ignore_index}
        rows = [call.labels_of_rows(labels, given, depth) for depth in range(len(self.mtp_heads) + 1)]
        return (torch.stack(rows) != ignore_index).all(dim=0)

    def linear_cross_entropy(
        self, labels: Tensor, temperature: float | Tensor = 1.0, **options: Unpack[kw.CapturedCrossEntropyOptions]
    ) -> LinearCrossEntropyOutput:
        """Return `megatron_lce.linear_cross_entropy` of the captured head.

        Only `ignore_index` is ignored, not every negative label as with `enable_fused_linear_ce`. Padded columns of the
        vocabulary take part, as in Megatron, unless `vocab_size` is given.
        """
        with self._captured() as call:
            return call.run(linear_cross_entropy, labels, temperature=temperature, **options)

    def linear_token_loss(
        self,
        labels: Tensor,
        loss: TokenLossFunction,
        *per_token: Tensor,
        **options: Unpack[kw.CapturedTokenLossOptions],
    ) -> TokenLoss:
        """Return `megatron_lce.linear_token_loss` of the captured head; `per_token`: tensors [b, s, ...]."""
        with self._captured() as call:
            with call.together("linear_token_loss", {"labels": labels, **options}):
                parts = [call.sequence_first(f"per_token[{i}]", tensor) for i, tensor in enumerate(per_token)]
                given, labels = call.keywords(options), call.labels(labels, options)
            return batch_first(linear_token_loss(call.hidden, call.weight, labels, loss, *parts, **given))

    @overload
    def linear_jsd(
        self, teacher_head: CapturedHead, *, return_student: Literal[True], **options: Unpack[kw.CapturedJsdOptions]
    ) -> tuple[Tensor, LinearCrossEntropyOutput]: ...
    @overload
    def linear_jsd(
        self,
        teacher_head: CapturedHead,
        *,
        return_student: Literal[False] = False,
        **options: Unpack[kw.CapturedJsdOptions],
    ) -> Tensor: ...
    def linear_jsd(
        self, teacher_head: CapturedHead, *, return_student: bool = False, **options: Unpack[kw.CapturedJsdOptions]
    ) -> Tensor | tuple[Tensor, LinearCrossEntropyOutput]:
        """Return `megatron_lce.linear_jsd` of this captured head, the student's, and a teacher's.

            divergence = head.linear_jsd(teacher_head, labels=labels, beta=0.5, temperature=1.0, token_weights=None)

        Args:
            teacher_head: the capture of the teacher's forward pass over the same tokens, its vocabulary sharded over
                the same ranks. It gets no gradient: run its forward pass under no_grad.
        """
        with self._captured() as student:
            with student.together("linear_jsd", {**options, "return_student": return_student}):
                if not isinstance(teacher_head, CapturedHead):
                    raise TypeError(f"teacher_head must be a captured head, got {type(teacher_head).__name__}")
                teacher = teacher_head._captured_call(" of the teacher")
                for words, mine, its in (
                    ("sequence_parallel", student.sequence_parallel, teacher.sequence_parallel),
                    ("tokens [b, s]", student.tokens, teacher.tokens),
                    ("ranks in tp_group", student.ranks, teacher.ranks),
                ):
                    check_same("teacher_head", f"have the student's {words}", mine, its)
                teacher.check_unchanged()
                forms = student.form("student", options) | teacher.form("teacher", options)
                options, shift = student.compared_with(teacher, options)
                given = student.call_keywords({**options, **forms, "return_student": return_student})
            teacher_hidden = teacher.later_rows(shift)
            return batch_first(linear_jsd(student.hidden, student.weight, teacher_hidden, teacher.weight, **given))

    def linear_logits_at(
        self, ids: Tensor, offsets: Tensor | None = None, **options: Unpack[kw.CapturedOptions]
    ) -> Tensor:
        """Return `megatron_lce.linear_logits_at` of the captured head: `ids` [b, s, K], or CSR over b * s tokens."""
        with self._captured() as call:
            with call.together("linear_logits_at", options):
                given, places = call.keywords(options), None
                if offsets is None:
                    ids = call.sequence_first("ids", ids)
                else:
                    ids, offsets, places = csr_sequence_first(ids, offsets, call.tokens)
            logits = linear_logits_at(call.hidden, call.weight, ids, offsets, **given)
            return batch_first(logits) if places is None else torch.empty_like(logits).index_copy(0, places, logits)

    def support_logprobs(
        self, labels: Tensor, ids: Tensor, offsets: Tensor, **options: Unpack[kw.CapturedSupportOptions]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return `megatron_lce.support_logprobs` of the captured head: labels [b, s], CSR over the b * s tokens."""
        with self._captured() as call:
            ids, offsets, _ = csr_sequence_first(ids, offsets, call.tokens)
            return call.run(support_logprobs, labels, ids, offsets, **options)

    def linear_topk(self, k: int, **options: Unpack[kw.CapturedOptions]) -> TopK:
        """Return `megatron_lce.linear_topk` of the captured head: [b, s, K], and [b, s]."""
        with self._captured() as call:
            with call.together("linear_topk", options):
                given = call.keywords(options)
            del given["weight_grad_sink"]
            return batch_first(linear_topk(call.hidden, call.weight, k, **given))

    @contextlib.contextmanager
    def _captured(self) -> Iterator[HeadCall]:
        """Yield the call; without gradients if the pass kept no graph, because the head alone would train."""
        call = self._captured_call()
        with torch.set_grad_enabled(torch.is_grad_enabled() and call.with_gradient):
            yield call

    def _captured_call(self, whose: str = "") -> HeadCall:
        if self._call is None:
            raise RuntimeError(f"nothing was captured{whose}: {self._why_nothing}")
        return self._call


class CapturingHead(ReplacedHead):
    """A model's head and loss while a capture is open: they record the inputs of the logits."""

    opened_by = "capture_lm_head"

    def __init__(self, language_model: LanguageModule, captures_mtp: bool):
        self.captured, self._captures_mtp = CapturedHead(), captures_mtp
        super().__init__(language_model)

    def start_pass(self, given: dict[str, Any], takes_labels: bool) -> Tensor | None:
        """Give the model labels if it has none and no MTP would use them: with labels it never reads its logits.

        torch.compile needs this, because it cannot trace a read of uncomputed logits.
        """
        self.captured.mtp_heads, self._packed = (), given.get("packed_seq_params")
        if self._captures_mtp:
            discard_metrics()
        if given.get("labels") is not None or not takes_labels:
            return None
        if self._captures_mtp and given.get("input_ids") is not None:
            return torch.zeros_like(given["input_ids"])
        return None if self.mtp_layers else torch.empty((0, 0), dtype=torch.int64)

    def _end_pass(self, *_: Any) -> None:
        super()._end_pass()
        restore_metrics()

    def close(self) -> None:
        restore_metrics()  # an interrupt leaves the end of a pass out
        super().close()

    @eager
    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None, **of_loss: Any
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        if not self.in_pass:  # another model shares the output layer
            return self.previous("forward")(input_, weight, runtime_gather_output, **of_loss)
        call = HeadCall(self.head, input_, weight)
        self._record(self.captured, call)
        logits = UncomputedLogits(call, self._capture)
        return self._loss(logits, **of_loss) if of_loss.pop("output_cross_entropy_loss", False) else (logits, None)

    @eager
    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        if not isinstance(logits, UncomputedLogits):  # the head was called outside a pass
            return self.previous("compute_language_model_loss")(labels, logits)
        return self._loss(logits, labels, telemetry=self.language_model.training)

    def _loss(self, logits: UncomputedLogits, labels: Tensor, **arguments: Any) -> Tensor:
        """Return the fused loss of MTP heads, which come first, and an empty one, [b, s, 0], of the main head."""
        if self.mtp_losses_left == 0:
            return self._capture(logits.call).transpose(0, 1)
        self.mtp_losses_left -= 1
        if self._captures_mtp:
            return self._capture_mtp(logits)
        enabled = [owner for owner in owners_on(self.language_model) if isinstance(owner, FusedLoss)]
        options = enabled[0].options_now() if enabled else {}  # the MTP losses keep the softcap, say
        return logits.compute_loss(labels, **arguments, **options)

    def _capture_mtp(self, logits: UncomputedLogits) -> Tensor:
        """Record the inputs of an MTP head's logits; return losses [b, s] of 0, and largest logits for metrics."""
        call, head = logits.call, CapturedHead()
        nothing = torch.zeros(call.tokens, dtype=torch.float32, device=call.hidden.device)
        logits.largest = nothing.T, nothing.T.long()
        call.depth = len(self.captured.mtp_heads) + 1
        self._record(head, call)
        self.captured.mtp_heads += (head,)
        return nothing

    def _record(self, head: CapturedHead, call: HeadCall) -> None:
        if self._captures_mtp:
            call.ends = sequence_ends(self._packed, call.tokens[1], call.hidden.device)
        head._record(call)

    def _capture(self, call: HeadCall) -> Tensor:
        """Record the inputs of the main head's logits, and return [s, b, 0] in their place, which takes no memory."""
        self._record(self.captured, call)
        self.mtp_losses_left = self.mtp_layers
        batch, sequence = call.tokens
        return call.hidden.new_empty((sequence, batch, 0)).as_subclass(NoLogits)


class capture_lm_head(contextlib.AbstractContextManager[CapturedHead, None]):
    """While open, the model's forward pass skips the output projection and records its inputs.

        with capture_lm_head(model) as head:
            model(input_ids, position_ids, attention_mask)
        out = head.linear_cross_entropy(labels, temperature=0.7)

    The model returns an empty [b, s, 0] tensor; reading it as logits raises. With MTP, pass the labels: the MTP losses
    are computed, fused, and take effect on the hidden states as in Megatron; the main loss is left to the caller. The
    last of several forward passes is kept. The result stays valid after the context; it keeps hidden and its graph
    alive. All ranks of the head's tensor-parallel group must open its first capture together.

    Args:
        model: as in `enable_fused_linear_ce`.
        mtp: "capture": the MTP heads are captured as well (`CapturedHead.mtp_heads`), and the model's own MTP loss adds
            nothing, neither to gradients nor to its metrics. Labels need not be passed.

    Raises:
        TypeError: `model` neither is nor holds a megatron-core language model.
        ValueError: hidden and weight do not determine the logits, for the reasons listed; or there are several heads.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], mtp: Literal["loss", "capture"] = "loss"):
        validation.check_choice("mtp", mtp, ("loss", "capture"))
        self._model, self._captures_mtp = model, mtp == "capture"
        self._open: list[CapturingHead | None] = []  # one for each `with`; None: the model has no head

    def __enter__(self) -> CapturedHead:
        language_model = find_language_model(self._model)
        if language_model is None:
            self._open.append(None)
            return CapturedHead(NO_HEAD)
        # Ranks agree at a head's first capture only: the host waits for the answer.
        output_layer, reasons = language_model.output_layer, capturing_reasons(language_model)
        if self._captures_mtp and language_model.config.context_parallel_size > 1:
            reasons += ("with mtp='capture' rows of one sequence must not lie on several ranks of context parallelism",)
        if output_layer not in _capturable:
            reasons = reasons_of_group(language_model, reasons)
        if reasons:
            raise ValueError(f"the LM head cannot be captured: {'; '.join(reasons)}")
        _capturable.add(output_layer)
        head = CapturingHead(language_model, self._captures_mtp)
        self._open.append(head)
        head.open()
        return head.captured

    def __exit__(self, *raised: Any) -> None:
        if (head := self._open[-1]) is not None:
            head.close()
        self._open.pop()

    def __del__(self) -> None:  # an interrupt may come after `__enter__` and before `__exit__`
        for head in reversed(vars(self).get("_open", ())):
            if head is not None:
                head.close()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a capture has no {name} before it is opened: `with capture_lm_head(model) as head:`")
