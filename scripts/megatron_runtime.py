"""How this project runs Megatron-core: process groups, small GPT models, the optimizer, and the patches a CPU needs.

Training programs and tests import this; the package never does. It runs on megatron-core 0.14 to 0.19, over NCCL on
GPUs and gloo on a CPU, without Apex and, unless it is asked for, TransformerEngine. In a program started by torchrun:

    def main():
        device = megatron_runtime.initialize(tensor_parallel=2)
        train(device)                      # models, losses and optimizers are locals of train
        megatron_runtime.teardown()        # ... and gone by now: see its docstring
"""

import contextlib
import gc
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.overrides import TorchFunctionMode

from scripts.megatron_layers import gpt_block_spec, mtp_block_spec
from scripts.ranks import device_of_rank

_process_patches = contextlib.ExitStack()


class _CudaMeansCpu(TorchFunctionMode):
    """Answers Megatron's literal `device="cuda"`, `.cuda()` and `torch.cuda.FloatTensor` checks with the CPU's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(arg) else arg for arg in args)
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


@contextlib.contextmanager
def cpu_patches():
    """Lets Megatron-core run on a CPU, for as long as the context is open and in the thread that opened it.

    - `torch.cuda.current_device()` answers the CPU: sequence parallel, RoPE, MTP and DDP allocate there.
    - `torch.cuda.current_stream()` likewise: DDP of megatron-core 0.19 asks for it and does nothing with it.
    - `"cuda"` literals mean the CPU: the schedules, the optimizer and gradient clipping.

    Everything else Megatron needs for a CPU is configuration, see `build_gpt` and `initialize`.
    """
    cpu = torch.device("cpu")
    with (
        mock.patch.multiple(torch.cuda, current_device=lambda: cpu, current_stream=torch.cpu.current_stream),
        _CudaMeansCpu(),
    ):
        yield


def _types_without_transformer_engine() -> contextlib.AbstractContextManager:
    """Megatron 0.20 asks whether MTP's layers are of two types, which are none without TransformerEngine."""
    try:
        from megatron.core.tensor_parallel import inference_layers
    except ImportError:  # before 0.16
        return contextlib.nullcontext()
    names = ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear")
    types = {
        name: type(name, (), {}) for name in names if not isinstance(getattr(inference_layers, name, object), type)
    }
    return mock.patch.multiple(inference_layers, **types) if types else contextlib.nullcontext()


def initialize(
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    virtual_pipeline_parallel: int | None = None,
    *,
    seed: int = 1234,
    device: str | None = None,
) -> torch.device:
    """Starts torch.distributed and Megatron's parallel_state; on a CPU also installs `cpu_patches` until `teardown`.

    Rank, world size and port come from torchrun's environment; without one the process is a world of its own.
    `device` is "cuda" (NCCL) or "cpu" (gloo); None: cuda where every rank has a GPU. Returns this rank's device.
    """
    ranks, together = int(os.environ.get("WORLD_SIZE", "1")), tensor_parallel * pipeline_parallel
    if ranks % together:
        raise ValueError(
            f"the number of ranks must be a multiple of {together}, tensor-parallel size times pipeline stages, "
            f"got {ranks}: start the program with torchrun --nproc-per-node {together}"
        )
    this_device = device_of_rank(device)
    if this_device.type == "cpu":
        _process_patches.enter_context(cpu_patches())
    _process_patches.enter_context(_types_without_transformer_engine())
    backend = "nccl" if this_device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=5)
    if "RANK" in os.environ:
        torch.distributed.init_process_group(backend, timeout=timeout)
    else:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    parallel_state.initialize_model_parallel(tensor_parallel, pipeline_parallel, virtual_pipeline_parallel)
    # The tracker for inference keeps no CUDA generator states, which a CPU does not have and a model without dropout
    # does not need.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)
    torch.manual_seed(seed)
    return this_device


def teardown() -> None:
    """Destroys the process groups and undoes the CPU patches.

    Call it when no tensor, model or optimizer of the run is referenced any more (do the work in a function and let it
    return first): with gloo, a process that ends while an autograd graph still holds a group aborts.
    """
    gc.collect()
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    _process_patches.close()


@dataclass
class GptOptions:
    """A small GPT. Parallel sizes come from parallel_state, so the same options serve every layout.

    config holds further TransformerConfig fields, by name.
    """

    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    num_query_groups: int | None = None
    vocab_size: int = 128  # of the embedding and the head; must divide by the tensor-parallel size
    max_sequence_length: int = 128
    tied: bool = False
    mtp_layers: int = 0
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 1234
    transformer_impl: str = "local"  # or "transformer_engine"
    config: dict[str, Any] = field(default_factory=dict)


def transformer_config(options: GptOptions) -> TransformerConfig:
    """The TransformerConfig of `options`, with what a CPU and equal weights across TP sizes need."""
    settings: dict[str, Any] = {
        "num_layers": options.num_layers,
        "hidden_size": options.hidden_size,
        "num_attention_heads": options.num_heads,
        "num_query_groups": options.num_query_groups or options.num_heads,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "sequence_parallel": options.sequence_parallel,
        "mtp_num_layers": options.mtp_layers or None,
        "params_dtype": options.dtype,
        "pipeline_dtype": options.dtype,
        "bf16": options.dtype == torch.bfloat16,
        "fp16": options.dtype == torch.float16,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Each rank draws the whole matrix from the same generator and keeps its shard: equal weights at every TP size.
        "use_cpu_initialization": True,
        "batch_p2p_sync": False,
    }
    if "transformer_impl" in TransformerConfig.__dataclass_fields__:  # from 0.21 on it chooses the loss, too
        settings["transformer_impl"] = options.transformer_impl
    return TransformerConfig(**{**settings, **options.config})


def build_gpt(
    options: GptOptions,
    *,
    device: torch.device | str = "cpu",
    vp_stage: int | None = None,
    ddp: bool = False,
    ddp_config: dict[str, Any] | None = None,
) -> torch.nn.Module:
    """This rank's GPTModel, in Float16Module for bf16 and fp16, in DDP with fp32 gradients when `ddp` is set.

    The same seed gives the same weights on every rank and at every tensor-parallel size. `vp_stage` is the chunk of a
    virtual pipeline; `ddp_config` holds further DistributedDataParallelConfig fields, by name.
    """
    config = transformer_config(options)
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    torch.manual_seed(options.seed)
    model = GPTModel(
        config=config,
        transformer_layer_spec=gpt_block_spec(config, vp_stage, options.transformer_impl),
        vocab_size=options.vocab_size,
        max_sequence_length=options.max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=options.tied,
        position_embedding_type="rope",
        mtp_block_spec=mtp_block_spec(config, vp_stage, options.transformer_impl) if options.mtp_layers else None,
        vp_stage=vp_stage,
    ).to(device)
    if config.fp16 or config.bf16:
        model = Float16Module(config, model)
    return with_ddp(model, ddp_config) if ddp else model


def with_ddp(model: torch.nn.Module, ddp_config: dict[str, Any] | None = None) -> torch.nn.Module:
    """The model in DDP with fp32 gradients of the parameters that require them now."""
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **(ddp_config or {}))
    model = DistributedDataParallel(model.config, settings, model)
    model.broadcast_params()
    return model


def build_optimizer(
    model_chunks: list[torch.nn.Module], dtype: torch.dtype = torch.float32, lr: float = 1e-3, **settings: Any
) -> MegatronOptimizer:
    """Megatron's Adam over DDP-wrapped chunks, and the hooks its schedules call.

    `settings` are further OptimizerConfig fields, by name. Adam's eps of 1e-5 is what makes runs at different TP sizes
    comparable: with 1e-8, rounding in a gradient that should be zero becomes a full step.
    """
    defaults = {"weight_decay": 0.0, "adam_eps": 1e-5, "clip_grad": 1.0}
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        **{**defaults, **settings},
    )
    optimizer = get_megatron_optimizer(config, model_chunks, use_gloo_process_groups=False)
    for chunk in model_chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        chunk.config.grad_scale_func = optimizer.scale_loss
    return optimizer
