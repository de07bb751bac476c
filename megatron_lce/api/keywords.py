"""Types of the keywords that operations share with `linear_cross_entropy`, for editors and type checkers.

`Captured...` are those of a captured head's operations.
"""

from typing import TypedDict

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.core.options import BackendName, Telemetry, WeightGradSink


class _LogitsKeywords(TypedDict, total=False):
    logits_scale: float
    softcap: float | None
    vocab_size: int | None
    logits_dtype: torch.dtype | None
    workspace_bytes: int
    backend: BackendName


class _LabelsKeywords(TypedDict, total=False):
    ignore_index: int
    entropy: bool
    telemetry: Telemetry
    candidates: Tensor | None
    skip_ignored: bool | int


class CapturedOptions(_LogitsKeywords, total=False):  # of linear_logits_at and linear_topk
    temperature: float | Tensor


class HeadOptions(CapturedOptions, total=False):  # of linear_topk
    tp_group: ProcessGroup | None
    sequence_parallel: bool
    vocab_start: int | None


class HeadGradientOptions(HeadOptions, total=False):  # of linear_logits_at and support_logprobs
    reduce_grad_hidden: bool
    weight_grad_sink: WeightGradSink | None


class TokenLossOptions(HeadGradientOptions, _LabelsKeywords, total=False):
    """Keywords of `linear_token_loss`."""


class CapturedTokenLossOptions(CapturedOptions, _LabelsKeywords, total=False):
    """Keywords of a captured head's `linear_token_loss`."""


class CapturedCrossEntropyOptions(_LogitsKeywords, _LabelsKeywords, total=False):  # temperature is positional
    logits_cache_bytes: int


class CapturedSupportOptions(CapturedOptions, total=False):  # of support_logprobs
    entropy: bool
    empty_rows: bool
    ignore_index: int


class _DivergenceOptions(TypedDict, total=False):
    beta: float
    temperature: float | Tensor
    student_logits_scale: float
    teacher_logits_scale: float
    student_softcap: float | None
    teacher_softcap: float | None
    teacher_temperature: float | Tensor | None
    ignore_index: int
    vocab_size: int | None
    skip_ignored: bool | int
    workspace_bytes: int
    backend: BackendName


class CapturedJsdOptions(_DivergenceOptions, total=False):  # of linear_jsd, but return_student
    labels: Tensor | None


class CapturedDivergenceLossOptions(_DivergenceOptions, total=False):
    """Keywords of a captured head's `linear_divergence_loss`."""

    return_student: bool


class CapturedDivergenceOptions(CapturedDivergenceLossOptions, total=False):  # of linear_divergence
    labels: Tensor | None


class DivergenceLossOptions(CapturedDivergenceLossOptions, total=False):
    """Keywords of `linear_divergence_loss`."""

    tp_group: ProcessGroup | None
    sequence_parallel: bool
    vocab_start: int | None
    weight_grad_sink: WeightGradSink | None


class DivergenceOptions(DivergenceLossOptions, total=False):
    """Keywords of `linear_divergence` and `linear_jsd`."""

    labels: Tensor | None
