"""The specification by which megatron-core builds a transformer layer out of its parts and this project's."""

from __future__ import annotations

import math

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from fbt_megatron.config.schema import ModelConfig
from fbt_megatron.model.attention import CoreAttention, PackedSelfAttention
from fbt_megatron.model.kernels import Kernels
from fbt_megatron.model.norm import norm_class
from fbt_megatron.model.residual import ResidualAdd, ResidualLayer


def norm_spec(kernels: Kernels, *, partial_gradient: bool) -> ModuleSpec:
    """An RMSNorm; `partial_gradient` as in `RMSNorm`."""
    return ModuleSpec(module=norm_class(kernels.norm), params={"partial_gradient": partial_gradient})


def build_layer_spec(model: ModelConfig, transformer: TransformerConfig, kernels: Kernels) -> ModuleSpec:
    """One transformer layer: norm, attention, residual, norm, SwiGLU, residual."""
    norm = norm_spec(kernels, partial_gradient=transformer.sequence_parallel)
    head_norm = norm_spec(kernels, partial_gradient=transformer.tensor_model_parallel_size > 1)
    attention = ModuleSpec(
        module=PackedSelfAttention,
        params={"model": model},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm if model.qk_norm else None,
            k_layernorm=head_norm if model.qk_norm else None,
        ),
    )
    mlp = ModuleSpec(
        module=MLP,
        params={"ffn_hidden_size": model.ffn_hidden_size},
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    scale = 1.0 / math.sqrt(2 * model.num_layers) if model.residual_scale == "depth" else 1.0
    post_norm = norm if model.post_norm else None
    residual = ModuleSpec(module=ResidualAdd, params={"config": transformer, "scale": scale, "norm": post_norm})
    return ModuleSpec(
        module=ResidualLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=residual,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=residual,
        ),
    )
