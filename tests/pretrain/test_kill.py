"""kill -9 of one rank of four at random moments, with a checkpoint in the background after every step.

Whatever was going on, the same command goes on from a checkpoint, and the end is that of a run without a kill: weights
and optimizer state, metrics, and the documents of every row, bit for bit.
"""

from __future__ import annotations

import random
import time
from collections import Counter
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


def steps_done(run_dir: Path) -> int:
    """Lines of the metrics, as far as they are written."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_once(config: Path, run_dir: Path, *overrides: str, draw: random.Random) -> str:
    """Start the run and kill one rank at a random moment; returns what was going on.

    A third of the kills come while the run starts or loads, a third at any moment of its steps, a third while a
    checkpoint is being written.
    """
    ranks = Ranks(config, run_dir, *LAYOUT, *overrides, world_size=WORLD_SIZE, output=run_dir.with_suffix(".out"))
    try:
        _wait_for_a_moment(ranks, run_dir, draw)
        saving = bool(list((run_dir / "checkpoints").glob("*.tmp")))
        victim = draw.randrange(WORLD_SIZE)
        ranks.processes[victim].kill()
        statuses = ranks.wait(KILL_WAIT_SECONDS)
        assert None not in statuses, f"ranks outlive rank {victim}: {statuses}\n{ranks.output.read_text()[-6000:]}"
        assert 0 not in statuses, f"rank {victim} was killed, and a rank says that the run is complete"
        return "saving" if saving else "training" if steps_done(run_dir) else "starting"
    finally:
        ranks.end()


def _wait_for_a_moment(ranks: Ranks, run_dir: Path, draw: random.Random) -> None:
    kind, before, deadline = draw.choice(("start", "step", "save")), steps_done(run_dir), time.monotonic() + 120.0
    if kind != "start":
        # The metrics of steps after the checkpoint are cut off first, so look for the file to change at all.
        while ranks.running() and steps_done(run_dir) == before and time.monotonic() < deadline:
            time.sleep(0.01)
    if kind == "save":
        known = set(run_dir.glob("checkpoints/*.tmp"))
        while ranks.running() and set(run_dir.glob("checkpoints/*.tmp")) <= known and time.monotonic() < deadline:
            time.sleep(0.001)
    time.sleep(draw.uniform(0.0, {"start": 3.0, "step": 1.0, "save": 0.05}[kind]))


def soak(config: Path, folder: Path, *, kills: int, steps: int, seed: int) -> Counter[str]:
    """Compare a run that is killed `kills` times with one that is not; what was going on at the kills."""
    draw, overrides = random.Random(seed), f"train.steps={steps}"
    run_to_the_end(config, folder / "straight", overrides)
    moments = Counter(kill_once(config, folder / "run", overrides, draw=draw) for _ in range(kills))
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
    soak(config, tmp_path, kills=3, steps=20, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thirty_kills(config: Path, tmp_path: Path) -> None:
    moments = soak(config, tmp_path, kills=30, steps=200, seed=2)
    assert moments["saving"] >= 5
