"""The result of a capture: a head's hidden states and weight, and the fused operations on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.api.keywords import (
    CapturedCrossEntropyOptions,
    CapturedJsdOptions,
    CapturedOptions,
    CapturedSupportOptions,
    CapturedTokenLossOptions,
)
from megatron_lce.api.linear_cross_entropy import linear_cross_entropy
from megatron_lce.api.linear_jsd import linear_jsd
from megatron_lce.api.linear_logits_at import linear_logits_at
from megatron_lce.api.linear_token_loss import TokenLoss, TokenLossFunction, linear_token_loss
from megatron_lce.api.linear_topk import TopK, linear_topk
from megatron_lce.api.support_logprobs import support_logprobs
from megatron_lce.backends.choice import describe_backend
from megatron_lce.core.options import LinearCrossEntropyOutput
from megatron_lce.megatron.head_call import HeadCall, batch_first, check_not_fixed, csr_sequence_first


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
    `hidden` and `weight` are None on a pipeline stage without a head, and before the forward pass.
    """

    def __init__(self, why_nothing: str = "no forward pass has reached the head"):
        self._why_nothing = why_nothing
        self._call: HeadCall | None = None

    def __repr__(self) -> str:
        if self._call is None:
            return f"CapturedHead(nothing captured: {self._why_nothing})"
        hidden, weight = self._call.hidden, self._call.weight
        parts = [f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, {hidden.dtype} on {hidden.device}"]
        parts += [f"tensor-parallel size {self._call.tp_group.size()}"]
        parts += ["sequence parallel"] * self.sequence_parallel + ["no graph"] * (not self._call.with_gradient)
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
        self, labels: Tensor, temperature: float | Tensor = 1.0, **options: Unpack[CapturedCrossEntropyOptions]
    ) -> LinearCrossEntropyOutput:
        """Return `megatron_lce.linear_cross_entropy` of the captured head.

        Only `ignore_index` is ignored, not every negative label as with `enable_fused_linear_ce`. Padded columns of the
        vocabulary take part, as in Megatron, unless `vocab_size` is given.
        """
        with self._captured(options) as call:
            return call.run(linear_cross_entropy, labels, temperature=temperature, **options)

    def linear_token_loss(
        self, labels: Tensor, loss: TokenLossFunction, *per_token: Tensor, **options: Unpack[CapturedTokenLossOptions]
    ) -> TokenLoss:
        """Return `megatron_lce.linear_token_loss` of the captured head; `per_token`: tensors [b, s, ...]."""
        with self._captured(options) as call:
            parts = [call.sequence_first(f"per_token[{i}]", tensor) for i, tensor in enumerate(per_token)]
            return call.run(linear_token_loss, labels, loss, *parts, **options)

    def linear_jsd(
        self, teacher_head: CapturedHead, **options: Unpack[CapturedJsdOptions]
    ) -> Tensor | tuple[Tensor, LinearCrossEntropyOutput]:
        """Return `megatron_lce.linear_jsd` of this captured head, the student's, and a teacher's.

            divergence = head.linear_jsd(teacher_head, labels=labels, beta=0.5, temperature=1.0, token_weights=None)

        Args:
            teacher_head: the capture of the teacher's forward pass over the same tokens, its vocabulary sharded over
                the same ranks. It gets no gradient: run its forward pass under no_grad.
        """
        with self._captured(options) as student:
            if not isinstance(teacher_head, CapturedHead):
                raise TypeError(f"teacher_head must be a captured head, got {type(teacher_head).__name__}")
            teacher = teacher_head._captured_call(" of the teacher")
            same = {"sequence_parallel": "sequence_parallel", "tokens": "tokens [b, s]", "ranks": "ranks in tp_group"}
            for name, words in same.items():
                mine, its = getattr(student, name), getattr(teacher, name)
                if mine != its:
                    raise ValueError(f"teacher_head must have the student's {words}, {mine}, got {its}")
            teacher.check_unchanged()
            others: dict[str, Any] = {**options}
            forms = student.form("student", others) | teacher.form("teacher", others)
            given = student.call_keywords(others | forms)
            return batch_first(linear_jsd(student.hidden, student.weight, teacher.hidden, teacher.weight, **given))

    def linear_logits_at(
        self, ids: Tensor, offsets: Tensor | None = None, **options: Unpack[CapturedOptions]
    ) -> Tensor:
        """Return `megatron_lce.linear_logits_at` of the captured head: `ids` [b, s, K], or CSR over b * s tokens."""
        with self._captured(options) as call:
            given, places = call.keywords(options), None
            if offsets is None:
                ids = call.sequence_first("ids", ids)
            else:
                ids, offsets, places = csr_sequence_first(ids, offsets, call.tokens)
            logits = linear_logits_at(call.hidden, call.weight, ids, offsets, **given)
            return batch_first(logits) if places is None else torch.empty_like(logits).index_copy(0, places, logits)

    def support_logprobs(
        self, labels: Tensor, ids: Tensor, offsets: Tensor, **options: Unpack[CapturedSupportOptions]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return `megatron_lce.support_logprobs` of the captured head: labels [b, s], CSR over the b * s tokens."""
        with self._captured(options) as call:
            ids, offsets, _ = csr_sequence_first(ids, offsets, call.tokens)
            return call.run(support_logprobs, labels, ids, offsets, **options)

    def linear_topk(self, k: int, **options: Unpack[CapturedOptions]) -> TopK:
        """Return `megatron_lce.linear_topk` of the captured head: [b, s, K], and [b, s]."""
        with self._captured(options) as call:
            given = call.keywords(options)
            del given["weight_grad_sink"]
            return batch_first(linear_topk(call.hidden, call.weight, k, **given))

    @contextlib.contextmanager
    def _captured(self, keywords: Mapping[str, Any]) -> Iterator[HeadCall]:
        """Yield the call; without gradients if the pass kept no graph, because the head alone would train."""
        check_not_fixed(keywords)
        call = self._captured_call()
        with torch.set_grad_enabled(torch.is_grad_enabled() and call.with_gradient):
            yield call

    def _captured_call(self, whose: str = "") -> HeadCall:
        if self._call is None:
            raise RuntimeError(f"nothing was captured{whose}: {self._why_nothing}")
        return self._call
