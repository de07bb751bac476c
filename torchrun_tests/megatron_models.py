"""Megatron models other than GPTModel that hold an LM head: the hybrid (Mamba) family and a VLM."""

import copy
import dataclasses
import importlib.util

import torch
from megatron.core import parallel_state
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.transformer import ModuleSpec
from torch import Tensor, nn

from scripts import megatron_layers, megatron_runtime

IMAGE_TOKEN = -200  # LLaVA's own


def hybrid_model(options: megatron_runtime.GptOptions, spec: ModuleSpec | None = None, layers: str = "*") -> nn.Module:
    """HybridModel, or MambaModel before megatron-core 0.18, of attention layers: Mamba's own need CUDA kernels.

    `layers`: by their letters, what each of the options' layers stands for; `spec`: of the stack that has them.
    """
    num_layers = len(layers) * options.num_layers
    config = megatron_runtime.transformer_config(dataclasses.replace(options, num_layers=num_layers))
    layer = megatron_layers.gpt_layer_spec()
    if importlib.util.find_spec("megatron.core.models.hybrid") is not None:
        from megatron.core.models.hybrid.hybrid_block import HybridStack as Stack
        from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules as Submodules
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Model

        spec_name, pattern_name = "hybrid_stack_spec", "hybrid_layer_pattern"
        mtp = {"mtp_block_spec": megatron_layers.mtp_block_spec(config)} if options.mtp_layers else {}
    else:
        from megatron.core.models.mamba.mamba_model import MambaModel as Model
        from megatron.core.ssm.mamba_block import MambaStack as Stack
        from megatron.core.ssm.mamba_block import MambaStackSubmodules as Submodules

        spec_name, pattern_name, mtp = "mamba_stack_spec", "hybrid_override_pattern", {}
    if spec is None:  # without the final norm of the stack, which is TransformerEngine's
        submodules = Submodules(attention_layer=layer, **mtp)
        spec = ModuleSpec(Stack, params={"post_layer_norm": False}, submodules=submodules)
    torch.manual_seed(options.seed)
    return Model(
        config=config,
        vocab_size=options.vocab_size,
        max_sequence_length=options.max_sequence_length,
        share_embeddings_and_output_weights=options.tied,
        position_embedding_type="rope",
        **{spec_name: spec, pattern_name: layers * options.num_layers + f"/{layers}" * options.mtp_layers},
    )


def llava_model(options: megatron_runtime.GptOptions) -> LLaVAModel:
    """LLaVAModel as on a pipeline stage behind its vision encoder, which hands over image embeddings."""
    config = megatron_runtime.transformer_config(options)
    vision = copy.deepcopy(config)
    vision.vision_model_type = "clip"
    config.language_model_type = ""
    torch.manual_seed(options.seed)
    return LLaVAModel(
        language_transformer_config=config,
        language_transformer_layer_spec=megatron_layers.gpt_block_spec(config),
        language_vocab_size=options.vocab_size,
        language_max_sequence_length=options.max_sequence_length,
        language_position_embedding_type="rope",
        share_embeddings_and_output_weights=options.tied,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=megatron_layers.gpt_layer_spec(),
        drop_vision_class_token=True,
        vision_projection_config=copy.deepcopy(config),
        vision_projection_layer_spec=None,
        img_h=28,
        img_w=28,
        patch_dim=14,
        add_encoder=False,
    )


def text_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Loss per token [b, s], zero where masked."""
    mtp = {"loss_mask": batch["loss_mask"]} if model.config.mtp_num_layers else {}
    losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"], **mtp)
    return torch.where(batch["loss_mask"].bool(), losses, 0.0)


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The same with one image of four patches in each sample; LLaVA gives its positions the label -100."""
    tokens = batch["tokens"].clone()
    tokens[:, 2] = IMAGE_TOKEN
    images = torch.zeros(len(tokens), 3, 28, 28, device=tokens.device)
    hidden_size = model.language_model.config.hidden_size
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    model.encoder_hidden_state = torch.randn(4, len(tokens), hidden_size, generator=generator).to(tokens.device)
    losses, loss_mask = model(images, tokens, batch["positions"], None, batch["labels"], batch["loss_mask"])
    return torch.where(loss_mask.bool(), losses, 0.0)
