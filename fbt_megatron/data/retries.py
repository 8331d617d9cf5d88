"""Reads that fail for a reason that may pass are tried again, a few times and later each time."""

from __future__ import annotations

import logging
import random
import time

logger = logging.getLogger(__name__)

MAX_RETRIES = 5
_FIRST_WAIT_SECONDS = 1.0
_JITTER = 0.5

# Not the generator that a program seeds, nor one whose state a forked reader shares with its siblings.
_generator = random.SystemRandom()


class Backoff:
    """Counts failures in a row and waits after each, twice as long as before, about half a minute in all.

    Waits are drawn within 50% of that, so that ranks that fail together do not come back together.
    """

    def __init__(self) -> None:
        self._failures = 0

    def succeeded(self) -> None:
        """The next failure is the first again."""
        self._failures = 0

    def wait(self, where: str, error: BaseException) -> bool:
        """Wait before the next try and say so; False without a wait where there have been enough tries."""
        if self._failures == MAX_RETRIES:
            return False
        seconds = _FIRST_WAIT_SECONDS * 2**self._failures * _generator.uniform(1.0 - _JITTER, 1.0 + _JITTER)
        self._failures += 1
        logger.warning(
            "%s: %s: %s; trying again in %.1f s (%d of %d)",
            where,
            type(error).__name__,
            error,
            seconds,
            self._failures,
            MAX_RETRIES,
        )
        time.sleep(seconds)
        return True
