"""The forward step of Megatron-LM's pretrain_gpt.py, with the lines of docs/integrations.md, against the step as it is.

    torchrun --nproc-per-node 2 tests/frameworks/run.py pretrain OWN FUSED      # folders that have pretrain_gpt.py

Stand-ins: arguments, timers, the batch and the loss function that the step returns.
"""

import ast
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from comparing import LABELS, MASK, POSITIONS, TOKENS, cases, compare, loss_of
from stand_ins import definitions
from torch import Tensor, nn


def forward_step(folder: Path) -> Callable[[None, nn.Module], Any]:
    file = folder / "pretrain_gpt.py"
    batch = {"tokens": TOKENS, "labels": LABELS, "position_ids": POSITIONS, "loss_mask": MASK}
    known = {
        "get_args": lambda: Namespace(use_legacy_models=False, sft=True),
        "get_timers": mock.MagicMock,
        "get_batch": lambda *_: [batch.get(name) for name in names_of_batch(file)],
        "loss_func": lambda *_: None,
        "stimer": mock.MagicMock(),
    }
    return definitions(file, "pretrain_gpt", "forward_step", **known)[0]


def names_of_batch(file: Path) -> list[str]:
    """What this version's forward step unpacks a batch into."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Call(func=ast.Name(id="get_batch"))):
                return [name.id for name in names if isinstance(name, ast.Name)]
    raise AssertionError(f"{file} unpacks no batch")


def program(*folders: Path) -> None:
    own, fused = map(forward_step, folders)

    def outputs(step: Callable[[None, nn.Module], Any]) -> Any:
        def call(model: nn.Module) -> dict[str, Tensor]:
            output, _ = step(None, model)
            assert hasattr(model, "fused_linear_ce") == (step is fused)
            assert step is own or model.fused_linear_ce.enabled
            return loss_of(output)

        return call

    for case in cases():
        compare(f"pretrain_gpt.py, {case.name}", case, outputs(fused), outputs(own))
