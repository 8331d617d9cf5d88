"""Processes that read ahead of the training step.

Each has a pipe of its own, of which nobody else holds the writing end, so a process that dies, also in the middle of
a message, is noticed by the one who waits for it and nowhere else. (PyTorch's `DataLoader` raises out of a signal
handler, at whatever point of the training step the process happens to be; ranks could not agree on that.)
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from fbt_megatron.errors import DataError

Item = TypeVar("Item")

_ITEMS_AHEAD = 4
_SECONDS_TO_END = 5.0


@dataclass(frozen=True)
class _Failure:
    """A `DataError` on its way out of a reader process."""

    message: str


class ReaderProcesses(Generic[Item]):
    """Items of several processes, taken from them in turns."""

    def __init__(self, read: Callable[[int, int], Iterator[Item]], workers: int) -> None:
        """Start `workers` processes; process w yields from `read(w, workers)`, which must not end."""
        context = multiprocessing.get_context("fork")  # the data set is open already
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for worker in range(workers):
            receiving, sending = context.Pipe(duplex=False)
            self._connections.append(receiving)
            arguments = (read, worker, workers, sending, self._connections)
            process = context.Process(target=_run_reader, args=arguments, daemon=True)
            process.start()
            sending.close()  # or the end of the process would not be the end of the pipe
            self._processes.append(process)

    def __iter__(self) -> Iterator[Item]:
        """The items in turns.

        Raises:
            DataError: one that a process raised, or a process has died.
        """
        for worker in cycle(range(len(self._processes))):
            yield self._receive(worker)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join(_SECONDS_TO_END)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()

    def _receive(self, worker: int) -> Item:
        try:
            item = self._connections[worker].recv()
        except (EOFError, OSError):  # the latter in the middle of a message
            raise self._death_of(worker) from None
        if isinstance(item, _Failure):
            raise DataError(item.message)
        received: Item = item
        return received

    def _death_of(self, worker: int) -> DataError:
        process = self._processes[worker]
        process.join(_SECONDS_TO_END)
        return DataError(
            f"data.workers={len(self._processes)}: reader process {worker} (pid {process.pid}) "
            f"{_describe_exit(process.exitcode)}. Give the run more memory or lower data.workers, and start it again: "
            "it goes on from its last checkpoint."
        )


def _describe_exit(status: int | None) -> str:
    if status is None or status >= 0:
        return f"ended with exit status {status}; what it printed before says why"
    likely = ", most likely because memory ran out" if -status == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-status).name}{likely}"


def _run_reader(
    read: Callable[[int, int], Iterator[Any]],
    worker: int,
    workers: int,
    sending: Connection,
    inherited: list[Connection],
) -> None:
    """Read a few items ahead while earlier ones wait in the pipe; `inherited` are the trainer's ends of the pipes."""
    _leave_signals_to_trainer()
    for connection in inherited:
        connection.close()  # or the end of the trainer would not be the end of the pipe
    items: queue.Queue[Any] = queue.Queue(_ITEMS_AHEAD)
    sender = threading.Thread(target=_send, args=(items, sending), daemon=True)
    sender.start()
    try:
        for item in read(worker, workers):
            items.put(item)
    except DataError as error:
        items.put(_Failure(str(error)))
        sender.join()


def _send(items: queue.Queue[Any], sending: Connection) -> None:
    """Send items up to a failure; ends the process where nobody is left to take them."""
    item = None
    try:
        while not isinstance(item, _Failure):
            item = items.get()
            sending.send(item)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)


def _leave_signals_to_trainer() -> None:
    """Keep reading when Ctrl-C or the scheduler signals the whole group: the trainer still finishes its step.

    The handlers that the trainer installed are not wanted in its copy either, or it could not end its readers.
    """
    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
