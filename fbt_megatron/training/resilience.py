"""When a run stops or goes back: on a signal, agreed by all ranks, or after too many skipped steps in a row."""

from __future__ import annotations

import torch

from fbt_megatron.config.schema import ResilienceConfig
from fbt_megatron.errors import DataError, NonFiniteError
from fbt_megatron.parallel.collectives import max_across
from fbt_megatron.training.stop_signal import StopSignal
from fbt_megatron.training.train_state import Counters


def agreed_signal(stop: StopSignal, *, device: torch.device) -> int:
    """Number of the signal that any rank received, or 0; the same on every rank, which must all call this."""
    return int(max_across(torch.tensor(float(stop.received), device=device)))


def goes_back(counters: Counters, resilience: ResilienceConfig) -> bool:
    """True after `resilience.max_consecutive_skips` skipped steps in a row.

    Raises NonFiniteError where the run may not go back any more, and DataError where none of them trains a token.
    """
    if counters.consecutive_skips < resilience.max_consecutive_skips:
        return False
    if counters.consecutive_untrained == counters.consecutive_skips:
        raise DataError(
            f"no token was trained in {counters.consecutive_skips} steps in a row, up to step {counters.step} "
            f"(resilience.max_consecutive_skips={resilience.max_consecutive_skips}): the conversations of their rows, "
            "which log.txt names, are cut before their first answer. Begin a run with a longer model.seq_length or a "
            "larger train.global_batch_size, or without conversations that are so long."
        )
    if counters.rewinds >= resilience.max_rewinds:
        raise too_many_skips(counters, resilience, f"resilience.max_rewinds={resilience.max_rewinds}")
    return True


def too_many_skips(counters: Counters, resilience: ResilienceConfig, why_not_back: str) -> NonFiniteError:
    """The error that ends a run which cannot go back."""
    number = counters.consecutive_skips
    reason = "The gradient was not finite"
    if resilience.spikes == "skip":
        reason += f" or a spike (resilience.spike_factor={resilience.spike_factor:g})"
    return NonFiniteError(
        f"{reason} in {number} steps in a row, up to step {counters.step} "
        f"(resilience.max_consecutive_skips={resilience.max_consecutive_skips}; {why_not_back}). No weight has changed "
        "since. Lower the learning rates, or look at the data of these steps, which log.txt names, and start again "
        "from the last checkpoint."
    )
