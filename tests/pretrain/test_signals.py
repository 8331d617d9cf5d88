"""Whole runs of two ranks that are asked to stop: when, who is asked, by which signal; and where and how they stop.

docs/faults.md has the same table for readers.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pretrain.ranked_run import RankedRun, awaits_signal, fork_ranks, listens_to, spawn_ranks
from tests.pretrain.runs import records, steps, write_config
from tests.pretrain.test_pretrain import assert_same_records

pytestmark = [pytest.mark.training, pytest.mark.distributed]

STEPS = 12


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run of 12 steps that validates every 5 steps, for longer than its steps take."""
    changes: dict[str, dict[str, Any]] = {
        "train": {"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 2, "seed": 7},
        "evaluation": {"every": 5, "batches": 30, "extra_passes": 0},
    }
    return write_config(tmp_path_factory.mktemp("config") / "signals.yaml", data, changes)


@pytest.fixture(scope="module")
def straight(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of a run that nobody stops."""
    run_dir = tmp_path_factory.mktemp("straight")
    _run_to_the_end(config, run_dir)
    return records(run_dir)


def _run_to_the_end(config: Path, run_dir: Path) -> None:
    with fork_ranks(config, run_dir, processes=1) as run:
        assert run.finish() == [0], run.output


# A moment waits for it and sends the signal; it returns the steps after which the run may stop (None: no checkpoint).
Send = Callable[[], None]
Moment = Callable[[RankedRun, Path, Send], range | None]


def _start_up(run: RankedRun, run_dir: Path, send: Send) -> None:
    """While the ranks import torch."""
    run.wait_until(lambda: len(run.ranks()) == 2 and all(listens_to(pid, signal.SIGUSR1) for pid in run.ranks()))
    send()
    assert "step 0 of" not in run.output


def _first_validation(run: RankedRun, run_dir: Path, send: Send) -> None:
    run.wait_for_line(f"step 0 of {STEPS}")
    send()


def _step(run: RankedRun, run_dir: Path, send: Send) -> range:
    run.wait_for_line(f"step 2/{STEPS}")
    send()
    return range(2, STEPS)


def _validation(run: RankedRun, run_dir: Path, send: Send) -> range:
    run.wait_for_line(f"step 5/{STEPS}")
    send()
    return range(5, 6)


def _save(run: RankedRun, run_dir: Path, send: Send) -> range:
    """While rank 0 is stopped with a checkpoint half written."""
    run.wait_until(lambda: _stop_in_save(run, run_dir))
    rank, step = run.ranks()[0], _unfinished(run_dir)
    assert step is not None
    send()
    if run.by_torchrun:  # it may take its time to pass the signal on
        run.wait_until(lambda: awaits_signal(rank))
    os.kill(rank, signal.SIGCONT)
    return range(step, step + 1)


def _stop_in_save(run: RankedRun, run_dir: Path) -> bool:
    """Stop rank 0 in a save; false, and it goes on, where the save was over by then."""
    if _unfinished(run_dir) is None:
        return False
    rank = run.ranks()[0]
    os.kill(rank, signal.SIGSTOP)
    time.sleep(0.05)
    if _unfinished(run_dir) is None:
        os.kill(rank, signal.SIGCONT)
        return False
    return True


def _unfinished(run_dir: Path) -> int | None:
    """The step whose checkpoint is being written; older folders of such a name are being removed."""
    folder = run_dir / "checkpoints"
    latest = folder / "latest"
    saved = int(latest.read_text().strip().removeprefix("step_")) if latest.exists() else 0
    steps = [int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.tmp")]
    return next((step for step in steps if step > saved), None)


MOMENTS: dict[str, Moment] = {
    "start-up": _start_up,
    "first validation": _first_validation,
    "step": _step,
    "validation": _validation,
    "save": _save,
}
RECEIVERS = ("one", "all", "launcher")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
IN_MAKE_TEST = {("start-up", "all"), ("validation", "one"), ("save", "launcher")}


def _cases() -> list[Any]:
    """Every moment with every receiver; the signals take turns."""
    cases = []
    for row, moment in enumerate(MOMENTS):
        for column, receiver in enumerate(RECEIVERS):
            marks = [] if (moment, receiver) in IN_MAKE_TEST else [pytest.mark.slow]
            number = SIGNALS[(2 * row + column + 1) % len(SIGNALS)]
            cases.append(pytest.param(moment, receiver, number, marks=marks, id=f"{moment}-{receiver}-{number.name}"))
    return cases


@pytest.mark.parametrize(("moment", "receiver", "number"), _cases())
def test_a_signal_stops_all_ranks_after_one_step(
    config: Path,
    straight: list[dict[str, Any]],
    tmp_path: Path,
    moment: str,
    receiver: str,
    number: signal.Signals,
) -> None:
    run_dir, by_torchrun = tmp_path / "run", receiver == "launcher"
    every = ["checkpoint.every=1"] if moment == "save" else []
    if by_torchrun or moment == "start-up":
        start = spawn_ranks(config, run_dir, *every, by_torchrun=by_torchrun)
    else:
        start = fork_ranks(config, run_dir, *every)
    with start as run:
        expected = MOMENTS[moment](run, run_dir, lambda: run.send(number, to=receiver))
        statuses, output = run.finish(), run.output
    assert "PeerError" not in output
    if by_torchrun:
        assert statuses != [0], output  # torchrun's own
    else:
        assert statuses == [128 + number] * 2, output
        assert "Traceback" not in output
    if expected is None:
        assert f"{number.name}: the run stops before its first step" in output
        assert not (run_dir / "checkpoints" / "latest").exists()
        assert records(run_dir) == []
    else:
        last = steps(run_dir)[-1]["step"]
        assert last in expected
        assert f"{number.name}: the run stops after step {last}" in output
        assert (run_dir / "checkpoints" / "latest").read_text().strip() == f"step_{last:08d}"
        validated = [record["step"] for record in records(run_dir) if record.get("kind") == "validation"]
        before, also_this = ([step for step in (0, 5, 10) if step < end] for end in (last, last + 1))
        # In `step` the signal may come to the validation as well, and to the end of it.
        assert validated in {"validation": [before], "save": [also_this], "step": [before, also_this]}[moment]
    _run_to_the_end(config, run_dir)
    assert_same_records(records(run_dir), straight)
