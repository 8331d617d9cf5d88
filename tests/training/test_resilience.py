"""Signals are agreed by all ranks; too many skipped steps end the run."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from fbt_megatron.config.schema import ResilienceConfig
from fbt_megatron.errors import NonFiniteError
from fbt_megatron.training.resilience import agreed_signal, goes_back
from fbt_megatron.training.stop_signal import StopSignal
from fbt_megatron.training.train_state import Counters
from tests.distributed import run_distributed

CPU = torch.device("cpu")


def _signal_of(rank: int) -> list[int]:
    """Rank 1 alone gets SIGTERM, then rank 0 gets the two others."""
    with StopSignal() as stop:
        found = [agreed_signal(stop, device=CPU)]
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        found.append(agreed_signal(stop, device=CPU))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGUSR1)
        return [*found, agreed_signal(stop, device=CPU)]


@pytest.mark.distributed
def test_ranks_agree_on_a_signal_that_one_received() -> None:
    assert run_distributed(_signal_of, 2) == [[0, signal.SIGTERM, signal.SIGTERM]] * 2


def test_skipped_steps_in_a_row() -> None:
    limit = ResilienceConfig(max_consecutive_skips=3)
    assert not goes_back(Counters(step=9, skipped_steps=7, consecutive_skips=2), limit)
    with pytest.raises(NonFiniteError, match=r"3 steps in a row, up to step 9 .*max_consecutive_skips=3") as caught:
        goes_back(Counters(step=9, skipped_steps=3, consecutive_skips=3), limit)
    assert "spike" not in str(caught.value)
    assert caught.value.exit_status == 5


def test_rewinds_are_bounded() -> None:
    limit = ResilienceConfig(max_consecutive_skips=3, max_rewinds=2, spikes="skip")
    assert goes_back(Counters(step=9, consecutive_skips=3, rewinds=1), limit)
    with pytest.raises(NonFiniteError, match=r"or a spike .*spike_factor=6\) in 3 steps.*max_rewinds=2"):
        goes_back(Counters(step=9, consecutive_skips=3, rewinds=2), limit)
