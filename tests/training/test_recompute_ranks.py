"""Recomputation and uneven stages in pipelines: the same gradients as without, and as those of one process."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from fbt_megatron.config.schema import FeedbackConfig, ParallelConfig, RunConfig
from fbt_megatron.data.batch import TrainBatch
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.layout import parameter_layouts
from fbt_megatron.model.noise import FeedbackNoise
from fbt_megatron.model.pass_schedule import build_pass_plan
from fbt_megatron.parallel.logical_tensor import Rect, pieces_of
from fbt_megatron.parallel.topology import ParallelTopology, build_topology, shutdown_distributed
from fbt_megatron.training.forward_backward import forward_backward
from fbt_megatron.training.gradients import sum_partial_gradients
from tests.distributed import run_distributed
from tests.model.toy import random_rows, tiny_config

PASSES = (1, 2, 3)
KINDS = ("none", "selective", "full")
LAYOUTS = [
    {"tensor": 2, "sequence": True, "pipeline": 2, "pipeline_layers": (2, 3)},
    {"pipeline": 4, "pipeline_layers": (2, 1, 1, 1)},
]
Losses = list[float]
Gradients = dict[str, list[tuple[Rect, Tensor]]]


def config_of(layout: dict[str, object], recompute: str) -> RunConfig:
    """Five layers of which every other one has a window, so that each must know its number."""
    parallel = ParallelConfig(precision="fp32", recompute=recompute, **layout)
    return tiny_config(parallel=parallel, num_layers=5, sliding_window=3, full_attention_every=2)


def micro_batches() -> list[TrainBatch]:
    """Four micro-batches of one packed row."""
    batches = []
    for number, row in enumerate(random_rows(torch.Generator().manual_seed(3), [5, 9], [14], [1, 6, 7], [13, 1])):
        positions = [row.documents[:t].count(document) for t, document in enumerate(row.documents)]
        columns = (row.tokens, row.labels, positions, row.documents)
        batches.append(TrainBatch(*(torch.tensor([column]) for column in columns), rows=torch.tensor([number])))
    return batches


def gradients_of(config: RunConfig, topology: ParallelTopology, num_passes: int) -> tuple[Losses, Gradients]:
    """Loss of each pass, and this rank's rectangles of the gradient of each whole tensor."""
    model = build_model(config, topology)
    layouts = parameter_layouts(model, config, topology)
    batches = micro_batches()
    losses = forward_backward(
        model,
        batches,
        build_pass_plan(FeedbackConfig(), num_passes),
        num_tokens=sum(batch.num_trained_tokens for batch in batches),
        z_loss=1e-2,
        noise=FeedbackNoise(seed=5, jitter=0.1, prefix_mixin="row"),
        topology=topology,
    )
    parameters = dict(model.named_parameters())
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    sum_partial_gradients(gradients, parameters, layouts, tie_embeddings=True, topology=topology)
    found: Gradients = {}
    for name, gradient in gradients.items():
        for piece in pieces_of(layouts[name]):
            found.setdefault(piece.tensor.name, []).append((piece.place, piece.view(gradient.reshape(-1)).clone()))
    return losses.cross_entropy.tolist(), found


def _all_gradients(rank: int) -> list[dict[tuple[str, int], tuple[Losses, Gradients]]]:
    results = []
    for layout in LAYOUTS:
        topology = build_topology(config_of(layout, "none").parallel)
        cases = [(kind, num_passes) for kind in KINDS for num_passes in PASSES]
        results.append({case: gradients_of(config_of(layout, case[0]), topology, case[1]) for case in cases})
        parallel_state.destroy_model_parallel()
    shutdown_distributed()
    return results


@pytest.mark.distributed
def test_recomputation_and_uneven_stages_change_nothing(topology: ParallelTopology) -> None:
    alone = {num_passes: gradients_of(config_of({}, "none"), topology, num_passes) for num_passes in PASSES}
    for by_layout in run_distributed(_all_gradients, 4):
        for layout, cases in zip(LAYOUTS, by_layout, strict=True):
            for (kind, num_passes), (losses, gradients) in cases.items():
                where = f"{layout}, {kind}, {num_passes} passes"
                plain_losses, plain = cases["none", num_passes]
                assert losses == plain_losses, where
                assert gradients.keys() == plain.keys(), where
                for name, pieces in gradients.items():
                    for (place, ours), (_, theirs) in zip(pieces, plain[name], strict=True):
                        assert torch.equal(ours, theirs), f"{where}: {name} {place}"
                check_against(alone[num_passes], losses, gradients, where)


def check_against(alone: tuple[Losses, Gradients], losses: Losses, gradients: Gradients, where: str) -> None:
    """The rank's part agrees with that of a single process, relative to the whole tensor's norm."""
    expected_losses, expected = alone
    assert losses == pytest.approx(expected_losses, rel=1e-6), where
    for name, pieces in gradients.items():
        whole = whole_of(expected[name])
        for place, ours in pieces:
            theirs = whole[place.row : place.row + place.rows, place.col : place.col + place.cols]
            assert (ours - theirs).norm() <= 1e-5 * whole.norm(), f"{where}: {name} {place}"


def whole_of(pieces: list[tuple[Rect, Tensor]]) -> Tensor:
    """The tensor that the rectangles make up."""
    rows = max(place.row + place.rows for place, _ in pieces)
    cols = max(place.col + place.cols for place, _ in pieces)
    whole = torch.zeros(rows, cols)
    for place, values in pieces:
        whole[place.row : place.row + place.rows, place.col : place.col + place.cols] = values
    return whole
