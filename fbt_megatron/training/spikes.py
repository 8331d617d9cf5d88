"""Loss spikes: a step whose loss or gradient norm lies far above those of the steps before it.

Far above means more than `resilience.spike_factor` standard deviations over the mean of the last 128 steps, judged from
64 steps on, as in OLMo-core's skip-step optimizers. A spike enters the window like any other step, skipped or not, so a
level that lasts is normal after a few steps, and skipping never goes on for ever.

Numbers are compared with their own kind. The cross entropy of pass k means the same in every step that runs it; the
gradient norm depends on how many passes a step runs, so there is one window for each number.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from fbt_megatron.parallel.collectives import max_across

WINDOW = 128
"""Steps that a number is compared with."""
FEWEST = WINDOW // 2
"""With fewer steps nothing is judged."""
SMALLEST_DEVIATION = 1e-3
"""Least standard deviation, relative to the mean: where all steps have the same loss, rounding is no spike."""


class SpikeDetector:
    """Recent losses and gradient norms, and what stands out from them; the same on every rank."""

    def __init__(self, factor: float) -> None:
        """`factor` is the number of standard deviations from which on a number is a spike."""
        self._factor = factor
        self._windows: dict[str, deque[float]] = {}

    def judge(self, losses: Sequence[float], grad_norm: float, *, device: torch.device) -> list[str]:
        """What of a step is a spike, one text for each number, and remember its numbers. All ranks call it together.

        `losses` is the cross entropy of each pass, `grad_norm` the finite norm before clipping. A loss that is not
        finite is a spike and is not remembered.
        """
        names = [*(f"loss_pass_{k}" for k in range(1, len(losses) + 1)), f"grad_norm_{len(losses)}"]
        own = [value if math.isfinite(value) else math.inf for value in (*losses, grad_norm)]
        # Ranks may have summed in different orders; a verdict must not hang on the last bit of a number.
        agreed = max_across(torch.tensor(own, dtype=torch.float64, device=device)).tolist()
        values = dict(zip(names, agreed, strict=True))
        found = list(self._excesses(values))
        for name, value in values.items():
            if math.isfinite(value):
                self._windows.setdefault(name, deque(maxlen=WINDOW)).append(value)
        return found

    def state_dict(self) -> dict[str, list[float]]:
        """The windows, oldest number first, as a checkpoint keeps them."""
        return {name: list(window) for name, window in self._windows.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on with the windows of a checkpoint."""
        self._windows = {name: deque(values, maxlen=WINDOW) for name, values in state.items()}

    def _excesses(self, values: Mapping[str, float]) -> Iterator[str]:
        for name, value in values.items():
            window = self._windows.get(name, ())
            if len(window) >= FEWEST:
                mean = math.fsum(window) / len(window)
                deviation = math.sqrt(math.fsum((past - mean) ** 2 for past in window) / (len(window) - 1))
                limit = mean + self._factor * max(deviation, SMALLEST_DEVIATION * abs(mean))
                if value > limit:
                    yield f"{name} {value:.4g} above {limit:.4g} (mean {mean:.4g} of {len(window)} steps)"
            elif not math.isfinite(value):
                yield f"{name} is not finite"
