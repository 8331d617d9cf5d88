"""Names of tensors: the canonical ones of checkpoints, and those in a Hugging Face folder.

An exported FBT has the names of the Gemma 2 family, whose layers also have a norm on both sides of each branch. The
stock architectures without post norms call the norm before the feed-forward block `post_attention_layernorm`.
"""

from __future__ import annotations

import re

_OUTSIDE_LAYERS = {
    "embedding.weight": "model.embed_tokens.weight",
    "embedding_norm.weight": "model.embedding_norm.weight",
    "fusion.w_u.weight": "model.fusion.w_u.weight",
    "fusion.w_g.weight": "model.fusion.w_g.weight",
    "fusion.w_e.weight": "model.fusion.w_e.weight",
    "fusion.w.weight": "model.fusion.w.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}

_IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.gate": "self_attn.gate",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp_post_norm": "post_feedforward_layernorm",
}

_PLAIN_IN_LAYER = {
    name: exported
    for name, exported in _IN_LAYER.items()
    if name not in ("attention.gate", "attention_post_norm", "mlp_post_norm")
} | {"mlp_norm": "post_attention_layernorm"}
_PLAIN_OUTSIDE_LAYERS = {
    name: _OUTSIDE_LAYERS[name] for name in ("embedding.weight", "final_norm.weight", "head.weight")
}

_LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)\.weight")


def exported_name(name: str) -> str:
    """Name in an exported FBT of the logical tensor `name`; raises KeyError where there is no such tensor."""
    return _translated(name, _OUTSIDE_LAYERS, _IN_LAYER)


def plain_name(name: str) -> str:
    """Name in a Llama or Qwen3 folder of the logical tensor `name`; raises KeyError where these have none."""
    return _translated(name, _PLAIN_OUTSIDE_LAYERS, _PLAIN_IN_LAYER)


def _translated(name: str, outside: dict[str, str], in_layer: dict[str, str]) -> str:
    match = _LAYER_NAME.fullmatch(name)
    return f"model.layers.{match[1]}.{in_layer[match[2]]}.weight" if match else outside[name]
