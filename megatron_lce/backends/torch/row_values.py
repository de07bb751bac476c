"""Per-row values before and after the statistics of the vocabulary, in torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lce.core.lm_head import (
    LOG_SUM_OF_IGNORED_ROW,
    SCALE_OF_IGNORED_ROW,
    LMHead,
    RowInputs,
    RowSoftmax,
    RowTerms,
)
from megatron_lce.core.options import LinearCrossEntropyOutput, Options, Shard
from megatron_lce.core.statistics import CHUNK_COLUMNS, FIXED_POINT_UNIT, LN_2, unpack_extremes


def prepare_rows(head: LMHead, labels: Tensor, ignore_index: int, shard: Shard) -> RowInputs:
    local, temperature = labels - shard.start, head.temperature
    ignored = labels == ignore_index
    in_shard = (local >= 0) & (local < shard.num_columns) & ~ignored
    if isinstance(temperature, Tensor):
        temperature = temperature.float()
        usable = (temperature > 0) & temperature.isfinite()
        one_or_nan = torch.ones_like(temperature).masked_fill_(~usable, torch.nan)
        scale = head.logits_factor / temperature * one_or_nan
    else:
        scale = labels.new_full(labels.shape, head.logits_factor / temperature, dtype=torch.float32)
        one_or_nan = torch.ones_like(scale)
    return RowInputs(
        local.masked_fill(~in_shard, -1).int(),
        scale.masked_fill(ignored, SCALE_OF_IGNORED_ROW),
        (LN_2 * one_or_nan).masked_fill_(ignored, 0.0),
    )


def write_outputs(
    packed_extremes: Tensor, sums: Tensor, rows: RowInputs, options: Options, outputs: LinearCrossEntropyOutput
) -> RowSoftmax:
    extremes = unpack_extremes(packed_extremes, options.telemetry)
    ignored = rows.ignored
    # If the label's logit is -inf on every rank, no rank owns it: the row is NaN.
    to_nats = torch.where(extremes.label_logit == -torch.inf, torch.nan, rows.to_nats)

    def in_nats(value: Tensor) -> Tensor:
        return torch.where(ignored, 0.0, value * to_nats)

    sum_exp, *others = (sums.float() * FIXED_POINT_UNIT).unbind()
    log_sum = sum_exp.log2()
    label_logprob = (extremes.label_logit - extremes.max_logit) - log_sum
    # Integer sums cannot be NaN; the largest logit is NaN if any logit is.
    zero_or_nan = extremes.max_logit * 0.0
    entropy = log_sum - others[0] / sum_exp + zero_or_nan if options.entropy else None
    results = LinearCrossEntropyOutput(
        in_nats(label_logprob), None if entropy is None else in_nats(entropy), in_nats(extremes.max_logit + log_sum)
    )
    num_columns = None
    if extremes.min_logit is not None:
        max_abs_logit = torch.maximum(extremes.max_logit.abs(), extremes.min_logit.abs())
        # NaN if the sum of squares of a chunk overflows fp32.
        zero_or_nan_if_huge = zero_or_nan + CHUNK_COLUMNS * max_abs_logit * max_abs_logit * 0.0
        sum_logit, num_columns = others[int(options.entropy)], sums[-1].float()
        mean_logit = in_nats(max_abs_logit * (sum_logit / num_columns) + zero_or_nan_if_huge)
        results = results._replace(mean_logit=mean_logit)
        if extremes.argmax is not None:
            max_logit = in_nats(extremes.max_logit)
            argmax = torch.where(max_logit.isnan(), -1, torch.where(ignored, 0, extremes.argmax))
            sum_exp_squared, sum_logit_squared = others[-3:-1]
            results = results._replace(
                max_logit=max_logit,
                min_logit=in_nats(extremes.min_logit),
                argmax=argmax.long(),
                sum_pi_squared=torch.where(
                    ignored, 0.0, sum_exp_squared / (sum_exp * sum_exp) + zero_or_nan + to_nats * 0.0
                ),
                logits_norm=in_nats(max_abs_logit * sum_logit_squared.sqrt() + zero_or_nan_if_huge),
            )
    for output, value in zip(outputs, results, strict=True):
        if output is not None and value is not None:
            output.copy_(value)
    return RowSoftmax(extremes.max_logit, log_sum, label_logprob, entropy, num_columns)


def row_terms(
    rows: RowInputs, softmax: RowSoftmax, upstream: Sequence[Tensor | None], head: LMHead
) -> tuple[Tensor, Tensor]:
    grad_logprobs, grad_entropy, grad_lse, grad_mean_logit = upstream
    ignored = rows.ignored
    # A logprob that is not finite makes all terms NaN.
    factor = (rows.to_nats + softmax.label_logprob * 0.0) * rows.scale * head.slope
    zero = torch.zeros_like(factor)
    label_term = zero if grad_logprobs is None else grad_logprobs
    p_term = (zero if grad_lse is None else grad_lse) - label_term
    entropy_term = zero
    if grad_entropy is not None and softmax.entropy is not None:
        entropy_term = grad_entropy * LN_2
        p_term = p_term - entropy_term * softmax.entropy

    def term(value: Tensor) -> Tensor:
        return torch.where(ignored, 0.0, value * factor)

    mean_term = None
    if grad_mean_logit is not None and softmax.num_columns is not None:
        mean_term = term(grad_mean_logit / softmax.num_columns)
    terms = RowTerms(
        max_logit=torch.where(ignored, 0.0, softmax.max_logit),
        log_sum=torch.where(ignored, LOG_SUM_OF_IGNORED_ROW, softmax.log_sum),
        p_term=term(p_term),
        entropy_term=term(entropy_term),
        label_term=term(label_term),
        label_logprob=softmax.label_logprob,
        mean_term=mean_term,
    )
    packed = torch.stack([values for values in terms if values is not None])
    has_grad = packed[2:5].any(dim=0)
    return packed, has_grad if terms.mean_term is None else has_grad | (terms.mean_term != 0)
