"""When a run stops: on a signal, agreed by all ranks, or after too many steps whose gradient was not finite."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

import torch

from fbt_megatron.config.schema import ResilienceConfig
from fbt_megatron.errors import NonFiniteError
from fbt_megatron.parallel.collectives import max_across
from fbt_megatron.training.train_state import Counters

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Notes SIGINT and SIGTERM, so that the run can stop between two steps with a checkpoint.

    A second signal of the same kind acts as it did before, for someone who cannot wait for the step to end.
    """

    def __init__(self) -> None:
        self._received = 0
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> StopSignal:
        self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        signal.signal(number, self._previous[signal.Signals(number)])

    def agreed(self, *, device: torch.device) -> int:
        """Number of the signal that any rank received, or 0; the same on every rank, which must all call this."""
        return int(max_across(torch.tensor(float(self._received), device=device)))


def check_skips(counters: Counters, resilience: ResilienceConfig) -> None:
    """Raise NonFiniteError after `resilience.max_consecutive_skips` skipped steps in a row."""
    if counters.consecutive_skips >= resilience.max_consecutive_skips:
        raise NonFiniteError(
            f"The gradient was not finite in {counters.consecutive_skips} steps in a row, up to step {counters.step} "
            f"(resilience.max_consecutive_skips={resilience.max_consecutive_skips}). No weight has changed since. "
            "Lower the learning rates, or look at the data of these steps, and start again from the last checkpoint."
        )
