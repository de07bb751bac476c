"""Types of the keywords that operations share with `linear_cross_entropy`, for editors and type checkers.

A captured head's operations have the same; those that it fixes raise.
"""

from typing import TypedDict

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.core.options import BackendName, Telemetry, WeightGradSink


class HeadOptions(TypedDict, total=False):  # of linear_topk
    temperature: float | Tensor
    tp_group: ProcessGroup | None
    sequence_parallel: bool
    vocab_start: int | None
    logits_scale: float
    softcap: float | None
    vocab_size: int | None
    logits_dtype: torch.dtype | None
    workspace_bytes: int
    backend: BackendName


class HeadGradientOptions(HeadOptions, total=False):  # of linear_logits_at and support_logprobs
    reduce_grad_hidden: bool
    weight_grad_sink: WeightGradSink | None


class TokenLossOptions(HeadGradientOptions, total=False):
    """Keywords of `linear_token_loss`; but one, those of `linear_cross_entropy`."""

    ignore_index: int
    entropy: bool
    telemetry: Telemetry
    candidates: Tensor | None
    skip_ignored: bool | int


class DivergenceOptions(TypedDict, total=False):  # of linear_divergence, linear_divergence_loss and linear_jsd
    beta: float
    temperature: float | Tensor
    student_logits_scale: float
    teacher_logits_scale: float
    student_softcap: float | None
    teacher_softcap: float | None
    teacher_temperature: float | Tensor | None
    return_student: bool
    tp_group: ProcessGroup | None
    sequence_parallel: bool
    vocab_start: int | None
    ignore_index: int
    vocab_size: int | None
    skip_ignored: bool | int
    workspace_bytes: int
    backend: BackendName
    weight_grad_sink: WeightGradSink | None
