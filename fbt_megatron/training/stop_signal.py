"""Notes the signals that ask a run to stop, from its start-up on. Imports no torch."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_IMPATIENT = (signal.SIGINT, signal.SIGTERM)
"""Those of which a second one ends the process. SIGUSR1 comes from schedulers, which may repeat it."""
_SAME_SECONDS = 1.0
"""A terminal, a launcher and a scheduler may each pass the same signal on: within this time it counts once."""
_END = 0
"""No signal has this number: ends the thread."""


class StopSignal:
    """Notes SIGINT, SIGTERM and SIGUSR1 while it is entered, so that the run can stop between two steps.

    A second SIGINT or SIGTERM ends the process at once with exit status 128 + its number, whatever the main thread is
    in: someone cannot wait for the step to end, or the step never does. Python calls its handlers in the main
    thread only, which does not listen while it waits inside a library, so a thread of its own counts them.
    """

    def __init__(self) -> None:
        self.received = 0
        """Number of the last signal, or 0."""
        self._previous: dict[signal.Signals, signal._HANDLER] = {}
        self._previous_descriptor = -1
        self._read = self._write = -1
        self._thread = threading.Thread(target=self._count, name="stop signal", daemon=True)

    def __enter__(self) -> StopSignal:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)  # a rule of `set_wakeup_fd`
        self._thread.start()
        self._previous_descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_descriptor)
        os.write(self._write, bytes([_END]))
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def _count(self) -> None:
        first: dict[int, float] = {}
        while (number := os.read(self._read, 1)[0]) != _END:
            now = time.monotonic()
            if number in _IMPATIENT and now - first.setdefault(number, now) > _SAME_SECONDS:
                os._exit(128 + number)
