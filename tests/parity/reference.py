"""Training in one process from the equations alone: fp64, whole matrices, no code of the product but the random draws.

NorMuon on matrices, Adam on the rest, one clip by the global norm; tensors that a step does not use are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.model.reference import Draws, Row, row_losses
from tests.optim.reference import ReferenceNorMuon
from tests.parity.cases import (
    FEEDBACK,
    MODEL,
    OPTIMIZER,
    ROWS_PER_STEP,
    STEPS,
    Z_LOSS,
    Training,
    noise,
    num_trained,
    rows_of_step,
)


@dataclass
class ReferenceAdam:
    """One tensor with its state; decay on everything but vectors."""

    weight: np.ndarray

    def __post_init__(self) -> None:
        self.exp_avg, self.exp_avg_sq, self.updates = np.zeros_like(self.weight), np.zeros_like(self.weight), 0

    def step(self, gradient: np.ndarray, *, lr: float, weight_decay: float) -> None:
        beta1, beta2 = OPTIMIZER.adam.betas
        self.updates += 1
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1) * gradient
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * gradient**2
        mean, square = self.exp_avg / (1 - beta1**self.updates), self.exp_avg_sq / (1 - beta2**self.updates)
        decay = weight_decay if self.weight.ndim == 2 else 0.0
        self.weight = (1 - lr * decay) * self.weight - lr * mean / (np.sqrt(square) + OPTIMIZER.adam.eps)


@dataclass
class ReferenceTraining:
    """Losses of each pass and norm of each step; weights and optimizer state after 1 and all steps, by name."""

    losses: list[list[float]]
    norms: list[float]
    state: dict[int, dict[str, dict[str, np.ndarray]]]


def train_reference(initial: dict[str, np.ndarray], training: Training, *, steps: int = STEPS) -> ReferenceTraining:
    """Train from the whole weights `initial`."""
    optimizers = {
        name: (ReferenceNorMuon if _is_matrix(name, weight) else ReferenceAdam)(weight.astype(np.float64))
        for name, weight in initial.items()
    }
    result = ReferenceTraining([], [], {})
    for step in range(steps):
        weights = {name: torch.tensor(o.weight, requires_grad=True) for name, o in optimizers.items()}
        result.losses.append(_backward(weights, training.passes_of(step), step))
        gradients = {name: w.grad.numpy() for name, w in weights.items() if w.grad is not None}
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
        result.norms.append(float(norm))
        factor = min(1.0, OPTIMIZER.grad_clip / (norm + 1e-6))
        for name, gradient in gradients.items():
            options = OPTIMIZER.normuon if isinstance(optimizers[name], ReferenceNorMuon) else OPTIMIZER.adam
            optimizers[name].step(factor * gradient, lr=options.lr, weight_decay=options.weight_decay)
        if step + 1 in (1, STEPS):
            result.state[step + 1] = _state(optimizers)
    return result


def _is_matrix(name: str, weight: np.ndarray) -> bool:
    return weight.ndim == 2 and name not in ("embedding.weight", "head.weight")


def _backward(weights: dict[str, Tensor], num_passes: int, step: int) -> list[float]:
    """Gradients of L_1 + lambda * mean of the later passes, of cross entropy and z-loss; cross entropies per token."""
    rows = rows_of_step(step)
    model = MODEL if "head.weight" not in weights else _untied()
    count = num_trained(rows)
    objective, cross_entropies = torch.zeros((), dtype=torch.float64), [0.0] * num_passes
    for index, row in enumerate(rows):
        drawn = _draws(row, ROWS_PER_STEP * step + index, num_passes)
        for k, (ce, z, _) in enumerate(row_losses(row, weights, model, num_passes=num_passes, draws=drawn)):
            weight = 1.0 if k == 0 else FEEDBACK.loss_weight / (num_passes - 1)
            objective = objective + weight * (ce + Z_LOSS * z) / count
            cross_entropies[k] += ce.item() / count
    objective.backward()
    return cross_entropies


def _untied() -> object:
    return MODEL.__class__(**{**vars(MODEL), "tie_embeddings": False})


def _draws(row: Row, number: int, num_passes: int) -> list[Draws]:
    """The product's draws for one row of the run; where they enter the equations is the reference's."""
    documents, zeros = torch.tensor([row.documents]), torch.zeros(len(row.tokens), 1, MODEL.hidden_size)
    result = []
    for k in range(1, num_passes):
        jitter = noise().add_jitter(zeros, rows=[number], pass_idx=k)[:, 0].double()
        plain = noise().plain_prefix(documents, rows=[number], pass_idx=k)
        result.append(Draws(jitter, plain[0].tolist()))
    return result


def _state(optimizers: dict[str, ReferenceNorMuon | ReferenceAdam]) -> dict[str, dict[str, np.ndarray]]:
    names = {"weight": "weight", "momentum": "momentum", "row_moment": "v"}
    names |= {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    return {
        kind: {name: getattr(o, attribute) for name, o in optimizers.items() if hasattr(o, attribute)}
        for kind, attribute in names.items()
    }
