"""What a save in the background needs: copies of the values in host memory, and a thread that other code can ask.

torch's `async_save` is such a thread around the writing of the shards alone. Hashing, publishing, the removal of older
checkpoints and further tries after a failure belong to the same background work, so the manager runs the whole save in
a thread of its own and takes only the staging from torch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from fbt_megatron.checkpoint.logical_shards import LogicalShards

T = TypeVar("T")


class HostCopies:
    """Copies of shards in host memory (pinned where there is a GPU), in buffers that the next call uses again."""

    def __init__(self) -> None:
        on_gpu = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )

    def take(self, shards: dict[str, LogicalShards]) -> dict[str, LogicalShards]:
        """The shards with the values of this moment; they hold until the next call."""
        staged = self._stager.stage({name: shard.views() for name, shard in shards.items()})
        assert isinstance(staged, dict)  # and no future of one: the copy ends here
        return {name: shard.with_views(staged[name]) for name, shard in shards.items()}


class BackgroundWork(Generic[T]):
    """One action in a thread, which says what happens through `note` and pauses through `pause`."""

    def __init__(self, action: Callable[[BackgroundWork[T]], T]) -> None:
        self._future: Future[T] = Future()
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._awaited = threading.Event()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        # A daemon, so that a write that never returns cannot keep a process whose run has ended.
        threading.Thread(target=self._run, args=(action,), name="checkpoint", daemon=True).start()

    def _run(self, action: Callable[[BackgroundWork[T]], T]) -> None:
        try:
            if self._device is not None:  # or the thread has that of rank 0, whatever the rank
                torch.cuda.set_device(self._device)
            self._future.set_result(action(self))
        except BaseException as error:  # whoever asks for the outcome gets it
            self._future.set_exception(error)

    # In the thread

    def note(self, text: str) -> None:
        """Leave a line for the log."""
        self._notes.put(text)

    def pause(self, seconds: float) -> None:
        """Wait, but not once somebody waits for the end of the work."""
        self._awaited.wait(seconds)

    # Outside

    @property
    def done(self) -> bool:
        """True once there is an outcome."""
        return self._future.done()

    def notes(self) -> list[str]:
        """The lines that were left since the last call."""
        return [self._notes.get() for _ in range(self._notes.qsize())]

    def wait(self) -> float:
        """Wait for the end of the work, whatever it is; returns the seconds that took."""
        started = time.monotonic()
        self._awaited.set()
        self._future.exception()
        return time.monotonic() - started

    def result(self) -> T:
        """What the action returned; raises what it raised. Only once it is done."""
        return self._future.result(timeout=0)
