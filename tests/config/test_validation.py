"""Rules between sections, each broken alone, and the fit of a configuration to a number of processes."""

from __future__ import annotations

import dataclasses

import pytest

from fbt_megatron.config.schema import DataConfig, RunConfig, SchedulePhase
from fbt_megatron.config.validation import (
    config_problems,
    microbatches_fill_pipeline,
    pipeline_divides_layers,
    sequence_parallel_needs_tensor_parallel,
    tensor_divides_model,
    validate_world_size,
)
from fbt_megatron.errors import TopologyError


def config_with(**changes: object) -> RunConfig:
    """A valid configuration with keys changed, given as section__key=value."""
    config = RunConfig(data=DataConfig(train="folder"))
    for name, value in changes.items():
        section, key = name.split("__")
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{key: value})})
    return config


def problems_of(config: RunConfig) -> list[str]:
    problems = config_problems(config)
    assert problems
    return problems


def test_the_base_of_these_tests_is_valid():
    assert config_problems(config_with()) == []
    validate_world_size(config_with(), 1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train__global_batch_size": 510, "train__micro_batch_size": 4, "data__streams": 8}, "Nearest: 504, 512."),
        ({"train__global_batch_size": 20}, "data.streams=8: must divide train.global_batch_size (20)"),
        ({"data__streams": 5}, "Allowed here: 2, 4, 8, 16."),
        ({"data__workers": 3}, "data.workers=3: must divide the groups of micro_batch_size streams on each rank"),
        ({"lr_schedule__warmup_steps": 751}, "Use at most 750 warm-up steps"),
        ({"train__stop_step": 1001}, "train.stop_step=1001: lies after the end of the run"),
        ({"feedback__fusion": "none", "evaluation__extra_passes": 1}, "evaluation.extra_passes=1: feedback"),
        ({"feedback__schedule": (SchedulePhase(0.5),)}, "schedule[0].until=0.5: the last phase must end"),
        ({"feedback__schedule": (SchedulePhase(1),)}, "schedule[0].until=1: the last phase must end"),
        (
            {"feedback__schedule": (SchedulePhase(700), SchedulePhase(0.7), SchedulePhase(1.0))},
            "feedback.schedule[1].until=0.7: the phase ends at step 700, but the one before it at step 700",
        ),
        ({"parallel__tensor": 2, "model__num_query_groups": 1}, "model.num_query_groups=1: must be a multiple of"),
        ({"parallel__tensor": 8, "model__num_attention_heads": 8}, "model.num_query_groups=4: must be a multiple of"),
        ({"parallel__pipeline": 3}, "model.num_layers=4: must be a multiple of parallel.pipeline (3)"),
        ({"parallel__pipeline": 4, "train__global_batch_size": 4, "data__streams": 4}, "needs at least 4 to keep"),
        ({"parallel__sequence": True}, "parallel.sequence=true: divides activations over tensor-parallel ranks, but"),
        ({"optimizer__grad_clip": -1.0}, "optimizer.grad_clip=-1.0: must not be negative."),
        ({"parallel__zero_stage": 0}, "parallel.zero_stage=0 with precision=bf16: refused"),
        ({"parallel__zero_stage": 2}, "parallel.zero_stage=2: must be 0 or 1. Stages 2 and 3 cut gradients up while"),
        ({"model__num_layers": 0}, "model.num_layers=0: must be greater than 0."),
        ({"resilience__max_rewinds": -1}, "resilience.max_rewinds=-1: must not be negative."),
        ({"resilience__spike_factor": 0.0}, "resilience.spike_factor=0.0: must be greater than 0."),
        ({"resilience__max_rewinds": 1, "checkpoint__keep": 1}, "Keep 2, save less often, or allow fewer skips."),
        (
            {"resilience__max_rewinds": 1, "checkpoint__every": 3},  # keep 3: saves at steps 3, 6 and 9 of 10
            "checkpoint.keep=3: with every=3 there may be 3 checkpoints from within the resilience.max_consecutive_s",
        ),
    ],
)
def test_each_broken_rule_is_one_problem(changes, expected):
    (problem,) = problems_of(config_with(**changes))
    assert expected in problem


@pytest.mark.parametrize(
    "changes",
    [
        {"lr_schedule__warmup_steps": 750},
        {"train__stop_step": 1000},
        {"data__workers": 4},
        {"feedback__schedule": (SchedulePhase(0.7), SchedulePhase(701), SchedulePhase(1000))},
        {"parallel__zero_stage": 0, "parallel__precision": "fp32"},
        {"data__streams": 16},
        {"parallel__tensor": 2},
        {"parallel__tensor": 4, "parallel__sequence": True},
        {"parallel__pipeline": 4},
        {"parallel__tensor": 2, "parallel__pipeline": 2, "parallel__recompute": "full"},
        {"parallel__pipeline": 2, "parallel__pipeline_layers": (1, 3)},
        {"parallel__recompute": "selective"},
        {"resilience__max_rewinds": 1, "checkpoint__every": 5},
        {"resilience__max_rewinds": 1, "resilience__max_consecutive_skips": 1, "checkpoint__keep": 1},
        {"parallel__recompute": "full"},
    ],
)
def test_the_edge_of_each_rule_is_allowed(changes):
    assert config_problems(config_with(**changes)) == []


@pytest.mark.parametrize(
    ("rule", "changes", "expected"),
    [
        (pipeline_divides_layers, {"parallel__pipeline": 3}, ["model.num_layers=4: must"]),
        (pipeline_divides_layers, {"parallel__pipeline": 4}, []),
        (pipeline_divides_layers, {"parallel__pipeline": 3, "parallel__pipeline_layers": (1, 2, 1)}, []),
        (pipeline_divides_layers, {"parallel__pipeline_layers": (4,)}, []),
        (
            pipeline_divides_layers,
            {"parallel__pipeline": 3, "parallel__pipeline_layers": (1, 3)},
            ["parallel.pipeline_layers=[1, 3]: has 2 entries, but parallel.pipeline is 3."],
        ),
        (
            pipeline_divides_layers,
            {"parallel__pipeline": 2, "parallel__pipeline_layers": (1, 2)},
            ["parallel.pipeline_layers=[1, 2]: adds up to 3, but model.num_layers is 4."],
        ),
        (
            pipeline_divides_layers,
            {"parallel__pipeline": 2, "parallel__pipeline_layers": (4, 0)},
            ["parallel.pipeline_layers=[4, 0]: every stage needs at least one layer"],
        ),
        (
            pipeline_divides_layers,
            {"parallel__pipeline_layers": ()},
            ["parallel.pipeline_layers=[]: has 0 entries", "parallel.pipeline_layers=[]: every stage needs"],
        ),
        (tensor_divides_model, {"parallel__tensor": 8}, ["model.num_attention_heads=4", "model.num_query_groups=4"]),
        (
            tensor_divides_model,
            {"parallel__tensor": 3},
            ["model.hidden_size=128", "model.num_attention_heads=4", "model.num_query_groups=4"],
        ),
        (tensor_divides_model, {"parallel__tensor": 4}, []),
        (
            sequence_parallel_needs_tensor_parallel,
            {"parallel__sequence": True, "parallel__tensor": 3},
            ["model.seq_length=512"],
        ),
        (sequence_parallel_needs_tensor_parallel, {"parallel__sequence": True, "parallel__tensor": 2}, []),
        (microbatches_fill_pipeline, {"parallel__pipeline": 16}, ["train.global_batch_size=16: leaves"]),
        (microbatches_fill_pipeline, {"parallel__pipeline": 8}, []),
    ],
)
def test_rules_of_layouts(rule, changes, expected):
    problems = list(rule(config_with(**changes)))
    assert len(problems) == len(expected)
    for problem, start in zip(problems, expected, strict=True):
        assert problem.startswith(start)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_world_sizes_that_fit(world_size):
    validate_world_size(config_with(), world_size)


def test_world_size_that_the_batch_does_not_divide_over():
    with pytest.raises(TopologyError) as caught:
        validate_world_size(config_with(), 3)
    message = str(caught.value)
    assert "3 processes (tensor 1 x pipeline 1 x data 3)" in message
    assert (
        "train.global_batch_size=16: must be a multiple of train.micro_batch_size (2) x data-parallel size (3) = 6"
        in message
    )
    assert "Data-parallel sizes that fit it as it is: 1, 2, 4." in message


def test_world_size_beyond_the_streams():
    with pytest.raises(TopologyError, match=r"data\.streams=8: must divide .* and be a multiple of .* = 16"):
        validate_world_size(config_with(), 8)


def test_workers_that_fit_one_process_but_not_two():
    config = config_with(data__workers=4)
    validate_world_size(config, 1)
    with pytest.raises(TopologyError, match=r"data\.workers=4: .* Allowed here: 0, 1, 2\."):
        validate_world_size(config, 2)


def test_world_size_that_is_no_multiple_of_the_layout():
    config = config_with(parallel__tensor=2, parallel__pipeline=2)
    with pytest.raises(TopologyError, match=r"tensor \(2\) x parallel\.pipeline \(2\) = 4.*Nearest: 4, 8 processes"):
        validate_world_size(config, 6)
    validate_world_size(config, 8)


def test_pipeline_that_one_replica_fills_but_two_do_not():
    config = config_with(parallel__pipeline=8)
    validate_world_size(config, 8)
    with pytest.raises(
        TopologyError, match=r"leaves each rank 4 micro-batches .* parallel\.pipeline=8 needs at least 8"
    ):
        validate_world_size(config, 16)
