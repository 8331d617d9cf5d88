"""Whole runs of two ranks of which one fails, and runs whose disk fills up; tests/training has every fault in small."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.disk import PAGE, small_disk
from tests.pretrain.ranked_run import fork_ranks, spawn_ranks
from tests.pretrain.runs import pretrain, records

pytestmark = [pytest.mark.training, pytest.mark.distributed]

HOST = socket.gethostname()

# pretrain_fbt.py with a fault of this program in step 3 of rank 1.
WITH_BUG = """
import os, sys
import pretrain_fbt
from fbt_megatron.training.trainer import Trainer

train_step = Trainer.train_step

def train_step_with_bug(trainer):
    if trainer.counters.step == 2 and trainer.topology.rank == 1:
        raise KeyError("a fault of this program")
    return train_step(trainer)

Trainer.train_step = train_step_with_bug
sys.exit(pretrain_fbt.main())
"""


@pytest.mark.parametrize("layout", ["parallel.tensor=1", pytest.param("parallel.pipeline=2", marks=pytest.mark.slow)])
def test_a_killed_rank(config: Path, tmp_path: Path, layout: str) -> None:
    with fork_ranks(config, tmp_path / "run", layout) as run:
        run.wait_for_line("step 3/20")
        killed = time.monotonic()
        os.kill(run.ranks()[1], signal.SIGKILL)
        statuses = run.finish()
        assert time.monotonic() - killed < 120.0  # torch's own limit is 1800 s
        assert statuses == [7, -signal.SIGKILL], run.output
        (line,) = run.lines_of(0)
        assert line.startswith(f"PeerError: rank 1 on {HOST} has ended without a word")
        assert "This rank was in: " in line
        assert "Traceback" not in run.output


@pytest.mark.slow
def test_an_unexpected_exception(config: Path, tmp_path: Path) -> None:
    with spawn_ranks(config, tmp_path / "run", program=WITH_BUG) as run:
        assert run.finish() == [7, 1], run.output
        trace = run.lines_of(1)
        assert trace[0] == f"on {HOST}: Traceback (most recent call last):"
        assert trace[-1] == "KeyError: 'a fault of this program'"
        (line,) = run.lines_of(0)
        assert line.startswith(f"PeerError: rank 1 on {HOST} has ended the run: KeyError: 'a fault of this program'.")


@pytest.mark.slow
def test_a_rank_that_stands_still(config: Path, tmp_path: Path) -> None:
    with fork_ranks(config, tmp_path / "run", "resilience.hang_timeout_seconds=20") as run:
        run.wait_for_line("step 3/20")
        rank = run.ranks()[1]
        os.kill(rank, signal.SIGSTOP)
        run.wait_for_line("HangError")
        os.kill(rank, signal.SIGKILL)
        assert run.finish() == [6, -signal.SIGKILL]
        lines = run.lines_of(0)
        assert lines[0].startswith(f"the run stands still; this rank, on {HOST}, is in: ")
        assert f"  rank 1 on {HOST}: no answer (killed, stopped, or node lost)" in lines
    assert list((tmp_path / "run" / "collective_traces").iterdir())


def _fill(path: Path) -> None:
    """Take what room is left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    with small_disk(tmp_path / "disk") as disk:
        disk.resize((4 << 20) // PAGE)
        yield disk.path


@pytest.mark.slow
def test_a_disk_that_fills_up_while_training(config: Path, disk: Path, tmp_path: Path) -> None:
    """One error on both ranks and no trace, TensorBoard's included; with room again the run goes on."""
    options = ["logging.tensorboard=true", "train.steps=3000", "checkpoint.every=3", "evaluation.every=10000"]
    with fork_ranks(config, disk / "run", *options, output=tmp_path / "output.txt") as run:
        run.wait_for_line("step 4/3000")
        _fill(disk / "filler")
        statuses = run.finish()
        ((ours,), (theirs,)) = run.lines_of(0), run.lines_of(1)
        assert "Traceback" not in run.output
    (disk / "filler").unlink()
    assert ours == theirs
    assert "No space left on device" in ours
    assert statuses == [2 if ours.startswith("RunDirError") else 4] * 2
    pretrain(config, disk / "run", *options, "train.stop_step=12").check()
    assert [record["step"] for record in records(disk / "run") if "kind" not in record] == list(range(1, 13))
