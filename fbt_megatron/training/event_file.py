"""TensorBoard's event file, written by whoever calls and not by a thread.

A thread that meets a full disk prints a trace of its own beside the error that stops the run, and is heard of late.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar

_VERSION = "brain.Event:2"


class EventFile:
    """A new file in a folder, which is created. Every method raises OSError where the disk does not take it."""

    def __init__(self, folder: Path, *, purge_step: int) -> None:
        """What earlier files of the folder hold from `purge_step` on, TensorBoard shows no longer."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = (folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._add(Event(file_version=_VERSION))
        self._add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self.flush()

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Append the value of a step under a tag."""
        self._add(Event(step=step, summary=scalar(tag, value)))

    def flush(self) -> None:
        """Hand what is written to the operating system."""
        self._records.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
