"""Megatron-SWIFT's GRPO step, logprobs and GKD step with the plugin, against its own of logits.

    torchrun --nproc-per-node 2 tests/frameworks/run.py ms_swift OWN FUSED BRIDGE

OWN/swift: without the plugin, FUSED/swift: with, BRIDGE/mcore_bridge: its model's way from hidden to logits is taken.
Stand-ins: the batch's preparation, router replay, profiling, and what reduces metrics.
"""

import contextlib
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from comparing import TEMPERATURE, VOCABULARY, Wrapper, cases, compare_with_plugin, sharpened
from megatron.core.models.gpt import GPTModel
from stand_ins import NO_REPLAY, definitions, forget, module_with, packages_without_their_init, stand_in
from torch import Tensor, nn

PROMPT, LENGTH = 5, 12
TRAINERS = "swift.megatron.trainers"


def import_swift(folder: Path, plugin: bool = False) -> SimpleNamespace:
    """The functions that stand between a model and its logprobs or its divergence, the first two with the plugin."""
    forget("swift")
    packages_without_their_init(folder, TRAINERS, "swift.rlhf_trainers")
    stand_in("mcore_bridge", split_cp_inputs=None)
    from swift.megatron.trainers import gkd_utils, vocab_parallel_utils
    from swift.rlhf_trainers import gkd_loss

    imported = {**vars(gkd_utils), **vars(vocab_parallel_utils), **vars(gkd_loss)}
    known = {name: value for name, value in imported.items() if not name.startswith("__")}
    known |= {
        "ContextManagers": lambda contexts: contextlib.nullcontext(),
        **dict.fromkeys(("GKDSample", "GRPOSample")),
        "MegatronRLHFTrainer": object,
        "MegatronRolloutMixin": type("Mixin", (), {}),
        "RouterReplayHelper": NO_REPLAY,
        "prepare_batch": lambda args, batch: dict(batch),
        "profiling_decorator": lambda method: method,
    }
    file = folder / "swift/megatron/utils/utils.py"
    (helper,) = definitions(file, "swift.megatron.utils", "forward_step_helper", **known)
    known["forward_step_helper"] = helper
    replay = dict.fromkeys(("get_local_topk_idx_for_current_rank", "get_router_replay_data", "set_router_replay_data"))
    stand_in("swift.megatron.utils", forward_step_helper=helper, RouterReplayHelper=NO_REPLAY, **replay)

    def module(name: str, *names: str) -> ModuleType:
        return module_with(folder / f"swift/megatron/trainers/{name}.py", f"{TRAINERS}.{name}", *names, **known)

    of_gkd = module("gkd_trainer", "MegatronGKDTrainer")
    trainer, logprobs = module("grpo_trainer", "MegatronGRPOTrainer"), module("utils", "compute_per_token_logps_fn")
    if plugin:
        switch_on(folder)
    return SimpleNamespace(
        plugin=sys.modules.get("megatron_lce.plugins.ms_swift"),
        modules={name: module for name, module in sys.modules.items() if name.partition(".")[0] == "swift"},
        grpo=lambda *inputs: trainer.MegatronGRPOTrainer.forward_step(*inputs),
        logprobs=lambda *inputs, **keywords: logprobs.compute_per_token_logps_fn(*inputs, **keywords),
        gkd=of_gkd.MegatronGKDTrainer,
    )


def switch_on(folder: Path) -> None:
    """By `--external_plugins lce.py`, as ms-swift imports such a file."""
    file = folder / "swift/utils/utils.py"
    (load,) = definitions(file, "swift.utils.utils", "import_external_file", _external_files=[])
    with tempfile.TemporaryDirectory() as into:
        Path(into, "lce.py").write_text("import megatron_lce.plugins.ms_swift\n")
        load(f"{into}/lce.py")


def head_of_mcore_bridge(folder: Path) -> Callable[[nn.Module], nn.Module]:
    """Gives a GPTModel mcore_bridge's way from hidden states to logits."""
    names = "_postprocess", "_forward_output_layer", "get_input_tensor"
    found = definitions(folder / "mcore_bridge/model/gpt_model.py", "mcore_bridge.model.gpt_model", *names)
    bridge = type("BridgeModel", (GPTModel,), dict(zip(names, found, strict=True)))

    def bridged(model: nn.Module) -> nn.Module:
        model.__class__ = bridge
        model.config.task_type, model.config.is_multimodal = "causal_lm", False
        return model

    return bridged


def batch() -> dict[str, Tensor | None]:
    """Two sequences whose prompt, and one token more, are not counted."""
    tokens, labels = torch.randint(VOCABULARY, (2, 2, LENGTH), generator=torch.Generator().manual_seed(0))
    labels[:, :PROMPT] = labels[0, -2] = -100
    positions = torch.arange(LENGTH).expand(2, -1)
    return {"input_ids": tokens, "position_ids": positions, "attention_mask": None, "labels": labels}


def trainer(**settings: Any) -> Any:
    return SimpleNamespace(
        args=SimpleNamespace(context_parallel_size=1, padding_free=False),
        temperature=TEMPERATURE,
        enable_routing_replay=False,
        micro_batch_size=2,
        steps_per_generation=1,
        _step=0,
        _prepare_batch=lambda data, vp_stage=None: dict(data),
        _all_reduce_metric=lambda metric, *_, **__: metric,
        _flush_log_completions=lambda: None,
        loss_func=lambda: None,
        **settings,
    )


def grpo(swift: SimpleNamespace, model: nn.Module) -> dict[str, Tensor]:
    counted = batch()["labels"] != -100
    inputs = batch() | {"grpo_batch": SimpleNamespace(completion_mask=counted)}
    logprobs, loss = swift.grpo(trainer(compute_entropy=True), iter([inputs]), model)
    return {"logprobs": logprobs, "entropy": loss.keywords["data"]["per_token_entropy"][counted]}


def logprobs(swift: SimpleNamespace, model: nn.Module) -> dict[str, Tensor]:
    args = SimpleNamespace(context_parallel_size=1)
    return {"logprobs": swift.logprobs(model, args, iter([batch()]), TEMPERATURE, no_grad=False)[0]}


def gkd(swift: SimpleNamespace, teacher: nn.Module, beta: float, model: nn.Module) -> dict[str, Tensor]:
    settings = {"_is_self_distillation": False, "teacher_models": [teacher], "gkd_logits_topk": None, "beta": beta}
    own = trainer(use_teacher_api=False, sft_alpha=0.5, unwrapped_models=[model], **settings)
    own.load_teacher_model_context = contextlib.nullcontext
    own.loss_func = functools.partial(swift.gkd.loss_func, own)
    inputs: dict[str, Any] = batch() | {"teacher_model_inputs": batch()}
    swift.gkd._compute_teacher_logits_local(own, [inputs])
    output, loss = swift.gkd.forward_step(own, iter([inputs]), Wrapper(Wrapper(model)))
    total, *number, _ = loss(output)
    if not number:  # of a version whose loss is a mean
        total = total * (inputs["labels"] != -100).sum()
    return {"divergence": total[None]}


def program(own_folder: Path, changed_folder: Path, folder_of_bridge: Path) -> None:
    own, fused = import_swift(own_folder), import_swift(changed_folder, plugin=True)
    bridged = head_of_mcore_bridge(folder_of_bridge)
    for case in cases():
        teacher = bridged(sharpened(case.build()))
        ways = {"GRPO": grpo, "logprobs": logprobs}
        ways |= {f"GKD, beta {beta}": functools.partial(gkd, teacher=teacher, beta=beta) for beta in (0, 0.5, 1)}
        for name, way in ways.items():

            def outputs(swift: SimpleNamespace, way: Any = way) -> Any:
                def call(model: nn.Module) -> dict[str, Tensor]:
                    with mock.patch.dict(sys.modules, swift.modules):  # which it imports from when it is called
                        return way(swift, model=bridged(model))

                return call

            compare_with_plugin(f"ms-swift, {name}, {case.name}", case, fused.plugin, outputs(fused), outputs(own))
