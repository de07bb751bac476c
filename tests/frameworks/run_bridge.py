"""Megatron-Bridge's output layers with a softcap, under the flag, against Megatron's loss of their logits.

    torchrun --nproc-per-node 2 tests/frameworks/run.py bridge FOLDER      # FOLDER/megatron/bridge

Of the files, which want TransformerEngine, the classes and their softcap alone are taken.
"""

from pathlib import Path
from typing import Any

from comparing import LABELS, POSITIONS, TOKENS, cases, compare
from megatron.core.tensor_parallel import ColumnParallelLinear
from stand_ins import definitions
from torch import Tensor, nn

import megatron_lce

HEADS = {
    "gemma.gemma2_provider": ("Gemma2OutputLayer", "logit_softcapping"),
    "gemma.modeling_gemma4": ("Gemma4OutputLayer", "_logit_softcapping"),
}


def program(folder: Path) -> None:
    for module, names in HEADS.items():
        file = folder / f"megatron/bridge/models/{module.replace('.', '/')}.py"
        head, _ = definitions(file, f"megatron.bridge.models.{module}", *names)
        if not issubclass(head, ColumnParallelLinear):  # a mixin, which Bridge puts in front
            head = type(names[0], (head, ColumnParallelLinear), {})

        def outputs(fused: bool, head: type = head) -> Any:
            def call(model: nn.Module) -> dict[str, Tensor]:
                model.output_layer.__class__ = head
                model.config.final_logit_softcapping = 0.5
                if fused:
                    megatron_lce.enable_fused_linear_ce(model, on_unsupported="raise")
                return {"loss": model(TOKENS, POSITIONS, None, labels=LABELS)}

            return call

        for case in cases():
            compare(f"Megatron-Bridge's {names[0]}, {case.name}", case, outputs(True), outputs(False))
