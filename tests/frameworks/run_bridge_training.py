"""Megatron-Bridge's forward step with the plugin and a model that its provider's hook enabled, against it without.

    torchrun --nproc-per-node 2 tests/frameworks/run_bridge_training.py FOLDER      # of megatron/bridge

Stand-ins: the state, the batch, process groups, and what counts FLOPs.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from comparing import LABELS, MASK, POSITIONS, TOKENS, cases, compare_with_plugin, loss_of, main
from stand_ins import Timer, definitions, module_with, packages_without_their_init
from torch import Tensor, nn


def provider(folder: Path) -> Any:
    """A model provider, whose hooks are the mixin's."""
    file = folder / "megatron/bridge/models/model_provider.py"
    known = {"ModelT": TypeVar("ModelT")}
    (mixin,) = definitions(file, "megatron.bridge.models.model_provider", "ModelProviderMixin", **known)
    return type("Provider", (mixin,), {"provide": None, "finalize": None})()


def forward_step(folder: Path, batch: tuple) -> Any:
    known = {
        **dict.fromkeys(("accumulate_flops_metadata", "get_model_chunk_vp_stage"), lambda *_, **__: None),
        "get_batch": lambda *_, **__: batch,
        "get_pg_collection": lambda model: mock.MagicMock(),
    }
    packages_without_their_init(folder, "megatron.bridge", "megatron.bridge.training")
    file = folder / "megatron/bridge/training/gpt_step.py"
    return module_with(file, "megatron.bridge.training.gpt_step", "_forward_step_common", **known)


def program() -> None:
    folder = Path(sys.argv[1])
    state = SimpleNamespace(timers=mock.MagicMock(), straggler_timer=Timer(), cfg=None)
    training = forward_step(folder, (TOKENS, LABELS, MASK, None, POSITIONS, None))
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


if __name__ == "__main__":
    main(program)
