"""`support_logprobs`: logprobs renormalised over the ids that a sampler kept (sampling-mask replay)."""

import functools
from typing import Unpack

import torch
from torch import Tensor

from megatron_lce.api.keywords import HeadGradientOptions
from megatron_lce.api.linear_cross_entropy import linear_cross_entropy
from megatron_lce.api.linear_logits_at import check_ids
from megatron_lce.checks import validation
from megatron_lce.checks.together import check_keywords, checked_together, keyword_options
from megatron_lce.core.collectives import wait_if_async
from megatron_lce.core.eager import eager
from megatron_lce.core.logits_at import LogitsAtFunction, csr_from_offsets
from megatron_lce.core.tokens import RowIndex


@eager
def support_logprobs(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V_local, H]
    labels: Tensor,  # [...]
    ids: Tensor,  # [M]
    offsets: Tensor,  # [N + 1]
    *,
    entropy: bool = False,
    empty_rows: bool = True,
    ignore_index: int = -100,
    **options: Unpack[HeadGradientOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Per-token logprobs over a set of kept ids: the label's logit minus the log-sum-exp of the set's logits.

    A top-p or top-k sampler draws from the softmax over the ids that it kept; a trainer with logprobs over the whole
    vocabulary sees another policy (DeepSeek-V3.2, 2025, section 3.1, "Keep Sampling Mask"). A token with a set needs no
    product over the vocabulary.

    Args:
        hidden, weight, labels: as in `linear_cross_entropy`, but no DTensors.
        ids, offsets: kept ids of each token, as CSR (see `linear_logits_at`); repeated ones have no effect. A token
            without ids takes the whole vocabulary.
        entropy: True: also return the entropy over the whole vocabulary, without gradient, for one more forward pass.
        empty_rows: True: some tokens may have no ids; the host waits once for their number. False: such a row is NaN.
        ignore_index, options: as in `linear_cross_entropy`.

    Returns:
        fp32 logprobs of labels' shape, never positive, the same bits on every rank; 0 and without gradient if the label
        is the only id; NaN if no rank owns the label or an id of the set, or the label is not in the set. With
        `entropy` a pair of logprobs and entropy.

    Raises:
        TypeError, ValueError: see `linear_cross_entropy`.
    """
    labels, ids, offsets = wait_if_async(labels), wait_if_async(ids), wait_if_async(offsets)
    name, compared = "support_logprobs", {"entropy": entropy, "empty_rows": empty_rows, "ids": ids}
    call_options = keyword_options(options, HeadGradientOptions, entropy=False, ignore_index=ignore_index)
    with checked_together(name, hidden, weight, labels, call_options, compared=compared) as checks:
        check_keywords(name, options, HeadGradientOptions)
        validation.check_scalar("entropy", entropy, bool)
        validation.check_scalar("empty_rows", empty_rows, bool)
        validation.check_tensor("offsets", offsets)
        check_ids(ids, offsets, checks.shape, hidden.device)
    call = checks.call
    with torch.no_grad():
        csr_ids = csr_from_offsets(ids, offsets).deduplicated()
    logprobs = LogitsAtFunction.apply(call.head.hidden, call.head.weight, call, csr_ids, True).view(labels.shape)
    over_vocabulary = functools.partial(linear_cross_entropy, hidden, weight, ignore_index=ignore_index, **options)
    if empty_rows:
        sizes = torch.segment_reduce((csr_ids.ids >= 0).float(), "sum", offsets=csr_ids.offsets, unsafe=True)
        is_empty = (sizes == 0) & (call.labels != ignore_index)
        if num_empty := RowIndex.from_mask(is_empty, call.options.tp_group).count:
            is_empty = is_empty.view(labels.shape)
            empty_labels = labels.masked_fill(~is_empty, ignore_index)
            dense = over_vocabulary(empty_labels, entropy=False, skip_ignored=num_empty)
            logprobs = torch.where(is_empty, dense.logprobs, logprobs)
    if not entropy:
        return logprobs
    with torch.no_grad():
        row_entropy = over_vocabulary(labels).entropy
    assert row_entropy is not None
    return logprobs, row_entropy
