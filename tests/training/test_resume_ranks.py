"""One run on three ranks, then two, then one, with other numbers of readers: the run that never changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from fbt_megatron.config.schema import LoggingConfig, LRScheduleConfig, ParallelConfig, RunConfig
from fbt_megatron.parallel.topology import ParallelTopology, build_topology
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.stop_signal import StopSignal
from tests.distributed import run_distributed
from tests.training.samples import read_samples_log
from tests.training.tiny_run import read_records, state_of, tiny_run, write_data

STEPS, BATCH = 9, 12
STOPS = {3: 3, 2: 6}
"""By number of ranks: the step at which they stop. One rank goes on, with 2 and then 3 reader processes."""


def run_config(folder: Path, data: Path) -> RunConfig:
    """Twelve rows a step over twelve streams, which three ranks share as well as two; all of it more than one epoch."""
    config = tiny_run(folder, data, mix={1: 0.4, 2: 0.3, 3: 0.3}, steps=STEPS)
    return replace(
        config,
        lr_schedule=LRScheduleConfig(warmup_steps=4, cooldown_fraction=0.3),
        data=replace(config.data, streams=BATCH),
        train=replace(config.train, global_batch_size=BATCH),
        logging=LoggingConfig(tensorboard=False, samples=True),
    )


def train_stage(rank: int, config: RunConfig, world_size: int) -> None:
    """Train to the stop of this number of ranks."""
    topology = build_topology(ParallelConfig())
    assert topology.dp_size == world_size
    _train(config, topology, STOPS[world_size])


def _train(config: RunConfig, topology: ParallelTopology, stop_step: int, workers: int = 0) -> dict[str, Tensor]:
    config = replace(
        config, data=replace(config.data, workers=workers), train=replace(config.train, stop_step=stop_step)
    )
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        trainer.train(StopSignal())
        return state_of(trainer)


@pytest.mark.distributed
def test_fewer_ranks_and_other_readers_go_on_exactly(topology: ParallelTopology, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    straight = run_config(tmp_path / "straight", data)
    expected = _train(straight, topology, STEPS)
    config = run_config(tmp_path / "run", data)
    for world_size in STOPS:
        run_distributed(train_stage, world_size, config, world_size)
    _train(config, topology, 7, workers=2)
    found = _train(config, topology, STEPS, workers=3)
    samples = read_samples_log(tmp_path / "run")
    assert samples == read_samples_log(tmp_path / "straight")
    assert [row for _, row, _ in samples] == list(range(STEPS * BATCH))
    assert all(keys for _, _, keys in samples)
    records = read_records(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert {record["passes"] for record in records} == {1, 2, 3}
    assert records[-1]["epoch"] > 0
    exact = ("passes", "tokens", "epoch", "lr_normuon", "lr_adam", "weight_decay", "skipped_steps")
    for record, other in zip(records, read_records(tmp_path / "straight"), strict=True):
        assert [record[key] for key in exact] == [other[key] for key in exact]
        for key in [key for key in other if key.startswith("loss") or key in ("grad_norm", "z_loss")]:
            assert record[key] == pytest.approx(other[key], rel=1e-4), (record["step"], key)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm(), name
