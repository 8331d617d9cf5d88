"""kill -9 of one rank of four at random moments, with a checkpoint in the background after every step.

Whatever was going on, the same command goes on from a checkpoint, and the end is that of a run without a kill: weights
and optimizer state, metrics, and the documents of every row, bit for bit.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from fbt_megatron.checkpoint.inspection import compare, open_checkpoint
from tests.pretrain.ranks import Ranks
from tests.pretrain.runs import TINY, records, write_config
from tests.pretrain.runs import steps as trained_steps
from tests.training.samples import read_samples_log

pytestmark = [pytest.mark.training, pytest.mark.distributed]

WORLD_SIZE = 4
LAYOUT = ("parallel.tensor=2",)  # times two replicas
KILL_WAIT_SECONDS, RUN_WAIT_SECONDS = 120.0, 400.0
CHANGES = {
    "checkpoint": {"every": 1, "keep": 2, "async": True},
    "evaluation": {"every": 1000, "batches": 1},
    "feedback": {"schedule": [{"until": 1.0, "mix": {1: 0.5, 2: 0.3, 3: 0.2}}]},
    "logging": {"samples": True},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return write_config(tmp_path_factory.mktemp("kill") / "tiny.yaml", data, CHANGES)


def run_to_the_end(config: Path, run_dir: Path, *overrides: str) -> None:
    ranks = Ranks(config, run_dir, *LAYOUT, *overrides, world_size=WORLD_SIZE, output=run_dir.with_suffix(".out"))
    try:
        statuses = ranks.wait(RUN_WAIT_SECONDS)
        assert statuses == [0] * WORLD_SIZE, ranks.output.read_text()[-6000:]
    finally:
        ranks.end()


def step_seconds(run_dir: Path) -> float:
    """Median time of a step."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line).get("step_seconds", 0.0) for line in lines)


class Life:
    """One start of the run, up to the kill."""

    def __init__(self, config: Path, run_dir: Path, *overrides: str) -> None:
        output = run_dir.with_suffix(".out")
        self.checkpoints = run_dir / "checkpoints"
        self._seen = output.stat().st_size if output.exists() else 0
        self.ranks = Ranks(config, run_dir, *LAYOUT, *overrides, world_size=WORLD_SIZE, output=output)

    def output(self) -> str:
        """What the ranks of this life have printed."""
        return self.ranks.output.read_bytes()[self._seen :].decode() if self.ranks.output.exists() else ""

    def steps(self) -> int:
        """Steps that this life has trained."""
        return self.output().count("\nstep ")

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self.checkpoints.glob("*.tmp"))

    def wait_until(self, condition: Callable[[], bool], *, seconds: float = KILL_WAIT_SECONDS) -> None:
        """Wait for something to happen, for a rank to end, or for some time."""
        deadline = time.monotonic() + seconds
        while not condition() and self.ranks.running() and time.monotonic() < deadline:
            time.sleep(0.001)


def kill_once(config: Path, run_dir: Path, *overrides: str, draw: random.Random, pause: float) -> str:
    """Start the run and kill one rank at a random moment; returns what was going on.

    A third of the kills come while the run starts, loads, or takes its first step, a third at any moment of a later
    step, a third while a checkpoint is being written. `pause` is about the time of a step.
    """
    life = Life(config, run_dir, *overrides)
    try:
        kind, delay = draw.choice(("start", "step", "save")), draw.random()
        if kind == "start":
            life.wait_until(lambda: life.steps() > 0, seconds=4.0 * delay)
        else:
            number = draw.randint(1, 4)
            life.wait_until(lambda: life.steps() >= number)
            if kind == "save":
                life.wait_until(lambda: not life.is_saving())
                life.wait_until(life.is_saving)
            time.sleep(delay * pause)
        saving, victim = life.is_saving(), draw.randrange(WORLD_SIZE)
        assert life.ranks.running(), f"a rank has ended by itself: {life.ranks.wait(0.0)}\n{life.output()[-6000:]}"
        life.ranks.processes[victim].kill()
        statuses = life.ranks.wait(KILL_WAIT_SECONDS)
        assert None not in statuses, f"ranks outlive rank {victim}: {statuses}\n{life.output()[-6000:]}"
        assert statuses[victim] == -signal.SIGKILL, f"rank {victim} was not killed: {statuses}\n{life.output()[-6000:]}"
        assert 0 not in statuses, f"rank {victim} was killed, and the run is complete: {statuses}"
        return "saving" if saving else "training" if life.steps() else "starting"
    finally:
        life.ranks.end()


def soak(config: Path, folder: Path, *, kills: int, steps: int, seed: int) -> Counter[str]:
    """Compare a run that is killed `kills` times with one that is not; what was going on at the kills."""
    draw, overrides = random.Random(seed), f"train.steps={steps}"
    run_to_the_end(config, folder / "straight", overrides)
    pause = step_seconds(folder / "straight")
    moments = Counter(kill_once(config, folder / "run", overrides, draw=draw, pause=pause) for _ in range(kills))
    run_to_the_end(config, folder / "run", overrides)
    found = compare(open_checkpoint(folder / "straight"), open_checkpoint(folder / "run"))
    assert found.same_state, found
    assert found.num_equal > 20
    assert records(folder / "run") == records(folder / "straight")
    assert read_samples_log(folder / "run") == read_samples_log(folder / "straight")
    assert len(read_samples_log(folder / "run")) == steps * TINY["train"]["global_batch_size"]
    assert [record["step"] for record in trained_steps(folder / "run")] == list(range(1, steps + 1))
    return moments


def test_three_kills(config: Path, tmp_path: Path) -> None:
    soak(config, tmp_path, kills=3, steps=30, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thirty_kills(config: Path, tmp_path: Path) -> None:
    moments = soak(config, tmp_path, kills=30, steps=150, seed=2)
    assert moments["saving"] >= 5
