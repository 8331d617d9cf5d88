"""The rank that keeps the others waiting is named, whatever it is slow at; who only waits for it is not."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.parallel.topology import build_topology
from fbt_megatron.training import stragglers
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.stop_signal import StopSignal
from fbt_megatron.training.stragglers import OwnTime, StragglerWatch
from tests.distributed import run_distributed
from tests.training.tiny_run import read_records, tiny_run, write_data

CPU = torch.device("cpu")


class Ranks:
    """A watch on rank 0 of several ranks whose times are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, places: list[tuple[int, int, str]], *, interval: int = 1):
        self._monkeypatch = monkeypatch
        self.lines: list[str] = []
        monkeypatch.setattr(stragglers, "gather_objects", lambda own: places)
        topology = SimpleNamespace(pp_rank=0, tp_rank=0, device=CPU)
        self.watch = StragglerWatch(topology, interval=interval, log=self.lines.append)

    def step(self, *seconds: float | tuple[float, float]) -> tuple[int | None, float | None]:
        """Slowest rank and its ratio, where each rank takes so many seconds of computing (or of both kinds)."""
        rows = [pair if isinstance(pair, tuple) else (0.0, pair) for pair in seconds]
        gathered = torch.tensor([(*pair, epoch) for epoch, pair in enumerate(rows)], dtype=torch.float64)
        self._monkeypatch.setattr(stragglers, "gather_across", lambda own: gathered)
        times = self.watch.end_step(epoch=0)
        assert times.epoch == len(rows) - 1
        assert times.data_seconds == max(data for data, _ in rows)
        return times.slowest_rank, times.slowest_rank_ratio


DATA_PARALLEL = [(0, 0, f"node{rank // 2}") for rank in range(4)]


def test_the_slowest_against_the_median_of_the_others(monkeypatch) -> None:
    ranks = Ranks(monkeypatch, DATA_PARALLEL)
    assert ranks.step(1.0, 2.0, 6.0, 4.0) == (2, 3.0)
    assert ranks.step(1.0, (2.5, 0.5), 1.0, 2.0) == (1, 3.0)


def test_two_ranks_are_compared_with_each_other(monkeypatch) -> None:
    assert Ranks(monkeypatch, DATA_PARALLEL[:2]).step(1.0, 4.0) == (1, 4.0)


def test_stages_are_not_compared(monkeypatch) -> None:
    """The last stage has three times the work, with its head; rank 1 is slower than rank 0 at the same work."""
    places = [(0, 0, "a"), (0, 0, "b"), (1, 0, "a"), (1, 0, "b")]
    assert Ranks(monkeypatch, places).step(1.0, 1.5, 3.0, 3.0) == (1, 1.5)


def test_a_rank_without_peers(monkeypatch) -> None:
    assert Ranks(monkeypatch, [(0, 0, "a"), (1, 0, "a")]).step(1.0, 9.0) == (None, None)


def test_a_rank_that_is_slow_for_three_intervals_is_named_once(monkeypatch) -> None:
    ranks = Ranks(monkeypatch, DATA_PARALLEL, interval=2)
    for _ in range(5):
        ranks.step(1.0, 1.0, 1.0, (1.0, 1.0))
    assert ranks.lines == []
    for _ in range(6):
        ranks.step(1.0, 1.0, 1.0, (1.0, 1.0))
    assert ranks.lines == [
        "slow rank: 3 on node1 has taken 2.00 times as long as its peers, and all wait for it; 1.000 s of reading and "
        "1.000 s of forward passes per step"
    ]
    for _ in range(3):
        ranks.step(1.0, 1.0, 1.0, 1.0)
    assert ranks.lines[1:] == ["slow rank: 3 on node1 keeps up again"]


def test_what_changes_from_interval_to_interval_is_no_slow_rank(monkeypatch) -> None:
    """One bad step in an interval, another rank in each, or a ratio that hardware of one kind has."""
    ranks = Ranks(monkeypatch, DATA_PARALLEL)
    for step in range(12):
        ranks.step(*[2.0 if rank == step % 4 else 1.0 for rank in range(4)])
    for _ in range(12):
        ranks.step(1.2, 1.0, 1.0, 1.0)
    assert ranks.lines == []


def test_a_clock_of_its_own(monkeypatch) -> None:
    times = iter([10.0, 10.5, 20.0, 21.0, 30.0, 32.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    own = OwnTime(CPU)
    with own.reading():
        pass
    for _ in range(2):
        with own.computing():
            pass
    assert own.take() == (0.5, 3.0)
    assert own.take() == (0.0, 0.0)


# Two ranks, of which one really is slow

SLEEP = 1.0


def _on_two_ranks(rank: int, folder: str, data: str) -> None:
    """Rank 1 reads slowly in one run, computes slowly in the other, and rank 0 waits for it."""
    topology = build_topology(ParallelConfig())
    for slow in ("reading", "computing"):
        config = tiny_run(Path(folder) / slow, Path(data), mix={1: 1.0}, steps=3)
        with open_trainer(config, topology, allowed_changes=[]) as trainer:
            if rank == 1:
                owner, name = (trainer.loader, "next_step") if slow == "reading" else (trainer.model, "forward_pass")
                _delay(owner, name)
            trainer.train(StopSignal())


def _delay(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def delayed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(SLEEP)
        return original(*args, **kwargs)

    setattr(owner, name, delayed)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    data = write_data(folder / "data")
    run_distributed(_on_two_ranks, 2, str(folder), str(data))
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("slow", ["reading", "computing"])
def test_the_rank_that_sleeps_is_named(runs: Path, slow: str) -> None:
    records = read_records(runs / slow)
    assert Counter(record["slowest_rank"] for record in records).most_common(1)[0][0] == 1
    assert all(record["step_seconds"] >= SLEEP for record in records)
    if slow == "reading":
        assert all(record["data_seconds"] >= SLEEP for record in records)
