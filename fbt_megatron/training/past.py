"""Schedules compared as functions: whether two configurations agree on every step that a checkpoint has behind it.

Where they do, the keys of the schedules may change: the steps that are done are those of the new configuration too, so
that the run is one of that configuration from its beginning. This is how a run is extended, how a cooldown is branched
off, and how feedback starts late.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.model.pass_schedule import build_pass_schedule
from fbt_megatron.optim.lr_schedule import WSDSchedule, scheduled_z_loss

_OfStep: TypeAlias = Callable[[int], Any]


@dataclass(frozen=True)
class PastDifference:
    """The first step of the past that two configurations treat differently, in one aspect.

    `keys` are those that the aspect depends on, `text` says what the step was and would have been, `remedy` how the new
    configuration can keep it, or is empty.
    """

    step: int
    keys: tuple[str, ...]
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class _Aspect:
    """One function of the step, the keys that it depends on, and how a difference is told (old value, new value)."""

    keys: tuple[str, ...]
    function: Callable[[RunConfig], _OfStep]
    text: Callable[[Any, Any], str]
    remedy: Callable[[RunConfig, RunConfig, int, int], str] = lambda old, new, step, last_step: ""


def past_differences(old: RunConfig, new: RunConfig, *, last_step: int) -> list[PastDifference]:
    """Where the configurations do not agree on the steps 1 to `last_step`, by aspect; both runs must be that long."""
    differences = []
    for aspect in _ASPECTS:
        before, after = aspect.function(old), aspect.function(new)
        step = next((step for step in range(1, last_step + 1) if before(step) != after(step)), None)
        if step is not None:
            text = f"step {step} {aspect.text(before(step), after(step))}"
            remedy = aspect.remedy(old, new, step, last_step)
            differences.append(PastDifference(step, aspect.keys, text, remedy))
    return differences


def _rate_factor(config: RunConfig) -> _OfStep:
    return WSDSchedule(config.lr_schedule, config.train.steps).factor


def _z_loss(config: RunConfig) -> _OfStep:
    schedule = WSDSchedule(config.lr_schedule, config.train.steps)
    return lambda step: scheduled_z_loss(config.loss, schedule, step)


def _num_passes(config: RunConfig) -> _OfStep:
    schedule = build_pass_schedule(config.feedback, steps=config.train.steps, seed=config.train.seed)
    return lambda step: schedule.plan(step).num_passes


def _feedback(config: RunConfig) -> _OfStep:
    """How the passes with feedback of a step are computed and weighted; None where it has none."""
    schedule = build_pass_schedule(config.feedback, steps=config.train.steps, seed=config.train.seed)
    computed = (config.feedback.fusion, config.feedback.jitter, config.feedback.prefix_mixin)

    def of_step(step: int) -> Any:
        plan = schedule.plan(step)
        return (*computed, plan.weights) if plan.uses_feedback else None

    return of_step


def _shorter_cooldown(old: RunConfig, new: RunConfig, step: int, last_step: int) -> str:
    """A cooldown that begins before the checkpoint although the run was not in one yet."""
    was, would = (WSDSchedule(config.lr_schedule, config.train.steps) for config in (old, new))
    left = new.train.steps - last_step
    if was.in_cooldown(last_step) or not would.in_cooldown(step) or not left:
        return ""
    updates = new.lr_schedule.cooldown_steps(new.train.steps)
    largest = math.floor(left / new.train.steps * 1e6) / 1e6
    return (
        f"The cooldown of {updates} updates would have begun before the checkpoint, after which {left} are left: "
        f"lr_schedule.cooldown_fraction may be at most {largest}. "
    )


def _fixed_borders(old: RunConfig, new: RunConfig, step: int, last_step: int) -> str:
    """Phases whose ends are fractions move with the length of the run."""
    ends = [phase.until for phase in new.feedback.schedule[:-1]]
    if old.train.steps == new.train.steps or not any(isinstance(end, float) for end in ends):
        return ""
    return "Ends of phases that are fractions move with train.steps: write them as step numbers. "


_ASPECTS = (
    _Aspect(
        (
            "train.steps",
            "lr_schedule.warmup_steps",
            "lr_schedule.cooldown_fraction",
            "lr_schedule.cooldown_shape",
            "lr_schedule.min_lr_ratio",
        ),
        _rate_factor,
        lambda old, new: f"had a learning-rate factor of {old:.6g} and would have had {new:.6g}",
        _shorter_cooldown,
    ),
    _Aspect(
        ("train.steps", "lr_schedule.cooldown_fraction", "loss.z_loss", "loss.z_loss_when"),
        _z_loss,
        lambda old, new: f"had a z-loss coefficient of {old:.6g} and would have had {new:.6g}",
    ),
    _Aspect(
        ("train.steps", "feedback.schedule"),
        _num_passes,
        lambda old, new: f"ran {_passes(old)} and would have run {_passes(new)}",
        _fixed_borders,
    ),
    _Aspect(
        (
            "feedback.fusion",
            "feedback.jitter",
            "feedback.loss_weight",
            "feedback.loss_reduction",
            "feedback.prefix_mixin",
        ),
        _feedback,
        lambda old, new: f"{'would have had' if old is None else 'had'} passes with feedback, which depend on it",
    ),
)

SHAPING_KEYS = frozenset(key for aspect in _ASPECTS for key in aspect.keys)
"""The keys that act on a step through the functions above alone."""


def _passes(number: int) -> str:
    return "1 pass" if number == 1 else f"{number} passes"
