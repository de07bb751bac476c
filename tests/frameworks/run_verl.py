"""verl's own fused forward files with the plugin, against verl's unfused path without, on any number of ranks.

    torchrun --nproc-per-node 2 tests/frameworks/run.py verl FOLDER      # FOLDER/verl

The plugin is imported before verl's modules, and once more after them.
Stand-ins: an output class that is a dataclass of transformers in verl, the unwrapping of DDP, what verl asks of a
device, a type that only annotates, and the schedule of `build_schedule_plan`, which calls what verl sets on it.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from comparing import TEMPERATURE, VOCABULARY, cases, compare_with_plugin
from megatron.core.utils import unwrap_model
from stand_ins import forget, module_with, packages_without_their_init, stand_in
from torch import Tensor, nn

from megatron_lce import capture_lm_head

LENGTHS = (5, 9, 6)


def import_verl(folder: Path, plugin: str = "") -> SimpleNamespace:
    """verl's functions, and the plugin if it is imported "before" or "after" the modules that it is about."""
    forget("verl")
    stand_ins_of_verl(folder)
    found = {"plugin": importlib.import_module("megatron_lce.plugins.verl")} if plugin == "before" else {}
    from verl.models.mcore import model_forward, model_forward_1f1b_overlap, model_forward_fused
    from verl.utils.megatron import tensor_parallel

    import_registry(folder)
    if plugin == "after":
        found["plugin"] = importlib.import_module("megatron_lce.plugins.verl")
    return SimpleNamespace(
        **found,
        unfused=lambda *inputs, **keywords: model_forward.gptmodel_forward_model_engine(*inputs, **keywords),
        fused=model_forward_fused,
        overlap=model_forward_1f1b_overlap.gptmodel_forward_1f1b_overlap,
        parallel=tensor_parallel,
    )


def stand_ins_of_verl(folder: Path) -> None:
    packages_without_their_init(folder, "verl.models.mcore", "verl.utils.megatron", "verl.workers")
    stand_in("verl.utils.model", CausalLMOutputForPPO=SimpleNamespace)
    stand_in(
        "verl.utils.device",
        is_npu_available=False,
        is_cuda_available=torch.cuda.is_available(),
        get_device_capability=torch.cuda.get_device_capability,
        get_device_name=lambda: "cuda",
        get_torch_device=lambda: torch.cuda,
    )
    stand_in("verl.workers.config", MtpConfig=None)
    stand_in("verl.utils.megatron_utils", unwrap_model=unwrap_model)


def import_registry(folder: Path) -> ModuleType:
    """The function of verl's registry that the engine imports, which has imported the forward pass by its name."""
    from verl.models.mcore import model_forward

    known = {"gptmodel_forward_model_engine": model_forward.gptmodel_forward_model_engine}
    file, name = folder / "verl/models/mcore/registry.py", "get_mcore_engine_forward_fn"
    registry = module_with(file, "verl.models.mcore.registry", name, **known)
    sys.modules["verl.models.mcore"].get_mcore_engine_forward_fn = registry.get_mcore_engine_forward_fn
    return registry


def batch() -> Tensor:
    """Sequences of several lengths, as verl's engine has them: a jagged nested tensor [b, j]."""
    generator = torch.Generator().manual_seed(0)
    return jagged([torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS])


def jagged(parts: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def lengths(tokens: Tensor) -> list[int]:
    return tokens.offsets().diff().tolist()


def counted(tokens: Tensor) -> Tensor:
    """All tokens but the last of each sequence: that one has no next, and verl's loss leaves it out."""
    return torch.cat([torch.arange(n, device=tokens.device) < n - 1 for n in lengths(tokens)])


def unfused(verl: SimpleNamespace, model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """verl's forward with logits, and what its engine computes from them."""

    def of_logits(logits: Tensor, label: Tensor, temperature: Tensor) -> dict[str, Tensor]:
        logits = logits / temperature.clamp(min=1e-8)[..., None]  # 0 in padding
        return {
            "entropy": verl.parallel.vocab_parallel_entropy(logits.clone()),
            "log_probs": verl.parallel.vocab_parallel_log_probs_from_logits(logits, label),
        }

    temperature = jagged([torch.full((n,), TEMPERATURE, device=tokens.device) for n in lengths(tokens)])
    arguments = {"label": tokens, "temperature": temperature}
    return verl.unfused(model, tokens, {}, logits_processor=of_logits, logits_processor_args=arguments)


def fused(verl: SimpleNamespace, model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    verl.fused.patch_fused_forward(model)
    run = verl.fused.fused_forward_model_engine()
    result = run(model, tokens, tokens, {}, TEMPERATURE, calculate_entropy=True, pad_token_id=0)
    verl.fused.unpatch_fused_forward(model)
    return result


def overlapped(verl: SimpleNamespace, model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """What verl hangs into the schedule of its overlapped forward, called as that schedule calls it."""
    padded = tokens.to_padded_tensor(0)
    mask = torch.arange(padded.shape[1])[None] < torch.tensor(lengths(tokens))[:, None]
    model.build_schedule_plan = lambda **keywords: SimpleNamespace(post_process=SimpleNamespace(), **keywords)
    plan = verl.overlap(model, padded, None, mask, padded.roll(-1, 1), torch.ones_like(mask), temperature=TEMPERATURE)
    postprocess = model._postprocess  # verl's own, of the model from now on
    del model.build_schedule_plan, model._postprocess
    with capture_lm_head(model) as head:
        model(plan.input_ids, None, None, packed_seq_params=plan.packed_seq_params)
    rest = dict.fromkeys(("input_ids", "position_ids", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"))
    (logprobs,) = postprocess(
        head.hidden, labels=plan.labels, attention_mask=mask, packed_seq_params=plan.packed_seq_params, **rest
    )
    return {"log_probs": logprobs[mask]}


def program(folder: Path) -> None:
    tokens = batch()
    for order in ("before", "after"):
        verl = import_verl(folder, order)

        def outputs(run: Any, verl: SimpleNamespace = verl) -> Any:
            def call(model: nn.Module) -> dict[str, Tensor]:
                result = run(verl, model, tokens)
                return {name: (t.values() if t.is_nested else t)[counted(tokens)] for name, t in result.items()}

            return call

        for case in cases() if order == "before" else cases()[:1]:
            mode = verl.fused._resolve_fused_forward_mode(case.build())
            ways = {f"fused forward ({mode})": fused}
            if not case.tied:  # that file takes the head's own weight
                ways["overlapped forward"] = overlapped
            for name, way in ways.items():
                name = f"verl's {name}, plugin {order}, {case.name}"
                compare_with_plugin(name, case, verl.plugin, outputs(way), outputs(unfused))
        verl.plugin.uninstall()
