"""The types of inputs and outputs of a call."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

BackendName = Literal["auto", "triton", "torch"]
Telemetry = bool | Literal["mean_logit"]
WORKSPACE_BYTES = 512 * 2**20  # the default cap on transient buffers
IGNORE_INDEX = -100  # the label of an ignored row, as in torch


class LinearCrossEntropyOutput(NamedTuple):
    """Per-token results of the shape of labels; a result that was not requested is `None`.

    logprobs        fp32, log p(label), never positive
    entropy         fp32, in nats
    lse             fp32, log-sum-exp of the logits
    max_logit       fp32, largest logit over the valid columns; no gradient
    min_logit       fp32, smallest logit over the valid columns; no gradient
    argmax          int64, global vocabulary id of the largest logit, the lowest on ties, -1 in NaN rows; no gradient
    sum_pi_squared  fp32, sum of p^2 over the valid columns; no gradient
    logits_norm     fp32, L2 norm of the logits of the valid columns, NaN where one is beyond 1e18; no gradient
    mean_logit      fp32, mean of the logits of the valid columns, NaN where one is beyond 1e18, or alone 1e16
    candidate_logprobs  fp32 [..., K], log p(candidate), never positive, with the bits of `logprobs` at the label
    """

    logprobs: Tensor
    entropy: Tensor | Any  # `Any`: a type checker lets pass what was requested, which it cannot know
    lse: Tensor
    max_logit: Tensor | Any = None
    min_logit: Tensor | Any = None
    argmax: Tensor | Any = None
    sum_pi_squared: Tensor | Any = None
    logits_norm: Tensor | Any = None
    mean_logit: Tensor | Any = None
    candidate_logprobs: Tensor | Any = None


DIFFERENTIABLE_SCALARS = ("logprobs", "entropy", "lse", "mean_logit")  # outputs of one number a token
DIFFERENTIABLE_OUTPUTS = (*DIFFERENTIABLE_SCALARS, "candidate_logprobs")


class WeightGradSink(Protocol):
    """A buffer of the caller to which the weight gradient is added (Megatron's `main_grad`)."""

    def buffer(self) -> Tensor:
        """Return the fp32 tensor [V_local, H] to which the gradient is added."""

    def finish(self) -> Tensor | None:
        """Return what autograd receives as the weight gradient. Called once, after the last addition."""


@dataclass(frozen=True)
class Options:
    """Keywords of `linear_cross_entropy`, which documents them. The tensors among them move to the `Call`."""

    tp_group: ProcessGroup | None = None
    sequence_parallel: bool = False
    temperature: float | Tensor = 1.0
    logits_scale: float = 1.0
    softcap: float | None = None
    ignore_index: int = IGNORE_INDEX
    vocab_start: int | None = None
    vocab_size: int | None = None
    entropy: bool = True
    telemetry: Telemetry = False
    logits_dtype: torch.dtype | None = None
    candidates: Tensor | None = None
    skip_ignored: bool | int = False
    logits_cache_bytes: int | None = None
    workspace_bytes: int = WORKSPACE_BYTES
    reduce_grad_hidden: bool = True
    backend: BackendName = "auto"
    weight_grad_sink: WeightGradSink | None = None


class Shard(NamedTuple):
    """This rank's part of the vocabulary."""

    start: int  # global id of the first column
    num_columns: int  # number of columns of the vocabulary; padding follows them
    max_columns: int  # number of columns of the largest shard of the group, padding included, for plans
