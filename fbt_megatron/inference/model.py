"""The full-bandwidth transformer for decoding: plain PyTorch in one process, weights by their canonical names.

Legend: `B` rows, `S` new tokens of each row, `H` hidden, `N` query heads, `G` key/value heads, `D` head width, `F`
inner width of the feed-forward block, `V` vocabulary, without padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fbt_megatron.config.schema import FeedbackConfig, FusionKind, ModelConfig
from fbt_megatron.inference.cache import Forward, KVCache
from fbt_megatron.planner import logical_tensors

Targets: TypeAlias = dict[str, Tensor]
"""Canonical name of each logical tensor -> where its values go."""


class DecoderModel:
    """Weights, and the forward of new tokens over a cache.

    Projections of one input lie in one matrix: query, key, value and gate; gate and up. Without a fusion there is
    neither feedback nor, where the embedding is not normed, an embedding norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        fusion: FusionKind,
        *,
        read: Callable[[Targets], None],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the weights in `dtype` on `device`; `read` fills every one of the targets it is given."""
        self.config = config
        self.fusion = fusion
        self.dtype = dtype
        self.device = torch.device(device)
        self._scale = 1.0 / math.sqrt(2 * config.num_layers) if config.residual_scale == "depth" else 1.0
        hidden = config.hidden_size
        self._embedding = self._new(config.vocab_size, hidden)
        self._embedding_norm = self._new(hidden) if config.embedding_norm or fusion != "none" else None
        self._fusion = {
            tensor.name.split(".")[1]: self._new(*tensor.shape)
            for tensor in logical_tensors(config, FeedbackConfig(fusion=fusion))
            if tensor.name.startswith("fusion.")
        }
        self._layers = [self._new_layer() for _ in range(config.num_layers)]
        self._final_norm = self._new(hidden)
        self._head = self._embedding if config.tie_embeddings else self._new(config.vocab_size, hidden)
        read(self._targets())
        for layer in self._layers:
            layer.spread_head_norms(config.num_attention_heads)

    @property
    def num_parameters(self) -> int:
        """Elements of all logical tensors."""
        return sum(target.numel() for target in self._targets().values())

    @torch.inference_mode()
    def plain_input(self, tokens: Tensor) -> Tensor:
        """Input of the stack, [B, S, H], for `tokens` [B, S] without feedback."""
        embedded = F.embedding(tokens, self._embedding)
        return self._normed_embedding(embedded) if self.config.embedding_norm else embedded

    @torch.inference_mode()
    def fused_input(self, tokens: Tensor, state: Tensor) -> Tensor:
        """Input of the stack, [B, S, H], for `tokens` [B, S] and `state` [B, S, H]: what the token before each left.

        Source: arXiv 2608.08888, eq. 4 and the appendix' listing for the norms.
        """
        embedding = self._normed_embedding(F.embedding(tokens, self._embedding))
        return self._normed_embedding(_FUSIONS[self.fusion](state, embedding, self._fusion))

    @torch.inference_mode()
    def forward(self, stack_input: Tensor, cache: KVCache) -> Tensor:
        """Top states [B, S, H], after the final norm, of the next S tokens of every row; they enter the cache.

        S > 1 needs an empty cache.
        """
        forward = cache.start_forward(stack_input.shape[1])
        x = stack_input
        for index, layer in enumerate(self._layers):
            branch = self._attention(layer, self._norm(x, layer.attention_norm), cache, index, forward)
            x = self._add(x, branch, layer.attention_post_norm)
            x = self._add(x, self._mlp(layer, self._norm(x, layer.mlp_norm)), layer.mlp_post_norm)
        cache.end_forward(forward)
        return self._norm(x, self._final_norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] in fp32 of top states [..., H]. There are no padded columns that could be chosen."""
        return F.linear(hidden, self._head).float()

    def _attention(self, layer: _Layer, x: Tensor, cache: KVCache, index: int, forward: Forward) -> Tensor:
        config = self.config
        num_heads, num_groups, width = config.num_attention_heads, config.num_query_groups, config.head_dim
        rotated, value_end = (num_heads + num_groups) * width, (num_heads + 2 * num_groups) * width
        projected = F.linear(x, layer.projections)
        query_key = projected[..., :rotated].unflatten(-1, (-1, width))
        if layer.head_norms is not None:
            query_key = F.rms_norm(query_key, (width,), None, config.norm_eps) * layer.head_norms
        query_key = forward.rotary.rotate(query_key)
        value = projected[..., rotated:value_end].unflatten(-1, (-1, width))
        heads = cache.attend(index, query_key[..., :num_heads, :], query_key[..., num_heads:, :], value, forward)
        if config.attention_gate:
            heads = heads * torch.sigmoid(projected[..., value_end:]).unsqueeze(-1)
        return F.linear(heads.flatten(-2), layer.output)

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down)

    def _add(self, x: Tensor, branch: Tensor, post_norm: Tensor | None) -> Tensor:
        branch = branch if post_norm is None else self._norm(branch, post_norm)
        return torch.add(x, branch, alpha=self._scale)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _normed_embedding(self, x: Tensor) -> Tensor:
        assert self._embedding_norm is not None
        return self._norm(x, self._embedding_norm)

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _new_layer(self) -> _Layer:
        """A layer without values."""
        config = self.config
        hidden, ffn, width = config.hidden_size, config.ffn_hidden_size, config.head_dim
        num_heads, num_groups = config.num_attention_heads, config.num_query_groups
        gates = num_heads if config.attention_gate else 0
        return _Layer(
            attention_norm=self._new(hidden),
            projections=self._new((num_heads + 2 * num_groups) * width + gates, hidden),
            head_norms=self._new(num_heads + num_groups, width) if config.qk_norm else None,
            output=self._new(hidden, num_heads * width),
            attention_post_norm=self._new(hidden) if config.post_norm else None,
            mlp_norm=self._new(hidden),
            gate_up=self._new(2 * ffn, hidden),
            down=self._new(hidden, ffn),
            mlp_post_norm=self._new(hidden) if config.post_norm else None,
        )

    def _targets(self) -> Targets:
        targets = {"embedding.weight": self._embedding, "final_norm.weight": self._final_norm}
        if self._embedding_norm is not None:
            targets["embedding_norm.weight"] = self._embedding_norm
        if not self.config.tie_embeddings:
            targets["head.weight"] = self._head
        targets |= {f"fusion.{name}.weight": matrix for name, matrix in self._fusion.items()}
        for index, layer in enumerate(self._layers):
            targets |= {f"layers.{index}.{name}.weight": t for name, t in layer.targets(self.config).items()}
        return targets


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer."""

    attention_norm: Tensor
    """[H]; so are the other norms of the stream."""
    projections: Tensor
    """[(N + 2 G) D + N, H]: rows of all query heads, key heads, value heads, gates."""
    head_norms: Tensor | None
    """[N + G, D]: the norm of the queries N times, that of the keys G times."""
    output: Tensor
    """[H, N D]."""
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    """[2 F, H]."""
    down: Tensor
    """[H, F]."""
    mlp_post_norm: Tensor | None

    def targets(self, config: ModelConfig) -> Targets:
        """Where each logical tensor lies, by its name inside the layer."""
        query_rows, key_rows = config.num_attention_heads * config.head_dim, config.num_query_groups * config.head_dim
        gates = config.num_attention_heads if config.attention_gate else 0
        query, key, value, gate = self.projections.split([query_rows, key_rows, key_rows, gates])
        mlp_gate, up = self.gate_up.chunk(2)
        targets = {
            "attention_norm": self.attention_norm,
            "attention.q": query,
            "attention.k": key,
            "attention.v": value,
            "attention.output": self.output,
            "mlp_norm": self.mlp_norm,
            "mlp.gate": mlp_gate,
            "mlp.up": up,
            "mlp.down": self.down,
        }
        if gates:
            targets["attention.gate"] = gate
        if self.head_norms is not None:
            targets["attention.q_norm"] = self.head_norms[0]
            targets["attention.k_norm"] = self.head_norms[config.num_attention_heads]
        if self.attention_post_norm is not None and self.mlp_post_norm is not None:
            targets |= {"attention_post_norm": self.attention_post_norm, "mlp_post_norm": self.mlp_post_norm}
        return targets

    def spread_head_norms(self, num_heads: int) -> None:
        """Copy the one row of queries and the one of keys that `targets` names to the other heads."""
        if self.head_norms is not None:
            self.head_norms[1:num_heads] = self.head_norms[0]
            self.head_norms[num_heads + 1 :] = self.head_norms[num_heads]


def _glu(state: Tensor, embedding: Tensor, matrices: Targets) -> Tensor:
    return F.linear(state, matrices["w_u"]) * torch.sigmoid(F.linear(embedding, matrices["w_g"]))


def _concat(state: Tensor, embedding: Tensor, matrices: Targets) -> Tensor:
    return F.linear(torch.cat((state, embedding), dim=-1), matrices["w"])


def _add(state: Tensor, embedding: Tensor, matrices: Targets) -> Tensor:
    return F.linear(state, matrices["w_u"]) + F.linear(embedding, matrices["w_e"])


_FUSIONS: dict[str, Callable[[Tensor, Tensor, Targets], Tensor]] = {"glu": _glu, "concat": _concat, "add": _add}
