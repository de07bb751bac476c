"""The losses of GRPO and GSPO, and their gradients, against loops over tokens."""

import pytest
import torch
from torch import Tensor

from scripts import rl_losses


@pytest.fixture
def case():
    """Three sequences of four tokens, the last one half masked, all double."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, 4)
    old = -torch.rand(shape, generator=generator, dtype=torch.float64)
    return {
        "logprobs": (old + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_(),
        "entropy": torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_(),
        "old_logprobs": old,
        "reference_logprobs": -torch.rand(shape, generator=generator, dtype=torch.float64),
        "advantages": torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64),
        "mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.float64),
    }


def surrogate(ratio: Tensor, advantage: Tensor) -> Tensor:
    return min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_policy_loss_is_the_sum_of_its_formula(case, level):
    """And its gradient is the formula's, in which masked tokens are not."""
    result = rl_losses.policy_loss(**case, level=level, clip_low=0.2, clip_high=0.28, kl_weight=0.3, entropy_weight=0.1)
    total, units = 0.0, 0
    for row, kept in enumerate(case["mask"].bool()):
        logprobs, advantage = case["logprobs"][row, kept], case["advantages"][row]
        gap, d = logprobs - case["old_logprobs"][row, kept], case["reference_logprobs"][row, kept] - logprobs
        penalty = 0.3 * (d.exp() - 1 - d) - 0.1 * case["entropy"][row, kept]
        if level == "token":
            total += penalty.sum() - sum(surrogate(ratio, advantage) for ratio in gap.exp())
            units += len(gap)
        elif len(gap):
            total += penalty.mean() - surrogate(gap.mean().exp(), advantage)
            units += 1
    trained = case["logprobs"], case["entropy"]
    actual, expected = ((loss, *torch.autograd.grad(loss, trained)) for loss in (result.total, total))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)
    assert float(result.count) == units
