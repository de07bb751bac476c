"""Training steps whose model stops at a captured head instead of logits; response tokens for slime and miles."""

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import megatron_lce


def captured_if(
    should_capture: Callable[[Mapping[str, Any]], bool],
    make_output: Callable[[Tensor], Tensor] = lambda hidden: hidden.view_as(hidden),  # a view: no cycle
) -> Callable[..., Any]:
    """Returns a replacement that captures the LM head of the function's `model` if `should_capture` its arguments.

    `model` is a chunk or a list of chunks. The chunk with the head returns `make_output(hidden)`, and the captured head
    as the attribute `lm_head` of that tensor.
    """

    def run(original: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
        arguments = inspect.signature(original).bind(*inputs, **keywords).arguments
        if not should_capture(arguments):
            return original(*inputs, **keywords)
        chunks = [arguments["model"]] if isinstance(arguments["model"], nn.Module) else arguments["model"]

        def take(chunk: nn.Module, _: Any, output: Tensor) -> Tensor | None:
            if head.hidden is None or output.shape[-1] > 0:  # a pipeline stage or a chunk without the head
                return None
            captured = copy.copy(head)  # which records the next microbatch
            output = make_output(head.hidden)
            output.lm_head = captured  # type: ignore[attr-defined]
            return output

        with contextlib.ExitStack() as opened:
            head = opened.enter_context(megatron_lce.capture_lm_head(chunks))
            for chunk in chunks:
                opened.enter_context(chunk.register_forward_hook(take))
            return original(*inputs, **keywords)

    return run


def reads_log_probs(arguments: Mapping[str, Any]) -> bool:
    """Whether `forward_only` or `train_one_step` with these arguments reads only logprobs and entropy."""
    if "f" in arguments:
        return getattr(arguments["f"], "__name__", None) == "get_log_probs_and_entropy"
    return arguments["args"].loss_type in ("policy_loss", "sft_loss")


class Responses:
    """Response tokens by sample, their rows in the head's output, and labels [b, s], -100 at all other tokens."""

    def __init__(self, head: Any, get_responses: Callable, **batch: Any) -> None:
        sequence = head.hidden.shape[0] * (head.tp_group.size() if head.sequence_parallel else 1)
        numbers = torch.arange(sequence * head.hidden.shape[1], dtype=torch.int64, device=head.hidden.device)
        parts = list(get_responses(numbers.float().view(-1, sequence, 1), **batch))
        self.head, self.token_index = head, [token_index[:, 0].long() for token_index, _ in parts]
        self.tokens = [tokens[: len(token_index)] for token_index, tokens in parts]  # an empty response gets all tokens
        labels = torch.full_like(numbers, -100).index_copy(0, torch.cat(self.token_index), torch.cat(self.tokens))
        self.labels = labels.view(-1, sequence)

    def log_probs_and_entropy(self, temperature: float, entropy: bool, entropy_grad: bool) -> dict[str, list[Tensor]]:
        count = sum(map(len, self.token_index))
        out = self.head.linear_cross_entropy(self.labels, temperature, entropy=entropy, skip_ignored=count)
        values = {"log_probs": self.by_sample(out.logprobs)}
        if entropy:
            values["entropy"] = self.by_sample(out.entropy if entropy_grad else out.entropy.detach())
        return values

    def by_sample(self, values: Tensor) -> list[Tensor]:
        return [values.flatten()[token_index] for token_index in self.token_index]
