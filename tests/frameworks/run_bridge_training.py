"""Megatron-Bridge's forward step with the plugin and a model that its provider's hook enabled, against it without.

    torchrun --nproc-per-node 2 tests/frameworks/run_bridge_training.py FOLDER      # of megatron/bridge

Stand-ins: the state, the batch, process groups, and what counts FLOPs.
"""

import abc
import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, Union
from unittest import mock

import torch
from comparing import VOCABULARY, cases, compare_with_plugin, main
from stand_ins import definitions, module_with, packages_without_their_init
from torch import Tensor, nn


def provider(folder: Path) -> Any:
    """A model provider, whose hooks are the mixin's."""
    known = {"abc": abc, "Generic": Generic, "ModelT": TypeVar("ModelT"), "Union": Union}
    known |= {"Float16Module": None, "ModelType": mock.Mock()}  # defaults of arguments
    file = folder / "megatron/bridge/models/model_provider.py"
    (mixin,) = definitions(file, "megatron.bridge.models.model_provider", "ModelProviderMixin", **known)
    return type("Provider", (mixin,), {"provide": None, "finalize": None})()


def forward_step(folder: Path, batch: tuple) -> Any:
    def none(*_: Any, **__: Any) -> None:
        return None

    known = {
        "accumulate_flops_metadata": none,
        "get_batch": lambda *_, **__: batch,
        "get_model_chunk_vp_stage": none,
        "get_model_config": lambda model: model.config,
        "get_pg_collection": lambda model: mock.MagicMock(),
    }
    packages_without_their_init(folder, "megatron.bridge", "megatron.bridge.training")
    file = folder / "megatron/bridge/training/gpt_step.py"
    return module_with(file, "megatron.bridge.training.gpt_step", "_forward_step_common", **known)


class Timer(contextlib.nullcontext):
    def __call__(self, **_: Any) -> "Timer":
        return self


def program() -> None:
    folder = Path(sys.argv[1])
    tokens, labels = torch.randint(VOCABULARY, (2, 3, 12), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(12) > 4).expand(3, -1).float()
    state = SimpleNamespace(timers=mock.MagicMock(), straggler_timer=Timer(), cfg=None)
    training = forward_step(folder, (tokens, labels, mask, None, torch.arange(12)[None], None))
    from megatron_lce.plugins import bridge

    def with_hook(model: nn.Module) -> dict[str, Tensor]:
        models = provider(folder)
        models.register_post_wrap_hook(bridge.enable)
        (model,) = models.post_wrap_hook([model])
        return losses(model)

    def losses(model: nn.Module) -> dict[str, Tensor]:
        values, loss_mask = training._forward_step_common(state, None, model)
        return {"losses": (values * loss_mask).detach(), "loss": (values * loss_mask).sum()[None]}

    for case in cases():
        compare_with_plugin(f"Megatron-Bridge's training, {case.name}", case, bridge, with_hook, losses)


if __name__ == "__main__":
    main(program)
