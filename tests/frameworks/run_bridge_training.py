"""Megatron-Bridge's forward step with the plugin and a model that its provider's hook enabled, against it without.

    torchrun --nproc-per-node 2 tests/frameworks/run.py bridge_training FOLDER      # of megatron/bridge

Stand-ins: the state, the batch, process groups, and what counts FLOPs.
"""

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

    def with_hook(model: nn.Module) -> dict[str, Tensor]:
        models = provider(folder)
        models.register_post_wrap_hook(bridge.enable)
        (model,) = models.post_wrap_hook([model])
        return losses(model)

    def losses(model: nn.Module) -> dict[str, Tensor]:
        return loss_of(*training._forward_step_common(state, None, model))

    for case in cases():
        compare_with_plugin(f"Megatron-Bridge's training, {case.name}", case, bridge, with_hook, losses)
