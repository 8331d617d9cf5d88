"""Reading configuration files: types, unknown keys, overrides, everything wrong at once, and writing them back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fbt_megatron.config.loader import config_diff, format_config, load_config, save_config
from fbt_megatron.config.schema import DataConfig, FeedbackConfig, RunConfig, SchedulePhase
from fbt_megatron.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
MINIMAL = "data: {train: some/folder}\n"


@pytest.fixture
def config_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return caught.value.problems


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_files_load_and_survive_being_written(path, tmp_path):
    config = load_config(path)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_absent_keys_have_their_defaults(config_file):
    assert load_config(config_file(MINIMAL)) == RunConfig(data=DataConfig(train="some/folder"))
    assert load_config(config_file(MINIMAL + "model:\noptimizer: {adam: }\n")).model == RunConfig().model


def test_values_have_the_types_of_the_schema(config_file):
    config = load_config(
        config_file(
            "model: {norm_eps: 1e-5, rope_theta: 10000, sliding_window: null}\n"
            "feedback: {prefix_mixin: off, schedule: [{until: 700, mix: {1: 1}}, {until: 1.0, mix: {1: .5, 2: 0.5}}]}\n"
            "optimizer: {adam: {betas: [0.8, 0.9]}}\n"
            "data: {train: [a, b]}\n"
        )
    )
    assert config.model.norm_eps == 1e-5
    assert type(config.model.rope_theta) is float
    assert config.model.sliding_window is None
    assert config.feedback.prefix_mixin == "off"
    assert [type(phase.until) for phase in config.feedback.schedule] == [int, float]
    assert config.feedback.schedule[1].mix == {1: 0.5, 2: 0.5}
    assert config.optimizer.adam.betas == (0.8, 0.9)
    assert config.data.train == ("a", "b")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.num_layers", "true"),
        ("model.num_layers", "4.0"),
        ("model.num_layers", '"4"'),
        ("model.num_layers", "010"),
        ("model.num_layers", "null"),
        ("model.qk_norm", "1"),
        ("model.qk_norm", "yes"),
        ("model.norm_eps", "small"),
        ("model.norm_eps", "true"),
        ("model.norm_eps", ".nan"),
        ("model.norm_eps", ".inf"),
        ("model.residual_scale", "deep"),
        ("parallel.zero_stage", "1.0"),
        ("parallel.zero_stage", "true"),
        ("optimizer.adam.betas", "[0.9]"),
        ("optimizer.adam.betas", "[0.9, x]"),
        ("feedback.schedule", "{until: 1.0}"),
        ("data.train", "[a, 3]"),
        ("train.run_dir", "3"),
    ],
)
def test_wrong_type_names_key_and_value(config_file, key, value):
    path = config_file(MINIMAL)
    (problem,) = problems_of(path, f"{key}={value}")
    assert problem.startswith(f"{key}")
    assert "must be" in problem


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        (
            "optimizer: {normuon: {momentun: 0.9}}",
            "optimizer.normuon.momentun: unknown key. Did you mean optimizer.normuon.momentum?",
        ),
        ("modle: {num_layers: 2}", "modle: unknown key. Did you mean model?"),
        ("train: {streams: 8}", "train.streams: unknown key. Did you mean data.streams?"),
        (
            "feedback: {schedule: [{utnil: 1.0}]}",
            "feedback.schedule[0].utnil: unknown key. Did you mean feedback.schedule[0].until?",
        ),
        ("logging: {zzz: 1}", "logging.zzz: unknown key. Known here: console_every, tensorboard, samples."),
        ("loss: {7: 1}", "loss.7: unknown key. Known here: z_loss, z_loss_when."),
    ],
)
def test_unknown_key_names_the_nearest(config_file, text, suggestion):
    assert problems_of(config_file(f"{text}\n{MINIMAL}")) == [suggestion]


@pytest.mark.parametrize("overrides", [["parallel.context=2"], []], ids=["override", "file"])
def test_context_parallelism_is_refused_with_the_reason(config_file, overrides):
    text = MINIMAL if overrides else f"parallel: {{context: 2}}\n{MINIMAL}"
    (problem,) = problems_of(config_file(text), *overrides)
    assert problem.startswith("parallel.context: context parallelism is not available, because feedback would cross")


def test_all_problems_are_reported_together(config_file):
    path = config_file(
        "model: {num_layers: 4.5, head_dim: 3, num_query_groups: 3}\n"
        "optimizer: {normuon: {momentun: 0.9, beta2: 1.5}}\n"
        "data: {train: x, streams: 8}\n"
        "train: {global_batch_size: 510, micro_batch_size: 4, steps: 5, steps: 500}\n"
        "lr_schedule: {warmup_steps: 400}\n"
    )
    problems = problems_of(path, "loss.z_los=1")
    expected = [
        "steps was already set on line 4",
        "loss.z_los: unknown key. Did you mean loss.z_loss?",
        "model.num_layers=4.5: must be a whole number",
        "optimizer.normuon.momentun: unknown key",
        "model.num_query_groups=3: must divide num_attention_heads (4)",
        "model.head_dim=3: must be even",
        "optimizer.normuon.beta2=1.5: must be at least 0 and below 1",
        "train.global_batch_size=510: must be a multiple of train.micro_batch_size (4)",
        "lr_schedule.warmup_steps=400: with a cooldown of 125 updates",
    ]
    assert len(problems) == len(expected)
    for problem, start in zip(problems, expected, strict=True):
        assert start in problem


def test_a_value_that_was_not_read_is_not_judged_by_its_default(config_file):
    assert problems_of(config_file("data: {train: [1]}\nmodel: {num_query_groups: 16, num_attention_heads: many}")) == [
        'model.num_attention_heads="many": must be a whole number.',
        "data.train=[1]: must be text or a list with each entry text.",
    ]


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"model: [1\ntrain: 2", "line 2, column 6"),
        (b"model:\n\tnum_layers: 3", "line 2, column 1"),
        (b"\xff\xfe", "not UTF-8"),
        (b"model: \x00", "not valid YAML"),
        (b"- model\n", "must hold sections"),
        (b"model: 3\ndata: {train: x}", "model=3: must be a mapping"),
        (b"data: {train: x}\ndata: {train: y}", "line 2: data was already set on line 1"),
    ],
)
def test_broken_files(tmp_path, content, fragment):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert fragment in "\n".join(problems_of(path))


def test_missing_file_and_folder(tmp_path):
    assert "No such file" in problems_of(tmp_path / "none.yaml")[0]
    assert "Is a directory" in problems_of(tmp_path)[0]


def test_overrides_reach_deep_keys_and_the_last_one_wins(config_file):
    path = config_file(MINIMAL + "optimizer: {normuon: {lr: 0.5, momentum: 0.5}}\n")
    config = load_config(
        path, ["optimizer.normuon.lr=0.1", "optimizer.normuon.lr=2e-2", "data.validation=[a, b]", "train.stop_step="]
    )
    assert (config.optimizer.normuon.lr, config.optimizer.normuon.momentum) == (0.02, 0.5)
    assert config.data.validation == ("a", "b")
    assert config.train.stop_step is None


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("train.steps", "must be section.key=value"),
        ("=3", "must be section.key=value"),
        ("train={steps: 3}", "train is a section"),
        ("optimizer.normuon=3", "optimizer.normuon is a section"),
        ("train.steps=[1", "not valid YAML"),
        ("train.stepss=1", "Did you mean train.steps?"),
        ("num_layers=1", "Did you mean model.num_layers?"),
        ("x.y=1", "Known here: model, feedback"),
    ],
)
def test_bad_overrides(config_file, override, fragment):
    (problem,) = problems_of(config_file(MINIMAL), override)
    assert fragment in problem


def test_override_does_not_write_through_a_yaml_alias(config_file):
    text = "optimizer: {adam: &same {lr: 0.1}, normuon: *same}\n" + MINIMAL
    config = load_config(config_file(text), ["optimizer.adam.lr=0.2"])
    assert (config.optimizer.adam.lr, config.optimizer.normuon.lr) == (0.2, 0.1)


def test_diff_lists_changed_keys_only():
    old = RunConfig()
    feedback = dataclasses.replace(old.feedback, schedule=(SchedulePhase(1, {1: 1.0}), SchedulePhase(1.0, {2: 1.0})))
    normuon = dataclasses.replace(old.optimizer.normuon, lr=0.5)
    optimizer = dataclasses.replace(old.optimizer, normuon=normuon)
    new = dataclasses.replace(old, feedback=feedback, optimizer=optimizer)
    assert config_diff(old, old) == []
    assert config_diff(old, new) == [
        (
            "feedback.schedule",
            [{"until": 1.0, "mix": {1: 1.0}}],
            [{"until": 1, "mix": {1: 1.0}}, {"until": 1.0, "mix": {2: 1.0}}],
        ),
        ("optimizer.normuon.lr", 0.01, 0.5),
    ]


def test_step_number_and_fraction_of_the_same_size_differ():
    """1 (the first step) equals 1.0 (the whole run) in Python, but not here."""
    fraction = RunConfig()
    step = dataclasses.replace(fraction, feedback=FeedbackConfig(schedule=(SchedulePhase(1),)))
    assert [key for key, _, _ in config_diff(fraction, step)] == ["feedback.schedule"]
    assert config_diff(step, step) == []


@settings(max_examples=60, deadline=None)
@given(
    text=st.one_of(
        st.text(min_size=1, max_size=20),
        st.sampled_from(
            [
                "off",
                "1e-5",
                "null",
                "010",
                "2024-01-01",
                "~",
                "true",
                "1_000",
                "a: b",
                "#x",
                "\u00e9",
                "\u2028 \n",
                "\x85",
                "\ufeff",
                "\r",
            ]
        ),
    ),
    number=st.floats(min_value=1e-300, max_value=1e300),
)
def test_written_configurations_read_back_exactly(tmp_path_factory, text, number):
    config = RunConfig(
        model=dataclasses.replace(RunConfig().model, norm_eps=number), data=DataConfig(train=text, validation=(text,))
    )
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    save_config(config, path)
    assert load_config(path) == config
    assert path.read_text(encoding="utf-8") == format_config(load_config(path))
