"""Every operation with a gradient as one call of hidden, weight and labels; ids and the teacher are made of them."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import megatron_lce
from megatron_lce.core.divergence_types import KINDS
from tests.jsd_oracle import weighted_jsd


def ids_of(labels: Tensor) -> Tensor:
    """Three for each token: its label or padding, one or more times, and another."""
    return torch.stack([labels.clamp(min=-1), labels % 7, labels.clamp(min=0)], dim=-1)


def candidates(hidden: Tensor, weight: Tensor, labels: Tensor, **keywords: Any) -> Any:
    return megatron_lce.linear_cross_entropy(hidden, weight, labels, candidates=ids_of(labels), **keywords)


def token_loss(hidden: Tensor, weight: Tensor, labels: Tensor, **keywords: Any) -> Any:
    def loss(out: Any, factors: Tensor) -> Any:
        return -(out.logprobs * factors) + 0.1 * out.entropy, {"ratio": out.logprobs.exp()}

    result = megatron_lce.linear_token_loss(hidden, weight, labels, loss, (labels % 5).float(), **keywords)
    return result.loss, result.outputs, result.metrics


def jsd(hidden: Tensor, weight: Tensor, labels: Tensor, weighted: bool = False, **keywords: Any) -> Tensor:
    teacher = 1.5 * hidden.detach().flip(-1), weight.detach()
    keywords |= {"labels": labels, "weights": (labels % 5).float() if weighted else None}
    return weighted_jsd(hidden, weight, *teacher, **keywords)


def divergences(hidden: Tensor, weight: Tensor, labels: Tensor, **keywords: Any) -> Any:
    teacher = 1.5 * hidden.detach().flip(-1), weight.detach()
    return megatron_lce.linear_divergence(hidden, weight, *teacher, kinds=KINDS, labels=labels, **keywords)


def logits_at(hidden: Tensor, weight: Tensor, labels: Tensor, **keywords: Any) -> Tensor:
    return megatron_lce.linear_logits_at(hidden, weight, ids_of(labels), **keywords)


def support(hidden: Tensor, weight: Tensor, labels: Tensor, **keywords: Any) -> Tensor:
    offsets = 3 * torch.arange(labels.numel() + 1, device=labels.device)
    return megatron_lce.support_logprobs(hidden, weight, labels, ids_of(labels).view(-1), offsets, **keywords)


cross_entropy, known_jsd = megatron_lce.linear_cross_entropy, functools.partial(jsd, weighted=True)
OPERATIONS = {
    "cross-entropy": cross_entropy,
    "candidates": candidates,
    "token loss": token_loss,
    "jsd": jsd,
    "divergences": divergences,
    "jsd, known weights": known_jsd,
    "logits at ids": logits_at,
    "support": support,
}
SUMS = ("token loss", "jsd, known weights")  # over the tokens, whose gradients are made in forward


def tensors_of(returned: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
