"""Megatron-Bridge's training: the loss of `gpt_step` without logits, and masked tokens left out.

cfg.model.register_post_wrap_hook(megatron_lce.plugins.bridge.enable)  # before pretrain or finetune
"""

from collections.abc import Callable
from typing import Any

from torch import nn

import megatron_lce
from megatron_lce.plugins.capturing import called_through, check_calls, rebound
from megatron_lce.plugins.replacing import Plugin


def enable(chunks: list[nn.Module]) -> list[nn.Module]:
    """Enables the model for losses that are a masked sum, and returns it, as Bridge's hooks do."""
    megatron_lce.enable_fused_linear_ce(chunks, known_loss=True, skip_masked=True)
    return chunks


def step_with_mask(own: Callable[..., Any]) -> Callable[..., Any]:
    """Bridge's step, which passes the batch's loss mask on to the model, too."""
    check_calls(own, "get_batch")

    def step(state: Any, data_iterator: Any, model: nn.Module, *rest: Any, **keywords: Any) -> Any:
        mask = {}
        read = keywords.pop("_get_batch_fn", None) or own.__globals__["get_batch"]

        def get_batch(*inputs: Any, **options: Any) -> Any:
            batch = read(*inputs, **options)
            mask["loss_mask"] = batch[2]
            return batch

        def call(chunk: nn.Module, own_call: Callable[..., Any], **given: Any) -> Any:
            return own_call(**{**mask, **given})

        with called_through(call, [model]):
            return rebound(own, get_batch=get_batch)(state, data_iterator, model, *rest, **keywords)

    return step


plugin = Plugin("megatron.bridge", {"megatron.bridge.training.gpt_step:_forward_step_common": step_with_mask})
install, uninstall = plugin.install, plugin.uninstall
install()
