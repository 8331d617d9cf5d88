"""How two trainings are compared: whole tensors from the pieces of all ranks, and limits on their distance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests.parity.cases import RankResult, assemble, distance

KINDS = ("weight", "momentum", "row_moment", "exp_avg", "exp_avg_sq")
"""The fp32 weights, and the states of the optimizer."""


@dataclass(frozen=True)
class Tolerance:
    """Relative limits. Tensors are compared one by one, or `pooled`: all of a kind together."""

    losses: float
    norms: float
    weights: float
    state: float
    pooled: bool = False

    def of(self, kind: str) -> float:
        """The limit of one of `KINDS`."""
        return self.weights if kind == "weight" else self.state


def whole(ranks: list[RankResult], *, steps: int, kind: str) -> dict[str, np.ndarray]:
    """Whole tensors after a number of steps, whose copies on several ranks are equal to the bit."""
    return assemble([rank.parts[steps].get(kind, []) for rank in ranks])


def joined(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """All tensors as one vector."""
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


def assert_same_tensors(
    actual: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    *,
    what: str,
    tolerance: float = 0.0,
    pooled: bool = False,
) -> None:
    """No tensor is farther from the expected one than `tolerance`."""
    assert actual.keys() == expected.keys(), what
    if pooled:
        actual, expected = {"all": joined(actual)}, {"all": joined(expected)}
    far = {name: distance(actual[name], expected[name]) for name in expected}
    worst = max(far, key=far.__getitem__)
    assert far[worst] <= tolerance, f"{what}, {worst}: {far[worst]:.2e}"


def assert_parameters_follow_weights(ranks: list[RankResult], *, steps: int, precision: str) -> None:
    """What the model computes with are the optimizer's fp32 weights, or these rounded to bf16."""
    weights = whole(ranks, steps=steps, kind="weight")
    for name, parameter in whole(ranks, steps=steps, kind="parameter").items():
        weight = torch.from_numpy(weights[name])
        expected = weight.bfloat16().float() if precision == "bf16" else weight
        assert torch.equal(torch.from_numpy(parameter), expected), name
