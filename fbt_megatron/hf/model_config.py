"""What `config.json` of an exported FBT says of the model, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from fbt_megatron.config.schema import FeedbackConfig, FusionKind, ModelConfig, RunConfig
from fbt_megatron.config.typed_values import Reading, known_keys, read_section
from fbt_megatron.errors import ConfigError

_SectionT = TypeVar("_SectionT")

MODEL_TYPE = "fbt"
ARCHITECTURE = "FBTForCausalLM"

_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "seq_length": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "qk_norm": "qk_norm",
    "attention_gate": "attention_gate",
    "sliding_window": "sliding_window",
    "full_attention_every": "full_attention_every",
    "post_norm": "post_norm",
    "residual_scale": "residual_scale",
    "embedding_norm": "embedding_norm",
    "tie_embeddings": "tie_word_embeddings",
}
"""Key of `model` in a configuration file -> key of `config.json`; `kernels` says how a model is computed, not what."""


def exported_config(model: ModelConfig, fusion: FusionKind) -> dict[str, Any]:
    """The keys of `config.json` that describe the model."""
    values = {exported: getattr(model, key) for key, exported in _KEYS.items()}
    return values | {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], "fusion": fusion}


def model_config(exported: Mapping[str, Any], *, source: str) -> tuple[ModelConfig, FusionKind]:
    """The model that `config.json` describes, and its fusion.

    `source` names the file in errors. Raises ConfigError where a key is missing, has another type or a value that no
    model can have.
    """
    names = {**_KEYS, "model_type": "model_type", "fusion": "fusion"}
    problems = [f"{name} is missing." for name in names.values() if name not in exported]
    if exported.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        problems.append(f"model_type={exported['model_type']!r}: must be {MODEL_TYPE}.")
    if problems:
        raise ConfigError(source, problems)
    model = checked_section(ModelConfig, {key: exported[name] for key, name in _KEYS.items()}, "model", source=source)
    feedback = checked_section(FeedbackConfig, {"fusion": exported["fusion"]}, "feedback", source=source)
    return model, feedback.fusion


def checked_section(section: type[_SectionT], values: dict[str, Any], key: str, *, source: str) -> _SectionT:
    """A section of a configuration from plain values; raises ConfigError with what is wrong with them."""
    reading = Reading(list(known_keys(RunConfig)))
    result: Any = read_section(section, values, key=key, reading=reading)
    problems = reading.problems or [f"{key}.{problem}" for problem in result.problems()]
    if problems:
        raise ConfigError(source, problems)
    return result
