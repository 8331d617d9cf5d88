"""What a Llama or Qwen3 model is in this project's words. What it has and this project has not is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fbt_megatron.config.schema import ModelConfig
from fbt_megatron.errors import ConfigError
from fbt_megatron.hf.model_config import checked_section

PLAIN_TYPES = ("llama", "qwen3")

_REFUSED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "partial_rotary_factor": (1, 1.0),
    "rope_scaling": (),
    "quantization_config": (),
    "per_layer_config": (),
}
"""Key -> values, beside null, that mean what this project does."""

_REQUIRED = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "seq_length": "max_position_embeddings",
}
_DEFAULT_THETA = 10000.0
_ROPE_KEYS = ("rope_theta", "rope_type", "type", "partial_rotary_factor")


def plain_model_config(exported: Mapping[str, Any], *, source: str) -> ModelConfig:
    """The model that `config.json` of a Llama or Qwen3 folder describes: no norm of the embedding, no gate.

    `source` names the file in errors. Raises ConfigError with every key that this project has no equal for.
    """
    kind = exported.get("model_type")
    if kind not in PLAIN_TYPES:
        raise ConfigError(source, [f"model_type={kind!r}: must be fbt, {' or '.join(PLAIN_TYPES)}."])
    problems = [
        f"{name}={exported.get(name)!r}: must be a number."
        for name in _REQUIRED.values()
        if not _number(exported.get(name))
    ]
    problems += list(_refused(exported))
    window, every = None, None
    if not problems and kind == "qwen3":
        window, every = _windows(exported, problems)
    if problems:
        raise ConfigError(source, problems)
    values = {key: exported[name] for key, name in _REQUIRED.items()}
    heads = exported["num_attention_heads"]
    values |= {
        "num_query_groups": exported.get("num_key_value_heads") or heads,
        "head_dim": exported.get("head_dim") or exported["hidden_size"] // heads,
        "rope_theta": _rope(exported).get("rope_theta", _DEFAULT_THETA),
        "init_std": exported.get("initializer_range", ModelConfig.init_std),
        "qk_norm": kind == "qwen3",
        "attention_gate": False,
        "sliding_window": window,
        "full_attention_every": every,
        "post_norm": False,
        "residual_scale": "none",
        "embedding_norm": False,
        "tie_embeddings": bool(exported.get("tie_word_embeddings", False)),
    }
    return checked_section(ModelConfig, values, "model", source=source)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rope(exported: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters, where older and newer files have them."""
    older = {"rope_theta": exported["rope_theta"]} if exported.get("rope_theta") is not None else {}
    return older | dict(exported.get("rope_parameters") or {})


def _refused(exported: Mapping[str, Any]) -> Iterator[str]:
    for key, accepted in _REFUSED.items():
        value = exported.get(key)
        if value is not None and value not in accepted:
            known = f"; known is {accepted[0]}" if accepted else ""
            yield f"{key}={value!r}: this project's model does not have that{known}."
    rope = _rope(exported)
    unknown = [key for key, value in rope.items() if key not in _ROPE_KEYS and value is not None]
    if unknown:
        yield f"rope_parameters: {', '.join(unknown)}: this project's rotary embedding has a base only."
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        yield f"rope_parameters: rope_type={kind!r}: this project's rotary embedding is not scaled; known is default."
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "rope_parameters: partial_rotary_factor: this project turns all channels of a head."


def _windows(exported: Mapping[str, Any], problems: list[str]) -> tuple[int | None, int | None]:
    """`sliding_window` and `full_attention_every` for the layer types of a Qwen3 model."""
    layers, window = exported["num_hidden_layers"], exported.get("sliding_window")
    if not exported.get("use_sliding_window", False) or window is None:
        window = None
    kinds = exported.get("layer_types")
    if kinds is None:
        first = exported.get("max_window_layers", layers)
        kinds = ["sliding_attention" if window is not None and n >= first else "full_attention" for n in range(layers)]
    full = [number for number, kind in enumerate(kinds, start=1) if kind == "full_attention"]
    if len(full) == layers or window is None:
        if len(full) != len(kinds) or len(kinds) != layers:
            problems.append(f"layer_types={kinds}: names windowed layers, but there is no window (use_sliding_window).")
        return None, None
    every = full[0] if full else None
    wanted = [] if every is None else list(range(every, layers + 1, every))
    if len(kinds) != layers or full != wanted or set(kinds) - {"full_attention", "sliding_attention"}:
        problems.append(
            f"layer_types={kinds}: this project has full attention in layers every, 2 * every, ... and windows in the "
            "others."
        )
    return window, every
