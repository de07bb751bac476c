"""`linear_logits_at`: logits of some ids of the vocabulary, at a cost proportional to the ids."""

from typing import Unpack

import torch
from torch import Tensor

from megatron_lce.api.keywords import HeadGradientOptions
from megatron_lce.checks import validation
from megatron_lce.checks.together import check_keywords, checked_together, keyword_options
from megatron_lce.core.collectives import wait_if_async
from megatron_lce.core.eager import eager
from megatron_lce.core.logits_at import LogitsAtFunction, csr_from_dense, csr_from_offsets


@eager
def linear_logits_at(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V_local, H]
    ids: Tensor,  # [..., K], or [M] with offsets
    offsets: Tensor | None = None,  # [N + 1]
    **options: Unpack[HeadGradientOptions],
) -> Tensor:
    """Logits of K ids of each token, with a gradient, at the cost of K products of length H for each token.

        logits = megatron_lce.linear_logits_at(hidden, weight, ids, tp_group=group, temperature=0.7)

    Logits are `z` of `linear_cross_entropy`. If tokens have different numbers of ids, pass them as CSR: token n has
    `ids[offsets[n] : offsets[n + 1]]`. Ids, offsets and the upstream gradient must be equal on every rank of the group.
    Gradients are bit-reproducible. A call takes about 100 bytes per id in addition to the workspace.

    Args:
        hidden, weight: as in `linear_cross_entropy`, but no DTensors.
        ids: int64 global ids, in any order, repeated or not; negative: padding. [..., K], tokens' shape first (under
            `sequence_parallel` the full [s, ...]); with `offsets` [M].
        offsets: int64 [N + 1] from 0 to M, ascending, for the N tokens in order; an id outside them is NaN. On a GPU
            nothing checks their order, because the host would wait.
        options: as in `linear_cross_entropy`.

    Returns:
        fp32 logits of ids' shape, the same bits on every rank: 0 at padding, NaN (without gradient) at an id that no
        rank owns, NaN in a row whose temperature is not positive and finite.

    Raises:
        TypeError, ValueError: see `linear_cross_entropy`.
        RuntimeError: in backward with `create_graph=True`.
    """
    name, ids, offsets = "linear_logits_at", wait_if_async(ids), wait_if_async(offsets)
    compared = {"ids": ids, "offsets": type(offsets).__name__}
    call_options = keyword_options(options, HeadGradientOptions, entropy=False)
    with checked_together(name, hidden, weight, None, call_options, compared=compared) as checks:
        check_keywords(name, options, HeadGradientOptions)
        check_ids(ids, offsets, checks.shape, hidden.device)
        checks.labels = checks.hidden.new_zeros(checks.shape, dtype=torch.int64)
    call = checks.call
    with torch.no_grad():
        csr_ids = csr_from_dense(ids.reshape(-1, ids.shape[-1])) if offsets is None else csr_from_offsets(ids, offsets)
    logits = LogitsAtFunction.apply(call.head.hidden, call.head.weight, call, csr_ids, False)
    if call.labels.numel() == 0:  # all ids lie outside the offsets
        outside = torch.full(ids.shape, torch.nan, dtype=torch.float32, device=ids.device).masked_fill_(ids < 0, 0.0)
        logits = torch.cat([logits, outside.view(-1)])
    return logits.view(ids.shape)


def check_ids(ids: Tensor, offsets: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """Check ids [..., K] of tokens of that shape, or CSR's ids [M] and offsets [N + 1]."""
    for name, tensor in {"ids": ids, **({} if offsets is None else {"offsets": offsets})}.items():
        validation.check_tensor(name, tensor, torch.int64)
        validation.require(tensor.device == device, name, f"be on hidden's device, {device}", tensor.device)
    if offsets is None:
        validation.check_ids_shape("ids", ids, shape, "the tokens'")
        return
    num_tokens = torch.Size(shape).numel()
    validation.require(ids.dim() == 1, "ids", "be [M] beside offsets", tuple(ids.shape))
    shape, requirement = tuple(offsets.shape), f"be [N + 1] for the {num_tokens} tokens"
    validation.require(shape == (num_tokens + 1,), "offsets", requirement, shape)
    if offsets.is_cpu:  # else the host would wait
        validation.check_ascending("offsets", offsets)
