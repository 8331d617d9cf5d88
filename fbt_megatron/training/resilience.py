"""When a run stops: on a signal, agreed by all ranks, or after too many steps whose gradient was not finite."""

from __future__ import annotations

import torch

from fbt_megatron.config.schema import ResilienceConfig
from fbt_megatron.errors import NonFiniteError
from fbt_megatron.parallel.collectives import max_across
from fbt_megatron.training.stop_signal import StopSignal
from fbt_megatron.training.train_state import Counters


def agreed_signal(stop: StopSignal, *, device: torch.device) -> int:
    """Number of the signal that any rank received, or 0; the same on every rank, which must all call this."""
    return int(max_across(torch.tensor(float(stop.received), device=device)))


def check_skips(counters: Counters, resilience: ResilienceConfig) -> None:
    """Raise NonFiniteError after `resilience.max_consecutive_skips` skipped steps in a row."""
    if counters.consecutive_skips >= resilience.max_consecutive_skips:
        raise NonFiniteError(
            f"The gradient was not finite in {counters.consecutive_skips} steps in a row, up to step {counters.step} "
            f"(resilience.max_consecutive_skips={resilience.max_consecutive_skips}). No weight has changed since. "
            "Lower the learning rates, or look at the data of these steps, and start again from the last checkpoint."
        )
