"""Matmuls and memory of one step of the head on one rank, for each implementation in `HEADS`.

Megatron's by formula; the package's own by a dry run of it. Peaks include both gradients and exclude hidden, weight and
Megatron's `main_grad`. `tests/test_estimate.py` compares them with measured peaks and times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_lce.backends.torch import primitives as torch_backend
from megatron_lce.command.dry_run import AllocatingBackend, Counter, MetaSink, SizedGroup
from megatron_lce.core.call import Call
from megatron_lce.core.call_plan import Plan, plan_cross_entropy
from megatron_lce.core.cross_entropy import linear_cross_entropy_autograd
from megatron_lce.core.known_loss import UpstreamCheck
from megatron_lce.core.options import WORKSPACE_BYTES, Options, Shard
from megatron_lce.core.plan import ceil_div
from megatron_lce.core.token_loss import known_losses

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
UNLIMITED_CACHE = 2**62  # `logits_cache_bytes` that keeps the logits of any step
UNFUSED, FUSED = "Megatron", "Megatron, fused cross-entropy"
TE = "Megatron, TransformerEngine's cross-entropy"
OURS, KNOWN_LOSS = "megatron-lce", "megatron-lce, known_loss=True"
# Bytes per logit that passes over logits move, without the matmuls. Fitted to bf16 heads on an H200: the measured time
# minus the matmuls' time, times 4.8 TB/s; TransformerEngine's from whole steps.
MOVED_BY_MEGATRON = {UNFUSED: 70, FUSED: 40, TE: 10}
MOVED_RECOMPUTED, MOVED_KEPT = 2, 8  # per logit that backward recomputes, and per cached logit


@dataclass(frozen=True)
class HeadStep:
    """Forward and backward of one microbatch's head on one rank. The callers check the sizes."""

    tokens: int  # N, of the whole sequence: under sequence parallel each rank holds tokens / tp of hidden
    hidden_size: int  # H, a multiple of `ALIGNED_COLUMNS`
    columns: int  # this rank's rows of the weight, V / tp
    tp: int = 1
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.bfloat16  # of hidden and weight
    main_grad: bool = False  # the weight gradient is added to Megatron's fp32 buffer (`gradient_accumulation_fusion`)
    entropy: bool = True
    ignored: float = 0.0  # share of the tokens whose label is `ignore_index`
    skip_ignored: bool = False  # ignored rows are left out, by their number
    workspace_bytes: int = WORKSPACE_BYTES
    logits_cache_bytes: int = 0
    backend: Literal["triton", "torch"] = "triton"  # on a Hopper GPU; peaks of torch are those on a GPU, too

    def __str__(self) -> str:
        parallel = f"one rank of TP={self.tp}{' with sequence parallel' if self.gathers else ''}, "
        dtype = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        return f"{parallel * (self.tp > 1)}{self.tokens} tokens x {self.hidden_size} x {self.columns}, {dtype}"

    @property
    def logits(self) -> int:
        return self.tokens * self.columns

    @property
    def hidden_bytes(self) -> int:
        return self.tokens * self.hidden_size * self.dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        return self.columns * self.hidden_size * self.dtype.itemsize

    @property
    def gathers(self) -> bool:
        return self.sequence_parallel and self.tp > 1

    @property
    def own_hidden_bytes(self) -> int:
        """Bytes of the hidden states of this rank's tokens."""
        return self.hidden_bytes // self.tp if self.gathers else self.hidden_bytes

    @property
    def computed_tokens(self) -> int:
        return max(1, round(self.tokens * (1 - self.ignored))) if self.skip_ignored else self.tokens

    @property
    def plan(self) -> Plan:
        """How `linear_cross_entropy` cuts the step."""
        call = _call(self, Counter())
        sizes = call.size, self.computed_tokens, self.columns, self.workspace_bytes
        return plan_cross_entropy(*sizes, logits_cache_bytes=self.logits_cache_bytes)


class HeadCost(NamedTuple):
    """Cost of one step."""

    matmuls: float  # of tokens x hidden x columns each; 3 is the minimum
    moved_bytes: float  # by passes over logits
    kept_bytes: int  # held from forward to backward
    peak_bytes: int  # largest allocation at any time, gradients included

    def time_ms(self, step: HeadStep, tflops: float, terabytes: float) -> float:
        """Return the time of the matmuls, at TFLOP/s, plus the time of the passes over logits, at TB/s."""
        return self.matmuls * 2 * step.logits * step.hidden_size / (tflops * 1e9) + self.moved_bytes / (terabytes * 1e9)


def megatron(step: HeadStep, loss: str = UNFUSED) -> HeadCost:
    """Megatron's vocab-parallel cross-entropy: logits, and fp32 logits that become the softmax in place.

    `FUSED` (`cross_entropy_loss_fusion`) holds the fp32 logits and their exponentials at once. `TE`, of version 2.20,
    keeps the logits, and makes the gradient in a copy of them. Both are for 16-bit heads.
    """
    logits, softmax = step.dtype.itemsize * step.logits, 4 * step.logits
    unfused = softmax + (logits if step.dtype.itemsize == 2 else 0)
    in_loss = {UNFUSED: unfused, FUSED: unfused + softmax, TE: 2 * logits}[loss]
    backward = (
        logits + (1 + step.gathers) * step.hidden_bytes + step.gathers * step.own_hidden_bytes + step.weight_bytes
    )
    kept = logits if loss == TE else softmax
    return HeadCost(3, MOVED_BY_MEGATRON[loss] * step.logits, kept, max(in_loss, backward))


def default_cost(step: HeadStep) -> HeadCost:
    """`linear_cross_entropy`."""

    def losses(call: Call) -> tuple[Tensor, ...]:
        outputs = linear_cross_entropy_autograd(call)
        return (outputs.logprobs, outputs.entropy) if step.entropy else (outputs.logprobs,)

    return _dry_run(step, losses)


def known_loss(step: HeadStep) -> HeadCost | None:
    """`known_loss` of the flag and `linear_token_loss`: gradients are computed in forward, and scaled in backward.

    None: it would compute logits twice, because inputs are fp32, the workspace holds too few tokens, or the backend
    keeps no logits.
    """

    def losses(call: Call) -> tuple[Tensor]:
        return (known_losses("known_loss", call, lambda outputs: -outputs.logprobs, UpstreamCheck(0))[0],)

    cost = _dry_run(step, losses)
    return cost if cost.matmuls * step.tokens < 3.5 * step.computed_tokens else None


def _call(step: HeadStep, counter: Counter) -> Call:
    """Return the step's call on meta tensors."""
    shards = step.tp if step.gathers else 1
    backend: Any = AllocatingBackend(counter) if step.backend == "triton" else torch_backend
    hidden, weight = (
        torch.empty(rows, step.hidden_size, dtype=step.dtype, device="meta", requires_grad=True)
        for rows in (ceil_div(step.tokens, shards), step.columns)
    )
    labels = torch.empty(hidden.shape[0] * shards, dtype=torch.int64, device="meta")
    options = Options(
        tp_group=SizedGroup(step.tp) if step.tp > 1 else None,
        sequence_parallel=step.gathers,
        entropy=step.entropy,
        skip_ignored=step.computed_tokens if step.skip_ignored else False,
        logits_cache_bytes=step.logits_cache_bytes,
        workspace_bytes=step.workspace_bytes,
        weight_grad_sink=MetaSink(weight) if step.main_grad else None,
    )
    shard = Shard(0, step.columns, step.columns)
    return Call(hidden, weight, labels, 1.0, None, options, shard, backend, labels.shape, backend.matmul)


@torch.inference_mode(False)
@torch.enable_grad()
def _dry_run(step: HeadStep, losses: Callable[[Call], tuple[Tensor, ...]]) -> HeadCost:
    """Run forward and backward of the losses on meta tensors."""
    counter = Counter()
    call = _call(step, counter)
    with counter:
        outputs = losses(call)
        kept_bytes = counter.live_bytes
        upstream = [torch.empty_like(output) for output in outputs]
        gradients = torch.autograd.grad(outputs, (call.hidden, call.weight), upstream)
    del gradients
    matmuls = counter.multiplications / (step.logits * step.hidden_size)
    moved_bytes = MOVED_RECOMPUTED * counter.recomputed_logits + MOVED_KEPT * counter.cached_logits
    return HeadCost(matmuls, moved_bytes, kept_bytes, counter.peak_bytes)


HEADS: dict[str, Callable[[HeadStep], HeadCost | None]]
HEADS = {loss: partial(megatron, loss=loss) for loss in MOVED_BY_MEGATRON} | {
    OURS: default_cost,
    KNOWN_LOSS: known_loss,
}
