"""Self attention of megatron-core with packed documents, sliding windows and a gate per head.

Legend: `S` sequence, `B` micro batch, `H` hidden, `N` query heads, `G` key/value heads, `D` head width; N and G are
those of this tensor-parallel rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fbt_megatron.config.schema import ModelConfig
from fbt_megatron.model.masks import AttentionMask, layer_window
from fbt_megatron.model.rotary import RotaryTable


@dataclass(frozen=True)
class AttentionInputs:
    """What every layer needs to know about the packed rows of a micro-batch; shared by all layers and passes."""

    rotary: RotaryTable
    masks: dict[int | None, AttentionMask]
    """Mask of each window size."""


class PackedSelfAttention(SelfAttention):
    """`W_O (gate_n * softmax(rot(q_n) rot(k)' / sqrt(D)) v)`, `gate_n = sigmoid((W x)_n)` with x the input.

    Projections, norms of q and k, and their division over ranks are megatron-core's; the gate is divided by heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *,
        model: ModelConfig,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, submodules, layer_number, AttnMaskType.causal, pg_collection=pg_collection)
        self.window = layer_window(model, layer_number)
        self.gate: ColumnParallelLinear | None = None
        if model.attention_gate:
            self.gate = ColumnParallelLinear(
                model.hidden_size,
                model.num_attention_heads,
                config=config,
                init_method=config.init_method,
                bias=False,
                tp_group=pg_collection.tp,
            )

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: AttentionInputs, **unused: object
    ) -> tuple[Tensor, None]:
        """Output [S, B, H] for the normed `hidden_states` [S, B, H], and no bias.

        `packed_seq_params` is the one argument that megatron-core hands to every layer untouched, under recomputation
        too. The rest of its arguments (inference, cross attention) has no use here.
        """
        inputs = packed_seq_params
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        query, key = inputs.rotary.rotate(query), inputs.rotary.rotate(key)
        heads = self.core_attention(query, key, value, inputs.masks[self.window])
        if self.gate is not None:
            scores, _ = self.gate(hidden_states)
            heads = heads * torch.sigmoid(scores).unsqueeze(-1)
        return self.linear_proj(heads.flatten(2))


class CoreAttention(nn.Module):
    """Softmax attention of grouped heads, by the kernel that the mask was made for."""

    def __init__(self, **unused: object) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        """Heads [S, B, N, D] for query [S, B, N, D], key and value [S, B, G, D]; G divides N."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if isinstance(mask, BlockMask):
            attend: Any = _compiled_flex_attention() if query.is_cuda else flex_attention
            heads = attend(query, key, value, block_mask=mask, enable_gqa=True)
        else:
            heads = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
        return heads.permute(2, 0, 1, 3).contiguous()  # otherwise the whole stream would inherit the odd strides


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    """Uncompiled, flex attention holds the whole score matrix."""
    return torch.compile(flex_attention, dynamic=False)
