"""NorMuon's update of whole matrices, as pure functions.

Where the matrices come from and who computes which is the subject of `partition.py` and `exchange.py`.

Legend: k matrices of one shape, m rows (neurons), n columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fbt_megatron.config.schema import NorMuonConfig
from fbt_megatron.optim.newton_schulz import orthogonalize

ROW_NORM_EPS = 1e-8


def normuon_update(directions: Tensor, row_moments: Tensor, config: NorMuonConfig) -> tuple[Tensor, Tensor]:
    """The update of k matrices, to be multiplied by the learning rate and subtracted, and their new row moments.

    `directions` is [k, m, n]: the momentum, or Nesterov's mix of momentum and gradient. `row_moments` is [k, m], fp32.
    The update is [k, m, n] in the dtype of `directions` and contains the factor of the matrix shape.

    Source: arXiv 2510.05491; after the row normalisation the Frobenius norm is set back to that of the polar factor, so
    that the shape factor is applied exactly once.
    """
    orthogonal = orthogonalize(directions, ns_steps=config.ns_steps, coefficients=config.coefficients).float()
    update = orthogonal
    if config.row_norm:
        update, row_moments = normalize_rows(orthogonal, row_moments, beta2=config.beta2)
    factor = shape_factor(directions.shape[-2], directions.shape[-1], scale=config.scale)
    return (update * factor).to(directions.dtype), row_moments


def normalize_rows(matrices: Tensor, row_moments: Tensor, *, beta2: float) -> tuple[Tensor, Tensor]:
    """Divide each row by the root of its running second moment, keeping the Frobenius norm of the matrix.

    `matrices` is [k, m, n] and `row_moments` [k, m], both fp32; returns both, updated. A zero row stays zero.
    """
    row_moments = beta2 * row_moments + (1 - beta2) * matrices.square().mean(dim=-1)
    normalized = matrices / (row_moments.sqrt() + ROW_NORM_EPS).unsqueeze(-1)
    norm_before = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    norm_after = torch.linalg.vector_norm(normalized, dim=(-2, -1), keepdim=True)
    return normalized * (norm_before / torch.where(norm_after > 0, norm_after, 1.0)), row_moments


def shape_factor(rows: int, cols: int, *, scale: str) -> float:
    """Factor on the update of an m x n matrix for `optimizer.normuon.scale`; raises ValueError for an unknown one.

    `spectral` is sqrt(m / n): one step changes outputs by about the learning rate at any width (arXiv 2310.17813).
    `rms` is 0.2 sqrt(max(m, n)): elements change by about 0.2 learning rates, as with Adam (arXiv 2502.16982).
    """
    if scale == "spectral":
        return math.sqrt(rows / cols)
    if scale == "rms":
        return 0.2 * math.sqrt(max(rows, cols))
    if scale == "none":
        return 1.0
    raise ValueError(f"scale={scale}: must be spectral, rms or none.")
