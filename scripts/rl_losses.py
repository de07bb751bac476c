"""Losses and measures of reinforcement learning on logprobs, in plain torch.

Shapes: B sequences of T positions; `logprobs`, `entropy`, `mask` are [B, T] with mask 1 where the policy chose the
token, `advantages` [B]. Every loss comes as (sum, count): Megatron sums both over microbatches and data-parallel ranks
and divides, so the mean is over all of them however unevenly tokens fall.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """GRPO's advantages (arXiv 2402.03300): A_i = (r_i - mean r) / (std r + eps) over the samples of one prompt.

    rewards [prompts, samples] to advantages of the same shape.
    """
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + eps)


def k3_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy || reference) per token: exp(d) - 1 - d with d = log p_ref - log p.

    Unbiased over the policy's own samples and never negative.
    """
    difference = reference_logprobs - logprobs
    return difference.expm1() - difference


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[B] masked means of each sequence; 0 for a sequence without a token."""
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def clipped_objective(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """PPO's surrogate (arXiv 1707.06347): min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), elementwise."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def clipped_losses(
    ratio: Tensor, advantages: Tensor, penalty: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """(penalty - `clipped_objective`, 1 where the ratio was clipped), elementwise."""
    objective = clipped_objective(ratio, advantages, clip_low, clip_high)
    return penalty - objective, (ratio.detach() * advantages > objective.detach()).to(ratio.dtype)


def token_policy_loss(
    logprobs: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_weight: float = 0.0,
    entropy_weight: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each token's part of `policy_loss` at level "token", and its measures: elementwise, all of one shape."""
    kl = k3_kl(logprobs, reference_logprobs)
    penalty = kl_weight * kl - entropy_weight * entropy
    ratio = (logprobs - old_logprobs).exp()
    losses, clipped = clipped_losses(ratio, advantages, penalty, clip_low, clip_high)
    return losses, {"clipped": clipped, "ratio": ratio.detach(), "kl": kl.detach(), "entropy": entropy.detach()}


@dataclass
class PolicyLoss:
    """What `policy_loss` returns: 0-dim tensors; the sums have no gradient but `total`'s."""

    total: Tensor  # to minimise, summed
    count: Tensor  # what to divide it by: tokens at token level, sequences at sequence level
    clipped: Tensor  # tokens or sequences whose ratio was clipped
    ratio: Tensor  # sum of the importance ratios of tokens or sequences
    kl: Tensor  # sum over tokens
    entropy: Tensor  # sum over tokens
    tokens: Tensor


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_weight: float = 0.0,
    entropy_weight: float = 0.0,
) -> PolicyLoss:
    """Clipped ratio loss with a KL penalty and an entropy bonus.

    Per token t: `-J_t + kl_weight k3_t - entropy_weight H_t`, where J is `clipped_objective` of

    - level "token" (GRPO with DAPO's token mean, arXiv 2503.14476): r_t = p(t) / p_old(t); summed over tokens, to be
      divided by their number;
    - level "sequence" (GSPO, arXiv 2507.18071): one r = exp(mean_t log p(t) / p_old(t)) for the whole sequence; each
      sequence contributes -J and the means of its other two terms, to be divided by the number of sequences.
    """
    clips = {"clip_low": clip_low, "clip_high": clip_high}
    logprobs = torch.where(mask > 0, logprobs, old_logprobs)  # a ratio of 1 where nothing counts
    if level == "token":
        weight, weights = mask, {"kl_weight": kl_weight, "entropy_weight": entropy_weight}
        given = (logprobs, entropy, old_logprobs, reference_logprobs, advantages[:, None])
        losses, measures = token_policy_loss(*given, **clips, **weights)
        clipped, ratio, kl = measures["clipped"], measures["ratio"], measures["kl"]
    elif level == "sequence":
        weight, kl = (mask.sum(1) > 0).to(mask.dtype), k3_kl(logprobs, reference_logprobs)
        penalty = sequence_mean(kl_weight * kl - entropy_weight * entropy, mask)
        ratio = sequence_mean(logprobs - old_logprobs, mask).exp()
        losses, clipped = clipped_losses(ratio, advantages, penalty, **clips)
    else:
        raise ValueError(f"level must be 'token' or 'sequence', got {level!r}")
    return PolicyLoss(
        total=(losses * weight).sum(),
        count=weight.sum(),
        clipped=(clipped * weight).sum(),
        ratio=(ratio.detach() * weight).sum(),
        kl=(kl * mask).sum().detach(),
        entropy=(entropy * mask).sum().detach(),
        tokens=mask.sum(),
    )


def logprob_gap(trainer: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the trainer's logprobs of the sampled tokens are from the sampler's; sums over tokens, and a maximum.

    `kl` is k3 of KL(sampler || trainer): d = log p_trainer - log p_sampler over tokens the sampler drew. A sampler and
    a trainer that compute the same thing differ by rounding alone; a gap that grows is a bug, or off-policy data.
    """
    difference = (trainer - sampler) * mask
    return {
        "absolute": difference.abs().sum(),
        "largest": difference.abs().max(),
        "kl": (k3_kl(sampler, trainer) * mask).sum(),
        "tokens": mask.sum(),
    }
