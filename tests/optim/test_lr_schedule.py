"""The learning-rate factor of every update, by hand-worked values."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fbt_megatron.config.schema import LRScheduleConfig
from fbt_megatron.optim.lr_schedule import WSDSchedule, scheduled_weight_decay

TEN_TWENTY = LRScheduleConfig(warmup_steps=10, cooldown_fraction=0.2, min_lr_ratio=0.1)


@pytest.mark.parametrize(
    ("step", "factor"),
    [(1, 0.1), (5, 0.5), (6, 0.6), (10, 1.0), (11, 1.0), (80, 1.0), (81, 0.955), (90, 0.55), (95, 0.325), (100, 0.1)],
)
def test_linear_cooldown(step, factor):
    assert WSDSchedule(TEN_TWENTY, 100).factor(step) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "factor"), [(80, 1.0), (85, 1 - 0.9 * 0.5), (90, 1 - 0.9 * math.sqrt(0.5)), (100, 0.1)]
)
def test_one_minus_square_root_cooldown(step, factor):
    schedule = WSDSchedule(dataclasses.replace(TEN_TWENTY, cooldown_shape="1-sqrt"), 100)
    assert schedule.factor(step) == pytest.approx(factor, rel=1e-12)


def test_an_extended_run_cools_down_at_its_own_end():
    """From a checkpoint before the old cooldown or inside it, the factor is that of a run planned at the new length."""
    schedule = WSDSchedule(dataclasses.replace(TEN_TWENTY, cooldown_fraction=0.1), 200)
    expected = {81: 1.0, 90: 1.0, 91: 1.0, 180: 1.0, 181: 0.955, 190: 0.55, 200: 0.1}
    assert {step: schedule.factor(step) for step in expected} == pytest.approx(expected, rel=1e-12)


def test_without_warmup_the_first_update_is_at_the_peak():
    assert WSDSchedule(dataclasses.replace(TEN_TWENTY, warmup_steps=0), 100).factor(1) == 1.0


@pytest.mark.parametrize(("fraction", "first"), [(0.0, None), (0.2, 81), (0.254, 76), (0.256, 75), (1.0, 1)])
def test_cooldown_is_the_last_rounded_share_of_updates(fraction, first):
    schedule = WSDSchedule(LRScheduleConfig(warmup_steps=0, cooldown_fraction=fraction), 100)
    inside = [step for step in range(1, 101) if schedule.in_cooldown(step)]
    assert inside == ([] if first is None else list(range(first, 101)))


def test_the_last_update_has_the_smallest_rate():
    assert WSDSchedule(LRScheduleConfig(), 1000).factor(1000) == 0.0


@pytest.mark.parametrize("step", [0, -1, 101])
def test_updates_outside_the_run_are_an_error(step):
    schedule = WSDSchedule(TEN_TWENTY, 100)
    with pytest.raises(ValueError, match="counted from 1 to 100"):
        schedule.factor(step)
    with pytest.raises(ValueError, match="counted from 1 to 100"):
        schedule.in_cooldown(step)


def test_weight_decay_follows_the_rate_and_both_rates_keep_their_ratio():
    schedule = WSDSchedule(LRScheduleConfig(warmup_steps=4), 100)
    rates = [(0.02 * schedule.factor(step), 0.0003 * schedule.factor(step)) for step in (1, 2, 3, 4)]
    assert rates == [pytest.approx(pair) for pair in [(5e-3, 7.5e-5), (1e-2, 1.5e-4), (1.5e-2, 2.25e-4), (2e-2, 3e-4)]]
    assert [scheduled_weight_decay(0.1, schedule.factor(step)) for step in (1, 4)] == pytest.approx([0.025, 0.1])
