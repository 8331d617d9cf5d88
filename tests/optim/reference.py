"""NorMuon, step by step from its equations: one whole matrix at a time, in float64 and numpy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

POLAR_EXPRESS = [
    [8.156554524902461, -22.48329292557795, 15.878769915207462],
    [4.042929935166739, -2.808917465908714, 0.5000178451051316],
    [3.8916678022926607, -2.772484153217685, 0.5060648178503393],
    [3.285753657755655, -2.3681294933425376, 0.46449024233003106],
    [2.3465413258596377, -1.7097828382687081, 0.42323551169305323],
]
QUINTIC = [[3.4445, -4.7750, 2.0315]] * 5


def orthogonalize(m: np.ndarray, coefficients: list[list[float]]) -> np.ndarray:
    norm = np.sqrt((m * m).sum())
    if norm == 0:
        return m
    x = m / (1.02 * norm)
    if m.shape[0] > m.shape[1]:
        x = x.T
    for a, b, c in coefficients:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if m.shape[0] > m.shape[1] else x


@dataclass
class ReferenceNorMuon:
    """One matrix with its state."""

    weight: np.ndarray
    mu: float = 0.95
    beta2: float = 0.95
    nesterov: bool = False
    row_norm: bool = True
    scale: str = "spectral"
    coefficients: list[list[float]] = field(default_factory=lambda: POLAR_EXPRESS)

    def __post_init__(self) -> None:
        self.momentum = np.zeros_like(self.weight)
        self.v = np.zeros(self.weight.shape[0])

    def step(self, gradient: np.ndarray, *, lr: float, weight_decay: float) -> None:
        rows, cols = self.weight.shape
        self.momentum = self.mu * self.momentum + (1 - self.mu) * gradient
        direction = (1 - self.mu) * gradient + self.mu * self.momentum if self.nesterov else self.momentum
        update = orthogonal = orthogonalize(direction, self.coefficients)
        if self.row_norm:
            self.v = self.beta2 * self.v + (1 - self.beta2) * (orthogonal**2).sum(axis=1) / cols
            update = orthogonal / (np.sqrt(self.v) + 1e-8)[:, None]
            if np.any(update):
                update = update * np.linalg.norm(orthogonal) / np.linalg.norm(update)
        factors = {"spectral": (rows / cols) ** 0.5, "rms": 0.2 * max(rows, cols) ** 0.5, "none": 1.0}
        self.weight = (1 - lr * weight_decay) * self.weight - lr * factors[self.scale] * update


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """||a - b|| / ||b|| in the Frobenius norm."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
