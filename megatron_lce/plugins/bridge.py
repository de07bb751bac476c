"""Megatron-Bridge's training: the loss of `gpt_step` without logits, and without masked tokens."""

from typing import Any

from torch import nn

import megatron_lce
from megatron_lce.plugins.functions import version_of
from megatron_lce.plugins.patching import installed


def enable(chunks: list[nn.Module]) -> list[nn.Module]:
    """Enables the fused loss. Returns the chunks, as Bridge expects of a hook."""
    megatron_lce.enable_fused_linear_ce(chunks, skip_masked=True)
    return chunks


def step_with_mask(call: Any) -> Any:
    """Bridge's step, which also passes the loss mask of the batch to the model."""
    read, mask = call._get_batch_fn or call.original.__globals__["get_batch"], {}

    def get_batch(*inputs: Any, **keywords: Any) -> Any:
        batch = read(*inputs, **keywords)
        mask["loss_mask"] = batch[2]
        return batch

    def with_mask(_: nn.Module, inputs: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return inputs, mask | given

    with call.model.register_forward_pre_hook(with_mask, prepend=True, with_kwargs=True):
        output = call.run(_get_batch_fn=get_batch)
    if not mask:
        raise RuntimeError(f"megatron_lce: the step of {version_of('megatron.bridge')} does not call get_batch")
    return output


STEP = "megatron.bridge.training.gpt_step:_forward_step_common(state, data_iterator, model, _get_batch_fn, ...)"
plugin, install, uninstall = installed("megatron.bridge", "0.6.0, 0.6.2, main", {STEP: step_with_mask})
