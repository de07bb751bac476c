"""Layers of the models: Megatron's over TransformerEngine, or RMSNorm and SDPA attention, which need no extension."""

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
    get_gpt_mtp_block_spec_for_backend,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.arguments import TRANSFORMER_IMPLS

# All but cuDNN's, which takes longer to plan for a length it has not met than a whole step does.
NO_PLAN_PER_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm that works under sequence parallel, where Megatron's own torch norm refuses to."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank sees its own tokens only: Megatron then sums this gradient over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class SdpaAttention(torch.nn.Module):
    """Core attention by torch's scaled_dot_product_attention.

    Causal without a mask and, with `packed_seq_params`, within each packed sequence; a mask given is used alone, True
    meaning masked out, as in Megatron.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, *_: object, **__: object):
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError(f"context_parallel_size must be 1 for SdpaAttention, got {config.context_parallel_size}")

    def forward(
        self,
        query: Tensor,  # [s, b, heads, d], packed [t, heads, d]
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,  # [b or 1, 1, s, s] bool
        *_: object,
        packed_seq_params: PackedSeqParams | None = None,
        **__: object,
    ) -> Tensor:
        """Returns [s, b, heads * d], packed [t, heads * d]."""
        if packed_seq_params is not None:
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
            with sdpa_kernel(NO_PLAN_PER_LENGTH):
                return torch.cat([self._attend(*(x.unsqueeze(1) for x in part), None).squeeze(1) for part in parts])
        return self._attend(query, key, value, attention_mask)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if attention_mask is None else ~attention_mask,
            is_causal=attention_mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return context.permute(2, 0, 1, 3).flatten(2)


class _OwnLayers(LocalSpecProvider):
    def layer_norm(self, *_: object, **__: object) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return SdpaAttention


def uses_transformer_engine(transformer_impl: str) -> bool:
    """Whether layers of this kind are TransformerEngine's.

    Raises:
        ValueError: there is no such kind.
        ModuleNotFoundError: they are, and it is not installed.
    """
    if transformer_impl not in TRANSFORMER_IMPLS:
        raise ValueError(f"transformer_impl must be one of {', '.join(TRANSFORMER_IMPLS)}, got {transformer_impl!r}")
    if transformer_impl == "transformer_engine" and not HAVE_TE:
        raise ModuleNotFoundError(
            "transformer_impl is 'transformer_engine', which is not installed", name="transformer_engine"
        )
    return transformer_impl == "transformer_engine"


def gpt_layer_spec() -> ModuleSpec:
    """Megatron's local transformer layer with our norms and core attention."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    return spec


def gpt_block_spec(
    config: TransformerConfig, vp_stage: int | None = None, transformer_impl: str = "local"
) -> TransformerBlockSubmodules:
    """This pipeline stage's layers and the final norm."""
    if uses_transformer_engine(transformer_impl):
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    num_layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[gpt_layer_spec()] * num_layers, layer_norm=RMSNorm)


def mtp_block_spec(
    config: TransformerConfig, vp_stage: int | None = None, transformer_impl: str = "local"
) -> MultiTokenPredictionBlockSubmodules | None:
    """Multi-token prediction over the same layer; None on a pipeline stage that holds none of it."""
    if uses_transformer_engine(transformer_impl):
        block = gpt_block_spec(config, vp_stage, transformer_impl)
        return get_gpt_mtp_block_spec(config, block, use_transformer_engine=True, vp_stage=vp_stage)
    return get_gpt_mtp_block_spec_for_backend(config, gpt_layer_spec(), _OwnLayers(), vp_stage=vp_stage)
