"""Megatron-Bridge's forward step with the plugin and a model that a hook enabled, against it without.

    torchrun --nproc-per-node 2 tests/frameworks/run.py bridge_training FOLDER      # of megatron/bridge

The hook is that of a model provider, and that of a configuration from `get_model_config()`, which Megatron-LM's builder
calls. Stand-ins: the model that the builder makes, the state, the batch, process groups, and what counts FLOPs.
"""

import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from comparing import LABELS, MASK, POSITIONS, TOKENS, cases, compare_with_plugin, loss_of
from stand_ins import definitions, module_with, packages_without_their_init
from torch import Tensor, nn


def provider(folder: Path) -> Any:
    """A model provider, whose hooks are the mixin's."""
    file = folder / "megatron/bridge/models/model_provider.py"
    known = {"ModelT": TypeVar("ModelT")}
    (mixin,) = definitions(file, "megatron.bridge.models.model_provider", "ModelProviderMixin", **known)
    return type("Provider", (mixin,), {"provide": None, "finalize": None})()


def program(folder: Path) -> None:
    state = SimpleNamespace(timers=mock.MagicMock(), straggler_timer=mock.MagicMock(), cfg=None)
    known = dict.fromkeys(("accumulate_flops_metadata", "get_model_chunk_vp_stage"), lambda *_, **__: None)
    known["get_batch"] = lambda *_, **__: (TOKENS, LABELS, MASK, None, POSITIONS, None)
    known["get_pg_collection"] = mock.MagicMock()
    packages_without_their_init(folder, "megatron.bridge.training")
    file = folder / "megatron/bridge/training/gpt_step.py"
    training = module_with(file, "megatron.bridge.training.gpt_step", "_forward_step_common", **known)
    from megatron_lce.plugins import bridge

    with mock.patch.object(typing, "override", lambda method: method, create=True):  # which Python 3.11 lacks
        from megatron.training.models import gpt

    def with_provider(model: nn.Module) -> dict[str, Tensor]:
        models = provider(folder)
        models.register_post_wrap_hook(bridge.enable)
        (model,) = models.post_wrap_hook([model])
        return losses(model)

    def with_configuration(model: nn.Module) -> dict[str, Tensor]:
        models = gpt.GPTModelConfig(transformer=model.config)
        models.post_wrap_hooks.append(bridge.enable)
        with mock.patch.object(gpt, "unimodal_build_distributed_models", return_value=[model]):
            (model,) = gpt.GPTModelBuilder(models).build_distributed_models(mock.MagicMock())
        return losses(model)

    def losses(model: nn.Module) -> dict[str, Tensor]:
        return loss_of(*training._forward_step_common(state, None, model))

    for case in cases():
        for name, way in (("provider", with_provider), ("configuration", with_configuration)):
            compare_with_plugin(f"Megatron-Bridge's training, {name}, {case.name}", case, bridge, way, losses)
