"""Any number of micro-batches that fills the pipeline gives the gradients and losses of one stage."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from fbt_megatron.data.batch import TrainBatch
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.layout import parameter_layouts
from fbt_megatron.model.pass_schedule import build_pass_plan
from fbt_megatron.parallel.topology import build_topology
from fbt_megatron.training.forward_backward import forward_backward, forward_only
from tests.distributed import run_distributed
from tests.parity.cases import (
    FEEDBACK,
    Layout,
    Part,
    Training,
    add_pieces,
    assemble,
    batch_of_row,
    distance,
    noise,
    rows_of_step,
    run_config,
)

MICRO_BATCHES, PASSES = (4, 5, 6, 7), (1, 2, 3)
EXTRA_PASSES = 9


def batches(num: int) -> list[TrainBatch]:
    rows = [*rows_of_step(0), *rows_of_step(1)]
    return [batch_of_row(row, number=number) for number, row in enumerate(rows[:num])]


def gradients_and_losses(rank: int) -> list[list[dict]]:
    """For four stages, and for one on every rank: gradient pieces and losses of each combination."""
    results = []
    for layout in (Layout(pp=4), Layout(dp=4)):
        parallel_state.destroy_model_parallel()
        config = run_config(layout, Training((1,), tied=False))
        topology = build_topology(config.parallel)
        model = build_model(config, topology)
        layouts = parameter_layouts(model, config, topology)
        found = []
        for num, num_passes in itertools.product(MICRO_BATCHES, PASSES):
            model.zero_grad()
            plan = build_pass_plan(FEEDBACK, num_passes)
            options = {"num_tokens": 10 * layout.dp, "z_loss": 1e-3, "noise": noise(), "topology": topology}
            losses = forward_backward(model, batches(num), plan, **options)
            sums = forward_only(model, batches(num), num_passes=EXTRA_PASSES, topology=topology)
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            numbers = [losses.cross_entropy, losses.z_sum, sums.cross_entropy, sums.hidden_delta]
            parts: list[Part] = []
            for name, gradient in gradients.items():
                add_pieces(parts, layouts[name], gradient.flatten())
            found.append({"numbers": torch.cat(numbers).numpy(), "parts": parts})
        results.append(found)
    return results


@pytest.fixture(scope="module")
def four_ranks() -> list[list[list[dict]]]:
    return run_distributed(gradients_and_losses, 4)


@pytest.mark.distributed
@pytest.mark.parametrize("case", range(len(MICRO_BATCHES) * len(PASSES)))
def test_four_stages_equal_one(four_ranks: list[list[list[dict]]], case: int) -> None:
    """Gradients, losses, and nine passes of validation, with K changing from call to call."""
    one = four_ranks[0][1][case]
    for staged, _ in four_ranks:
        np.testing.assert_allclose(staged[case]["numbers"], one["numbers"], rtol=1e-4)
    gradients, expected = assemble([rank[0][case]["parts"] for rank in four_ranks]), assemble([one["parts"]])
    assert gradients.keys() == expected.keys()
    for name in expected:
        assert distance(gradients[name], expected[name]) < 1e-5, name
