"""A signal in a validation: what the run leaves, and that the resumed run has the metrics of one without a stop."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from fbt_megatron.checkpoint.manifest import Manifest
from fbt_megatron.config.schema import DataConfig, EvaluationConfig, RunConfig
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.stop_signal import StopSignal
from tests.training.tiny_run import read_records, tiny_run, write_data


class SignalAfter(StopSignal):
    """SIGTERM arrives after a number of looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def received(self) -> int:  # type: ignore[override]
        self.looks -= 1
        return signal.SIGTERM if self.looks < 0 else 0


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Three steps; three batches of validation before the first, after the second and at the end."""
    data = str(write_data(tmp_path / "data"))
    config = tiny_run(tmp_path / "run", Path(data), steps=3)
    evaluation = EvaluationConfig(every=2, batches=3)
    return replace(config, data=DataConfig(train=data, validation=data, streams=4), evaluation=evaluation)


def _train(config: RunConfig, topology: ParallelTopology, stop: StopSignal) -> int:
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        return trainer.train(stop)


def _logged(config: RunConfig) -> list[tuple[str | None, int]]:
    return [(record.get("kind"), record["step"]) for record in read_records(Path(config.train.run_dir))]


def _newest(config: RunConfig) -> Manifest:
    folder = Path(config.train.run_dir) / "checkpoints"
    return Manifest.read(folder / (folder / "latest").read_text().strip())


WHOLE = [("validation", 0), (None, 1), (None, 2), ("validation", 2), (None, 3), ("validation", 3)]


# Looks before the signal: one for each batch and each step.
@pytest.mark.parametrize(
    ("looks", "step", "logged"),
    [(5, 2, WHOLE[:3]), (7, 2, WHOLE[:3]), (9, 3, WHOLE[:5])],
    ids=["before the first batch", "before the last batch", "at the end of the run"],
)
def test_the_resumed_run_does_the_validation_that_was_cut(
    topology: ParallelTopology, config: RunConfig, looks: int, step: int, logged: list[tuple[str | None, int]]
) -> None:
    assert _train(config, topology, SignalAfter(looks)) == signal.SIGTERM
    assert _logged(config) == logged
    assert _newest(config).step == step
    with open_trainer(config, topology, allowed_changes=[]) as trainer:  # a run that is killed after its validation
        assert trainer.validate() == 0
    assert _train(config, topology, StopSignal()) == 0
    assert _logged(config) == WHOLE
    assert not _newest(config).state["counters"]["validation_due"]
    assert _train(config, topology, StopSignal()) == 0
    assert _logged(config) == WHOLE


def test_a_signal_in_the_first_validation_leaves_nothing(topology: ParallelTopology, config: RunConfig) -> None:
    assert _train(config, topology, SignalAfter(1)) == signal.SIGTERM
    assert _logged(config) == []
    assert not (Path(config.train.run_dir) / "checkpoints" / "latest").exists()


def test_a_signal_after_a_validation_does_not_cut_it(topology: ParallelTopology, config: RunConfig) -> None:
    """Three looks in the first validation, two steps, three looks in the second: the next one is before step 3."""
    assert _train(config, topology, SignalAfter(8)) == signal.SIGTERM
    assert _logged(config) == WHOLE[:4]
    assert not _newest(config).state["counters"]["validation_due"]
