"""Training steps whose model stops at a captured head instead of logits; response tokens for slime and miles."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import megatron_lce
from megatron_lce.plugins.functions import called_with, origin


def captured_if(
    wanted: Callable[[Mapping[str, Any]], bool],
    instead: Callable[[Tensor], Tensor] = lambda hidden: hidden.view_as(hidden),  # a view: no cycle
) -> Callable[..., Any]:
    """Returns a replacement that captures the LM head of the function's `model` if its arguments are `wanted`.

    `model` is a chunk or a list of chunks. The chunk with the head returns `instead(hidden)`, and the captured head as
    the attribute `lm_head` of that tensor.
    """

    def run(own: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
        given = inspect.signature(own).bind(*inputs, **keywords).arguments
        if not wanted(given):
            return own(*inputs, **keywords)
        chunks = [given["model"]] if isinstance(given["model"], nn.Module) else given["model"]
        kinds = {chunk: type(chunk) for chunk in chunks}

        def call(chunk: nn.Module, *inputs: Any, **keywords: Any) -> Any:
            with megatron_lce.capture_lm_head(chunk) as head:
                output = kinds[chunk].__call__(chunk, *inputs, **keywords)
            if head.hidden is not None:  # it is None on other pipeline stages
                output = instead(head.hidden)
                output.lm_head = head  # type: ignore[attr-defined]
            return output

        for chunk, kind in kinds.items():  # by class: a capture opens before a chunk's hooks
            chunk.__class__ = type(kind.__name__, (kind,), {"__call__": call})
        try:
            return own(*inputs, **keywords)
        finally:
            for chunk, kind in kinds.items():
                chunk.__class__ = kind

    return run


def reads_log_probs(given: Mapping[str, Any]) -> bool:
    """Whether `forward_only` or `train_one_step` with these arguments reads only logprobs and entropy."""
    if "f" in given:
        return origin(given["f"]) == called_with.__module__  # not get_values, which is the framework's
    return given["args"].loss_type in ("policy_loss", "sft_loss")


class Responses:
    """Response tokens by sample: their rows in the head's output and their (negative) places in the sample."""

    def __init__(self, head: Any, get_responses: Callable, unconcat_tokens: list[Tensor], **batch: Any) -> None:
        sequence = head.hidden.shape[0] * (head.tp_group.size() if head.sequence_parallel else 1)
        device = head.hidden.device
        numbers = torch.arange(sequence * head.hidden.shape[1], dtype=torch.int64, device=device)
        numbers = numbers.view(-1, sequence)  # [b, s]
        places = [torch.arange(-len(tokens), 0, dtype=torch.int64, device=tokens.device) for tokens in unconcat_tokens]
        parts = list(get_responses(numbers.float()[..., None], unconcat_tokens=places, **batch))
        self.head, self.rows = head, [rows[:, 0].long() for rows, _ in parts]
        self.places = [at[: len(rows)] for rows, at in parts]  # an empty response gets all places
        self.tokens = [tokens[at] for tokens, at in zip(unconcat_tokens, self.places, strict=True)]
        ignored = torch.full_like(numbers.flatten(), -100)
        self.labels = ignored.index_copy(0, torch.cat(self.rows), torch.cat(self.tokens)).view_as(numbers)

    def log_probs_and_entropy(self, temperature: float, entropy: bool, entropy_grad: bool) -> dict[str, list[Tensor]]:
        count = sum(map(len, self.rows))
        out = self.head.linear_cross_entropy(self.labels, temperature, entropy=entropy, skip_ignored=count)
        values = {"log_probs": self.by_sample(out.logprobs)}
        if entropy:
            values["entropy"] = self.by_sample(out.entropy if entropy_grad else out.entropy.detach())
        return values

    def by_sample(self, values: Tensor) -> list[Tensor]:
        return [values.flatten()[rows] for rows in self.rows]
