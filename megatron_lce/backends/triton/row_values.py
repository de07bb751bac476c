"""`prepare_rows`, `write_outputs` and `row_terms`, one launch each: at TP=8 a dozen would take as long as a product."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.packed import extremes_at, row_terms_at, sums_at
from megatron_lce.core.lm_head import (
    LOG_SUM_OF_IGNORED_ROW,
    NUM_TERMS,
    SCALE_OF_IGNORED_ROW,
    LMHead,
    RowInputs,
    RowSoftmax,
)
from megatron_lce.core.options import LinearCrossEntropyOutput, Options, Shard
from megatron_lce.core.plan import ceil_div
from megatron_lce.core.statistics import CHUNK_COLUMNS, FIXED_POINT_UNIT, LN_2

_LN_2 = tl.constexpr(LN_2)
_UNIT = tl.constexpr(FIXED_POINT_UNIT)
_CHUNK_COLUMNS = tl.constexpr(CHUNK_COLUMNS)
_LOG_SUM_OF_IGNORED_ROW = tl.constexpr(LOG_SUM_OF_IGNORED_ROW)
_SCALE_OF_IGNORED_ROW = tl.constexpr(SCALE_OF_IGNORED_ROW)
_STRIDES = ("grad_logprobs_stride", "grad_entropy_stride", "grad_lse_stride", "grad_mean_logit_stride")


def prepare_rows(head: LMHead, labels: Tensor, ignore_index: int, shard: Shard) -> RowInputs:
    rows = RowInputs(*(torch.empty_like(labels, dtype=dtype) for dtype in (torch.int32, torch.float32, torch.float32)))
    temperature, num_tokens = head.temperature, labels.shape[0]
    temperatures, temperature_scalar = (
        (temperature.contiguous(), 1.0) if isinstance(temperature, Tensor) else (None, temperature)
    )
    tiles.launch(
        _prepare_rows_kernel,
        (ceil_div(num_tokens, tiles.ROW_BLOCK),),
        labels,
        fp_fusion=True,
        label_ptr=labels.contiguous(),
        temperature_ptr=temperatures,
        out=rows,
        N=num_tokens,
        temperature=temperature_scalar,
        logits_factor=head.logits_factor,
        ignore_index=ignore_index,
        vocab_start=shard.start,
        num_columns=shard.num_columns,
        BLOCK_N=tiles.ROW_BLOCK,
    )
    return rows


def write_outputs(
    packed_extremes: Tensor, sums: Tensor, rows: RowInputs, options: Options, outputs: LinearCrossEntropyOutput
) -> RowSoftmax:
    num_tokens, entropy, telemetry = rows.labels.shape[0], options.entropy, options.telemetry
    saved = (
        packed_extremes.new_empty(num_tokens) if requested else None for requested in (True, True, entropy, telemetry)
    )
    softmax = RowSoftmax(packed_extremes[0], *saved)  # type: ignore[arg-type]
    tiles.launch(
        _write_outputs_kernel,
        (ceil_div(num_tokens, tiles.ROW_BLOCK),),
        packed_extremes,
        fp_fusion=False,  # the same bits with and without the optional outputs
        extremes_ptr=packed_extremes,
        sums_ptr=sums,
        to_nats_ptr=rows.to_nats,
        outputs=outputs._replace(candidate_logprobs=None),  # `megatron_lce.core.candidates` makes them
        saved=softmax,
        N=num_tokens,
        ENTROPY=entropy,
        MEAN=bool(telemetry),
        TELEMETRY=telemetry is True,
        BLOCK_N=tiles.ROW_BLOCK,
    )
    return softmax


def row_terms(
    rows: RowInputs, softmax: RowSoftmax, upstream: Sequence[Tensor | None], head: LMHead
) -> tuple[Tensor, Tensor]:
    num_tokens = rows.labels.shape[0]
    grad_logprobs, grad_entropy, grad_lse, grad_mean_logit = upstream
    terms = rows.scale.new_empty(NUM_TERMS + (grad_mean_logit is not None), num_tokens)
    has_grad = rows.scale.new_empty(num_tokens, dtype=torch.bool)
    tiles.launch(
        _row_terms_kernel,
        (ceil_div(num_tokens, tiles.ROW_BLOCK),),
        terms,
        fp_fusion=True,
        scale_ptr=rows.scale,
        to_nats_ptr=rows.to_nats,
        saved=softmax,
        grad_logprobs_ptr=grad_logprobs,
        grad_entropy_ptr=grad_entropy,
        grad_lse_ptr=grad_lse,
        grad_mean_logit_ptr=grad_mean_logit,
        **{name: 0 if grad is None else grad.stride(0) for name, grad in zip(_STRIDES, upstream, strict=True)},
        terms_ptr=terms,
        has_grad_ptr=has_grad,
        N=num_tokens,
        slope=head.slope,
        BLOCK_N=tiles.ROW_BLOCK,
    )
    return terms, has_grad


@triton.jit(do_not_specialize=["N", "temperature", "logits_factor", "ignore_index", "vocab_start", "num_columns"])
def _prepare_rows_kernel(
    label_ptr,  # [N] int64, global
    temperature_ptr,  # [N], or None
    out,  # `RowInputs`, [N] out each
    N,
    temperature,  # where there is no temperature_ptr
    logits_factor,
    ignore_index,
    vocab_start,
    num_columns,
    BLOCK_N: tl.constexpr,
):
    """Write the `RowInputs` of BLOCK_N tokens."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    label = tl.load(label_ptr + offs_n, mask=mask, other=0)
    ignored = label == ignore_index
    local = label - vocab_start
    in_shard = (local >= 0) & (local < num_columns) & (label != ignore_index)
    tl.store(out.labels + offs_n, tl.where(in_shard, local, -1).to(tl.int32), mask=mask)
    scale = tl.full((BLOCK_N,), logits_factor, tl.float32) / temperature
    to_nats = tl.full((BLOCK_N,), _LN_2, tl.float32)
    if temperature_ptr is not None:
        row_temperature = tl.load(temperature_ptr + offs_n, mask=mask, other=1.0).to(tl.float32)
        usable = (row_temperature > 0) & (row_temperature < float("inf"))
        scale = tl.where(usable, logits_factor / row_temperature, float("nan"))
        to_nats = tl.where(usable, to_nats, float("nan"))
    tl.store(out.scale + offs_n, tl.where(ignored, _SCALE_OF_IGNORED_ROW, scale), mask=mask)
    tl.store(out.to_nats + offs_n, tl.where(ignored, 0.0, to_nats), mask=mask)


@triton.jit
def _in_nats(value, to_nats):
    """Return the value in nats: 0 in ignored rows, NaN in broken ones."""
    return tl.where(to_nats == 0, 0.0, value * to_nats)


@triton.jit(do_not_specialize=["N"])
def _write_outputs_kernel(
    extremes_ptr,  # [E, N] packed
    sums_ptr,  # [sums, N] int64
    to_nats_ptr,  # [N]
    outputs,  # `LinearCrossEntropyOutput` without candidates, [N] out each; None where not wanted
    saved,  # `RowSoftmax`, out but for max_logit; None where not wanted
    N,
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,
    TELEMETRY: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the outputs of BLOCK_N tokens, and what backward needs."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    extremes, sums = extremes_at(extremes_ptr + offs_n, N), sums_at(sums_ptr + offs_n, N, ENTROPY, TELEMETRY, 0)
    max_logit = tl.load(extremes.max_logit, mask=mask, other=0.0)
    label_logit = tl.load(extremes.label_logit, mask=mask, other=0.0)
    sum_exp = tl.load(sums.sum_exp, mask=mask, other=1).to(tl.float32) * _UNIT
    to_nats = tl.load(to_nats_ptr + offs_n, mask=mask, other=0.0)
    # If the label's logit is -inf on every rank, no rank owns it: the row is NaN.
    to_nats = tl.where((label_logit == float("-inf")) & (to_nats != 0), float("nan"), to_nats)
    log_sum = tl.log2(sum_exp)
    log_sum = tl.where(log_sum < 0, 0.0, log_sum)  # the sum is at least 1 up to rounding
    label_shift = label_logit - max_logit
    label_shift = tl.where(label_shift > 0, 0.0, label_shift)  # two kernels computed the two logits
    label_logprob = label_shift - log_sum
    tl.store(saved.log_sum + offs_n, log_sum, mask=mask)
    tl.store(saved.label_logprob + offs_n, label_logprob, mask=mask)
    tl.store(outputs.lse + offs_n, _in_nats(max_logit + log_sum, to_nats), mask=mask)
    tl.store(outputs.logprobs + offs_n, _in_nats(label_logprob, to_nats), mask=mask)
    if ENTROPY:
        sum_exp_logit = tl.load(sums.sum_exp_logit, mask=mask, other=0).to(tl.float32) * _UNIT
        # Integer sums cannot be NaN; the largest logit is NaN if any logit is.
        entropy = log_sum - sum_exp_logit / sum_exp + max_logit * 0.0
        tl.store(saved.entropy + offs_n, entropy, mask=mask)
        tl.store(outputs.entropy + offs_n, _in_nats(entropy, to_nats), mask=mask)
    if MEAN:
        min_logit = tl.load(extremes.min_logit, mask=mask, other=0.0)
        max_abs_logit = tl.maximum(tl.abs(max_logit), tl.abs(min_logit))
        zero_or_nan = max_logit * 0.0
        # NaN if the sum of squares of a chunk overflows fp32.
        zero_or_nan_if_huge = zero_or_nan + _CHUNK_COLUMNS * max_abs_logit * max_abs_logit * 0.0
        sum_logit = tl.load(sums.sum_logit, mask=mask, other=0).to(tl.float32) * _UNIT
        num_columns = tl.load(sums.num_columns, mask=mask, other=1).to(tl.float32)
        mean_logit = max_abs_logit * (sum_logit / num_columns) + zero_or_nan_if_huge
        tl.store(outputs.mean_logit + offs_n, _in_nats(mean_logit, to_nats), mask=mask)
        tl.store(saved.num_columns + offs_n, num_columns, mask=mask)
    if TELEMETRY:
        sum_exp_squared = tl.load(sums.sum_exp_squared, mask=mask, other=0).to(tl.float32) * _UNIT
        sum_logit_squared = tl.load(sums.sum_logit_squared, mask=mask, other=0).to(tl.float32) * _UNIT
        sum_pi_squared = sum_exp_squared / (sum_exp * sum_exp) + zero_or_nan + to_nats * 0.0
        tl.store(outputs.sum_pi_squared + offs_n, tl.where(to_nats == 0, 0.0, sum_pi_squared), mask=mask)
        logits_norm = max_abs_logit * tl.sqrt(sum_logit_squared) + zero_or_nan_if_huge
        tl.store(outputs.logits_norm + offs_n, _in_nats(logits_norm, to_nats), mask=mask)
        max_logit = _in_nats(max_logit, to_nats)
        argmax = tl.load(extremes.argmax, mask=mask, other=0.0).to(tl.int32, bitcast=True)
        argmax = tl.where(to_nats == 0, 0, tl.where(max_logit != max_logit, -1, argmax))
        tl.store(outputs.max_logit + offs_n, max_logit, mask=mask)
        tl.store(outputs.min_logit + offs_n, _in_nats(min_logit, to_nats), mask=mask)
        tl.store(outputs.argmax + offs_n, argmax.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["N", *_STRIDES, "slope"])
def _row_terms_kernel(
    scale_ptr,  # [N] fp32, as all that follow
    to_nats_ptr,
    saved,  # `RowSoftmax`
    grad_logprobs_ptr,  # or None, as the other upstream gradients
    grad_entropy_ptr,
    grad_lse_ptr,
    grad_mean_logit_ptr,
    grad_logprobs_stride,
    grad_entropy_stride,
    grad_lse_stride,
    grad_mean_logit_stride,
    terms_ptr,  # [6 or 7, N] out, `RowTerms`
    has_grad_ptr,  # [N] bool out: the row has a gradient that is not zero
    N,
    slope,
    BLOCK_N: tl.constexpr,
):
    """Write the `RowTerms` of BLOCK_N tokens, and which of them have a gradient."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    terms = row_terms_at(terms_ptr + offs_n, N)
    offs = offs_n.to(tl.int64)  # strides are arbitrary
    to_nats = tl.load(to_nats_ptr + offs_n, mask=mask, other=0.0)
    ignored = to_nats == 0
    label_logprob = tl.load(saved.label_logprob + offs_n, mask=mask, other=0.0)
    # A logprob that is not finite makes all terms NaN.
    factor = to_nats + label_logprob * 0.0
    factor *= tl.load(scale_ptr + offs_n, mask=mask, other=0.0) * slope
    label_term = tl.zeros((BLOCK_N,), tl.float32)
    if grad_logprobs_ptr is not None:
        label_term = tl.load(grad_logprobs_ptr + offs * grad_logprobs_stride, mask=mask, other=0.0)
    p_term = -label_term
    if grad_lse_ptr is not None:
        p_term += tl.load(grad_lse_ptr + offs * grad_lse_stride, mask=mask, other=0.0)
    entropy_term = tl.zeros((BLOCK_N,), tl.float32)
    if grad_entropy_ptr is not None:
        grad_entropy = tl.load(grad_entropy_ptr + offs * grad_entropy_stride, mask=mask, other=0.0)
        entropy_term = grad_entropy * _LN_2
        p_term -= entropy_term * tl.load(saved.entropy + offs_n, mask=mask, other=0.0)
    max_logit = tl.load(saved.max_logit + offs_n, mask=mask, other=0.0)
    log_sum = tl.load(saved.log_sum + offs_n, mask=mask, other=0.0)
    tl.store(terms.max_logit, tl.where(ignored, 0.0, max_logit), mask=mask)
    tl.store(terms.log_sum, tl.where(ignored, _LOG_SUM_OF_IGNORED_ROW, log_sum), mask=mask)
    p_term = tl.where(ignored, 0.0, p_term * factor)
    entropy_term = tl.where(ignored, 0.0, entropy_term * factor)
    label_term = tl.where(ignored, 0.0, label_term * factor)
    has_grad = (p_term != 0) | (entropy_term != 0) | (label_term != 0)
    tl.store(terms.p_term, p_term, mask=mask)
    tl.store(terms.entropy_term, entropy_term, mask=mask)
    tl.store(terms.label_term, label_term, mask=mask)
    tl.store(terms.label_logprob, label_logprob, mask=mask)
    if grad_mean_logit_ptr is not None:
        mean_term = tl.load(grad_mean_logit_ptr + offs * grad_mean_logit_stride, mask=mask, other=0.0)
        mean_term = mean_term / tl.load(saved.num_columns + offs_n, mask=mask, other=1.0)
        mean_term = tl.where(ignored, 0.0, mean_term * factor)
        has_grad |= mean_term != 0
        tl.store(terms.mean_term, mean_term, mask=mask)
    tl.store(has_grad_ptr + offs_n, has_grad, mask=mask)
