"""Training steps whose model stops at a captured head instead of logits; response tokens for slime and miles."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import megatron_lce


def captured_if(
    should_capture: Callable[[Any], bool],
    make_output: Callable[[Tensor], Tensor] = lambda hidden: hidden.view_as(hidden),  # a view: no cycle
) -> Callable[..., Any]:
    """Returns a replacement that captures the LM head of the call's `model` if `should_capture(call)`.

    `model` is a chunk or a list of chunks. The chunk with the head returns `make_output(hidden)`, and the captured head
    as the attribute `lm_head` of that tensor.
    """

    def step(call: Any, **changed: Any) -> Any:
        if not should_capture(call):
            return call.run(**changed)
        chunks = [call.model] if isinstance(call.model, nn.Module) else call.model

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
            return call.run(**changed)

    return step


def reads_log_probs(call: Any) -> bool:
    """Whether this call of `forward_only` or `train_one_step` reads only logprobs and entropy."""
    if hasattr(call, "f"):
        return getattr(call.f, "__name__", None) == "get_log_probs_and_entropy"
    return call.args.loss_type in ("policy_loss", "sft_loss")


def steps_of(framework: str, should_capture: Callable[[Any], bool]) -> dict[str, Callable[..., Any]]:
    """The steps of slime or miles, captured."""
    module, step = f"{framework}.backends.megatron_utils.model", captured_if(should_capture)
    return {f"{module}:forward_only(f, args, model, ...)": step, f"{module}:train_one_step(args, model, ...)": step}


BATCH = "args, unconcat_tokens, total_lengths, response_lengths"  # of `get_responses`, in slime and miles


class Responses:
    """Response tokens by sample, their rows in the head's output, and labels [b, s], -100 at all other tokens."""

    def __init__(self, call: Any, **options: Any) -> None:
        self.head = head = call.logits.lm_head
        sequence = head.hidden.shape[0] * (head.tp_group.size() if head.sequence_parallel else 1)
        numbers = torch.arange(sequence * head.hidden.shape[1], dtype=torch.int64, device=head.hidden.device)
        batch = {name: getattr(call, name) for name in BATCH.split(", ")} | options
        parts = list(call.original.__globals__["get_responses"](numbers.float().view(-1, sequence, 1), **batch))
        self.token_index = [token_index[:, 0].long() for token_index, _ in parts]
        self.tokens = [tokens[: len(token_index)] for token_index, tokens in parts]  # an empty response gets all tokens
        labels = torch.full_like(numbers, -100).index_copy(0, torch.cat(self.token_index), torch.cat(self.tokens))
        self.labels = labels.view(-1, sequence)

    def log_probs_and_entropy(self, temperature: float, entropy: bool, entropy_grad: bool) -> dict[str, list[Tensor]]:
        count = sum(map(len, self.token_index))
        out = self.head.linear_cross_entropy(self.labels, temperature=temperature, entropy=entropy, skip_ignored=count)
        values = {"log_probs": self.by_sample(out.logprobs)}
        if entropy:
            values["entropy"] = self.by_sample(out.entropy if entropy_grad else out.entropy.detach())
        return values

    def by_sample(self, values: Tensor) -> list[Tensor]:
        return [values.flatten()[token_index] for token_index in self.token_index]
