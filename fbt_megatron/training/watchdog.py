"""Ends this process where its main thread cannot: when it stands still, and when another rank says that the run failed.

A thread of its own looks whether the main thread has got on (`activity`). When it has not for
`resilience.hang_timeout_seconds`, it prints the stack of every thread, calls the other ranks, who print theirs, and the
first to call says where each rank is. All of them exit.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from fbt_megatron import activity
from fbt_megatron.config.schema import ResilienceConfig, RunConfig
from fbt_megatron.errors import HangError, PeerError
from fbt_megatron.parallel.collectives import COLLECTIVE_SECONDS
from fbt_megatron.parallel.launcher import Launch
from fbt_megatron.parallel.roll_call import Call, RollCall

TRACES_NAME = "collective_traces"
_REPORT_SECONDS = 300.0
"""The time that ranks have to report before torch.distributed would end them."""
_DUMP_SECONDS = 20.0
_RECORDERS: tuple[tuple[str, dict[str, bool], str], ...] = (
    ("_dump_nccl_trace", {"includeStackTraces": False}, "nccl_trace_{rank}"),
    ("_dump_fr_trace_json", {}, "trace_{rank}.json"),
)
"""torch's functions that give the last collectives of NCCL, and of other backends, with arguments and a file name.

Not every torch has both. NCCL's come in the format that torch's tool reads; their stacks take minutes to look up.
"""


def collective_timeout(resilience: ResilienceConfig) -> float:
    """Seconds after which torch.distributed gives a collective up: later than the watchdog, which says more."""
    own = resilience.hang_timeout_seconds
    return COLLECTIVE_SECONDS if own is None else max(COLLECTIVE_SECONDS, own + _REPORT_SECONDS)


def watch(config: RunConfig, launch: Launch) -> Watchdog:
    """A watchdog of a run, started; torch.distributed must be."""
    roll_call = None
    if launch.world_size > 1:
        store = dist.distributed_c10d._get_default_store()
        roll_call = RollCall(store, rank=launch.rank, world_size=launch.world_size)
    watchdog = Watchdog(
        launch,
        hang_timeout=config.resilience.hang_timeout_seconds,
        roll_call=roll_call,
        trace_folder=Path(config.train.run_dir) / TRACES_NAME,
    )
    watchdog.start()
    return watchdog


class Watchdog:
    """Watches while it is started. `roll_call` is None for a process on its own, `hang_timeout` None to watch no hang.

    `trace_folder` is where the flight recorder's traces go.
    """

    def __init__(
        self, launch: Launch, *, hang_timeout: float | None, roll_call: RollCall | None, trace_folder: Path
    ) -> None:
        self.launch = launch
        self.roll_call = roll_call
        self.host = socket.gethostname() if roll_call is None else roll_call.host
        self._trace_folder = trace_folder
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        self._threads = []
        if hang_timeout is not None:
            self._threads.append(
                threading.Thread(target=self._watch, args=(hang_timeout,), name="watchdog", daemon=True)
            )
        if roll_call is not None:
            self._threads.append(threading.Thread(target=self._listen, args=(roll_call,), name="listener", daemon=True))

    def start(self) -> None:
        """Begin to watch."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """The main thread goes on alone; does not return where a thread is ending the process already."""
        self._ending.acquire()
        self._stopped.set()
        for thread in self._threads:
            thread.join(2.0)  # longer only where the store does not answer

    def _watch(self, hang_timeout: float) -> None:
        marks, idle, looked = activity.count_marks(), 0.0, time.monotonic()
        while not self._stopped.wait(min(hang_timeout / 20, 5.0)):
            before, marks = marks, activity.count_marks()
            # One look counts for a part of the limit at most: a process that was suspended has not stood still.
            elapsed, looked = min(time.monotonic() - looked, hang_timeout / 4), time.monotonic()
            idle = idle + elapsed if marks == before else 0.0
            if idle >= hang_timeout:
                self._ending.acquire()
                self._end_hung(self._call_hang(f"no progress for {hang_timeout:g} s"))

    def _call_hang(self, text: str) -> Call:
        """Say that this rank stands still; what was called first, by this rank or another."""
        if self.roll_call is None:
            return Call("hang", self.launch.rank, self.host, text)
        own = self.roll_call.call("hang", text)
        return self.roll_call.heard() or own

    def _listen(self, roll_call: RollCall) -> None:
        call = roll_call.listen(self._stopped)
        if call is None:
            return
        self._ending.acquire()
        if call.kind == "hang":
            self._end_hung(call)
        error = PeerError(explain(call, roll_call))
        self.launch.report(error)
        if call.kind == "failed":
            roll_call.see_off()
        os._exit(error.exit_status)

    def _end_hung(self, call: Call) -> NoReturn:
        where = f"this rank, on {self.host}, is in: {activity.describe()}"
        self.launch.say("\n".join([f"the run stands still; {where}. Its threads:", *_stacks()]))
        roll = None if self.roll_call is None else self.roll_call.answer(activity.describe())
        lines = [f"rank {call.rank} on {call.host}: {call.text} (resilience.hang_timeout_seconds)."]
        if roll is None and self.roll_call is not None:
            lines.append("The ranks cannot compare: the process where they met, rank 0 or torchrun, does not answer.")
        elif roll is not None and call.rank == self.launch.rank:
            lines += ["Where the ranks are, those to look at first:", *(f"  {line}" for line in roll.lines())]
            lines += [f"Traces of the last collectives: {self._trace_folder}"]
        self.launch.report(HangError("\n".join(lines)))
        # Last and not waited for long: what stands still may be the file system.
        dump = threading.Thread(target=self._dump_flight_recorder, daemon=True)
        dump.start()
        dump.join(_DUMP_SECONDS)
        os._exit(HangError.exit_status)

    def _dump_flight_recorder(self) -> None:
        """Write the last collectives of this rank as torch recorded them."""
        if self.roll_call is None:
            return
        try:
            self._trace_folder.mkdir(parents=True, exist_ok=True)
            for function, arguments, name in _RECORDERS:
                dump = getattr(torch._C._distributed_c10d, function, None)
                if dump is not None:
                    (self._trace_folder / name.format(rank=self.launch.rank)).write_bytes(dump(**arguments))
        except OSError as error:
            self.launch.say(f"the traces of the last collectives cannot be written: {error}")


def explain(call: Call, roll_call: RollCall) -> str:
    """What another rank's failure was, and where it found this one. Asks the ranks who is left where nobody knows."""
    here = f"This rank was in: {activity.describe()}."
    if call.kind != "lost":
        return f"rank {call.rank} on {call.host} has ended the run: {call.text} {here}"
    roll = roll_call.answer(activity.describe())
    remedy = "Start the run again: it goes on from its last checkpoint."
    if roll is None:
        return f"the connection to the other ranks broke, and the process where all met is gone. {here} {remedy}"
    if not roll.silent:
        broken = f"a connection of rank {call.rank} on {call.host} broke, but all ranks answer"
        return f"{broken}: {call.text} {here} {remedy}"
    lost = ", ".join(f"rank {rank} on {host}" for rank, host in roll.silent)
    verb = "has" if len(roll.silent) == 1 else "have"
    return f"{lost} {verb} ended without a word: killed, out of memory, or the node is gone. {here} {remedy}"


def _stacks() -> Iterator[str]:
    """The stack of every thread of this process."""
    with os.fdopen(os.memfd_create("stacks"), "r+b") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        yield from file.read().decode(errors="replace").splitlines()
