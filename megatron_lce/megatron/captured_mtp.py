"""Heads of multi-token prediction in a capture: rows that predict the same token, and Megatron's own MTP loss.

Row t of depth d predicts the token that row t + d of the main head, depth 0, predicts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_trackers: list[dict[str, Any]] = []  # the one in which Megatron logs its MTP losses, while they are discarded


def sequence_ends(packed_seq_params: Any, num_tokens: int, device: torch.device) -> Tensor:
    """Return the end of the sequence that holds each of the positions, [num_tokens] int64; of padding, its position."""
    positions = torch.arange(num_tokens, dtype=torch.int64, device=device)
    if packed_seq_params is None:
        return torch.full_like(positions, num_tokens)
    bounds = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
    bounds = (packed_seq_params.cu_seqlens_q if bounds is None else bounds).to(device=device, dtype=torch.int64)
    number = torch.searchsorted(bounds, positions, right=True)
    return torch.where(number < len(bounds), bounds[number.clamp(max=len(bounds) - 1)], positions)


def later_labels(labels: Tensor, ends: Tensor, shift: int, ignore_index: int) -> Tensor:
    """Return the labels [b, s] of the rows `shift` further on; `ignore_index` where the sequence has none."""
    has_later_row = torch.arange(ends.shape[0], dtype=torch.int64, device=ends.device) + shift < ends
    return labels.roll(-shift, dims=1).masked_fill(~has_later_row, ignore_index)


def discard_metrics() -> None:
    """Keep what Megatron logs of its MTP losses out of its tracker until `restore_metrics`."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as helper

    if not _trackers:  # else they are discarded already
        _trackers.append(helper.tracker)
        helper.tracker = {}


def restore_metrics() -> None:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as helper

    if _trackers:
        helper.tracker = _trackers.pop()
