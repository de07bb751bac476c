"""Megatron-Bridge's training: the loss of `gpt_step` without logits, and without masked tokens.

cfg.model.register_post_wrap_hook(megatron_lce.plugins.bridge.enable)  # before pretrain or finetune
"""

from typing import Any

from torch import nn

import megatron_lce
from megatron_lce.plugins.functions import version_of
from megatron_lce.plugins.patching import Plugin


def enable(chunks: list[nn.Module]) -> list[nn.Module]:
    """Enables the fused loss for masked sums. Returns the chunks, as Bridge expects of a hook."""
    megatron_lce.enable_fused_linear_ce(chunks, known_loss=True, skip_masked=True)
    return chunks


def step_with_mask(original: Any, state: Any, data_iterator: Any, model: nn.Module, *rest: Any, **keywords: Any) -> Any:
    """Bridge's step, which also passes the loss mask of the batch to the model."""
    read, mask = keywords.get("_get_batch_fn") or original.__globals__["get_batch"], {}

    def get_batch(*inputs: Any, **options: Any) -> Any:
        batch = read(*inputs, **options)
        mask["loss_mask"] = batch[2]
        return batch

    def with_mask(_: nn.Module, inputs: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return inputs, mask | given

    with model.register_forward_pre_hook(with_mask, prepend=True, with_kwargs=True):
        output = original(state, data_iterator, model, *rest, **keywords | {"_get_batch_fn": get_batch})
    if not mask:
        raise RuntimeError(f"megatron_lce: the step of {version_of('megatron.bridge')} does not call get_batch")
    return output


STEP = "megatron.bridge.training.gpt_step:_forward_step_common(state, data_iterator, model, _get_batch_fn, ...)"
plugin = Plugin("megatron.bridge", {STEP: step_with_mask})
install, uninstall = plugin.install, plugin.uninstall
install()
