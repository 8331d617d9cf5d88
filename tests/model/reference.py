"""A second implementation of the method, from its equations, with nothing of the product's code.

Loops over rows and tokens in fp64; weights are whole matrices by canonical name. Shapes: a row is [S], a state [S, H].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fbt_megatron.config.schema import ModelConfig

Weights = dict[str, Tensor]


@dataclass
class Row:
    """One packed row."""

    tokens: list[int]
    documents: list[int]
    """Document of each token."""
    labels: list[int]
    """-100: not trained."""


@dataclass
class Draws:
    """What training draws for one row and one pass."""

    jitter: Tensor
    """[S, H], added to the state that position t is about to hand on to t + 1."""
    plain: list[bool]
    """Positions kept plain by the prefix mixin."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Turn channels (i, i + D/2) of each head [N, D] as one complex number."""
    half = x.shape[-1] // 2
    angles = torch.tensor([position * theta ** (-2.0 * i / (2 * half)) for i in range(half)], dtype=x.dtype)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def attention(x: Tensor, weights: Weights, model: ModelConfig, layer: int, documents: list[int], reset: bool) -> Tensor:
    name = f"layers.{layer}.attention"
    heads, groups, width = model.num_attention_heads, model.num_query_groups, model.head_dim
    query = (x @ weights[f"{name}.q.weight"].T).view(-1, heads, width)
    key = (x @ weights[f"{name}.k.weight"].T).view(-1, groups, width)
    value = (x @ weights[f"{name}.v.weight"].T).view(-1, groups, width)
    if model.qk_norm:
        query = rms_norm(query, weights[f"{name}.q_norm.weight"], model.norm_eps)
        key = rms_norm(key, weights[f"{name}.k_norm.weight"], model.norm_eps)
    positions = [sum(other == document for other in documents[:t]) for t, document in enumerate(documents)]
    query = torch.stack([rotate(query[t], position, model.rope_theta) for t, position in enumerate(positions)])
    key = torch.stack([rotate(key[t], position, model.rope_theta) for t, position in enumerate(positions)])
    windowed = model.sliding_window is not None and not (
        model.full_attention_every is not None and (layer + 1) % model.full_attention_every == 0
    )
    rows = []
    for t in range(len(documents)):
        visible = [
            u
            for u in range(t + 1)
            if (not reset or documents[u] == documents[t]) and (not windowed or t - u < model.sliding_window)
        ]
        group_of_head = [head // (heads // groups) for head in range(heads)]
        scores = torch.einsum("nd,und->nu", query[t], key[visible][:, group_of_head]) / math.sqrt(width)
        row = torch.einsum("nu,und->nd", scores.softmax(-1), value[visible][:, group_of_head])
        if model.attention_gate:
            row = row * torch.sigmoid(weights[f"{name}.gate.weight"] @ x[t])[:, None]
        rows.append(row.flatten())
    return torch.stack(rows) @ weights[f"{name}.output.weight"].T


def mlp(x: Tensor, weights: Weights, layer: int) -> Tensor:
    gate = x @ weights[f"layers.{layer}.mlp.gate.weight"].T
    up = x @ weights[f"layers.{layer}.mlp.up.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ weights[f"layers.{layer}.mlp.down.weight"].T


def stack(x: Tensor, weights: Weights, model: ModelConfig, documents: list[int], reset: bool) -> Tensor:
    scale = (2 * model.num_layers) ** -0.5 if model.residual_scale == "depth" else 1.0

    def normed(y: Tensor, name: str) -> Tensor:
        return rms_norm(y, weights[name], model.norm_eps)

    for layer in range(model.num_layers):
        branch = attention(normed(x, f"layers.{layer}.attention_norm.weight"), weights, model, layer, documents, reset)
        x = x + scale * (normed(branch, f"layers.{layer}.attention_post_norm.weight") if model.post_norm else branch)
        branch = mlp(normed(x, f"layers.{layer}.mlp_norm.weight"), weights, layer)
        x = x + scale * (normed(branch, f"layers.{layer}.mlp_post_norm.weight") if model.post_norm else branch)
    return normed(x, "final_norm.weight")


def fuse(fusion: str, state: Tensor, embedding: Tensor, weights: Weights) -> Tensor:
    """One token: state [H] of the token before, (normed) embedding [H]."""
    if fusion == "glu":
        return (weights["fusion.w_u.weight"] @ state) * torch.sigmoid(weights["fusion.w_g.weight"] @ embedding)
    if fusion == "concat":
        return weights["fusion.w.weight"] @ torch.cat((state, embedding))
    return weights["fusion.w_u.weight"] @ state + weights["fusion.w_e.weight"] @ embedding


def pass_input(
    row: Row, before: Tensor | None, weights: Weights, model: ModelConfig, fusion: str, draws: Draws | None
) -> Tensor:
    inputs = []
    for t, token in enumerate(row.tokens):
        embedding = weights["embedding.weight"][token]
        normed = rms_norm(embedding, weights["embedding_norm.weight"], model.norm_eps) if fusion != "none" else None
        starts = t == 0 or row.documents[t] != row.documents[t - 1]
        if before is None or starts or (draws is not None and draws.plain[t]):
            inputs.append(normed if model.embedding_norm else embedding)
        else:
            state = before[t - 1] + (draws.jitter[t - 1] if draws is not None else 0.0)
            mixed = fuse(fusion, state, normed, weights)
            inputs.append(rms_norm(mixed, weights["embedding_norm.weight"], model.norm_eps))
    return torch.stack(inputs)


def row_losses(
    row: Row,
    weights: Weights,
    model: ModelConfig,
    *,
    fusion: str = "glu",
    num_passes: int = 1,
    reset: bool = True,
    draws: list[Draws] | None = None,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(sum of cross entropies, sum of squared log-partition functions, logits [S, V]) of each pass over one row."""
    head = weights["embedding.weight" if model.tie_embeddings else "head.weight"]
    results, hidden = [], None
    for k in range(num_passes):
        drawn = draws[k - 1] if draws is not None and k > 0 else None
        x = pass_input(row, hidden, weights, model, fusion, drawn)
        hidden = stack(x, weights, model, row.documents, reset)
        logits = hidden @ head.T
        lse = logits.exp().sum(-1).log()
        trained = [(t, label) for t, label in enumerate(row.labels) if label != -100]
        ce = sum(lse[t] - logits[t, label] for t, label in trained)
        results.append((ce, sum(lse[t] ** 2 for t, _ in trained), logits))
    return results
