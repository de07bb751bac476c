"""mcore_adapter's model (ROLL, LLaMA-Factory) under the flag and in a capture, against its own loss and logprobs.

    torchrun --nproc-per-node 2 tests/frameworks/run.py mcore_adapter FOLDER  # ROLL: FOLDER/mcore_adapter, FOLDER/roll

Of the model's class, which wants transformers, its loss and the hook that its constructor puts on the head are taken.
Its own losses change fp32 logits in place, which torch forbids behind the hook: beside them the hook gives a copy.
"""

import functools
from pathlib import Path
from typing import Any

from comparing import LABELS, MASK, POSITIONS, TEMPERATURE, TOKENS, cases, compare, loss_of
from stand_ins import definitions, mocks, packages_without_their_init
from torch import Tensor, nn

import megatron_lce


def import_adapter(folder: Path) -> tuple[type, Any, Any, Any]:
    """The model's class, the hook on its head, and ROLL's logprobs and entropy of logits."""
    models = folder / "mcore_adapter/src/mcore_adapter/models"
    names = "_McaLoraLogitsHelper", "_mca_lora_logits_postprocess", "mca_lora_logits_postprocess_hook"
    *_, hook = definitions(models / "model_utils.py", "mcore_adapter.models.model_utils", *names)
    known = {"PretrainedModel": nn.Module, "McaModelConfig": None}
    (kind,) = definitions(models / "model_factory.py", "mcore_adapter.models.model_factory", "McaGPTModel", **known)
    packages_without_their_init(folder / "mcore_adapter/src", "mcore_adapter.parallel_functions")
    packages_without_their_init(folder, "roll.third_party.megatron", "roll.utils")
    mocks("mcore_adapter.utils", "roll.utils.logging")
    from mcore_adapter.parallel_functions import vocab_parallel
    from roll.third_party.megatron import tensor_parallel

    return kind, hook, vocab_parallel.vocab_parallel_logprobs, tensor_parallel.vocab_parallel_entropy


def program(folder: Path) -> None:
    kind, hook, logprobs_of, entropy_of = import_adapter(folder)

    def adapted(model: nn.Module, fused: bool) -> nn.Module:
        model.__class__ = kind
        model.output_layer.register_forward_hook(hook)
        if not fused:
            model.output_layer.register_forward_hook(lambda head, args, output: (output[0].clone(), output[1]))
        return model

    def trained(model: nn.Module, fused: bool) -> dict[str, Tensor]:
        """What mcore_adapter's trainer and ROLL's SFT take."""
        model = adapted(model, fused)
        if fused:
            megatron_lce.enable_fused_linear_ce(model, on_unsupported="raise", known_loss=True, skip_masked=True)
        return loss_of(model(TOKENS, POSITIONS, None, labels=LABELS, loss_mask=MASK))

    def captured(model: nn.Module) -> dict[str, Tensor]:
        with megatron_lce.capture_lm_head(adapted(model, True)) as head:
            model(TOKENS, POSITIONS, None)
        out = head.linear_cross_entropy(LABELS, temperature=TEMPERATURE)
        return {"logprobs": out.logprobs, "entropy": out.entropy}

    def of_logits(model: nn.Module) -> dict[str, Tensor]:
        logits = adapted(model, False)(TOKENS, POSITIONS, None) / TEMPERATURE
        entropy = entropy_of(logits.clone(), use_fused_kernel=False)
        return {"logprobs": logprobs_of(logits.clone(), LABELS, use_fused_kernel=False), "entropy": entropy}

    for case in cases():
        ways = (functools.partial(trained, fused=fused) for fused in (True, False))
        compare(f"mcore_adapter, flag, {case.name}", case, *ways)
        compare(f"ROLL, {case.name}", case, captured, of_logits)
