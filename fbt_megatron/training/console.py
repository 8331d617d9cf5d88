"""What a person sees of a run: lines on the terminal and in `log.txt`, and a progress bar where there is a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

from tqdm import tqdm

from fbt_megatron.errors import RunDirError
from fbt_megatron.training.run_dir import writing


class Console:
    """Lines and progress of rank 0; on other ranks nothing is printed.

    Writing never raises: rank 0 alone would end, and leave the others waiting. The first failure is kept in `failure`,
    for the trainer to stop all ranks together.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.failure: RunDirError | None = None
        self._log: IO[str] | None = None
        self._log_path = Path()
        self._bar: tqdm | None = None

    def open_log(self, path: Path) -> None:
        """Append every further line to `path` as well, with the time of day; raises RunDirError."""
        if self.enabled:
            self._log_path = path
            with writing(path):
                self._log = path.open("a", buffering=1)

    @contextmanager
    def noting_failures(self, path: Path) -> Iterator[None]:
        """Keep what goes wrong while `path` is written."""
        try:
            with writing(path):
                yield
        except RunDirError as error:
            self.failure = self.failure or error

    def line(self, text: str) -> None:
        """Print one line above the progress bar."""
        if not self.enabled:
            return
        with self.noting_failures(Path("standard output")):
            if self._bar is None:
                print(text, flush=True)
            else:
                self._bar.write(text)
        self.log(text)

    def log(self, text: str) -> None:
        """Write to `log.txt` only: what is too long for a terminal."""
        if self._log is not None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            with self.noting_failures(self._log_path):
                self._log.write("".join(f"{stamp} {part}\n" for part in text.split("\n")))

    def start_progress(self, *, done: int, total: int) -> None:
        """Show a bar of `total` steps, where standard error is a terminal."""
        if self.enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, smoothing=0.05)

    def advance(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.update()

    def rewind(self, *, done: int) -> None:
        """The run goes on after step `done` again."""
        if self._bar is not None:
            self._bar.n = done
            self._bar.refresh()

    def close(self) -> None:
        """End the bar and the log."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._log is not None:
            with self.noting_failures(self._log_path):
                self._log.close()
            self._log = None

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.log(f"the run ends: {type(error).__name__}: {error}")  # the terminal gets it from whoever catches it
        self.close()


def print_warnings(label: str) -> None:
    """Print what modules warn of (reads tried again, documents passed over) on standard error, behind `label`.

    Reader processes, which are forked, do the same.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{label}%(message)s"))
    package = logging.getLogger("fbt_megatron")
    package.addHandler(handler)
    package.propagate = False


def format_duration(seconds: float) -> str:
    """A duration as people write it: `42s`, `7m05s`, `3h12m`, `2d04h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_count(value: float) -> str:
    """A large number with three digits and a unit: `812`, `9.83k`, `1.20M`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:  # from here on three digits round up to the unit
            return f"{value / size:#.3g}".rstrip(".") + unit
    return f"{value:.0f}"
