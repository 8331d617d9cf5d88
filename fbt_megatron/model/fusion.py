"""Fusions: how the state of the previous token and the embedding of a token become the input of the stack.

Each has matrices divided over output channels between tensor-parallel ranks; the result is gathered. A new fusion is a
class with the same `forward` and a line in `_FUSIONS` and in the table of `layout.py`.

Legend: `S` sequence, `B` micro batch, `H` hidden.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class Fusion(nn.Module, ABC):
    """Mixes a fed-back state and a token embedding."""

    def __init__(self, config: TransformerConfig, *, tp_group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.hidden_size = config.hidden_size
        self._linear_config = copy.copy(config)
        self._linear_config.sequence_parallel = False  # the shift by one token needs whole rows: no division here

    def forward(self, state: Tensor, embedding: Tensor) -> Tensor:
        """Mix of `state` and `embedding`, all [S, B, H]: whole rows and channels on every tensor-parallel rank."""
        return gather_from_tensor_model_parallel_region(self.mix(state, embedding), group=self.tp_group)

    @abstractmethod
    def mix(self, state: Tensor, embedding: Tensor) -> Tensor:
        """This rank's output channels of the mix, [S, B, H / tp]."""

    def linear(self, input_size: int) -> ColumnParallelLinear:
        """A matrix without bias from `input_size` to H channels."""
        config = self._linear_config
        return ColumnParallelLinear(
            input_size,
            self.hidden_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            tp_group=self.tp_group,
        )


class GLUFusion(Fusion):
    """`(W_U state) * sigmoid(W_G embedding)`: the state is the value, the token only the gate.

    Source: arXiv 2608.08888, eq. 4.
    """

    def __init__(self, config: TransformerConfig, *, tp_group: dist.ProcessGroup | None) -> None:
        super().__init__(config, tp_group=tp_group)
        self.w_u = self.linear(self.hidden_size)
        self.w_g = self.linear(self.hidden_size)

    def mix(self, state: Tensor, embedding: Tensor) -> Tensor:
        value, _ = self.w_u(state)
        gate, _ = self.w_g(embedding)
        return value * torch.sigmoid(gate)


class ConcatFusion(Fusion):
    """`W [state; embedding]`."""

    def __init__(self, config: TransformerConfig, *, tp_group: dist.ProcessGroup | None) -> None:
        super().__init__(config, tp_group=tp_group)
        self.w = self.linear(2 * self.hidden_size)

    def mix(self, state: Tensor, embedding: Tensor) -> Tensor:
        mixed, _ = self.w(torch.cat((state, embedding), dim=-1))
        return mixed


class AddFusion(Fusion):
    """`W_U state + W_E embedding`."""

    def __init__(self, config: TransformerConfig, *, tp_group: dist.ProcessGroup | None) -> None:
        super().__init__(config, tp_group=tp_group)
        self.w_u = self.linear(self.hidden_size)
        self.w_e = self.linear(self.hidden_size)

    def mix(self, state: Tensor, embedding: Tensor) -> Tensor:
        from_state, _ = self.w_u(state)
        from_token, _ = self.w_e(embedding)
        return from_state + from_token


_FUSIONS: dict[str, type[Fusion]] = {"glu": GLUFusion, "concat": ConcatFusion, "add": AddFusion}


def build_fusion(name: str, config: TransformerConfig, *, tp_group: dist.ProcessGroup | None) -> Fusion | None:
    """The fusion of `feedback.fusion`; None for `none`."""
    return None if name == "none" else _FUSIONS[name](config, tp_group=tp_group)


def shift_by_one(state: Tensor, *, plain: Tensor) -> Tensor:
    """State of the previous token, [S, B, H]: position t gets `state` of t - 1, and 0 where `plain` [S, B] is true.

    Plain positions are cut off here and not only in the result, so that nothing, not even an infinite state of the
    document before, reaches their gradients.
    """
    shifted = torch.cat((torch.zeros_like(state[:1]), state[:-1]))
    return shifted.masked_fill(plain.unsqueeze(-1), 0.0)
