"""Builds the model of one pipeline stage from the configuration, out of megatron-core's parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from fbt_megatron.config.schema import ModelConfig, ParallelConfig, RunConfig
from fbt_megatron.model.fbt_model import FBTModel
from fbt_megatron.model.fusion import build_fusion
from fbt_megatron.model.initialization import initialize_weights
from fbt_megatron.model.kernels import Kernels, select_kernels
from fbt_megatron.model.layer_spec import build_layer_spec, norm_spec
from fbt_megatron.model.layout import padded_vocab_size, parameter_layouts, stage_layers
from fbt_megatron.model.norm import norm_class
from fbt_megatron.parallel.logical_tensor import ParameterLayout
from fbt_megatron.parallel.mcore_compat import prepare_megatron_core
from fbt_megatron.parallel.topology import ParallelTopology


def build_model(config: RunConfig, topology: ParallelTopology, *, device: torch.device | None = None) -> FBTModel:
    """The stage of this rank with its initial weights, on `device` (default: the topology's).

    On the meta device nothing is allocated or drawn: that is for counting parameters. Raises ConfigError when
    `model.kernels` names a library that cannot be used.
    """
    device = device or topology.device
    prepare_megatron_core(seed=config.train.seed)
    kernels = select_kernels(config.model.kernels, device=topology.device)
    transformer = build_transformer_config(config, device=device)
    with device:
        model = _build_stage(config, transformer, topology, kernels)
    layouts = parameter_layouts(model, config, topology)
    _mark_tensor_parallel(model, layouts)
    if device.type != "meta":
        initialize_weights(model, layouts, seed=config.train.seed, init_std=config.model.init_std)
    return model


def build_transformer_config(config: RunConfig, *, device: torch.device) -> TransformerConfig:
    """megatron-core's configuration of the stack; what this project does itself is switched off there."""
    model, parallel = config.model, config.parallel
    dtype = torch.bfloat16 if parallel.precision == "bf16" else torch.float32
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        pipeline_model_parallel_layout=_pipeline_layout(config),
        sequence_parallel=parallel.sequence and parallel.tensor > 1,
        use_cpu_initialization=True,  # on the device in force; otherwise megatron-core takes the current GPU
        perform_initialization=False,
        bias_activation_fusion=device.type == "cuda",  # compiled: on the CPU this would want a compiler
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=True,
        batch_p2p_comm=device.type == "cuda",
        cuda_graph_scope=[],
        **_recompute_options(parallel),
    )


def _build_stage(
    config: RunConfig, transformer: TransformerConfig, topology: ParallelTopology, kernels: Kernels
) -> FBTModel:
    model, fusion = config.model, config.feedback.fusion
    first, last = topology.is_first_stage, topology.is_last_stage
    # The tied head of a single stage uses the embedding; on a stage of its own it holds a copy.
    uses_embedding = model.tie_embeddings and first
    return FBTModel(
        model,
        transformer,
        topology,
        kernels,
        reset_attention_mask=config.data.reset_attention_mask,
        recompute_passes=config.parallel.recompute == "full",
        embedding=_build_embedding(model, transformer, topology) if first else None,
        embedding_norm=_build_embedding_norm(transformer, kernels)
        if first and (model.embedding_norm or fusion != "none")
        else None,
        fusion=build_fusion(fusion, transformer, tp_group=topology.pg.tp) if first else None,
        stack=_build_stack(config, transformer, topology, kernels),
        head=_build_head(model, transformer, topology, allocate=not uses_embedding) if last else None,
    )


def _build_embedding(
    model: ModelConfig, transformer: TransformerConfig, topology: ParallelTopology
) -> VocabParallelEmbedding:
    return VocabParallelEmbedding(
        padded_vocab_size(model.vocab_size, tp_size=topology.tp_size),
        model.hidden_size,
        init_method=transformer.init_method,
        config=transformer,
        tp_group=topology.pg.tp,
    )


def _build_embedding_norm(transformer: TransformerConfig, kernels: Kernels) -> nn.Module:
    """Before the stack every tensor-parallel rank has all tokens, under sequence parallelism too."""
    return norm_class(kernels.norm)(
        config=transformer,
        hidden_size=transformer.hidden_size,
        eps=transformer.layernorm_epsilon,
        partial_gradient=False,
    )


def _build_stack(
    config: RunConfig, transformer: TransformerConfig, topology: ParallelTopology, kernels: Kernels
) -> TransformerBlock:
    layers = [build_layer_spec(config.model, transformer, kernels)] * len(stage_layers(config, topology.pp_rank))
    final_norm = norm_spec(kernels, partial_gradient=transformer.sequence_parallel)
    return TransformerBlock(
        transformer,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm),
        post_process=topology.is_last_stage,  # the final norm; pre_process stays on: the input is always handed over
        pg_collection=ProcessGroupCollection(tp=topology.pg.tp, pp=topology.pg.pp, cp=None),
    )


def _build_head(
    model: ModelConfig, transformer: TransformerConfig, topology: ParallelTopology, *, allocate: bool
) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        model.hidden_size,
        padded_vocab_size(model.vocab_size, tp_size=topology.tp_size),
        config=transformer,
        init_method=transformer.init_method,
        bias=False,
        skip_weight_param_allocation=not allocate,
        tp_group=topology.pg.tp,
    )


def _mark_tensor_parallel(model: FBTModel, layouts: dict[str, ParameterLayout]) -> None:
    """Set the mark by which DeepSpeed's gradient norm tells divided parameters from replicated ones."""
    for name, parameter in model.named_parameters():
        marked: Any = parameter
        marked.tensor_model_parallel = not layouts[name].replicated


def _pipeline_layout(config: RunConfig) -> list[list[str]] | None:
    """The layers of each stage in megatron-core's words; from these it numbers the layers of a stage."""
    stages = config.parallel.pipeline
    if stages == 1:
        return None
    layout = [["decoder"] * len(stage_layers(config, stage)) for stage in range(stages)]
    return [["embedding", *layout[0]], *layout[1:-1], [*layout[-1], "loss"]]


def _recompute_options(parallel: ParallelConfig) -> dict[str, object]:
    """`selective` computes the MLP again, the widest activations of a layer; `full` is `FBTModel`'s own."""
    if parallel.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    return {}
