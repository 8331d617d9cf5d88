"""A run of several ranks under the eyes of a test, which signals it at a chosen moment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.distributed import free_port
from tests.pretrain.ranks import Ranks
from tests.pretrain.runs import ROOT, command, environment

LIMIT_SECONDS = 300.0
"""For whatever is waited for here: machines that run tests may be slow."""
FORWARDED = "SIGINT,SIGTERM,SIGUSR1"


class RankedRun:
    """The processes of one run. `children` are those that this test started: the ranks, or torchrun.

    `status_of` gives the exit status of a child, or None while it runs. `by_torchrun` says that the child is torchrun.
    """

    def __init__(
        self, children: list[int], status_of: Callable[[int], int | None], output: Path, *, by_torchrun: bool = False
    ) -> None:
        self._children = children
        self._status_of = status_of
        self._path = output
        self.by_torchrun = by_torchrun

    @property
    def output(self) -> str:
        """What all processes have printed so far."""
        return self._path.read_text()

    def lines_of(self, rank: int) -> list[str]:
        """Lines that bear the number of a rank, without it."""
        label = f"[rank {rank}] "
        return [line.removeprefix(label) for line in self.output.splitlines() if line.startswith(label)]

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Look every few milliseconds; fails where a process ends before."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not happened():
            ended = [status for status in map(self._status_of, self._children) if status is not None]
            assert not ended, f"exit status {ended}:\n{self.output[-6000:]}"
            assert time.monotonic() < deadline, self.output[-6000:]
            time.sleep(0.002)

    def wait_for_line(self, text: str) -> None:
        """Wait until the output contains `text`."""
        self.wait_until(lambda: text in self.output)

    def ranks(self) -> list[int]:
        """Process ids of the ranks."""
        if not self.by_torchrun:
            return self._children
        (parent,) = self._children
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]

    def send(self, number: signal.Signals, *, to: str) -> None:
        """Signal `one` rank (the last), `all`, or the `launcher`."""
        for pid in {"one": self.ranks()[-1:], "all": self.ranks(), "launcher": self._children}[to]:
            os.kill(pid, number)

    def finish(self) -> list[int]:
        """Wait for the end; exit statuses of the children."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while any(self._status_of(pid) is None for pid in self._children):
            assert time.monotonic() < deadline, self.output[-6000:]
            time.sleep(0.05)
        return [status for pid in self._children if (status := self._status_of(pid)) is not None]

    def kill(self) -> None:
        """Kill what is left."""
        left = [pid for pid in self._children if self._status_of(pid) is None]
        for pid in [*(self.ranks() if self.by_torchrun and left else []), *left]:
            with contextlib.suppress(ProcessLookupError):  # torchrun may have reaped one of its ranks meanwhile
                os.kill(pid, signal.SIGKILL)


@contextmanager
def fork_ranks(
    config: Path, run_dir: Path, *overrides: str, processes: int = 2, output: Path | None = None
) -> Iterator[RankedRun]:
    """Ranks that have imported everything when they start; `output` is a file for what they print."""
    output = output or run_dir.with_suffix(".txt")
    output.touch()
    ranks = Ranks(config, run_dir, *overrides, world_size=processes, output=output)
    try:
        by_pid = {process.pid: process for process in ranks.processes if process.pid is not None}
        yield RankedRun(list(by_pid), lambda pid: by_pid[pid].exitcode, output)
    finally:
        ranks.end()


@contextmanager
def spawn_ranks(
    config: Path, run_dir: Path, *overrides: str, by_torchrun: bool = False, program: str | None = None
) -> Iterator[RankedRun]:
    """Two ranks as a user starts them, from the start of the interpreter on.

    `program` is Python source to run in place of pretrain_fbt.py.
    """
    arguments = command(config, f"train.run_dir={run_dir}", *overrides)[1:]
    if program is not None:
        arguments = ["-c", program, *arguments[1:]]
    if by_torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        arguments = [*launcher, f"--signals-to-handle={FORWARDED}", *arguments]
        variables: list[dict[str, str]] = [{}]
    else:
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        variables = [meeting | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    output = run_dir.with_suffix(".txt")
    with output.open("ab") as file:
        started = [
            subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environment(**extra),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for extra in variables
        ]
    by_pid = {process.pid: process for process in started}
    run = RankedRun(list(by_pid), lambda pid: by_pid[pid].poll(), output, by_torchrun=by_torchrun)
    try:
        yield run
    finally:
        run.kill()
        for process in started:
            process.wait()


def listens_to(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    return bool(_signal_mask(pid, "SigCgt") >> (number - 1) & 1)


def awaits_signal(pid: int) -> bool:
    """Whether a signal waits for a process that is stopped."""
    return _signal_mask(pid, "ShdPnd") != 0


def _signal_mask(pid: int, kind: str) -> int:
    """Bit n - 1 is signal n."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(f"{kind}:")).split()[1], 16)
