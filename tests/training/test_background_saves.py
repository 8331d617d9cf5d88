"""Runs whose checkpoints are written while they train: what is in them, and what ends such a run."""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystem

from fbt_megatron.checkpoint import manager as manager_module
from fbt_megatron.checkpoint import writer as writer_module
from fbt_megatron.checkpoint.inspection import compare, open_checkpoint
from fbt_megatron.config.schema import CheckpointConfig, RunConfig
from fbt_megatron.errors import CheckpointError, NonFiniteError
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.stop_signal import StopSignal
from fbt_megatron.training.trainer import Trainer
from tests.training.tiny_run import read_records, tiny_run

STEPS = 6


def saving_run(folder: Path, data: Path, *, in_background: bool, every: int = 1, **options: Any) -> RunConfig:
    config = tiny_run(folder, data, mix={1: 0.5, 2: 0.5}, steps=STEPS, **options)
    return replace(config, checkpoint=CheckpointConfig(every=every, keep=STEPS, async_=in_background))


def train(config: RunConfig, topology: ParallelTopology) -> None:
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        assert trainer.train(StopSignal()) == 0


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_????????"))


def write_late(patch: pytest.MonkeyPatch) -> None:
    """Every write begins when training has gone on."""
    save = writer_module.dcp.save

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return save(*args, **kwargs)

    patch.setattr(writer_module.dcp, "save", late)


def assert_same_checkpoints(one: Path, other: Path) -> None:
    """Every step's: all tensors, counters and cursors, bit for bit."""
    assert steps_of(one) == steps_of(other)
    for step in steps_of(one):
        name = f"checkpoints/step_{step:08d}"
        found = compare(open_checkpoint(one / name), open_checkpoint(other / name))
        assert found.same_state, (step, found)
        assert found.num_equal > 20


@pytest.mark.parametrize(("zero_stage", "precision"), [(0, "fp32"), (1, "fp32"), (1, "bf16")])
def test_each_checkpoint_holds_its_own_step(
    topology: ParallelTopology,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    zero_stage: int,
    precision: str,
) -> None:
    """Each is written late, when the step after it has changed every tensor."""
    options: dict[str, Any] = {"zero_stage": zero_stage, "precision": precision}
    train(saving_run(tmp_path / "at once", data, in_background=False, **options), topology)
    write_late(monkeypatch)
    train(saving_run(tmp_path / "in background", data, in_background=True, **options), topology)
    assert steps_of(tmp_path / "at once") == list(range(1, STEPS + 1))
    assert_same_checkpoints(tmp_path / "at once", tmp_path / "in background")


def test_a_write_that_keeps_failing_ends_the_run_and_the_next_start_goes_on(
    topology: ParallelTopology, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(saving_run(tmp_path / "straight", data, in_background=False), topology)
    config = saving_run(tmp_path / "run", data, in_background=True)
    create = FileSystem.create_stream

    def full(self: FileSystem, path: Path, mode: str) -> Any:
        if mode == "wb" and "step_00000003" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(self, path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", full)
        patch.setattr(manager_module, "_PAUSES_SECONDS", (0.0, 0.0))
        with pytest.raises(CheckpointError, match=r"No space left on device.*step_00000002\. Free or change the disk"):
            train(config, topology)
    assert steps_of(tmp_path / "run") == [1, 2]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert [f"checkpoint of step 3, try {number} of 3: Cannot write" in log for number in (1, 2, 3)] == [
        True,
        True,
        False,  # the last one is the error of the run
    ]
    train(config, topology)
    assert_same_checkpoints(tmp_path / "straight", tmp_path / "run")
    assert [record["step"] for record in read_records(tmp_path / "run")] == list(range(1, STEPS + 1))


def test_the_failure_is_found_without_another_save(
    topology: ParallelTopology, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run does not train on to its end when its only checkpoint is lost."""
    config = saving_run(tmp_path, data, in_background=True, every=2)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer_module, "hash_file", full)
    monkeypatch.setattr(manager_module, "_PAUSES_SECONDS", ())
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        step = trainer.train_step

        def step_after_the_failure() -> Any:
            if trainer.counters.step == 2:
                work = trainer.checkpoints._saving
                assert work is not None
                work.wait()
            return step()

        monkeypatch.setattr(trainer, "train_step", step_after_the_failure)
        with pytest.raises(CheckpointError, match="No space left on device"):
            trainer.train(StopSignal())
        assert trainer.counters.step in (2, 3)


def test_a_run_that_ends_with_an_error_finishes_its_save(
    topology: ParallelTopology, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = saving_run(tmp_path, data, in_background=True, every=2, max_consecutive_skips=1)
    gate, save = threading.Event(), writer_module.dcp.save

    def held(*args: Any, **kwargs: Any) -> Any:
        gate.wait()
        return save(*args, **kwargs)

    monkeypatch.setattr(writer_module.dcp, "save", held)

    def open_the_gate_after_the_error(trainer: Trainer) -> None:
        parameter = next(parameter for name, parameter in trainer.model.named_parameters() if "linear_fc2" in name)
        parameter.register_hook(lambda gradient: gradient * math.inf if trainer.counters.step == 2 else gradient)
        try:
            trainer.train(StopSignal())
        finally:
            found.append(steps_of(tmp_path))
            threading.Timer(0.1, gate.set).start()

    found: list[list[int]] = []
    with open_trainer(config, topology, allowed_changes=[]) as trainer, pytest.raises(NonFiniteError):
        open_the_gate_after_the_error(trainer)
    assert found == [[]]
    assert open_checkpoint(tmp_path).manifest.step == 2
    assert open_checkpoint(tmp_path).damage() == []


def test_a_signal_finishes_the_save_and_makes_one_more(
    topology: ParallelTopology, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_late(monkeypatch)
    config = saving_run(tmp_path, data, in_background=True, every=2)
    with StopSignal() as stop, open_trainer(config, topology, allowed_changes=[]) as trainer:
        step = trainer.train_step

        def step_and_signal() -> Any:
            record = step()
            if record.step == 3:
                signal.raise_signal(signal.SIGTERM)
            return record

        monkeypatch.setattr(trainer, "train_step", step_and_signal)
        assert trainer.train(stop) == signal.SIGTERM
        assert steps_of(tmp_path) == [2, 3]
    for number in (2, 3):
        assert open_checkpoint(tmp_path / "checkpoints" / f"step_{number:08d}").damage() == []
    assert open_checkpoint(tmp_path).manifest.step == 3
