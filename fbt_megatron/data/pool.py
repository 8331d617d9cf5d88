"""Runs independent tasks in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.connection import wait as wait_for_sentinel
from typing import TypeVar

from fbt_megatron.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_tasks(function: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> Iterator[Result]:
    """Yield `function(task)` for every task, in the order in which they finish.

    Args:
        function: importable by name; it and its results are pickled.
        tasks: pickled a few at a time, so all of them together may be large.
        workers: processes at most; where one is enough, the work is done in this one.

    Raises:
        DataError: a worker was killed. Errors of `function` come through as they are.
    """
    workers = min(workers, len(tasks))
    if workers <= 1:
        yield from map(function, tasks)
        return
    remaining = iter(tasks)
    # Fresh interpreters: a forked one would inherit the threads' locks of the tokenizer library.
    context = multiprocessing.get_context("spawn")
    finished_all = False
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        running: set[Future[Result]] = {executor.submit(function, task) for task in islice(remaining, 2 * workers)}
        while running:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {executor.submit(function, task) for task in islice(remaining, len(finished))}
            for future in finished:
                yield future.result()
        finished_all = True
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed, most likely because memory ran out. Run again with fewer --workers: "
            "finished work is kept."
        ) from error
    finally:
        if not finished_all:  # Nobody waits for tasks whose results nobody takes.
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
        executor.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and end with it even where it is killed without a chance to say so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for_sentinel([parent.sentinel])
        os._exit(1)
