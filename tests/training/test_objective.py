"""The step that the trainer runs has the objective of the equations: pass weights, division, z-loss, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fbt_megatron.config.schema import FeedbackConfig, ModelConfig
from fbt_megatron.data.batch import TrainBatch
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.noise import FeedbackNoise
from fbt_megatron.model.pass_schedule import build_pass_plan
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.training.forward_backward import forward_backward, forward_only
from tests.model.reference import Row, Weights, pass_input, row_losses, stack
from tests.model.test_against_reference import Z_COEFFICIENT, pass_weights, perturb_norms, reference_objective
from tests.model.toy import random_rows, tiny_config, whole_tensors

TOLERANCE = 1e-5
LOSS_WEIGHT = 0.7


def _rows() -> list[Row]:
    """Rows of one length whose numbers of trained tokens differ much: 13, 4 and 9 of 14."""
    return random_rows(torch.Generator().manual_seed(11), [14], [1, 1, 1, 1, 1, 1, 2, 1, 1, 4], [3, 1, 1, 7, 2])


def _batch(rows: list[Row], first_row: int) -> TrainBatch:
    documents = torch.tensor([row.documents for row in rows])
    positions = [[row.documents[:t].count(d) for t, d in enumerate(row.documents)] for row in rows]
    return TrainBatch(
        tokens=torch.tensor([row.tokens for row in rows]),
        labels=torch.tensor([row.labels for row in rows]),
        positions=torch.tensor(positions),
        document_ids=documents,
        rows=torch.arange(first_row, first_row + len(rows)),
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_step_equals_the_equations(topology: ParallelTopology, num_passes: int, reduction: str) -> None:
    """Micro-batches of one and of two rows; every gradient of every whole matrix."""
    model = build_model(tiny_config(), topology)
    perturb_norms(model)
    rows = _rows()
    weights = pass_weights(num_passes, reduction, LOSS_WEIGHT)
    expected, expected_gradients = reference_objective(model, rows, weights)

    num_tokens = sum(label >= 0 for row in rows for label in row.labels)
    feedback = FeedbackConfig(loss_weight=LOSS_WEIGHT, loss_reduction=reduction)
    losses = forward_backward(
        model,
        [_batch(rows[:1], 0), _batch(rows[1:], 1)],
        build_pass_plan(feedback, num_passes),
        num_tokens=num_tokens,
        z_loss=Z_COEFFICIENT,
        noise=FeedbackNoise(seed=1, jitter=0.0, prefix_mixin="off"),
        topology=topology,
    )
    terms = losses.cross_entropy + Z_COEFFICIENT * losses.z_sum
    objective = sum(weight * term.item() for weight, term in zip(weights, terms, strict=True)) / num_tokens
    assert objective == pytest.approx(expected.item(), rel=TOLERANCE)
    gradients = whole_tensors(model, gradients=True)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        difference = (gradient - expected_gradients[name]).norm() / expected_gradients[name].norm()
        assert difference <= TOLERANCE, f"{name}: {difference:.2e}"


def test_noise_takes_part_in_training(topology: ParallelTopology) -> None:
    model, rows = build_model(tiny_config(), topology), _rows()
    plan = build_pass_plan(FeedbackConfig(), 2)

    def second_pass(noise: FeedbackNoise, first_row: int) -> float:
        batches = [_batch(rows, first_row)]
        options = {"num_tokens": 1, "z_loss": 0.0, "noise": noise, "topology": topology}
        return forward_backward(model, batches, plan, **options).cross_entropy[1].item()

    quiet = FeedbackNoise(seed=1, jitter=0.0, prefix_mixin="off")
    assert second_pass(quiet, 0) == second_pass(quiet, 5)
    for noise in (FeedbackNoise(1, 0.5, "off"), FeedbackNoise(1, 0.0, "row"), FeedbackNoise(1, 0.0, "document")):
        assert second_pass(noise, 0) == second_pass(noise, 0)
        assert second_pass(noise, 0) != second_pass(quiet, 0)
        assert second_pass(noise, 0) != second_pass(noise, 5), "draws belong to the row of the run"


def _top_states(row: Row, weights: Weights, shape: ModelConfig, *, num_passes: int) -> list[Tensor]:
    states: list[Tensor] = []
    for _ in range(num_passes):
        inputs = pass_input(row, states[-1] if states else None, weights, shape, "glu", None)
        states.append(stack(inputs, weights, shape, row.documents, True))
    return states


def test_validation_sums_equal_the_equations(topology: ParallelTopology) -> None:
    """Cross entropy of three passes, and how far the top state moves from pass to pass over the trained tokens."""
    model, rows = build_model(tiny_config(), topology).eval(), _rows()
    sums = forward_only(model, [_batch(rows, 0)], num_passes=3, topology=topology)
    weights = whole_tensors(model)
    cross_entropy, change = torch.zeros(3, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for row in rows:
        passes = row_losses(row, weights, model.model, num_passes=3)
        cross_entropy += torch.stack([ce for ce, _, _ in passes])
        states = _top_states(row, weights, model.model, num_passes=3)
        trained = torch.tensor(row.labels) >= 0
        for k in (0, 1):
            moved = (states[k + 1] - states[k]).square().mean(dim=-1).sqrt()
            change[k] += moved[trained].sum()
    torch.testing.assert_close(sums.cross_entropy, cross_entropy, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(sums.hidden_delta, change, rtol=TOLERANCE, atol=0)
