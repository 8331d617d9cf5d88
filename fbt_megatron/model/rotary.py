"""Rotary position embedding with positions of each token of each row.

Legend: `S` sequence, `B` micro batch, `N` heads, `D` head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RotaryTable:
    """Cosine and sine of every angle of a micro-batch, each [S, B, 1, D], the halves of D alike."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """Turn the pairs (i, i + D/2) of `x` [S, B, N, D] by their angles."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin


def rotary_table(positions: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> RotaryTable:
    """Table for `positions` [B, S] int64: pair i turns by `position * theta^(-2i / D)`. Angles are computed in fp32.

    Source: Su et al., RoFormer (arXiv 2104.09864), eq. 34, with the halves layout of GPT-NeoX.
    """
    channels = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = theta ** (-channels / head_dim)
    angles = positions.t()[:, :, None, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))
