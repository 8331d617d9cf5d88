"""What this process is doing, in words: for whoever finds it standing still.

A process does one thing at a time, in its main thread, so this is a module, and whatever does the work says so without
being handed anything. A mark is an assignment and a sum, no clock and no lock. Imports no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_MAIN = threading.main_thread().ident


class _Activity:
    marks = 0
    phase = "start-up"
    detail = ""
    collective = ""
    waiting = False


_activity = _Activity()


def begin(phase: str) -> None:
    """The main thread begins something; other threads are not heard."""
    if threading.get_ident() == _MAIN:
        _activity.phase, _activity.detail = phase, ""
        _activity.collective, _activity.waiting = "", False
        _activity.marks += 1


def advance(detail: str) -> None:
    """The main thread has come to `detail` of what it does."""
    if threading.get_ident() == _MAIN:
        _activity.detail = detail
        _activity.marks += 1


@contextmanager
def communicating(collective: str) -> Iterator[None]:
    """Inside, the main thread waits for other ranks. Where that fails, the activity keeps saying so."""
    if threading.get_ident() != _MAIN:
        yield
        return
    _activity.collective, _activity.waiting = collective, True
    _activity.marks += 1
    yield
    _activity.waiting = False
    _activity.marks += 1


def count_marks() -> int:
    """A number that is another one whenever the main thread has got on."""
    return _activity.marks


def describe() -> str:
    """`step 12, update, in sum_across`: what the main thread does, and this project's last collective in it."""
    parts = [_activity.phase, _activity.detail]
    if _activity.collective:
        parts.append(f"{'waiting in' if _activity.waiting else 'after'} {_activity.collective}")
    return ", ".join(part for part in parts if part)
