"""Ranks that fail in every way, watched as pretrain_fbt.py watches its own; run as a program, prints JSON.

The program imports torch once and forks three gloo ranks for each fault, all at the same time: they mostly wait.
Ranks do steps of one small reduction, and rank `culprit` fails in step 3.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fbt_megatron import activity
from fbt_megatron.config.schema import ResilienceConfig, RunConfig, TrainConfig
from fbt_megatron.errors import DataError
from fbt_megatron.parallel.collectives import raise_together, sum_across
from fbt_megatron.parallel.launcher import Launch
from fbt_megatron.training.failure import leave
from fbt_megatron.training.watchdog import watch
from tests.distributed import free_port

WORLD_SIZE, STEPS, FAULTY_STEP = 3, 10, 3
LIMIT_SECONDS = 240.0
SUSPENDED_SECONDS = 14.0


@dataclass(frozen=True)
class Case:
    """One fault of one rank."""

    fault: str
    culprit: int
    hang_timeout: float | None = 120.0

    @property
    def name(self) -> str:
        """Of this case."""
        return f"{self.fault}-{self.culprit}"


# Rank 0 holds the store at which the ranks meet.
CASES = [
    Case("none", 0, hang_timeout=None),
    *(Case(fault, culprit) for fault in ("killed", "bug", "alone") for culprit in (0, 1)),
    Case("together", 1),
    *(Case("stopped", culprit, hang_timeout=6.0) for culprit in (0, 1)),
    Case("stuck", 1, hang_timeout=6.0),
    Case("suspended", 1, hang_timeout=10.0),
]


@dataclass(frozen=True)
class End:
    """How a rank ended: exit status (negative: number of a signal), seconds of its life, what it printed.

    Those of a suspended rank count from the moment when it was stopped; 0 where it had ended before.
    """

    status: int
    seconds: float
    output: str


def _read_for_ever() -> None:
    activity.begin(f"step {FAULTY_STEP}, reading its batches")
    time.sleep(2 * LIMIT_SECONDS)


def _raise_bug() -> None:
    raise KeyError("a fault of this program")


def _raise_alone() -> None:
    raise DataError("a shard is gone.")


FAULTS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "bug": _raise_bug,
    "alone": _raise_alone,
    "stuck": _read_for_ever,
}


def _work(case: Case, rank: int, folder: Path) -> None:
    for step in range(1, STEPS + 1):
        activity.begin(f"step {step}")
        if step == FAULTY_STEP and case.fault == "together":
            raise_together(DataError("a shard is gone.") if rank == case.culprit else None)
        if step == FAULTY_STEP and rank == case.culprit and case.fault in FAULTS:
            FAULTS[case.fault]()
        if case.fault == "suspended":
            time.sleep(0.6)
        sum_across(torch.ones(1))
        if case.fault == "suspended" and step == 1:
            (folder / f"{rank}.ready").touch()
        if case.fault == "suspended" and step == STEPS - 1:  # steps are left for afterwards, however late it comes
            while not (folder / "resumed").exists():
                time.sleep(0.05)


def _run_rank(case: Case, rank: int, port: int, folder: Path) -> NoReturn:
    """The process of one rank, from the fork to its end; in the order of pretrain_fbt.py."""
    descriptor = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE)
    resilience = ResilienceConfig(hang_timeout_seconds=case.hang_timeout)
    config = RunConfig(train=TrainConfig(run_dir=str(folder)), resilience=resilience)
    launch = Launch("torchrun", world_size=WORLD_SIZE, rank=rank, local_rank=rank, address="127.0.0.1", port=port)
    watchdog = watch(config, launch)
    try:
        _work(case, rank, folder)
    except Exception as error:
        os._exit(leave(error, watchdog))
    watchdog.stop()
    dist.destroy_process_group()
    os._exit(0)


def main() -> None:
    """Run all cases at once; prints the end of each rank of each case, and the traces that they left."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        json.dump(_run_cases(Path(root)), sys.stdout)


def _run_cases(root: Path) -> dict[str, Any]:
    start = time.monotonic()
    alive: dict[int, tuple[Case, int]] = {}
    ends: dict[str, dict[int, End]] = {case.name: {} for case in CASES}
    for case in CASES:
        (root / case.name).mkdir()
        port = free_port()
        for rank in range(WORLD_SIZE):
            pid = os.fork()
            if pid == 0:
                _run_rank(case, rank, port, root / case.name)
            alive[pid] = case, rank
    suspensions = [Suspension(case, root / case.name) for case in CASES if case.fault == "suspended"]
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        seconds = time.monotonic() - start
        if pid:
            case, rank = alive.pop(pid)
            output = (root / case.name / f"{rank}.txt").read_text()
            own = next((suspension.seconds for suspension in suspensions if suspension.case == case), seconds)
            ends[case.name][rank] = End(os.waitstatus_to_exitcode(status), round(own, 1), output)
            others = [pid for pid, (other, _) in alive.items() if other == case]
            if case.fault == "stopped" and len(others) == 1:  # the one that is stopped; its launcher would kill it
                os.kill(others[0], signal.SIGKILL)
            continue
        for suspension in suspensions:
            suspension.advance([pid for pid, (case, _) in alive.items() if case == suspension.case])
        if seconds > LIMIT_SECONDS:
            signal_all(list(alive), signal.SIGKILL)
        time.sleep(0.05)
    return {
        "ends": {name: [asdict(of[rank]) for rank in sorted(of)] for name, of in ends.items()},
        "traces": {
            case.name: {path.name: path.read_text() for path in (root / case.name).glob("collective_traces/*")}
            for case in CASES
        },
    }


class Suspension:
    """Stops the ranks of a case once each has done a step under its watchdog, and lets them go on later."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self._folder = folder
        self._stopped_at: float | None = None
        self._resumed = False

    @property
    def seconds(self) -> float:
        """Since the ranks were stopped; 0 before."""
        return 0.0 if self._stopped_at is None else time.monotonic() - self._stopped_at

    def advance(self, pids: list[int]) -> None:
        """Do what is due with the processes that are left of the case."""
        if self._stopped_at is None and len(list(self._folder.glob("*.ready"))) == WORLD_SIZE:
            signal_all(pids, signal.SIGSTOP)
            self._stopped_at = time.monotonic()
        elif self.seconds > SUSPENDED_SECONDS and not self._resumed:
            (self._folder / "resumed").touch()
            signal_all(pids, signal.SIGCONT)
            self._resumed = True


def signal_all(pids: list[int], number: signal.Signals) -> None:
    """Signal every process of a list."""
    for pid in pids:
        os.kill(pid, number)


if __name__ == "__main__":
    main()
