"""`support_logprobs`: logprobs renormalised over the ids that a sampler kept of each token (sampling-mask replay)."""

from typing import Any

import torch
from torch import Tensor

from megatron_lce.core import validation
from megatron_lce.core.collectives import waited
from megatron_lce.core.gathered_logits import Ids, LogitsAtFunction, ids_of_offsets
from megatron_lce.core.products import own_arithmetic
from megatron_lce.core.tokens import rows_that_count
from megatron_lce.cross_entropy import linear_cross_entropy
from megatron_lce.logits_at import OF_GRADIENT, OF_HEAD, call_of_head, check_ids

_PADDING = 2**32 - 1  # in the lower half of a key that sorts ids by token and id


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
    **keywords: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Per-token logprobs over a set of kept ids: the label's logit less the log-sum-exp of the set's logits.

    A top-p or top-k sampler draws from `softmax` over the ids that it kept; a trainer that takes logprobs over the
    whole vocabulary sees another policy (DeepSeek-V3.2, 2025, section 3.1, "Keep Sampling Mask"). No product over the
    vocabulary is made for a token that has a set.

    Args:
        hidden, weight, labels: as `linear_cross_entropy` takes them, but no DTensors.
        ids, offsets: the kept ids of token n are `ids[offsets[n] : offsets[n + 1]]`, as in `linear_logits_at`; one that
            is repeated counts once. A token without ids takes the whole vocabulary.
        entropy: True also returns the entropy of the full distribution, without gradient, for one more forward pass.
        empty_rows: whether some tokens may have no ids: the host waits once for their number. False: such a row is NaN.
        ignore_index: rows with this label are 0 and get no gradient.
        keywords: as `linear_logits_at` takes them.

    Returns:
        fp32 logprobs of labels' shape, never positive, the same bits on every rank; 0 and without gradient where the
        label is the only id; NaN where the label, or any of its set's ids, is not what a rank owns, or the label is
        outside its set. With `entropy` a pair of it and the entropy.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
    labels, ids, offsets = waited(labels), waited(ids), waited(offsets)

    def check(shape: tuple[int, ...]) -> None:
        validation.check_flag("entropy", entropy)
        validation.check_flag("empty_rows", empty_rows)
        validation.check_integer("ignore_index", ignore_index)
        validation.check_tensor("offsets", offsets)
        check_ids(ids, offsets, shape, hidden.device)
        validation.check_label_tensor(labels)
        if tuple(labels.shape) != shape or labels.device != hidden.device:
            raise ValueError(f"labels must be {shape} on {hidden.device}, got {tuple(labels.shape)} on {labels.device}")

    own = {"entropy": entropy, "empty_rows": empty_rows}
    call = call_of_head("support_logprobs", hidden, weight, keywords, (*OF_HEAD, *OF_GRADIENT), check, own)
    flat = labels.reshape(-1)
    ignored = flat == ignore_index
    with torch.no_grad():
        kept = _each_once(ids_of_offsets(ids, offsets), ignored)
        empty = _sums((kept.ids >= 0).float(), kept) == 0
        counted = rows_that_count(empty & ~ignored, call.options) if empty_rows else None
    with own_arithmetic(call.hidden.device, "support_logprobs"):
        logits = LogitsAtFunction.apply(call.hidden, call.weight, call, kept)
        logprobs = _log_softmax(logits, kept, flat).masked_fill(ignored, 0.0).view(labels.shape)
    num_empty = 0
    if counted is not None:
        num_empty = flat.shape[0] if counted.rows is None else counted.rows.shape[0]
    others = {"ignore_index": ignore_index, **keywords}
    if num_empty:
        empty = empty.view(labels.shape)
        of_empty = labels.masked_fill(~empty, ignore_index)
        dense = linear_cross_entropy(hidden, weight, of_empty, entropy=False, skip_ignored=num_empty, **others)
        logprobs = torch.where(empty, dense.logprobs, logprobs)
    if not entropy:
        return logprobs
    with torch.no_grad():
        full = linear_cross_entropy(hidden, weight, labels, **others).entropy
    assert full is not None
    return logprobs, full


def _each_once(ids: Ids, ignored: Tensor) -> Ids:
    """Sort each token's ids; repeated ones and those of ignored tokens become padding."""
    low = ids.ids.clamp(max=_PADDING - 1).masked_fill_((ids.ids < 0) | ignored[ids.rows], _PADDING)
    key = (ids.rows * (_PADDING + 1) + low).sort().values
    low = key % (_PADDING + 1)
    nothing = low == _PADDING
    nothing[1:] |= key[1:] == key[:-1]
    return Ids(low.masked_fill_(nothing, -1), ids.rows, ids.offsets)


def _sums(values: Tensor, ids: Ids) -> Tensor:
    """Return the sum [N] over each token's values [M], which has a gradient."""
    return torch.segment_reduce(values, "sum", offsets=ids.offsets, unsafe=True)


def _log_softmax(logits: Tensor, ids: Ids, labels: Tensor) -> Tensor:
    """Return the logprob [N] of each label among its token's logits [M], NaN where it is none of them."""
    given = ids.ids >= 0
    is_label = given & (ids.ids == labels[ids.rows])
    largest = torch.segment_reduce(
        logits.detach().masked_fill(~given, -torch.inf), "max", offsets=ids.offsets, unsafe=True
    )
    shifted = torch.where(given, logits - largest[ids.rows], -torch.inf)
    log_sum = _sums(shifted.exp(), ids).log()
    of_label = _sums(shifted.masked_fill(~is_label, 0.0), ids)
    found = _sums(is_label.float(), ids)
    return (of_label - log_sum) * (found / found)  # a factor: the gradient of such a row is NaN, too
