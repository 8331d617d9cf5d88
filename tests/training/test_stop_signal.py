"""A first signal is noted, a second one ends the process at once, and what was there before comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from fbt_megatron.training.stop_signal import STOP_SIGNALS, StopSignal
from tests.pretrain.runs import ROOT, environment

# The main thread is inside a library, for minutes, and does not come back to Python meanwhile.
STUCK = """
import hashlib, sys
from fbt_megatron.training.stop_signal import StopSignal
assert "torch" not in sys.modules
with StopSignal():
    print("entered", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted(number: signal.Signals) -> None:
    with StopSignal() as stop:
        assert stop.received == 0
        os.kill(os.getpid(), number)
        assert stop.received == number


def test_the_same_signal_by_two_ways_counts_once() -> None:
    """A terminal sends Ctrl-C to all of its processes, and the launcher among them passes it on."""
    with StopSignal() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        assert stop.received == signal.SIGTERM


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_come_back(fails: bool) -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    try:
        with StopSignal():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) != before[0]
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGUSR1, False)])
def test_a_second_signal_ends_a_process_that_does_not_listen(number: signal.Signals, ends: bool) -> None:
    """A person's does; a scheduler's may only be a repetition."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "entered\n"
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        process.send_signal(number)
        if ends:
            assert process.wait(60) == 128 + number
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.5)
    finally:
        process.kill()
