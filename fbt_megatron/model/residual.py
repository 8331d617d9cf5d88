"""The residual stream: how a branch is added to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn


class ResidualAdd(nn.Module):
    """`x + scale * norm(branch)`, in the slot that megatron-core has for bias, dropout and add."""

    def __init__(self, *, config: TransformerConfig, scale: float, norm: ModuleSpec | None) -> None:
        super().__init__()
        self.scale = scale
        self.norm: nn.Module | None = None
        if norm is not None:
            self.norm = build_module(norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        """The function that adds a branch; megatron-core asks for it in each forward."""
        return self.add

    def add(self, branch_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        """`residual` + the scaled branch, both [s, b, h]. There is no bias and no dropout in this project."""
        branch, _ = branch_and_bias
        if self.norm is not None:
            branch = self.norm(branch)
        return torch.add(residual, branch, alpha=self.scale)


class ResidualLayer(TransformerLayer):
    """megatron-core's layer, which respects `torch.no_grad`.

    The original turns gradients on while it adds a branch, for the sake of fused kernels. With a norm in that slot this
    would build a graph through all layers during validation.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.bias_dropout_add_exec_handler = contextlib.nullcontext
