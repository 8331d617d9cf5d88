"""Which documents a run was trained on: every row of every step once, across resumes and changes of layout."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from fbt_megatron.config.schema import LoggingConfig, ParallelConfig, RunConfig
from fbt_megatron.errors import RunDirError
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.console import Console
from fbt_megatron.training.sample_log import SampleLog
from fbt_megatron.training.stop_signal import StopSignal
from tests.training.samples import expected_samples, read_samples_log
from tests.training.tiny_run import tiny_run

STEPS = 5


def logged_run(folder: Path, data: Path, **parallel: int) -> RunConfig:
    """A tiny run of `STEPS` steps that logs its samples."""
    config = tiny_run(folder, data, steps=STEPS)
    layout = ParallelConfig(zero_stage=1, precision="fp32", **parallel)
    return replace(config, parallel=layout, logging=LoggingConfig(tensorboard=False, samples=True))


def train(config: RunConfig, topology: ParallelTopology, *, stop_step: int | None = None, lost_steps: int = 0) -> None:
    """Train up to `stop_step` with a checkpoint, and then `lost_steps` more that no checkpoint holds."""
    stopped = replace(config, train=replace(config.train, stop_step=stop_step))
    with open_trainer(stopped, topology, allowed_changes=[]) as trainer:
        trainer.train(StopSignal())
        for _ in range(lost_steps):
            trainer.metrics.step(trainer.train_step())


def test_every_row_of_every_step(topology: ParallelTopology, data: Path, tmp_path: Path) -> None:
    config = logged_run(tmp_path, data)
    train(config, topology)
    assert read_samples_log(tmp_path) == expected_samples(config)


def test_a_step_whose_gradient_is_not_finite_has_read_its_rows(
    topology: ParallelTopology, data: Path, tmp_path: Path
) -> None:
    config = logged_run(tmp_path, data)
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        parameter = next(p for name, p in trainer.model.named_parameters() if name.endswith("linear_fc2.weight"))
        parameter.register_hook(lambda gradient: gradient * math.inf)
        trainer.train(StopSignal())
        assert trainer.counters.skipped_steps == STEPS
    assert read_samples_log(tmp_path) == expected_samples(config)


def test_a_resumed_run_lists_each_row_once(topology: ParallelTopology, data: Path, tmp_path: Path) -> None:
    config = logged_run(tmp_path, data)
    train(config, topology, stop_step=2, lost_steps=2)
    assert [step for step, _, _ in read_samples_log(tmp_path)][-1] == 4
    train(config, topology)
    assert read_samples_log(tmp_path) == expected_samples(config)


def test_a_run_that_begins_anew_keeps_nothing(topology: ParallelTopology, data: Path, tmp_path: Path) -> None:
    config = logged_run(tmp_path, data)
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        trainer.train_step()
    assert read_samples_log(tmp_path)
    quiet = replace(config, logging=replace(config.logging, samples=False))
    with open_trainer(quiet, topology, allowed_changes=[]) as trainer:
        trainer.train_step()
    assert read_samples_log(tmp_path) == []


def test_files_of_all_ranks_are_cut(topology: ParallelTopology, tmp_path: Path) -> None:
    """Also those of ranks that the run no longer has, half a line, and what a power cut leaves of a block."""
    folder = tmp_path / "samples"
    folder.mkdir()
    contents = {
        "rank_00000.jsonl": _lines(1, 2, 3),
        "rank_00001.jsonl": _lines(1, 2) + b'{"step": 3, "ro',
        "rank_00002.jsonl": _lines(1, 2) + b"\0\0\0\n\xff\n",
        "rank_00003.jsonl": _lines(3, 4),
        "rank_00004.jsonl": b"",
        "rank_00005.jsonl": b'{"step": 1',
        "other.jsonl": _lines(3),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    log = SampleLog(tmp_path, rank=1, enabled=True, console=Console(enabled=False))
    log.open(resume_step=2)
    log.step(3, {7: ("a", "b")})
    log.close()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "rank_00000.jsonl": _lines(1, 2),
        "rank_00001.jsonl": _lines(1, 2) + b'{"step": 3, "rows": {"7": ["a", "b"]}}\n',
        "rank_00002.jsonl": _lines(1, 2),
        "other.jsonl": _lines(3),
    }


def _lines(*steps: int) -> bytes:
    return b"".join(json.dumps({"step": step, "rows": {"0": ["x"]}}).encode() + b"\n" for step in steps)


def test_a_failing_write_is_kept_for_the_trainer(topology: ParallelTopology, tmp_path: Path) -> None:
    console = Console(enabled=False)
    log = SampleLog(tmp_path, rank=0, enabled=True, console=console)
    log.open(resume_step=0)
    with Path("/dev/full").open("w", buffering=1) as full:  # every write to it finds a full disk
        log._file = full
        log.step(1, {0: ("a",)})
        log.close()
    assert "rank_00000.jsonl cannot be written: No space left on device" in str(console.failure)


def test_a_folder_that_cannot_be_made(topology: ParallelTopology, tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("in the way")
    with pytest.raises(RunDirError, match=r"samples.*cannot be written"):
        SampleLog(tmp_path, rank=0, enabled=True, console=Console(enabled=False)).open(resume_step=0)
