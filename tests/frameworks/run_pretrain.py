"""The forward step of Megatron-LM's pretrain_gpt.py, with the diff of docs/recipes, against the step as it is.

    torchrun --nproc-per-node 2 tests/frameworks/run_pretrain.py OWN FUSED      # folders that have pretrain_gpt.py

Stand-ins: arguments, timers, the batch and the loss function that the step returns.
"""

import ast
import contextlib
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from comparing import VOCABULARY, cases, compare, main
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_attr_wrapped_model
from stand_ins import definitions
from torch import Tensor, nn

import megatron_lce

MASK = (torch.arange(12) > 4).expand(3, -1).float()  # of the tokens that count


class Detector(contextlib.nullcontext):
    def __call__(self, **_: Any) -> "Detector":
        return self


def forward_step(folder: str) -> Callable[[None, nn.Module], Any]:
    file = Path(folder, "pretrain_gpt.py")
    tokens, labels = torch.randint(VOCABULARY, (2, 3, 12), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "labels": labels, "position_ids": torch.arange(12)[None], "loss_mask": MASK}
    known = {
        "get_args": lambda: Namespace(use_legacy_models=False, sft=True),
        "get_timers": lambda: lambda *_, **__: Namespace(start=lambda: None, stop=lambda: None),
        "get_batch": lambda *_: [batch.get(name) for name in names_of_batch(file)],
        "loss_func": lambda *_: None,
        "stimer": Detector(),
    }
    known |= {"GPTModel": GPTModel, "get_attr_wrapped_model": get_attr_wrapped_model, "partial": partial}
    return definitions(file, "pretrain_gpt", "forward_step", megatron_lce=megatron_lce, **known)[0]


def names_of_batch(file: Path) -> list[str]:
    """What this version's forward step unpacks a batch into."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Call(func=ast.Name(id="get_batch"))):
                return [name.id for name in names if isinstance(name, ast.Name)]
    raise AssertionError(f"{file} unpacks no batch")


def program() -> None:
    own, fused = (forward_step(folder) for folder in sys.argv[1:])

    def outputs(step: Callable[[None, nn.Module], Any]) -> Any:
        def call(model: nn.Module) -> dict[str, Tensor]:
            output, _ = step(None, model)
            assert hasattr(model, "fused_linear_ce") == (step is fused)
            assert step is own or model.fused_linear_ce.enabled
            return {"losses": (output * MASK).detach(), "loss": (output * MASK).sum()[None]}

        return call

    for case in cases():
        compare(f"pretrain_gpt.py, {case.name}", case, outputs(fused), outputs(own))


if __name__ == "__main__":
    main(program)
