"""A task whose reward a program checks: sort the digits, character by character, `3141=` to `1134`."""

from dataclasses import dataclass

import torch
from torch import Tensor

EQUALS, EOS, PAD = 10, 11, 12  # after the digits 0 to 9
VOCAB_SIZE = 13


@dataclass
class SortingTask:
    """Prompts of `digits` digits and '=', answers of the same digits in order and an end of text."""

    digits: int

    @property
    def prompt_length(self) -> int:
        return self.digits + 1

    @property
    def answer_length(self) -> int:
        return self.digits + 1

    def prompts(self, count: int, generator: torch.Generator) -> Tensor:
        """[count, prompt_length] int64."""
        digits = torch.randint(0, 10, (count, self.digits), generator=generator)
        return torch.cat([digits, torch.full((count, 1), EQUALS)], dim=1)

    def answers(self, prompts: Tensor) -> Tensor:
        """[count, answer_length] int64: what a perfect policy writes."""
        ordered = prompts[:, : self.digits].sort(1).values
        return torch.cat([ordered, torch.full_like(ordered[:, :1], EOS)], dim=1)

    def rewards(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """[count] float32: the share of the answer's positions, its end of text included, that are right."""
        return (completions == self.answers(prompts)).float().mean(1)
