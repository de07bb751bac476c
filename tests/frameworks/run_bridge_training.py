"""Megatron-Bridge's forward step of a model that its provider's hook enabled, against the step as it is.

    torchrun --nproc-per-node 2 tests/frameworks/run_bridge_training.py OWN FUSED      # folders of megatron/bridge

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
from comparing import VOCABULARY, cases, compare, main
from stand_ins import definitions
from torch import Tensor, nn

import megatron_lce


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
    file = folder / "megatron/bridge/training/gpt_step.py"
    return definitions(file, "megatron.bridge.training.gpt_step", "_forward_step_common", **known)[0]


class Timer(contextlib.nullcontext):
    def __call__(self, **_: Any) -> "Timer":
        return self


def program() -> None:
    folders = [Path(folder) for folder in sys.argv[1:]]
    tokens, labels = torch.randint(VOCABULARY, (2, 3, 12), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(12) > 4).expand(3, -1).float()
    state = SimpleNamespace(timers=mock.MagicMock(), straggler_timer=Timer(), cfg=None)
    batch = tokens, labels, mask, None, torch.arange(12)[None], None
    own, fused = (forward_step(folder, batch) for folder in folders)

    def enable(model: list[nn.Module]) -> list[nn.Module]:
        assert megatron_lce.enable_fused_linear_ce(model, known_loss=True, skip_masked=True).enabled
        return model

    def with_hook(model: nn.Module) -> dict[str, Tensor]:
        models = provider(folders[1])
        models.register_post_wrap_hook(enable)
        (model,) = models.post_wrap_hook([model])
        return of(model, fused)

    def of(model: nn.Module, step: Any) -> dict[str, Tensor]:
        losses, loss_mask = step(state, None, model)
        return {"losses": (losses * loss_mask).detach(), "loss": (losses * loss_mask).sum()[None]}

    for case in cases():
        compare(f"Megatron-Bridge's training, {case.name}", case, with_hook, lambda model: of(model, own))


if __name__ == "__main__":
    main(program)
