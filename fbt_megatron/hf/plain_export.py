"""Exports a model without its feedback as a stock architecture, for engines that know no other.

What the stock architectures do not have is folded into weights where that is exact: the scale of the residual branches
into their last matrices, the norm of the embedding into its rows. The head then needs the embedding as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from fbt_megatron.checkpoint.reading import StoredWeights
from fbt_megatron.config.schema import FeedbackConfig, ModelConfig, RunConfig
from fbt_megatron.errors import ConfigError
from fbt_megatron.hf.folder import ModelFolder
from fbt_megatron.hf.model_card import plain_card
from fbt_megatron.hf.names import plain_name
from fbt_megatron.hf.safetensors_files import Entry
from fbt_megatron.model.masks import layer_window
from fbt_megatron.parallel.logical_tensor import LogicalTensor
from fbt_megatron.planner import logical_tensors

PlainKind = Literal["qwen3", "llama"]

_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
_BRANCH_ENDS = (".attention.output.weight", ".mlp.down.weight")


def plain_folder(weights: StoredWeights, config: RunConfig, dtype: str, kind: PlainKind) -> ModelFolder:
    """The model of a checkpoint as stock architecture `kind`.

    Raises ConfigError with every key of the model that the architecture has no equal for.
    """
    model = config.model
    problems = list(_misfits(model, kind))
    if problems:
        raise ConfigError(f"the model, for an export as {kind},", problems)
    return ModelFolder(
        config=_config(model, kind),
        entries=_entries(weights, model),
        dtype=dtype,
        card=plain_card(model, config.feedback.fusion, dtype=dtype, kind=kind),
        code={},
        seq_length=model.seq_length,
    )


def _misfits(model: ModelConfig, kind: PlainKind) -> Iterator[str]:
    remedy = "Export it as fbt."
    if model.attention_gate:
        yield f"model.attention_gate=true: {kind} has no gate on the heads. {remedy}"
    if model.post_norm:
        yield f"model.post_norm=true: {kind} has no norm after a branch. {remedy}"
    if kind == "qwen3" and not model.qk_norm:
        yield "model.qk_norm=false: qwen3 norms queries and keys. Export it as llama."
    if kind == "llama" and model.qk_norm:
        yield "model.qk_norm=true: llama does not norm queries and keys. Export it as qwen3."
    if kind == "llama" and model.sliding_window is not None:
        yield f"model.sliding_window={model.sliding_window}: llama has no windows. {remedy}"


def _config(model: ModelConfig, kind: PlainKind) -> dict[str, Any]:
    values: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "initializer_range": model.init_std,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.seq_length,
        "num_attention_heads": model.num_attention_heads,
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.num_query_groups,
        "rms_norm_eps": model.norm_eps,
        # Older programs read the first, newer ones the second.
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie_embeddings and not model.embedding_norm,
        "use_cache": True,
        "vocab_size": model.vocab_size,
    }
    if kind == "llama":
        return values | {"mlp_bias": False}
    windowed = model.sliding_window is not None
    windows = [layer_window(model, number) for number in range(1, model.num_layers + 1)]
    return values | {
        "use_sliding_window": windowed,
        "sliding_window": model.sliding_window,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "max_window_layers": 0 if windowed else model.num_layers,
    }


def _entries(weights: StoredWeights, model: ModelConfig) -> list[Entry]:
    tensors = {tensor.name: tensor for tensor in logical_tensors(model, FeedbackConfig(fusion="none"))}
    norm = tensors.pop("embedding_norm.weight", None)
    scale = 1.0 / math.sqrt(2 * model.num_layers) if model.residual_scale == "depth" else 1.0
    entries = [
        Entry(plain_name(tensor.name), tensor.shape, _loader(weights, tensor, model, norm, scale))
        for tensor in tensors.values()
    ]
    embedding = tensors["embedding.weight"]
    if model.embedding_norm and model.tie_embeddings:
        entries.append(Entry(plain_name("head.weight"), embedding.shape, lambda: weights.read(embedding)))
    return entries


def _loader(
    weights: StoredWeights, tensor: LogicalTensor, model: ModelConfig, norm: LogicalTensor | None, scale: float
) -> Callable[[], Tensor]:
    def load() -> Tensor:
        values = weights.read(tensor)
        if tensor.name == "embedding.weight" and norm is not None:
            return F.rms_norm(values, (model.hidden_size,), weights.read(norm), model.norm_eps)
        return values * scale if tensor.name.endswith(_BRANCH_ENDS) else values

    return load
