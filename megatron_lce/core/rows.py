"""What happens to each token by itself, before and after the vocabulary is looked at, in plain torch.

`megatron_lce.backends.triton.rows` has the same three functions as one launch each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.options import LinearCrossEntropyOutput, Options
from megatron_lce.core.softmax_stats import LN_2, LOG2_E, unpack

# A log-sum-exp under which every probability is zero: how an ignored row gets a zero gradient.
LSE_OF_IGNORED_ROW = 1e30


class Rows(NamedTuple):
    """What each token brings, [N] each."""

    labels: Tensor  # int32, local to this shard; -1: owned by another rank, by none, or ignored
    scale: Tensor  # fp32 factor from products (or their tanh) to base-2 logits; NaN where the temperature is unusable
    to_nats: Tensor  # fp32 ln 2; 0 where the row is ignored, NaN where it is broken


class Saved(NamedTuple):
    """What backward needs of the forward's results, [N] each, in base 2."""

    lse: Tensor
    label_logprob: Tensor
    entropy: Tensor | None = None


class Finished(NamedTuple):
    outputs: LinearCrossEntropyOutput
    saved: Saved


def logits_factor(options: Options) -> float:
    """Factor from products (or, under a softcap, their tanh) to base-2 logits at temperature 1."""
    return LOG2_E * (options.logits_scale if options.softcap is None else options.softcap)


def softcap_scale(options: Options) -> float | None:
    """Factor from products to the argument of tanh; None without a softcap."""
    return None if options.softcap is None else options.logits_scale / options.softcap


def inner_factor(options: Options) -> float:
    """What `Rows.scale` leaves out of d logit / d product: the factor inside the softcap's tanh."""
    scale = softcap_scale(options)
    return 1.0 if scale is None else scale


def prepare_rows(labels: Tensor, temperature: Tensor | float, options: Options) -> Rows:
    """int64 global labels [N] and their temperature -> what the primitives read of each row."""
    local = labels - options.vocab_start
    ignored = labels == options.ignore_index
    owned = (local >= 0) & (local < options.num_columns) & ~ignored
    if isinstance(temperature, Tensor):
        temperature = temperature.float()
        usable = (temperature > 0) & temperature.isfinite()
        scale = torch.where(ignored, 1.0, torch.where(usable, logits_factor(options) / temperature, torch.nan))
        to_nats = torch.where(usable, LN_2, torch.nan)
    else:
        scale = labels.new_full(labels.shape, logits_factor(options) / temperature, dtype=torch.float32)
        to_nats = torch.full_like(scale, LN_2)
    return Rows(torch.where(owned, local, -1).int(), scale, torch.where(ignored, 0.0, to_nats))


def finish(packed: Tensor, rows: Rows, options: Options) -> Finished:
    """Packed statistics [K, N] of the whole vocabulary to outputs in nats: 0 in ignored rows, NaN in broken ones."""
    stats = unpack(packed, options.entropy, options.telemetry)
    ignored = rows.to_nats == 0
    # No rank owns the label where it is -inf on all of them.
    to_nats = torch.where(stats.label_logit == -torch.inf, torch.nan, rows.to_nats)

    def in_nats(value: Tensor) -> Tensor:
        return torch.where(ignored, 0.0, value * to_nats)

    log2_sum = stats.sum_exp.log2()
    lse = stats.max_logit + log2_sum
    label_logprob = (stats.label_logit - stats.max_logit) - log2_sum
    entropy = None if stats.sum_exp_logit is None else log2_sum - stats.sum_exp_logit / stats.sum_exp
    outputs = LinearCrossEntropyOutput(
        in_nats(label_logprob), None if entropy is None else in_nats(entropy), in_nats(lse)
    )
    if stats.min_logit is not None and stats.argmax is not None:
        outputs = outputs._replace(
            max_logit=in_nats(stats.max_logit),
            min_logit=in_nats(stats.min_logit),
            argmax=torch.where(ignored, 0, stats.argmax).long(),
        )
    return Finished(outputs, Saved(lse, label_logprob, entropy))


def row_terms(
    rows: Rows,
    saved: Saved,
    grad_logprobs: Tensor | None,  # [N] fp32, as every upstream gradient
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    options: Options,
) -> Tensor:
    """The numbers of each token from which its gradient of any logit follows: [5, N] fp32.

    With p = 2^t, t = log2 p, and each output's own upstream gradient g,

        dz = g_logprobs (1[label] - p) + g_lse p - g_entropy p (ln p + entropy)
           = p (p_term - entropy_term t) + 1[label] label_term

    Rows: lse (base 2), p_term, entropy_term, label_term, label_logprob (base 2). The terms carry the factor from
    logits to products, d logit / d product.
    """
    ignored = rows.to_nats == 0
    factor = torch.where(saved.label_logprob == -torch.inf, torch.nan, rows.to_nats) * rows.scale
    factor = factor * inner_factor(options)
    zero = torch.zeros_like(factor)
    label_term = zero if grad_logprobs is None else grad_logprobs
    p_term = (zero if grad_lse is None else grad_lse) - label_term
    entropy_term = zero
    if grad_entropy is not None and saved.entropy is not None:
        entropy_term = grad_entropy * LN_2
        p_term = p_term - entropy_term * saved.entropy
    terms = torch.where(ignored, 0.0, torch.stack([p_term, entropy_term, label_term]) * factor)
    lse = torch.where(ignored, LSE_OF_IGNORED_ROW, saved.lse)
    return torch.cat([lse[None], terms, saved.label_logprob[None]])
