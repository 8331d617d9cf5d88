"""Which keys of the schedules may change at a checkpoint: those that leave every step up to it as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fbt_megatron.checkpoint.manifest import Manifest
from fbt_megatron.config.loader import format_config, load_config
from fbt_megatron.config.schema import (
    DataConfig,
    FeedbackConfig,
    LRScheduleConfig,
    RunConfig,
    SchedulePhase,
    TrainConfig,
)
from fbt_megatron.errors import ConfigError
from fbt_megatron.model.pass_schedule import build_pass_schedule
from fbt_megatron.optim.lr_schedule import WSDSchedule
from fbt_megatron.training.past import SHAPING_KEYS
from fbt_megatron.training.resume import check_same_run, new_feedback_tensors

RUN = RunConfig(
    feedback=FeedbackConfig(schedule=(SchedulePhase(60, {1: 1.0}), SchedulePhase(1.0, {2: 0.5, 3: 0.5}))),
    lr_schedule=LRScheduleConfig(warmup_steps=10, cooldown_fraction=0.2, min_lr_ratio=0.1),
    data=DataConfig(train="data"),
    train=TrainConfig(steps=100),
)
"""Warm-up 1 to 10, stable to 80, cooldown to 100; one pass up to step 60."""


def changed(config: RunConfig, **values: Any) -> RunConfig:
    """`config` with `section__key=value` replaced."""
    for name, value in values.items():
        section, _, key = name.partition("__")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    return config


def changes(old: RunConfig, new: RunConfig, step: int, *allowed: str) -> list[str]:
    """What a run of `new` lists when it goes on from `old`'s checkpoint of `step`."""
    return check_same_run(new, Manifest(step, {}, format_config(old), {}, {}), allowed=list(allowed))


def refusal(old: RunConfig, new: RunConfig, step: int) -> str:
    """The message when it may not go on."""
    with pytest.raises(ConfigError) as caught:
        changes(old, new, step)
    return str(caught.value)


def first_step_of(config: RunConfig, *, passes: int) -> int:
    schedule = build_pass_schedule(config.feedback, steps=config.train.steps, seed=config.train.seed)
    return next(step for step in range(1, config.train.steps + 1) if schedule.plan(step).num_passes == passes)


LATER = (SchedulePhase(60, {1: 1.0}), SchedulePhase(90, {2: 0.5, 3: 0.5}), SchedulePhase(1.0, {1: 1.0}))

# A key, its new value, and the last step up to which that changes nothing.
CHANGES: list[tuple[str, Any, int]] = [
    ("train__steps", 110, 80),  # the cooldown of 22 updates begins after step 88
    ("lr_schedule__warmup_steps", 11, 0),
    ("lr_schedule__cooldown_fraction", 0.3, 70),
    ("lr_schedule__cooldown_shape", "1-sqrt", 80),
    ("lr_schedule__min_lr_ratio", 0.0, 80),
    ("loss__z_loss", 1e-4, 80),
    ("loss__z_loss_when", "always", 0),
    ("feedback__schedule", LATER, 90),
    ("feedback__fusion", "concat", 60),
    ("feedback__jitter", 0.0, 60),
    ("feedback__prefix_mixin", "off", 60),
    ("feedback__loss_weight", 0.5, 60),
    ("feedback__loss_reduction", "sum", first_step_of(RUN, passes=3) - 1),
]


def test_every_key_of_the_schedules_is_tried_below() -> None:
    assert {name.replace("__", ".") for name, _, _ in CHANGES} == SHAPING_KEYS


@pytest.mark.parametrize(("name", "value", "last"), CHANGES, ids=[name for name, _, _ in CHANGES])
def test_a_key_may_change_as_long_as_no_step_notices(name: str, value: Any, last: int) -> None:
    new, key = changed(RUN, **{name: value}), name.replace("__", ".")
    for step in {min(1, last), last // 2, last} - {0}:
        (listed,) = changes(RUN, new, step)
        assert listed.startswith(f"{key} ")
        assert " -> " in listed
    for step in (last + 1, 100):
        message = refusal(RUN, new, step)
        assert message.count("the checkpoint was made with") == 1
        assert f"{key}=" in message
        assert f" step {last + 1} " in message
        assert f"allow it with --allow-config-change {key}" in message
        assert ("from a checkpoint of step" in message) == (last > 0)
        assert changes(RUN, new, step, key)


def test_the_words_of_a_refusal() -> None:
    message = refusal(RUN, changed(RUN, train__steps=200, lr_schedule__cooldown_fraction=0.1), 90)
    assert message.splitlines() == [
        "2 problems in the configuration, against the checkpoint of step 90",
        "  lr_schedule.cooldown_fraction=0.1: the checkpoint was made with 0.2, and step 81 had a learning-rate factor "
        "of 0.955 and would have had 1. Set it back, allow it with --allow-config-change "
        "lr_schedule.cooldown_fraction, or go on from a checkpoint of step 80 or before in another train.run_dir.",
        "  train.steps=200: the checkpoint was made with 100, and step 81 had a learning-rate factor of 0.955 and "
        "would have had 1. Set it back, allow it with --allow-config-change train.steps, or go on from a checkpoint "
        "of step 80 or before in another train.run_dir.",
    ]


def test_extension_from_the_stable_phase() -> None:
    """The numbers of a run that is made longer: at the peak until its own cooldown."""
    longer = changed(RUN, train__steps=200, lr_schedule__cooldown_fraction=0.1)
    listed = changes(RUN, longer, 80)
    assert listed == ["lr_schedule.cooldown_fraction 0.2 -> 0.1", "train.steps 100 -> 200"]
    schedule = WSDSchedule(longer.lr_schedule, 200)
    assert {k: schedule.factor(k) for k in (90, 181, 190)} == pytest.approx({90: 1.0, 181: 0.955, 190: 0.55})


@pytest.mark.parametrize("step", [81, 90, 100])
def test_extension_from_inside_the_cooldown_is_refused(step: int) -> None:
    longer = changed(RUN, train__steps=200, lr_schedule__cooldown_fraction=0.1)
    assert "step 81 had a learning-rate factor of 0.955 and would have had 1" in refusal(RUN, longer, step)
    # Only the length: the new cooldown begins at 161.
    assert "train.steps=200" in refusal(RUN, changed(RUN, train__steps=200), step)


def test_a_cooldown_that_begins_before_the_checkpoint_is_refused_with_the_largest_that_fits() -> None:
    shorter = changed(RUN, train__steps=60, feedback__schedule=(SchedulePhase(1.0, {1: 1.0}),))
    message = refusal(RUN, shorter, 53)
    assert "step 49 had a learning-rate factor of 1 and would have had 0.925" in message
    assert "The cooldown of 12 updates would have begun before the checkpoint, after which 7 are left" in message
    assert "lr_schedule.cooldown_fraction may be at most 0.116666." in message
    fitting = changed(shorter, lr_schedule__cooldown_fraction=0.116666)
    assert len(changes(RUN, fitting, 53)) == 3
    assert fitting.lr_schedule.cooldown_steps(60) == 7


def test_a_run_may_not_end_before_its_checkpoint() -> None:
    shorter = changed(RUN, train__steps=60)
    with pytest.raises(ConfigError, match=r"train\.steps=60: the run would have ended before the checkpoint.* 61"):
        changes(RUN, shorter, 61, "train.steps")


def test_phases_that_end_at_fractions_move_and_the_message_says_so() -> None:
    fractions = (SchedulePhase(0.6, {1: 1.0}), SchedulePhase(1.0, {2: 0.5, 3: 0.5}))
    old = changed(RUN, feedback__schedule=fractions)
    longer = changed(old, train__steps=200, lr_schedule__cooldown_fraction=0.1)
    assert changes(old, longer, 60)
    message = refusal(old, longer, 70)
    assert "train.steps=200" in message
    assert "step 61 ran" in message
    assert "would have run 1 pass" in message
    assert "write them as step numbers" in message
    assert "cooldown_fraction=" not in message  # it is not what step 61 would notice
    assert changes(old, changed(longer, feedback__schedule=RUN.feedback.schedule), 70)


@pytest.mark.parametrize("steps", [101, 250, 1000])
def test_an_extension_keeps_the_passes_that_were_run(steps: int) -> None:
    """Step for step, and so the shares of the phase that goes on at every cut."""
    old, new = (build_pass_schedule(RUN.feedback, steps=length, seed=RUN.train.seed) for length in (100, steps))
    done = [old.plan(step).num_passes for step in range(1, 101)]
    assert [new.plan(step).num_passes for step in range(1, 101)] == done
    for step in range(61, steps + 1):
        count = sum(new.plan(other).num_passes == 3 for other in range(61, step + 1))
        assert abs(count - 0.5 * (step - 60)) <= 1


PLAIN = changed(RUN, feedback__fusion="none", feedback__schedule=(SchedulePhase(1.0, {1: 1.0}),))


def test_feedback_may_start_after_a_past_without() -> None:
    late = changed(RUN, feedback__jitter=0.1, feedback__loss_weight=0.5)
    assert len(changes(PLAIN, late, 60)) == 4
    message = refusal(PLAIN, late, 61)
    assert "feedback.schedule=" in message
    assert "step 61 ran 1 pass and would have run" in message
    assert "step 61 would have had passes with feedback, which depend on it" in message
    for key in ("fusion", "jitter", "loss_weight"):
        assert f"feedback.{key}=" in message


@pytest.mark.parametrize(
    ("fusion", "embedding_norm", "fresh"),
    [
        ("glu", True, {"fusion.w_u.weight", "fusion.w_g.weight"}),
        ("glu", False, {"fusion.w_u.weight", "fusion.w_g.weight", "embedding_norm.weight"}),
        ("concat", True, {"fusion.w.weight"}),
        ("none", True, set()),
    ],
)
def test_tensors_that_start_with_feedback(fusion: str, embedding_norm: bool, fresh: set[str]) -> None:
    old = changed(PLAIN, model__embedding_norm=embedding_norm)
    new = changed(RUN, feedback__fusion=fusion, model__embedding_norm=embedding_norm)
    assert new_feedback_tensors(new, Manifest(60, {}, format_config(old), {}, {})) == fresh
    assert new_feedback_tensors(new, Manifest(60, {}, format_config(new), {}, {})) == set()


def test_only_the_matrices_that_another_fusion_does_not_share_are_new() -> None:
    manifest = Manifest(60, {}, format_config(RUN), {}, {})
    assert new_feedback_tensors(changed(RUN, feedback__fusion="add"), manifest) == {"fusion.w_e.weight"}


def test_a_changed_model_never_counts_as_new_feedback() -> None:
    deeper = changed(RUN, model__num_layers=5, model__tie_embeddings=False)
    assert new_feedback_tensors(deeper, Manifest(60, {}, format_config(RUN), {}, {})) == set()


def test_configurations_of_the_repository_can_be_extended() -> None:
    """Their feedback starts at a fraction: up to that step a longer run needs nothing but its length."""
    config = load_config(Path(__file__).parent.parent.parent / "configs" / "fbt_1b.yaml")
    longer = changed(config, train__steps=2 * config.train.steps)
    (listed,) = changes(config, longer, first_step_of(config, passes=2) - 1)
    assert listed.startswith("train.steps ")
