"""What a capture of an LM head holds, and the fused operations on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.api import keywords as kw
from megatron_lce.api.linear_cross_entropy import linear_cross_entropy
from megatron_lce.api.linear_divergence import DivergenceLoss, linear_divergence, linear_divergence_loss
from megatron_lce.api.linear_logits_at import linear_logits_at
from megatron_lce.api.linear_token_loss import TokenLoss, TokenLossFunction, linear_token_loss
from megatron_lce.api.linear_topk import TopK, linear_topk
from megatron_lce.api.support_logprobs import support_logprobs
from megatron_lce.backends.choice import describe_backend
from megatron_lce.checks import validation
from megatron_lce.checks.together import laying_out, refusing
from megatron_lce.core.divergence_types import Kind, LinearDivergenceOutput
from megatron_lce.core.eager import warn
from megatron_lce.core.options import IGNORE_INDEX, LinearCrossEntropyOutput
from megatron_lce.megatron.head_call import HeadCall, StoredHead, batch_first, csr_sequence_first


class CapturedHead:
    """Inputs of the LM head in the last forward pass, and the fused operations on them.

    An operation is the function of the same name in `megatron_lce`, on the captured hidden states and weight. Tensors
    per token, such as labels, are [b, s], as Megatron passes them and under sequence parallel the full sequence; so are
    results. The head fixes tp_group, sequence_parallel, vocab_start, reduce_grad_hidden and weight_grad_sink, and
    scales of logits multiply the model's own (MuP). If the forward pass kept no graph (under no_grad, inside a
    reentrant checkpoint), results have none. Errors are those of the function, and RuntimeError if nothing was
    captured, or if hidden or weight was changed in place since, as by an optimizer's step.

    Only tensors of inference mode are copied, because nothing tells when they are overwritten: run a teacher under
    no_grad. Otherwise `hidden` is the tensor that the output layer was called with. To attach the capture to a tensor,
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

    weight: Tensor | None = None
    tp_group: ProcessGroup | None = None
    sequence_parallel = False

    def __init__(self, why_nothing: str = "no forward pass has reached the head"):
        self._why_nothing = why_nothing
        self._call: HeadCall | None = None
        self._mtp_heads: tuple[CapturedHead, ...] = ()
        self._is_used = True  # whether anything was read of the last pass

    @property
    def hidden(self) -> Tensor | None:
        self._is_used = True
        return None if self._call is None else self._call.hidden

    @property
    def mtp_heads(self) -> tuple[CapturedHead, ...]:
        self._is_used = True
        return self._mtp_heads

    def __repr__(self) -> str:
        if self._call is None:
            return f"CapturedHead(nothing captured: {self._why_nothing})"
        hidden, weight = self._call.hidden, self._call.weight
        parts = [f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, {hidden.dtype} on {hidden.device}"]
        parts += [f"tensor-parallel size {self._call.head.tp_group.size()}"]
        parts += ["sequence parallel"] * self.sequence_parallel + ["no graph"] * (not self._call.with_gradient)
        return f"CapturedHead({', '.join(parts)}, backend: {describe_backend('auto', hidden.device)})"

    def _start_pass(self) -> None:
        if not self._is_used:
            warn(
                "a forward pass inside capture_lm_head replaces another, which was not used: call the operations of "
                "the captured head after each pass, or capture each pass"
            )
        self._mtp_heads, self._is_used = (), True

    def _record(self, call: HeadCall) -> None:
        call.keep_inference_tensors()
        self._call, self.weight = call, call.weight
        self.tp_group, self.sequence_parallel = call.head.tp_group, call.sequence_parallel

    def chain_mask(self, labels: Tensor | None = None, ignore_index: int = IGNORE_INDEX) -> Tensor:
        """Return which tokens have a whole chain, bool [b, s]: a row of the main head for each of the `mtp_heads`.

        With the main head's labels, none of the rows may be ignored, its own at the token included.
        """
        call = self._captured_call()
        if labels is None:
            labels = call.hidden.new_full(call.batch_and_sequence, int(ignore_index == 0), dtype=torch.int64)
        validation.check_tensor("labels", labels, torch.int64)
        shape, wanted = tuple(labels.shape), call.batch_and_sequence
        validation.require(shape == wanted, "labels", f"be [b, s], {wanted}", shape)
        given = {"ignore_index": ignore_index}
        rows = [call.labels_of_rows(labels, given, depth) for depth in range(len(self.mtp_heads) + 1)]
        return (torch.stack(rows) != ignore_index).all(dim=0)

    def linear_cross_entropy(  # type: ignore[misc]
        self,
        labels: Tensor,
        temperature: float | Tensor = 1.0,  # by position, too, as other projects call it
        *,
        logits_cache_bytes: int | None = None,
        **options: Unpack[kw.TokenLossOptions],
    ) -> LinearCrossEntropyOutput:
        """Return `megatron_lce.linear_cross_entropy` of the captured head.

        Only `ignore_index` is ignored, not every negative label as with `enable_fused_linear_ce`. Padded columns of the
        vocabulary take part, as in Megatron, unless `vocab_size` is given.
        """
        with self._captured() as call:
            given = {"temperature": temperature, "logits_cache_bytes": logits_cache_bytes, **options}
            return call.run(linear_cross_entropy, labels, **given)

    def linear_token_loss(
        self,
        labels: Tensor,
        loss: TokenLossFunction,
        *per_token: Tensor,
        **options: Unpack[kw.TokenLossOptions],
    ) -> TokenLoss:
        """Return `megatron_lce.linear_token_loss` of the captured head; `per_token`: tensors [b, s, ...]."""
        with self._captured() as call:
            parts = [call.sequence_first(f"per_token[{i}]", tensor) for i, tensor in enumerate(per_token)]
            return call.run(linear_token_loss, labels, loss, *parts, **options)

    def linear_divergence(
        self,
        teacher_head: CapturedHead | StoredHead,
        *,
        kinds: Sequence[Kind] = ("forward_kl", "tv"),
        labels: Tensor | None = None,
        **options: Unpack[kw.DivergenceOptions],
    ) -> LinearDivergenceOutput:
        """Return `megatron_lce.linear_divergence` of this captured head, the student's, and a teacher's.

            out = head.linear_divergence(teacher_head, kinds=("tv",), labels=labels, temperature=1.0)

        Args:
            teacher_head: the capture of the teacher's forward pass over the same tokens, its vocabulary sharded over
                the same ranks; or a `StoredHead`. It gets no gradient: run its forward pass under no_grad.
        """
        return self._compared(linear_divergence, teacher_head, {"kinds": kinds, "labels": labels, **options})

    def linear_jsd(
        self,
        teacher_head: CapturedHead | StoredHead,
        *,
        labels: Tensor | None = None,
        **options: Unpack[kw.DivergenceOptions],
    ) -> Tensor | tuple[Tensor, LinearCrossEntropyOutput]:
        """Return `megatron_lce.linear_jsd` of this captured head and a teacher's, as `linear_divergence` takes it."""
        out = self.linear_divergence(teacher_head, kinds=("jsd",), labels=labels, **options)
        return out.jsd if out.student is None else (out.jsd, out.student)

    def linear_divergence_loss(
        self,
        teacher_head: CapturedHead | StoredHead,
        labels: Tensor,
        loss: TokenLossFunction,
        *per_token: Tensor,
        kinds: Sequence[Kind] = ("forward_kl", "tv"),
        **options: Unpack[kw.DivergenceOptions],
    ) -> DivergenceLoss:
        """Return `megatron_lce.linear_divergence_loss` of this captured head and a teacher's.

        `per_token`: tensors [b, s, ...]; teachers are as in `linear_divergence`.
        """
        given = {"kinds": kinds, **options, "labels": labels}
        return self._compared(linear_divergence_loss, teacher_head, given, loss, *per_token)

    def _compared(
        self,
        operation: Callable[..., Any],
        teacher_head: CapturedHead | StoredHead,
        options: Mapping[str, Any],
        *loss: Any,  # the caller's, and its tensors per token
    ) -> Any:
        with self._captured() as student:
            teacher: Any = teacher_head
            with refusing():
                if isinstance(teacher_head, CapturedHead):
                    teacher = teacher_head._captured_call(" of the teacher")
                student.check_teacher(teacher)
            heads, given = student.compared_with(teacher, options)
            loss = tuple(student.sequence_first(f"per_token[{i - 1}]", x) if i else x for i, x in enumerate(loss))
            by_place = [given.pop("labels"), *loss] if loss else []
            return batch_first(operation(student.hidden, student.weight, *heads, *by_place, **given))

    def linear_logits_at(
        self, ids: Tensor, offsets: Tensor | None = None, **options: Unpack[kw.HeadGradientOptions]
    ) -> Tensor:
        """Return `megatron_lce.linear_logits_at` of the captured head: `ids` [b, s, K], or CSR over b * s tokens."""
        with self._captured() as call:
            given, permutation = call.keywords(options), None
            if offsets is None:
                ids = call.sequence_first("ids", ids)
            else:
                ids, offsets, permutation = csr_sequence_first(ids, offsets, call.batch_and_sequence)
            logits = linear_logits_at(call.hidden, call.weight, ids, offsets, **given)
            if permutation is None:
                return batch_first(logits)
            return torch.empty_like(logits).index_copy(0, permutation, logits)

    def support_logprobs(
        self,
        labels: Tensor,
        ids: Tensor,
        offsets: Tensor,
        *,
        entropy: bool = False,
        empty_rows: bool = True,
        ignore_index: int = IGNORE_INDEX,
        **options: Unpack[kw.HeadGradientOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return `megatron_lce.support_logprobs` of the captured head: labels [b, s], CSR over the b * s tokens."""
        with self._captured() as call:
            ids, offsets, _ = csr_sequence_first(ids, offsets, call.batch_and_sequence)
            own = {"entropy": entropy, "empty_rows": empty_rows, "ignore_index": ignore_index}
            return call.run(support_logprobs, labels, ids, offsets, **own, **options)

    def linear_topk(self, k: int, **options: Unpack[kw.HeadOptions]) -> TopK:
        """Return `megatron_lce.linear_topk` of the captured head: [b, s, K], and [b, s]."""
        with self._captured() as call:
            given = call.keywords(options)
            del given["weight_grad_sink"]
            return batch_first(linear_topk(call.hidden, call.weight, k, **given))

    @contextlib.contextmanager
    def _captured(self) -> Iterator[HeadCall]:
        """Yield the call; without gradients if the pass kept no graph, because the head alone would train."""
        call = self._captured_call()
        with laying_out(), torch.set_grad_enabled(torch.is_grad_enabled() and call.with_gradient):
            yield call

    def _captured_call(self, whose: str = "") -> HeadCall:
        self._is_used = True
        if self._call is None:
            raise RuntimeError(f"nothing was captured{whose}: {self._why_nothing}")
        return self._call
