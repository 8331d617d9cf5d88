"""Number of passes of each step: shares kept at every prefix, a function of seed and step, weights of the objective."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fbt_megatron.config.schema import FeedbackConfig, SchedulePhase
from fbt_megatron.model.pass_schedule import PassPlan, build_pass_schedule


def order_of(phases: list[tuple[float | int, dict[int, float]]], *, steps: int, seed: int) -> list[int]:
    """Number of passes of steps 1..`steps`."""
    feedback = FeedbackConfig(schedule=tuple(SchedulePhase(until, mix) for until, mix in phases))
    schedule = build_pass_schedule(feedback, steps=steps, seed=seed)
    return [schedule.plan(step).num_passes for step in range(1, steps + 1)]


@st.composite
def mixes(draw) -> dict[int, float]:
    """One to six numbers of passes with shares from equal to very rare."""
    numbers = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6, unique=True))
    weights = draw(st.lists(st.integers(1, 1000), min_size=len(numbers), max_size=len(numbers)))
    return {number: weight / sum(weights) for number, weight in zip(numbers, weights, strict=True)}


@settings(max_examples=150, deadline=None)
@given(mix=mixes(), seed=st.integers(0, 2**31), steps=st.integers(1, 600))
@example(mix={1: 0.75, 2: 0.22, 3: 0.03}, seed=1, steps=2000)
@example(mix={2: 0.88, 3: 0.12}, seed=1, steps=2000)
@example(mix={1: 0.5, 2: 0.5}, seed=1, steps=500)
@example(mix={1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25}, seed=1, steps=500)
@example(mix={1: 0.999, 2: 0.001}, seed=1, steps=3000)
def test_every_prefix_of_a_phase_keeps_the_shares(mix, seed, steps):
    counts = dict.fromkeys(mix, 0)
    for slot, passes in enumerate(order_of([(1.0, mix)], steps=steps, seed=seed), start=1):
        counts[passes] += 1
        for number, share in mix.items():
            # Exact arithmetic; 1e-8 allows for shares that add up to 1 only as floats.
            assert abs(counts[number] - Fraction(share) * slot) <= 1 + Fraction(1, 10**8)


def test_phases_follow_one_another_and_each_keeps_its_own_shares():
    phases = [(0.75, {1: 1.0}), (0.9, {2: 0.88, 3: 0.12}), (1000, {4: 1.0})]
    order = order_of(phases, steps=1000, seed=3)
    assert set(order[:750]) == {1}
    assert abs(order[750:900].count(3) - 18) <= 1
    assert set(order[750:900]) == {2, 3}
    assert set(order[900:]) == {4}


def test_seed_and_phase_change_the_order_and_nothing_else_does():
    mix = {1: 0.75, 2: 0.22, 3: 0.03}
    orders = {seed: order_of([(1.0, mix)], steps=400, seed=seed) for seed in range(5)}
    assert len({tuple(order) for order in orders.values()}) == 5
    assert order_of([(1.0, mix)], steps=400, seed=0) == orders[0]
    two = order_of([(0.5, mix), (1.0, mix)], steps=800, seed=0)
    assert two[:400] == orders[0]
    assert two[400:] != orders[0]


def test_a_longer_run_has_the_same_steps_and_then_some():
    mix = {2: 0.88, 3: 0.12}
    short, long = (order_of([(1.0, mix)], steps=steps, seed=9) for steps in (301, 1000))
    assert long[:301] == short


def test_rare_steps_are_spread_at_random_rather_than_at_fixed_distances():
    order = order_of([(1.0, {2: 0.9, 3: 0.1})], steps=4000, seed=0)
    places = [step for step, passes in enumerate(order) if passes == 3]
    gaps = {after - before for before, after in pairwise(places)}
    assert len(gaps) >= 8


def test_counts_are_those_of_the_plans():
    feedback = FeedbackConfig(schedule=(SchedulePhase(10, {1: 1.0}), SchedulePhase(1.0, {3: 0.2, 2: 0.8, 4: 0.0})))
    schedule = build_pass_schedule(feedback, steps=110, seed=0)
    order = [schedule.plan(step).num_passes for step in range(1, 111)]
    assert schedule.counts() == [{1: 10}, {2: order[10:].count(2), 3: order[10:].count(3)}]
    assert schedule.counts()[1] == {2: 80, 3: 20}


@pytest.mark.parametrize(
    ("reduction", "passes", "weights"),
    [
        ("mean", 1, (1.0,)),
        ("mean", 2, (1.0, 0.6)),
        ("mean", 4, (1.0, 0.2, 0.2, 0.2)),
        ("sum", 1, (1.0,)),
        ("sum", 3, (1.0, 0.6, 0.6)),
    ],
)
def test_weights_of_the_objective(reduction, passes, weights):
    feedback = FeedbackConfig(loss_weight=0.6, loss_reduction=reduction, schedule=(SchedulePhase(1.0, {passes: 1.0}),))
    plan = build_pass_schedule(feedback, steps=1, seed=0).plan(1)
    assert plan.weights == pytest.approx(weights, rel=1e-15)
    assert plan.uses_feedback == (passes > 1)


@pytest.mark.parametrize("step", [0, -1, 11])
def test_steps_outside_the_run_are_an_error(step):
    schedule = build_pass_schedule(FeedbackConfig(), steps=10, seed=0)
    assert schedule.plan(10) == PassPlan(1, (1.0,))
    with pytest.raises(ValueError, match="counted from 1 to 10"):
        schedule.plan(step)


def test_passes_after_counts_what_is_left() -> None:
    phases = (SchedulePhase(5, {1: 1.0}), SchedulePhase(1.0, {1: 0.2, 2: 0.5, 3: 0.3}))
    schedule = build_pass_schedule(FeedbackConfig(schedule=phases), steps=40, seed=3)
    passes = [schedule.plan(step).num_passes for step in range(1, 41)]
    assert [schedule.passes_after(step) for step in range(41)] == [sum(passes[step:]) for step in range(41)]
