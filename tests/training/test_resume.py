"""Where a run starts from, and which changes of its configuration it refuses."""

from __future__ import annotations

import fcntl
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import Manifest
from fbt_megatron.config.loader import format_config, load_config
from fbt_megatron.config.schema import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    FeedbackConfig,
    LoggingConfig,
    ParallelConfig,
    ResilienceConfig,
    RunConfig,
    SchedulePhase,
    TrainConfig,
)
from fbt_megatron.config.typed_values import attribute_name, field_values, is_section, known_keys
from fbt_megatron.errors import CheckpointError, ConfigError, RunDirError
from fbt_megatron.training.past import SHAPING_KEYS
from fbt_megatron.training.resume import _is_free, check_same_run, find_start
from fbt_megatron.training.run_dir import hold_run_dir, write_config

CONFIG = RunConfig(
    feedback=FeedbackConfig(schedule=(SchedulePhase(0.5, {1: 1.0}), SchedulePhase(1.0, {2: 0.5, 10: 0.5}))),
    data=DataConfig(train="data", validation="validation"),
)


def manifest_of(config: RunConfig) -> Manifest:
    """The manifest of a checkpoint of step 3, after its way through the disk."""
    return Manifest(3, {}, format_config(config), {}, {})


def test_the_same_configuration_may_go_on() -> None:
    check_same_run(CONFIG, manifest_of(CONFIG), allowed=[])


def test_every_key_of_the_layout_is_free_but_the_precision() -> None:
    """A key that is added to the section must not tie a checkpoint to its layout by accident."""
    free = {key.partition(".")[2] for key in known_keys(RunConfig) if key.startswith("parallel.") and _is_free(key)}
    assert free == {field.name for field in fields(ParallelConfig)} - {"precision"}


def test_free_keys_may_change() -> None:
    changed = replace(
        CONFIG,
        model=replace(CONFIG.model, kernels="torch"),
        parallel=ParallelConfig(tensor=2, pipeline=2, sequence=True, zero_stage=0, recompute="full"),
        data=replace(CONFIG.data, workers=3, validation="elsewhere"),
        train=replace(CONFIG.train, micro_batch_size=1, run_dir="other", stop_step=7),
        checkpoint=CheckpointConfig(every=5, keep=1, keep_every=10, load="other"),
        evaluation=EvaluationConfig(every=5, batches=1, extra_passes=3),
        logging=LoggingConfig(console_every=1, tensorboard=False),
        resilience=ResilienceConfig(max_consecutive_skips=1),
    )
    check_same_run(changed, manifest_of(CONFIG), allowed=[])


CHANGED = replace(
    CONFIG,
    model=replace(CONFIG.model, num_layers=5),
    optimizer=replace(CONFIG.optimizer, adam=replace(CONFIG.optimizer.adam, betas=(0.8, 0.95))),
    feedback=replace(CONFIG.feedback, schedule=CONFIG.feedback.schedule[1:]),
    parallel=replace(CONFIG.parallel, precision="fp32", tensor=2),
    train=replace(CONFIG.train, seed=9),
)
REFUSED = ["model.num_layers", "feedback.schedule", "optimizer.adam.betas", "parallel.precision", "train.seed"]


STRICT_NAMES = {
    "model": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups head_dim vocab_size "
    "seq_length rope_theta norm_eps init_std qk_norm attention_gate sliding_window full_attention_every post_norm "
    "residual_scale embedding_norm tie_embeddings",
    "optimizer": "grad_clip",
    "optimizer.normuon": "lr weight_decay momentum beta2 nesterov scale ns_steps coefficients row_norm",
    "optimizer.adam": "lr betas eps weight_decay",
    "parallel": "precision",
    "data": "kind tokenizer chat_template streams reset_attention_mask",
    "train": "global_batch_size seed",
    "resilience": "spikes spike_factor",
}
STRICT = {f"{section}.{name}" for section, names in STRICT_NAMES.items() for name in names.split()}
"""Keys that act on the run in every step: a change needs a name. A key that is added to the schema is free only if it
cannot change a weight or a sample, or shaping (`training/past.py`) if it acts through a schedule."""


def leaf_keys(section: object, prefix: str = "") -> dict[str, Any]:
    """Full key -> value of all keys that are no section."""
    leaves: dict[str, Any] = {}
    for key, value in field_values(section).items():
        inner = leaf_keys(value, f"{prefix}{key}.") if is_section(type(value)) else {prefix + key: value}
        leaves |= inner
    return leaves


def with_key(section: Any, key: str, value: Any) -> Any:
    """The configuration with one key replaced, whether the value makes sense or not."""
    name, _, rest = key.partition(".")
    name = attribute_name(name)
    return replace(section, **{name: with_key(getattr(section, name), rest, value) if rest else value})


def another(value: Any) -> Any:
    """A value that differs."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else "another"


def test_every_key_is_free_or_shapes_the_run_or_is_refused() -> None:
    keys = leaf_keys(CONFIG)
    assert set(keys) < set(known_keys(RunConfig))
    free = {key for key in keys if _is_free(key)}
    assert free | SHAPING_KEYS | STRICT == set(keys)
    assert len(free) + len(SHAPING_KEYS) + len(STRICT) == len(keys), "each in one of the three"


@pytest.mark.parametrize("key", [key for key in leaf_keys(CONFIG) if key not in SHAPING_KEYS])
def test_a_change_of_a_key_is_free_or_refused(key: str) -> None:
    changed = with_key(CONFIG, key, another(leaf_keys(CONFIG)[key]))
    if key not in STRICT:
        assert check_same_run(changed, manifest_of(CONFIG), allowed=[]) == []
        return
    with pytest.raises(ConfigError, match=f"1 problem in (.|\n)*  {key}=.* changes the run"):
        check_same_run(changed, manifest_of(CONFIG), allowed=[])
    (listed,) = check_same_run(changed, manifest_of(CONFIG), allowed=[key])
    assert listed.startswith(f"{key} ")


def test_refused_keys_are_listed_together() -> None:
    with pytest.raises(ConfigError, match="against the checkpoint of step 3") as caught:
        check_same_run(CHANGED, manifest_of(CONFIG), allowed=[])
    problems = caught.value.problems
    assert [problem.split("=")[0] for problem in problems] == REFUSED
    assert "step 1 ran 1 pass and would have run 2 passes" in problems[1]
    changes = {0: ("5", "4"), 2: ("[0.8, 0.95]", "[0.9, 0.95]"), 3: ('"fp32"', '"bf16"')}
    for index, (new, old) in changes.items():
        assert f"={new}: the checkpoint was made with {old}, and this changes the run" in problems[index]
    assert all(f"--allow-config-change {key}" in problem for key, problem in zip(REFUSED, problems, strict=True))


def test_allowed_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        check_same_run(CHANGED, manifest_of(CONFIG), allowed=["train.seed", "model.num_layers"])
    assert [problem.split("=")[0] for problem in caught.value.problems] == REFUSED[1:4]
    check_same_run(CHANGED, manifest_of(CONFIG), allowed=REFUSED)


def test_keys_that_one_version_does_not_have() -> None:
    """A key that the checkpoint does not have yet has its default; one that this version does not know is an error."""
    text = format_config(CONFIG)
    older = replace(manifest_of(CONFIG), config=text.replace("  init_std: 0.02\n", ""))
    assert older.config != text
    check_same_run(CONFIG, older, allowed=[])
    newer = replace(older, config=text.replace("loss:\n", "loss:\n  label_smoothing: 0.1\n"))
    with pytest.raises(ConfigError, match=r"checkpoint of step 3(.|\n)*loss.label_smoothing: unknown key"):
        check_same_run(CONFIG, newer, allowed=[])


def test_allowing_a_key_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"--allow-config-change\n  train.sede: unknown key"):
        check_same_run(CONFIG, manifest_of(CONFIG), allowed=["train.sede"])


class Starts:
    """A run directory, and others with checkpoints to load."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[str] = []

    def save(self, name: str, *steps: int) -> Path:
        for step in steps:
            self._manager(name).save(Manifest(step, {"from": name}, {}, {}, {}), {})
        return self.root / name

    def find(self, load: Path | str | None) -> tuple[str, int] | None:
        """Name of the run and step that a run `own` starts from."""
        config = replace(CONFIG, checkpoint=CheckpointConfig(load=None if load is None else str(load)))
        start = find_start(config, self._manager("own"))
        return None if start is None else (start[1].state["from"], start[1].step)

    def _manager(self, name: str) -> CheckpointManager:
        manager = CheckpointManager(self.root / name / "checkpoints", config=CheckpointConfig(), log=self.log.append)
        manager.prepare()
        return manager


@pytest.fixture
def starts(topology, tmp_path: Path) -> Starts:
    return Starts(tmp_path)


def test_a_new_run(starts: Starts) -> None:
    assert starts.find(None) is None


def test_the_three_ways_to_name_a_checkpoint(starts: Starts) -> None:
    other = starts.save("other", 10, 20)
    assert starts.find(other) == ("other", 20)
    assert starts.find(other / "checkpoints") == ("other", 20)
    assert starts.find(other / "checkpoints" / "step_00000010") == ("other", 10)


def test_own_checkpoints_win(starts: Starts) -> None:
    other = starts.save("other", 10, 20)
    starts.save("own", 5)
    assert starts.find(None) == ("own", 5)
    assert not [line for line in starts.log if "checkpoint.load" in line]
    assert starts.find(other) == ("own", 5)
    assert starts.find("nowhere") == ("own", 5)
    assert [line.split(":")[0] for line in starts.log if "checkpoint.load" in line] == [
        f"checkpoint.load={other} counts no more",
        "checkpoint.load=nowhere counts no more",
    ]


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_nothing_to_load(starts: Starts, name: str) -> None:
    (starts.root / "empty").mkdir()
    with pytest.raises(CheckpointError, match=f"{name}: there is no checkpoint"):
        starts.find(starts.root / name)


def test_a_damaged_step_that_was_named_is_not_replaced_by_another(starts: Starts) -> None:
    step = starts.save("other", 10, 20) / "checkpoints" / "step_00000020"
    (step / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000020 cannot be loaded: \.metadata"):
        starts.find(step)
    assert starts.find(starts.root / "other") == ("other", 10)


def test_own_checkpoints_that_are_all_damaged_are_an_error(starts: Starts) -> None:
    """The run must not quietly start again from another one's."""
    (starts.save("own", 5) / "checkpoints" / "step_00000005" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000005: \.metadata"):
        starts.find(starts.save("other", 10))


def test_a_run_directory_is_held_by_one_run(topology, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    with hold_run_dir(folder), pytest.raises(RunDirError, match="another run is writing there"), hold_run_dir(folder):
        pass
    with hold_run_dir(folder), (folder / ".lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with hold_run_dir(folder):
        pass


def test_a_run_directory_that_cannot_be_made(topology, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"train\.run_dir: .*cannot be written: Not a directory") as caught:
        hold_run_dir(tmp_path / "file" / "run").__enter__()
    assert caught.value.exit_status == 2


def test_the_written_configuration_is_the_run_s(tmp_path: Path) -> None:
    config = replace(CONFIG, train=TrainConfig(run_dir=str(tmp_path)))
    write_config(config)
    assert load_config(tmp_path / "config.yaml") == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    with pytest.raises(RunDirError, match="No such file"):
        write_config(replace(config, train=TrainConfig(run_dir=str(tmp_path / "none"))))
