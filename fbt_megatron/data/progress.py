"""Progress of a build: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from tqdm import tqdm

LINE_INTERVAL_SECONDS = 10.0
_COUNTS = "kMBT"
_BYTES = "kMGT"


class Progress:
    """Reports work measured in bytes of input, with tokens per second and the time that is left.

    Use as a context manager around one phase of the work.
    """

    def __init__(
        self,
        title: str,
        total_bytes: int,
        done_bytes: int,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start a phase of `total_bytes`, of which `done_bytes` were done by an earlier run."""
        self._title = title
        self._total = total_bytes
        self._stream = stream
        self._clock = clock
        self._initial = self._done = done_bytes
        self._tokens = 0
        self._started = self._last_line = clock()
        self._bar: tqdm | None = None
        if stream.isatty():
            self._bar = tqdm(
                total=total_bytes, initial=done_bytes, desc=title, unit="B", unit_scale=True, file=stream, leave=True
            )

    def advance(self, num_bytes: int, num_tokens: int) -> None:
        """Count finished work."""
        self._done += num_bytes
        self._tokens += num_tokens
        if self._bar is not None:
            self._bar.set_postfix_str(f"{format_count(self._tokens_per_second())} tokens/s", refresh=False)
            self._bar.update(num_bytes)
        elif self._clock() - self._last_line >= LINE_INTERVAL_SECONDS:
            self._write_line()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None:
            self._write_line()

    def _tokens_per_second(self) -> float:
        return self._tokens / max(self._clock() - self._started, 1e-9)

    def _write_line(self) -> None:
        self._last_line = self._clock()
        elapsed = self._last_line - self._started
        worked = self._done - self._initial
        left = f"{elapsed * (self._total - self._done) / worked:.0f}s" if worked else "unknown"
        self._stream.write(
            f"{self._title}: {_scaled(self._done, _BYTES)}B of {_scaled(self._total, _BYTES)}B, "
            f"{format_count(self._tokens)} tokens, "
            f"{format_count(self._tokens_per_second())} tokens/s, {elapsed:.0f}s, eta {left}\n"
        )
        self._stream.flush()


def format_count(value: float) -> str:
    """Return a number with three digits and a unit: `812`, `9.83k`, `1.20M`, `3.00B`."""
    return _scaled(value, _COUNTS)


def _scaled(value: float, units: str) -> str:
    """Write `value` with three digits and one of `units`, the names of the powers of 1000 from the first up."""
    for power, unit in reversed(list(enumerate(units, start=1))):
        if value >= 0.9995 * 1000**power:  # from here on three digits round up to the unit
            return f"{value / 1000**power:#.3g}".rstrip(".") + unit
    return f"{value:.0f}"
