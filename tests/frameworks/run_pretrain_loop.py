"""Megatron-LM's pretrain_hybrid.py or pretrain_gpt.py as a whole, with the lines of docs/integrations.md and without.

    PYTHONPATH=MEGATRON_LM torchrun --nproc-per-node 2 tests/frameworks/run.py pretrain_loop OWN FUSED

OWN and FUSED have the script; only FUSED's has the lines. Its arguments, mock data, model builder, schedule, DDP and
optimizer run as they are. Compared are the losses of three iterations and every parameter's gradient in each.
Stand-ins: layers without TransformerEngine, CUDA's calls on a CPU, and helpers that the data set would compile.
"""

import contextlib
import functools
import importlib.util
import sys
import sysconfig
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import typing_extensions
from comparing import check, megatron_runtime
from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from stand_ins import cuda_without_gpu, stand_in
from torch import Tensor

from scripts import megatron_layers

typing.override = getattr(typing, "override", typing_extensions.override)  # Python 3.11 lacks it

SIZES = "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --vocab-size 12"
SIZES += " --make-vocab-size-divisible-by 16 --micro-batch-size 2 --global-batch-size 4"
STEPS = "--train-iters 3 --lr 1e-3 --lr-decay-style constant --adam-eps 1e-5 --eval-iters 0 --eval-interval 9"
DATA = "--mock-data --tokenizer-type NullTokenizer --num-workers 0 --split 100,0,0 --eod-mask-loss"
LAYERS = "--transformer-impl local --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
LAYERS += " --attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization --distributed-backend gloo"
LAYERS += " --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion"
COMMON = f"{SIZES} {STEPS} {DATA} {LAYERS}".split()
CASES = {  # further arguments, by the script's name
    "pretrain_gpt.py": ("--num-layers 2", "--num-layers 2 --untie-embeddings-and-output-weights"),
    "pretrain_hybrid.py": (
        "--hybrid-layer-pattern **",
        "--hybrid-layer-pattern ** --untie-embeddings-and-output-weights --calculate-per-token-loss",
        "--hybrid-layer-pattern **/* --mtp-num-layers 1",
    ),
}


def own_layers() -> None:
    """The module whose specifications `--spec` names."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules

    layer = megatron_layers.gpt_layer_spec()
    mtp = megatron_layers.mtp_block_spec(megatron_runtime.transformer_config(megatron_runtime.GptOptions(mtp_layers=1)))
    stack = HybridStackSubmodules(attention_layer=layer, mtp_block_spec=mtp)
    block = TransformerBlockSubmodules(layer_specs=[layer] * 2, layer_norm=megatron_layers.RMSNorm)
    hybrid = ModuleSpec(HybridStack, params={"post_layer_norm": False}, submodules=stack)
    stand_in("own_layers", pretrain_gpt=block, pretrain_hybrid=hybrid)


@contextlib.contextmanager
def stand_ins(training: Any) -> Iterator[None]:
    """Of what wants a GPU or a compiler."""
    name = "megatron.core.datasets.helpers_cpp"
    (library,) = Path(sysconfig.get_path("purelib"), "megatron/core/datasets").glob("helpers_cpp*.so")
    specification = importlib.util.spec_from_file_location(name, library)
    sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(sys.modules[name])
    initialize = training.initialize_megatron
    with (
        cuda_without_gpu(),
        mock.patch("megatron.core.datasets.utils.compile_helpers"),
        mock.patch.object(training, "set_jit_fusion_options"),
        mock.patch.object(training, "initialize_megatron", functools.partial(initialize, allow_no_cuda=True)),
    ):
        yield


def losses_and_gradients(script: Path, arguments: list[str], skip: bool) -> tuple[dict[str, Tensor], set[bool]]:
    """Of each iteration, and which of the model's chunks had the flag enabled. `skip`: masked tokens, by the lines."""
    from megatron.training import global_vars, training

    found: dict[str, Tensor] = {}
    enabled: set[bool] = set()
    finalize, log = training.finalize_model_grads, training.training_log

    def gradients(model: list[Any], *inputs: Any, **keywords: Any) -> None:
        finalize(model, *inputs, **keywords)
        iteration = sum("embedding.word_embeddings.weight" in name for name in found)
        for name, parameter in model[0].module.named_parameters():
            found[f"{name}, iteration {iteration}"] = parameter.main_grad.clone()
        enabled.add(hasattr(model[0], "fused_linear_ce") and model[0].fused_linear_ce.enabled)

    def losses(loss_dict: dict[str, Tensor], *inputs: Any, **keywords: Any) -> Any:
        found.update({f"{name}, {len(found)}": x.detach().flatten().clone() for name, x in loss_dict.items()})
        return log(loss_dict, *inputs, **keywords)

    text = script.read_text().replace("get_args().sft", str(skip))
    with (
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        mock.patch.object(training, "finalize_model_grads", gradients),
        mock.patch.object(training, "training_log", losses),
        contextlib.redirect_stdout(sys.stderr),
    ):
        exec(compile(text, str(script), "exec"), {"__name__": "__main__", "__file__": str(script)})
    global_vars.destroy_global_vars()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    return found, enabled


def program(own: Path, fused: Path) -> None:
    sys.path.insert(0, str(own))
    from megatron.training import training

    own_layers()
    (script,) = fused.glob("pretrain_*.py")
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    common = [*COMMON, "--spec", "own_layers", script.stem, "--tensor-model-parallel-size", str(ranks)]
    common += ["--sequence-parallel"] * (ranks > 1)
    with stand_ins(training):
        for further in CASES[script.name]:
            run = functools.partial(losses_and_gradients, arguments=[*common, *further.split()])
            expected, enabled = run(own / script.name, skip=False)
            assert enabled == {False}
            for skip in (False, True):
                actual, enabled = run(script, skip=skip)
                assert enabled == {True}
                check(f"{script.name} {further}, TP={ranks}{', skip_masked' * skip}", actual, expected)
