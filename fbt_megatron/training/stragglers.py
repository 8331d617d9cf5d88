"""Which rank keeps the others waiting.

In data-parallel training every rank waits for the slowest one inside the next collective, so the time of a step is the
same on all of them and says nothing. Each rank therefore measures only what it does by itself: reading its data, and
the forward passes of its part of the model. Ranks that hold the same part (one data-parallel group) have the same work
and are compared with each other; stages of a pipeline have different work and are not. Ranks of one tensor-parallel
group wait for each other in every layer and share their time: what is found there is the group.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fbt_megatron.parallel.collectives import gather_across, gather_objects
from fbt_megatron.parallel.topology import ParallelTopology

SLOW_RATIO = 1.3
"""From this ratio on an interval is slow; machines and rows of the same kind differ by less."""
SLOW_INTERVALS = 3
"""Slow intervals in a row of the same rank after which it is named in the log."""


class OwnTime:
    """Seconds that this rank has worked by itself since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._data_seconds = 0.0
        self._compute_seconds = 0.0
        self._events: list[tuple[torch.Event, torch.Event]] = []

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Time the body as waiting for data."""
        start = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - start

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Time the body as computing; on a GPU what it launches, without waiting for it."""
        if self._device.type == "cpu":
            begin = time.perf_counter()
            yield
            self._compute_seconds += time.perf_counter() - begin
            return
        start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((start, end))

    def take(self) -> tuple[float, float]:
        """Seconds of reading and of computing; waits for the work that is timed, so call it at the end of a step."""
        for start, end in self._events:
            end.synchronize()
            self._compute_seconds += start.elapsed_time(end) / 1000.0
        seconds = self._data_seconds, self._compute_seconds
        self._data_seconds, self._compute_seconds, self._events = 0.0, 0.0, []
        return seconds


@dataclass(frozen=True)
class StepTimes:
    """What the ranks' own times of one step say."""

    data_seconds: float
    """Longest wait of a rank for its data."""
    epoch: int
    """Largest epoch of a rank."""
    slowest_rank: int | None
    """None where no two ranks hold the same part of the model."""
    slowest_rank_ratio: float | None
    """Its time over the median time of the other ranks with the same part."""


class StragglerWatch:
    """Compares the ranks' own times, and says who has been slow for long. Built on all ranks together."""

    def __init__(self, topology: ParallelTopology, *, interval: int, log: Callable[[str], None]) -> None:
        """`interval` is the number of steps whose times are added up before somebody is called slow."""
        places = gather_objects((topology.pp_rank, topology.tp_rank, socket.gethostname()))
        self.own_time = OwnTime(topology.device)
        self._device = topology.device
        self._hosts = [host for *_, host in places]
        parts: dict[tuple[int, int], list[int]] = {}
        for rank, (pp_rank, tp_rank, _) in enumerate(places):
            parts.setdefault((pp_rank, tp_rank), []).append(rank)
        self._peers = [ranks for ranks in parts.values() if len(ranks) > 1]
        self._interval = interval
        self._log = log
        self._totals = torch.zeros(len(places), 2, dtype=torch.float64)
        self._num_steps = 0
        self._slow_rank: int | None = None
        self._slow_intervals = 0

    def end_step(self, *, epoch: int) -> StepTimes:
        """Compare the times of the step that ends. All ranks call it together, with the epoch that each has come to.

        The epoch has nothing to do with times: it travels along, so that a step has one message less.
        """
        own = torch.tensor([*self.own_time.take(), epoch], dtype=torch.float64, device=self._device)
        gathered = gather_across(own).cpu()
        seconds = gathered[:, :2]
        self._totals += seconds
        self._num_steps += 1
        if self._num_steps == self._interval:
            self._end_interval()
        rank, ratio = self._slowest(seconds)
        return StepTimes(float(seconds[:, 0].max()), int(gathered[:, 2].max()), rank, ratio)

    def _slowest(self, seconds: Tensor) -> tuple[int | None, float | None]:
        """The slowest of all ranks by their [ranks, 2] seconds of reading and computing, and its ratio."""
        totals = seconds.sum(dim=1).tolist()
        ratios = []
        for ranks in self._peers:  # in each group only the slowest can be the slowest of all
            slowest = max(ranks, key=lambda rank: (totals[rank], rank))
            others = statistics.median(totals[rank] for rank in ranks if rank != slowest)
            ratios.append((totals[slowest] / max(others, 1e-9), slowest))
        if not ratios:
            return None, None
        ratio, rank = max(ratios)
        return rank, ratio

    def _end_interval(self) -> None:
        """Say where a rank becomes, or ceases to be, one to look at."""
        means, self._totals, self._num_steps = self._totals / self._interval, torch.zeros_like(self._totals), 0
        rank, ratio = self._slowest(means)
        if rank is None or ratio is None or ratio < SLOW_RATIO:
            rank = None
        before = self._slow_rank
        if rank != before:
            if before is not None and self._slow_intervals >= SLOW_INTERVALS:
                self._log(f"slow rank: {before} on {self._hosts[before]} keeps up again")
            self._slow_rank, self._slow_intervals = rank, 0
        self._slow_intervals += 1
        if rank is not None and self._slow_intervals == SLOW_INTERVALS:
            reading, computing = means[rank].tolist()
            self._log(
                f"slow rank: {rank} on {self._hosts[rank]} has taken {ratio:.2f} times as long as its peers, and all "
                f"wait for it; {reading:.3f} s of reading and {computing:.3f} s of forward passes per step"
            )
