"""verl's own TrainingWorker around a small GPT: its update and its log-prob pass, as its trainer calls them.

Nothing of verl's is replaced but what would read a checkpoint: configurations of the model, the bridge that builds it,
the checkpoint manager. Stand-ins, of which nothing computes: Ray and other services, data sets, PEFT, other engines.
Needed are tensordict, omegaconf, codetiming and transformers (`make test-frameworks` fetches them).
"""

import importlib
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from run_workers import Missing
from torch import Tensor, nn

NOT_RUN = "ray", "accelerate", "cupy", "datasets", "fastapi", "pandas", "peft", "psutil", "pydantic", "tabulate"
NOT_RUN += "torchdata", "uvicorn", "vllm", "zmq"
ENGINE = "verl.workers.engine.megatron.transformer_impl"
TEMPERATURE = 0.8


class StandIns(Missing):
    """The last finder, for these packages alone: verl asks for more, and does without."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return super().find_spec(name, path, target) if name.partition(".")[0] in NOT_RUN else None


class Settings(SimpleNamespace):
    """In place of verl's configuration of a checkpoint."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def import_verl(folder: Path) -> SimpleNamespace:
    importlib.import_module("transformers")  # before the stand-ins: it looks for what is installed
    sys.path.insert(0, str(folder))
    sys.meta_path.append(StandIns("verl"))  # type: ignore[arg-type]
    names = {
        "config": "verl.workers.config",
        "engine": ENGINE,
        "losses": "verl.workers.utils.losses",
        "padding": "verl.workers.utils.padding",
        "tensors": "verl.utils.tensordict_utils",
        "workers": "verl.workers.engine_workers",
    }
    return SimpleNamespace(**{short: importlib.import_module(name) for short, name in names.items()})


def of_model(hidden: int, layers: int, heads: int, vocabulary: int) -> Settings:
    from transformers import Qwen3Config

    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return Settings(
        use_remove_padding=True,
        use_fused_kernels=False,
        hf_config=Qwen3Config(**sizes, vocab_size=vocabulary, architectures=["Qwen3ForCausalLM"]),
        architectures=["Qwen3ForCausalLM"],
        local_path=None,
        get_processor=lambda: None,
        mtp=SimpleNamespace(enable=False, enable_train=False),
        tokenizer=SimpleNamespace(pad_token_id=0),
        share_embeddings_and_output_weights=False,
    )


def build_worker(verl: SimpleNamespace, model: nn.Module, settings: Settings, sequences: int) -> Any:
    """verl's TrainingWorker, initialized, of a Megatron model under DDP; a learning rate of 0 keeps its weights.

    `sequences`: of a microbatch.
    """

    def tf_config(engine: Any) -> None:
        engine.tf_config, engine.is_value_model = model.config, False
        engine.param_dtype = engine.dtype = model.config.params_dtype
        engine.share_embeddings_and_output_weights = False
        engine.bridge = engine.provider = engine.peft_cls = None

    config = verl.config
    engine_config = config.McoreEngineConfig(
        tensor_model_parallel_size=torch.distributed.get_world_size(),
        use_distributed_optimizer=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=sequences,
        infer_micro_batch_size_per_gpu=sequences,
    )
    optimizer = config.McoreOptimizerConfig(lr=0.0, weight_decay=0.0, total_training_steps=1, lr_warmup_steps=0)
    given = {"model_config": settings, "engine_config": engine_config, "optimizer_config": optimizer}
    replaced = {"_build_tf_config": tf_config, "_build_megatron_module": lambda engine: [model]}
    with (
        mock.patch.multiple(verl.engine.MegatronEngineWithLMHead, **replaced),
        mock.patch.object(verl.engine, "MegatronCheckpointManager"),
        mock.patch.object(verl.workers, "set_numa_affinity"),  # it asks Ray for the GPU
        mock.patch.dict("os.environ", {"VERL_ENGINE_DEVICE": "cuda"}),
    ):
        worker = verl.workers.TrainingWorker(config.TrainingWorkerConfig(model_type="language_model", **given))
        worker.reset()
    return worker


def set_loss(verl: SimpleNamespace, worker: Any, entropy_coeff: float) -> None:
    """verl's PPO loss, as its actor sets it."""
    options = {"clip_ratio_high": 0.28, "use_torch_compile": False, "entropy_coeff": entropy_coeff}
    actor = verl.config.ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
    worker.set_loss_fn(loss_fn=partial(verl.losses.ppo_loss, actor))


def jagged(rows: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def make_batch(verl: SimpleNamespace, tokens: Tensor, prompt: int) -> Any:
    """Sequences [b, s] that begin with prompts, without padding; the trained tokens are those of the answers."""
    prompts, answers = tokens[:, :prompt], tokens[:, prompt:]
    mask = jagged(torch.ones_like(answers))
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    parts = {"input_ids": tokens, "position_ids": positions, "prompts": prompts, "responses": answers}
    tensors = {name: jagged(rows) for name, rows in parts.items()} | {"loss_mask": mask, "response_mask": mask}
    tensors["temperature"] = torch.full((len(tokens),), TEMPERATURE, device=tokens.device)
    settings = {"global_token_num": [tokens.shape[1]] * len(tokens), "global_batch_size": len(tokens)}
    return verl.tensors.get_tensordict(tensors, settings)


def log_probs(verl: SimpleNamespace, worker: Any, batch: Any, entropy: bool) -> dict[str, Tensor]:
    """verl's pass for old or reference logprobs; on the first rank, of every token."""
    batch = batch.copy()
    verl.tensors.assign_non_tensor(batch, calculate_entropy=entropy, compute_loss=False)
    output = worker.infer_batch(batch)
    names = ("log_probs", "entropy") if entropy else ("log_probs",)
    return {} if output is None else {name: output[name].values() for name in names}


def update(verl: SimpleNamespace, worker: Any, batch: Any, entropy: bool) -> dict[str, Any]:
    """verl's update of the actor: all microbatches, and the optimizer's step; the first rank's metrics."""
    batch = batch.copy()
    verl.tensors.assign_non_tensor(batch, calculate_entropy=entropy, compute_loss=True)
    output = worker.train_batch(batch)
    return {} if output is None else output["metrics"]
