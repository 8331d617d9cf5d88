"""Timing of several sides in turn, and the report that every benchmark gives."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

_PACKAGES = ("torch", "megatron-core", "deepspeed", "webdataset")


@dataclass(frozen=True)
class Row:
    """One line of a report: a quantity over the repetitions."""

    name: str
    median: float
    smallest: float
    largest: float

    @classmethod
    def over(cls, name: str, values: Sequence[float]) -> Row:
        """The row of the values of all repetitions."""
        return cls(name, statistics.median(values), min(values), max(values))


def parse_arguments(description: str, *, repetitions: int) -> argparse.Namespace:
    """The options that every benchmark has: `quick`, `repetitions`, `json`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that the script works")
    parser.add_argument("--repetitions", type=_positive, default=repetitions, help="rounds that count (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def wall_seconds(action: Callable[[], object]) -> float:
    """Wall-clock time of `action`, work that it left on a GPU included."""
    started = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def seconds(action: Callable[[], object]) -> float:
    """Processor time of this process in `action`; with a GPU, wall-clock time.

    On a shared machine other processes take the processor away, but do not add to this time.
    """
    if torch.cuda.is_available():
        return wall_seconds(action)
    started = time.process_time()
    action()
    return time.process_time() - started


def time_in_turn(sides: dict[str, Callable[[], object]], *, repetitions: int) -> dict[str, list[float]]:
    """`seconds` of every side in every repetition, after one round that does not count.

    The sides take turns, so that whatever else the machine does falls on all of them, and every other round goes
    backwards.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for action in sides.values():
        action()
    for repetition in range(repetitions):
        names = list(sides) if repetition % 2 == 0 else list(reversed(sides))
        for name in names:
            times[name].append(seconds(sides[name]))
    return times


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio within each repetition."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def report(benchmark: str, setting: str, rows: Sequence[Row], *, as_json: bool) -> None:
    """Print the rows and where they were measured, as a table or as one JSON object."""
    surroundings = _surroundings()
    if as_json:
        lines = [asdict(row) for row in rows]
        print(json.dumps({"benchmark": benchmark, "setting": setting, "environment": surroundings, "rows": lines}))
        return
    width = max(len(row.name) for row in rows)
    print(f"{benchmark}: {setting}")
    print(f"{'':{width}} {'median':>12} {'min':>12} {'max':>12}")
    for row in rows:
        values = (row.median, row.smallest, row.largest)
        print(f"{row.name:{width}} " + " ".join(f"{_number(value):>12}" for value in values))
    print(" | ".join(f"{name} {value}" for name, value in surroundings.items()))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"


def _surroundings() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    one_minute_load, _, _ = os.getloadavg()
    return {
        "commit": _commit(),
        "processor": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
        "load": f"{one_minute_load:.1f}",
        "python": platform.python_version(),
        **versions,
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return described.stdout.strip() or "unknown"
