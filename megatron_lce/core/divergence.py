"""The divergence of each token of `megatron_lce.jsd`, from both heads' logits, and the factor of its gradient."""

import math

import torch
from torch import Tensor

from megatron_lce.core import collectives
from megatron_lce.core.blocks import cut
from megatron_lce.core.jsd_logits import Heads, JsdLogits, LogitsBuffer, forward_blocks
from megatron_lce.core.jsd_stats import STATS_ROWS, Found, Head
from megatron_lce.core.options import Options
from megatron_lce.core.rows import Rows
from megatron_lce.core.softmax_stats import LN_2


def diverge(heads: Heads, options: Options, found: Tensor) -> None:
    """Fill `Found`, [6, N], block of tokens by block."""
    heads = heads.block(slice(None), slice(0, options.num_columns))
    blocks, copied = forward_blocks(heads, found.shape[1], options)
    buffer = LogitsBuffer.allocate(blocks, copied, found.device)
    for tokens in cut(found.shape[1], blocks.tokens):
        logits = JsdLogits(heads.block(tokens, slice(None)), buffer)
        diverge_block(logits, options, heads, found[:, tokens])


def diverge_block(
    logits: JsdLogits,
    options: Options,
    heads: Heads,
    found: Tensor,
    into: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Fill `Found`, [6, n], of a block: one exchange over the group for both softmaxes, one for what they are apart.

    `into`: the gradient's coefficients [n] and room [n, V] for it. The divergence of the whole row comes first, but
    where no other rank has columns, or at a beta of 0, whose gradient wants none, it comes in the same pass.
    """
    group, backend = options.tp_group, heads.backend
    stats, sums = found[: 2 * STATS_ROWS], found[2 * STATS_ROWS :]
    logits.stats(stats)
    if group is not None:
        ranks = collectives.stack_over_group(stats, group)
        backend.merge_stats(ranks[:, :STATS_ROWS], ranks[:, STATS_ROWS:], stats)
    one_pass = group is None or heads.beta == 0
    if into is not None and one_pass:
        logits.divergence_and_gradient(found, *into)
    else:
        logits.divergence(found, sums)
    if group is not None:
        backend.sum_parts(collectives.stack_over_group(sums, group), sums)
    if into is not None and not one_pass:
        logits.gradient(found, *into)


def losses_in_nats(found: Tensor, rows: Rows, beta: float) -> tuple[Tensor, Tensor]:
    """The loss of each token, [N]; and to_nats, NaN where the loss is."""
    divergence = Found(*found).divergence
    # What is not finite in either head ends here: backward, which may not meet it, takes the row's NaN from to_nats.
    # Every rank has the same divergence, so no rank goes on with a finite gradient.
    to_nats = torch.where(divergence.isfinite() | rows.ignored, rows.to_nats, torch.nan)
    # Rounding may carry a divergence past its bounds; a clamp passes NaN.
    return torch.where(rows.ignored, 0.0, divergence.clamp(0.0, _largest_divergence(beta)) * to_nats), to_nats


def _largest_divergence(beta: float) -> float:
    """In base 2: that of two distributions with nothing in common."""
    return math.inf if beta in (0, 1) else -beta * math.log2(beta) - (1 - beta) * math.log2(1 - beta)


def gradient_factor(upstream: Tensor, to_nats: Tensor, scale: Tensor, student: Head, beta: float) -> Tensor:
    """[N] what a product's gradient is a multiple of: upstream, scale / temperature, and the way from bits to nats."""
    factor = upstream * to_nats * scale * student.logits_scale  # scale is log2 e / temperature
    if beta > 0:  # the gradient has a logarithm, in base 2
        factor = factor * LN_2
    if beta < 1:
        factor = factor * (1 - beta)
    return torch.where(to_nats == 0, 0.0, factor)
