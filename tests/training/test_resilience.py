"""Signals are noted once and agreed by all ranks; too many skipped steps end the run."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from fbt_megatron.config.schema import ResilienceConfig
from fbt_megatron.errors import NonFiniteError
from fbt_megatron.training.resilience import StopSignal, check_skips
from fbt_megatron.training.train_state import Counters
from tests.distributed import run_distributed

CPU = torch.device("cpu")


class InterruptedByTestError(Exception):
    """What the handler before ours raises."""


@pytest.fixture
def handlers():
    """Handlers of both signals that raise; the test process's own are put back."""

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedByTestError(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    yield interrupt
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_acts_as_before(handlers, topology, number: signal.Signals) -> None:
    with StopSignal() as stop:
        assert stop.agreed(device=CPU) == 0
        os.kill(os.getpid(), number)
        assert stop.agreed(device=CPU) == number
        with pytest.raises(InterruptedByTestError, match=number.name):
            os.kill(os.getpid(), number)


def test_each_kind_of_signal_has_a_first_time(handlers, topology) -> None:
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(device=CPU) == signal.SIGTERM


@pytest.mark.parametrize("signalled", [True, False])
def test_handlers_are_restored(handlers, signalled: bool) -> None:
    with StopSignal():
        assert signal.getsignal(signal.SIGINT) is not handlers
        if signalled:
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handlers
    assert signal.getsignal(signal.SIGTERM) is handlers


def test_handlers_are_restored_after_an_error(handlers) -> None:
    with pytest.raises(KeyError), StopSignal():
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is handlers


def _signal_of(rank: int) -> list[int]:
    """Rank 1 alone gets SIGTERM, then rank 0 gets SIGINT as well."""
    with StopSignal() as stop:
        found = [stop.agreed(device=CPU)]
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        found.append(stop.agreed(device=CPU))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return [*found, stop.agreed(device=CPU)]


@pytest.mark.distributed
def test_ranks_agree_on_a_signal_that_one_received() -> None:
    assert run_distributed(_signal_of, 2) == [[0, signal.SIGTERM, signal.SIGTERM]] * 2


def test_skipped_steps_in_a_row() -> None:
    limit = ResilienceConfig(max_consecutive_skips=3)
    check_skips(Counters(step=9, skipped_steps=7, consecutive_skips=2), limit)
    with pytest.raises(NonFiniteError, match=r"3 steps in a row, up to step 9 .*max_consecutive_skips=3") as caught:
        check_skips(Counters(step=9, skipped_steps=3, consecutive_skips=3), limit)
    assert caught.value.exit_status == 5
