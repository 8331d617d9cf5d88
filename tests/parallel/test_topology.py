"""How processes find each other and divide into groups, and what a wrong number of them is told."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.errors import TopologyError
from fbt_megatron.parallel.topology import build_topology, init_distributed, shutdown_distributed
from tests.distributed import run_distributed

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_one_process_needs_no_launcher(no_launcher: None) -> None:
    init_distributed()
    try:
        topology = build_topology(ParallelConfig())
        assert (topology.world_size, topology.rank, topology.local_rank) == (1, 0, 0)
        assert topology.is_first_stage
        assert topology.is_last_stage
        for config, product in ((ParallelConfig(tensor=2), 2), (ParallelConfig(tensor=2, pipeline=3), 6)):
            with pytest.raises(TopologyError, match=rf"1 processes do not fit .*= {product}: start a multiple of"):
                build_topology(config)
    finally:
        shutdown_distributed()
    assert not dist.is_initialized()


def test_all_groups_have_the_time_limit(no_launcher: None) -> None:
    """megatron-core would give its groups one of its own."""
    init_distributed(timeout_seconds=2100.0)
    try:
        topology = build_topology(ParallelConfig(), timeout_seconds=2100.0)
        for group in (dist.group.WORLD, topology.pg.tp, topology.pg.pp, topology.pg.dp, topology.tp_dp_group):
            assert group is not None
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(minutes=35)
    finally:
        shutdown_distributed()


def test_half_a_launcher_is_refused(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TopologyError, match=r"has RANK, WORLD_SIZE but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        init_distributed()
    assert not dist.is_initialized()


def _layout_of(rank: int, tensor: int, pipeline: int) -> dict[str, Any]:
    topology = build_topology(ParallelConfig(tensor=tensor, pipeline=pipeline))
    groups = {"tp": topology.pg.tp, "pp": topology.pg.pp, "dp": topology.pg.dp, "tp_dp": topology.tp_dp_group}
    found = {
        "ranks": (topology.tp_rank, topology.dp_rank, topology.pp_rank),
        "sizes": (topology.tp_size, topology.dp_size, topology.pp_size),
        "stages": (topology.is_first_stage, topology.is_last_stage),
        "groups": {name: dist.get_process_group_ranks(group) for name, group in groups.items()},
        "device": topology.device == torch.device("cpu"),
    }
    shutdown_distributed()
    return found


@pytest.mark.distributed
def test_tensor_varies_fastest_then_data_then_pipeline() -> None:
    """Rank = tp + 2 dp + 2 pp of 2 x 1 x 2; at this size data parallelism has one rank."""
    for rank, found in enumerate(run_distributed(_layout_of, 4, 2, 2)):
        tp, pp = rank % 2, rank // 2
        assert found["ranks"] == (tp, 0, pp)
        assert found["sizes"] == (2, 1, 2)
        assert found["stages"] == (pp == 0, pp == 1)
        first = 2 * pp
        expected = {"tp": [first, first + 1], "pp": [tp, tp + 2], "dp": [rank], "tp_dp": [first, first + 1]}
        assert found["groups"] == expected
        assert found["device"]
