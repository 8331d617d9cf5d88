"""Warm-up, stable, decay: the learning-rate factor, and what follows it, as a pure function of the update's number."""

from __future__ import annotations

import math

from fbt_megatron.config.schema import LossConfig, LRScheduleConfig


class WSDSchedule:
    """Factor on both learning rates for update 1, 2, ..., `steps`.

    Of w warm-up updates, update k has k/w, so the very first one already moves. The last n = round(fraction * steps)
    updates are the cooldown: its update j of n has t = j/n of the way behind it, and the factor goes from 1 (not
    reached, t = 0) to `min_lr_ratio` (the last update of the run, t = 1), either linearly in t or as 1 - sqrt(t).

    There is no state: a run resumed at any step, or extended by a larger `steps`, has the factors of a run of that
    length from its beginning. An extension in mid-cooldown, after which the factor would be 1 again until the new
    cooldown, is refused unless it is allowed by name (`training/past.py`).

    Source: Hu et al. 2024, arXiv 2404.06395 (WSD); Haegele et al. 2024, arXiv 2405.18392 (1 - sqrt).
    """

    def __init__(self, config: LRScheduleConfig, steps: int) -> None:
        self._config = config
        self._steps = steps
        self._cooldown_steps = config.cooldown_steps(steps)

    def factor(self, step: int) -> float:
        """Factor of update `step` (counted from 1). Raises `ValueError` outside the run."""
        self._check(step)
        if self.in_cooldown(step):
            done = (step - self._cooldown_start) / self._cooldown_steps
            fall = done if self._config.cooldown_shape == "linear" else math.sqrt(done)
            return 1.0 - (1.0 - self._config.min_lr_ratio) * fall
        if step < self._config.warmup_steps:
            return step / self._config.warmup_steps
        return 1.0

    def in_cooldown(self, step: int) -> bool:
        """True for the last round(fraction * steps) updates. Raises `ValueError` outside the run."""
        self._check(step)
        return step > self._cooldown_start

    @property
    def _cooldown_start(self) -> int:
        """The last update before the cooldown."""
        return self._steps - self._cooldown_steps

    def _check(self, step: int) -> None:
        if not 1 <= step <= self._steps:
            raise ValueError(f"update {step} is outside the run: updates are counted from 1 to {self._steps}")


def scheduled_weight_decay(weight_decay: float, factor: float) -> float:
    """Weight decay of an update whose learning rate is `factor` times its peak: wd_s = wd * lr_s / lr_peak.

    The update shrinks W by 1 - lr_s * wd_s, so the decay falls with the square of the factor.
    Source: Defazio 2025, arXiv 2506.02285 (AdamC).
    """
    return weight_decay * factor


def scheduled_z_loss(config: LossConfig, schedule: WSDSchedule, step: int) -> float:
    """Coefficient of the z-loss in update `step`. Raises `ValueError` outside the run where the cooldown decides."""
    return config.z_loss if config.z_loss_when == "always" or schedule.in_cooldown(step) else 0.0
