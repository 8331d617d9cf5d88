"""The two copies of a tied embedding stay equal to the bit, also where the replicas' gradients are summed in other
orders on their two stages."""

from __future__ import annotations

import pytest
import torch

from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.parallel.logical_tensor import ParamKind
from fbt_megatron.parallel.topology import build_topology
from fbt_megatron.training.engine import build_engine
from tests.distributed import run_distributed
from tests.training.toy import COMBINATIONS, EACH_COMBINATION, Bag, layout, run_config, settings, weights_of

STEPS, REPLICAS = 4, 3
SHAPE = (40, 8)


@pytest.fixture(scope="module")
def six_ranks() -> list[dict]:
    return run_distributed(train_tied, 2 * REPLICAS)


def train_tied(rank: int) -> dict:
    """The embedding after some steps of random gradients, as bytes, by combination and with the rank's stage."""
    topology = build_topology(ParallelConfig(pipeline=2))
    results: dict = {"stage": topology.pp_rank}
    for combination in COMBINATIONS:
        values = {"matrix": torch.zeros(2, 2), "shared": torch.zeros(SHAPE)}
        layouts = {
            "matrix": layout("matrix", (2, 2), ParamKind.MATRIX),
            "shared": layout("shared", SHAPE, ParamKind.EMBEDDING, tied_copy=topology.is_last_stage),
        }
        if topology.is_last_stage:  # before the copy, so that ranks cut it elsewhere than the embedding
            values = {"norm": torch.zeros(100), **values}
            layouts["norm"] = layout("norm", (100,), ParamKind.VECTOR)
        engine = build_engine(Bag(**values), layouts, run_config(*combination, pipeline=2), topology)
        draw = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            engine.module.send(**{name: torch.randn(value.shape, generator=draw) for name, value in values.items()})
            engine.step(settings())
        results[combination] = weights_of(engine)["shared"].numpy().tobytes()
    return results


@pytest.mark.distributed
@EACH_COMBINATION
def test_copies_are_equal_to_the_bit_at_three_replicas(six_ranks, zero_stage, precision):
    found = {rank[zero_stage, precision] for rank in six_ranks}
    assert {rank["stage"] for rank in six_ranks} == {0, 1}
    assert len(found) == 1
    assert any(found.pop()), "trained"
