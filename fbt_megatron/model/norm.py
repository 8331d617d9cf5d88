"""RMSNorm, as megatron-core's layer specs build it."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from fbt_megatron.model.kernels import NormKernel

_FUSED = {"apex": ("apex.normalization", "FusedRMSNorm"), "te": ("transformer_engine.pytorch", "RMSNorm")}


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    `partial_gradient` marks the weight as `sequence_parallel` (megatron-core's name): each tensor-parallel rank has the
    gradient of its own tokens or heads only, and who owns the gradients must sum them over the tensor-parallel group.
    megatron-core's own PyTorch norm refuses sequence parallelism and has no such mark.
    """

    def __init__(self, *, config: TransformerConfig, hidden_size: int, eps: float, partial_gradient: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        _mark(self.weight, partial_gradient)

    def forward(self, x: Tensor) -> Tensor:
        """Normed `x` [..., hidden_size], in its dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def norm_class(kernel: NormKernel) -> type[nn.Module]:
    """The class of a kernel's RMSNorm, with a parameter `weight` and the arguments of `RMSNorm`."""
    if kernel == "torch":
        return RMSNorm
    package, name = _FUSED[kernel]
    library_class: Any = getattr(importlib.import_module(package), name)

    class FusedRMSNorm(library_class):
        def __init__(self, *, config: TransformerConfig, hidden_size: int, eps: float, partial_gradient: bool) -> None:
            super().__init__(hidden_size, eps=eps)
            self.to(config.params_dtype)
            _mark(self.weight, partial_gradient)

    return FusedRMSNorm


def _mark(weight: Any, partial_gradient: bool) -> None:
    weight.sequence_parallel = partial_gradient
