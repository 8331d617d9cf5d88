"""Runs that go on with another plan: extended, cooled down on a branch, with feedback from some step on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import Manifest
from fbt_megatron.config.schema import (
    AdamConfig,
    FeedbackConfig,
    LRScheduleConfig,
    NorMuonConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SchedulePhase,
)
from fbt_megatron.errors import CheckpointError, ConfigError
from fbt_megatron.model.initialization import draw_tensor
from fbt_megatron.parallel.topology import ParallelTopology, build_topology
from fbt_megatron.planner import logical_tensors
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.stop_signal import StopSignal
from fbt_megatron.training.train_state import shards_of
from fbt_megatron.training.trainer import Trainer
from tests.distributed import run_distributed
from tests.parity.cases import Part, assemble, held_parts
from tests.pretrain.runs import TIMES
from tests.training.tiny_run import read_records, state_of, tiny_run
from tests.training.toy import COMBINATIONS

WSD = LRScheduleConfig(warmup_steps=10, cooldown_fraction=0.2, min_lr_ratio=0.1)
STRONG_DECAY = OptimizerConfig(
    normuon=NorMuonConfig(lr=0.01, weight_decay=2.0), adam=AdamConfig(lr=5e-3, weight_decay=2.0)
)
"""A decay that is not this step's shows in every matrix."""


def wsd_run(folder: Path, data: Path, *, steps: int = 100, **changes: Any) -> RunConfig:
    """Warm-up over 10 steps, the last fifth cools down, peak rate 0.01."""
    config = replace(tiny_run(folder, data, steps=steps), lr_schedule=WSD, optimizer=STRONG_DECAY)
    return replace(config, **changes)


def started_from(config: RunConfig, source: Path) -> RunConfig:
    return replace(config, checkpoint=replace(config.checkpoint, load=str(source)))


def stopping_at(config: RunConfig, step: int) -> RunConfig:
    return replace(config, train=replace(config.train, stop_step=step))


def train(
    config: RunConfig, topology: ParallelTopology, *allowed: str
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Train to the end or the planned stop: the lines of `metrics.jsonl` without times, and all state."""
    with open_trainer(config, topology, allowed_changes=list(allowed)) as trainer:
        trainer.train(StopSignal())
        state = state_of(trainer)
    records = read_records(Path(config.train.run_dir))
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records], state


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def save_at(config: RunConfig, topology: ParallelTopology, step: int) -> Path:
    """A checkpoint that says to be of `step`, without that many steps of training."""
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        trainer.counters.step = step
        trainer.save()
    return Path(config.train.run_dir)


def one_step(config: RunConfig, topology: ParallelTopology) -> dict[str, Any]:
    """The record of the step after the checkpoint, and the decay that the optimizer was given."""
    with open_trainer(config, topology, allowed_changes=[]) as trainer:
        record = trainer.train_step().as_dict()
        record["decays"] = [group["weight_decay"] for group in trainer.engine.optimizer.param_groups]
    return record


# Position of the learning rate


@pytest.mark.parametrize(
    ("step", "factor"), [(4, 0.5), (5, 0.6), (9, 1.0), (50, 1.0), (80, 0.955), (89, 0.55), (99, 0.1)]
)
def test_the_first_step_after_a_resume_has_its_own_rate_and_decay(
    topology: ParallelTopology, data: Path, tmp_path: Path, step: int, factor: float
) -> None:
    """Counted twice, step 51 would be at 0.1 and step 6 at 1; a constructor's decay would be 2."""
    config = wsd_run(tmp_path, data)
    save_at(config, topology, step)
    record = one_step(config, topology)
    assert record["step"] == step + 1
    assert record["lr_normuon"] == pytest.approx(0.01 * factor, rel=1e-12)
    assert record["lr_adam"] == pytest.approx(5e-3 * factor, rel=1e-12)
    assert record["weight_decay"] == pytest.approx(2.0 * factor, rel=1e-12)
    assert record["decays"] == pytest.approx([2.0 * factor] * 2, rel=1e-12)


def test_the_decay_of_the_first_step_after_a_resume_is_that_of_a_run_that_never_stopped(
    topology: ParallelTopology, data: Path, tmp_path: Path
) -> None:
    straight = train(stopping_at(wsd_run(tmp_path / "straight", data), 6), topology)
    config = wsd_run(tmp_path / "stopped", data)
    train(stopping_at(config, 5), topology)
    records, state = train(stopping_at(config, 6), topology)
    assert records == straight[0]
    assert differing(state, straight[1]) == []


@pytest.mark.parametrize(("step", "factor"), [(80, 1.0), (89, 1.0), (180, 0.955), (189, 0.55)])
def test_an_extended_run_cools_down_at_its_own_end(
    topology: ParallelTopology, data: Path, tmp_path: Path, step: int, factor: float
) -> None:
    """Extended to 200 at step 80, stopped again later: 90 is at the peak, 181 at .955, 190 at .55."""
    save_at(wsd_run(tmp_path, data), topology, 80)
    longer = wsd_run(tmp_path, data, steps=200, lr_schedule=replace(WSD, cooldown_fraction=0.1))
    if step > 80:
        save_at(longer, topology, step)
    record = one_step(longer, topology)
    assert (record["step"], record["lr_normuon"]) == (step + 1, pytest.approx(0.01 * factor, rel=1e-12))


def test_an_extension_in_the_cooldown_needs_a_name(topology: ParallelTopology, data: Path, tmp_path: Path) -> None:
    save_at(wsd_run(tmp_path, data), topology, 90)
    longer = wsd_run(tmp_path, data, steps=200)
    with (
        pytest.raises(ConfigError, match=r"train\.steps=200.*step 81 had a learning-rate factor of 0\.955"),
        open_trainer(longer, topology, allowed_changes=[]),
    ):
        pass
    with open_trainer(longer, topology, allowed_changes=["train.steps"]) as trainer:
        assert trainer.train_step().lr_normuon == pytest.approx(0.01)


# Extended and branched runs are runs of the new plan from their beginning


def test_an_extended_run_equals_one_that_was_planned_longer(
    topology: ParallelTopology, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = LRScheduleConfig(warmup_steps=2, cooldown_fraction=0.5)
    phases = FeedbackConfig(schedule=(SchedulePhase(2, {1: 1.0}), SchedulePhase(1.0, {1: 0.5, 2: 0.5})))
    planned = wsd_run(tmp_path / "planned", data, steps=16, lr_schedule=short, feedback=phases)
    extended = replace(planned, train=replace(planned.train, run_dir=str(tmp_path / "extended"), steps=10))
    straight = train(stopping_at(planned, 10), topology)
    train(stopping_at(extended, 5), topology)
    capsys.readouterr()
    longer = replace(planned, train=replace(planned.train, run_dir=str(tmp_path / "extended")))
    records, state = train(stopping_at(longer, 10), topology)
    output = capsys.readouterr().out
    assert "changes from step 6 on: train.steps 10 -> 16" in output
    assert "resumed from" in output
    assert records == straight[0]
    assert differing(state, straight[1]) == []


def test_a_branched_cooldown_equals_a_run_that_was_planned_with_it(
    topology: ParallelTopology, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trunk stays as it is; the branch has steps 7 to 9, of which two cool down, and its own checkpoints."""
    trunk = wsd_run(tmp_path / "trunk", data, steps=50)
    trunk = replace(trunk, lr_schedule=LRScheduleConfig(warmup_steps=2), loss=replace(trunk.loss, z_loss=0.1))
    train(stopping_at(trunk, 6), topology)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "trunk").rglob("*") if path.is_file()}
    cooldown = replace(trunk.lr_schedule, cooldown_fraction=0.2)
    planned, branch = (
        replace(trunk, lr_schedule=cooldown, train=replace(trunk.train, run_dir=str(tmp_path / name), steps=9))
        for name in ("planned", "branch")
    )
    branch = started_from(branch, tmp_path / "trunk" / "checkpoints" / "step_00000006")
    straight = train(planned, topology)
    capsys.readouterr()
    train(stopping_at(branch, 8), topology)
    output = capsys.readouterr().out
    assert f"branched off from {tmp_path / 'trunk' / 'checkpoints' / 'step_00000006'}" in output
    assert "goes on with step 7" in output
    assert "changes from step 7 on: lr_schedule.cooldown_fraction 0.25 -> 0.2; train.steps 50 -> 9" in output
    records, state = train(branch, topology)
    assert f"resumed from {tmp_path / 'branch' / 'checkpoints' / 'step_00000008'}" in capsys.readouterr().out
    assert records == straight[0][6:]
    assert [record["step"] for record in records] == [7, 8, 9]
    assert [record["lr_normuon"] for record in records] == pytest.approx([0.01, 0.005, 0.0])
    assert [record["z_loss"] > 0 for record in records] == [False, True, True]
    assert differing(state, straight[1]) == []
    assert {path: path.stat().st_mtime_ns for path in before} == before


# Feedback from some step on

PLAIN = FeedbackConfig(fusion="none")


def late(config: RunConfig, *, start: int, fusion: str = "glu") -> RunConfig:
    """The same run with passes of feedback after step `start`."""
    schedule = (SchedulePhase(start, {1: 1.0}), SchedulePhase(1.0, {2: 0.5, 3: 0.5}))
    return replace(config, feedback=FeedbackConfig(fusion=fusion, schedule=schedule))


def with_model(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, model=replace(config.model, **changes))


@pytest.mark.parametrize("embedding_norm", [True, False], ids=["shared norm", "own norm"])
@pytest.mark.parametrize(("zero_stage", "precision"), COMBINATIONS)
def test_feedback_that_starts_late_equals_feedback_that_was_planned(
    topology: ParallelTopology,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    zero_stage: int,
    precision: str,
    embedding_norm: bool,
) -> None:
    """Four steps of an ordinary transformer, then two with feedback: as if the fusion had waited there, bit for bit."""
    parallel = ParallelConfig(zero_stage=zero_stage, precision=precision)
    planned = with_model(
        late(wsd_run(tmp_path / "planned", data, parallel=parallel), start=4), embedding_norm=embedding_norm
    )
    straight = train(stopping_at(planned, 6), topology)
    run = replace(planned, train=replace(planned.train, run_dir=str(tmp_path / "run")))
    train(stopping_at(replace(run, feedback=PLAIN), 4), topology)
    capsys.readouterr()
    records, state = train(stopping_at(run, 6), topology)
    own = "" if embedding_norm else "embedding_norm.weight, "
    assert f"with their initial values: {own}fusion.w_g.weight, fusion.w_u.weight\n" in capsys.readouterr().out
    assert [record["passes"] > 1 for record in records] == [False] * 4 + [True] * 2
    assert records == straight[0]
    assert differing(state, straight[1]) == []


def test_feedback_that_waited_may_start_earlier_and_with_another_fusion(
    topology: ParallelTopology, data: Path, tmp_path: Path
) -> None:
    """A fusion that no step has used yet has its initial values: it makes no difference that it was there."""
    planned = late(wsd_run(tmp_path / "planned", data), start=3, fusion="add")
    straight = train(stopping_at(planned, 5), topology)
    run = late(wsd_run(tmp_path / "run", data), start=90)
    train(stopping_at(run, 3), topology)
    records, state = train(stopping_at(late(run, start=3, fusion="add"), 5), topology)
    assert records == straight[0]
    assert differing(state, straight[1]) == []


def test_feedback_that_has_begun_is_not_changed_by_accident(
    topology: ParallelTopology, data: Path, tmp_path: Path
) -> None:
    run = late(wsd_run(tmp_path, data), start=2)
    train(stopping_at(run, 4), topology)
    other = replace(run, feedback=replace(run.feedback, fusion="concat", jitter=0.0))
    with (
        pytest.raises(ConfigError, match=r"(?s)2 problems.*feedback\.fusion=.*step 3 had passes with feedback"),
        open_trainer(other, topology, allowed_changes=[]),
    ):
        pass


@pytest.mark.parametrize("lost", ["weights/fusion.w_u.weight", "optimizer/momentum/fusion.w_u.weight"])
def test_a_fusion_that_a_checkpoint_should_have_is_not_drawn_again(
    topology: ParallelTopology, data: Path, tmp_path: Path, lost: str
) -> None:
    run = late(wsd_run(tmp_path, data), start=2)
    _save_without(run, topology, lost)
    with (
        pytest.raises(CheckpointError, match=f"does not fit this run: it does not have {lost}$"),
        open_trainer(run, topology, allowed_changes=[]),
    ):
        pass


@pytest.mark.parametrize("lost", ["weights/layers.0.mlp.up.weight", "optimizer/exp_avg/final_norm.weight"])
def test_only_feedback_may_be_missing_where_it_starts_late(
    topology: ParallelTopology, data: Path, tmp_path: Path, lost: str
) -> None:
    plain = wsd_run(tmp_path, data, feedback=PLAIN)
    _save_without(plain, topology, lost)
    with (
        pytest.raises(CheckpointError, match=f"does not fit this run: it does not have {lost}$"),
        open_trainer(late(plain, start=2), topology, allowed_changes=[]),
    ):
        pass


def _save_without(config: RunConfig, topology: ParallelTopology, lost: str) -> None:
    """A checkpoint of step 2 from which one tensor is gone."""
    with open_trainer(stopping_at(config, 2), topology, allowed_changes=[]) as trainer:
        trainer.train(StopSignal())
        shards = shards_of(trainer.engine)
    del shards[lost]
    folder = Path(config.train.run_dir) / "checkpoints"
    manifest = Manifest.read(folder / "step_00000002")
    CheckpointManager(folder, config=config.checkpoint, log=print).save(manifest, shards)


# In other layouts: tensors compared with what they have to be, written out

LATE_LAYOUTS = {
    "tensor": ParallelConfig(tensor=2, precision="fp32"),
    "sequence": ParallelConfig(tensor=2, sequence=True, precision="bf16"),
    "pipeline": ParallelConfig(pipeline=2, precision="fp32"),
    "pipeline without ZeRO": ParallelConfig(pipeline=2, precision="fp32", zero_stage=0),
    "data": ParallelConfig(precision="bf16"),
}


def _topology(parallel: ParallelConfig) -> ParallelTopology:
    parallel_state.destroy_model_parallel()
    return build_topology(parallel)


def _states(trainer: Trainer) -> dict[str, list[Part]]:
    return held_parts(trainer.model, trainer.engine)


def _start_late(rank: int, folder: str, data: str) -> dict[str, Any]:
    """On two ranks: four steps of an ordinary transformer in one layout, feedback from there on in each layout."""
    root, found = Path(folder), {}
    for precision in ("fp32", "bf16"):
        config = with_model(wsd_run(root / precision, Path(data), feedback=PLAIN), embedding_norm=False)
        config = replace(config, parallel=ParallelConfig(pipeline=2, precision=precision))
        with open_trainer(stopping_at(config, 4), _topology(config.parallel), allowed_changes=[]) as trainer:
            trainer.train(StopSignal())
            found[precision] = _states(trainer)
    for name, parallel in LATE_LAYOUTS.items():
        config = with_model(late(wsd_run(root / name, Path(data)), start=4), embedding_norm=False)
        config = started_from(replace(config, parallel=parallel), root / parallel.precision)
        with open_trainer(config, _topology(parallel), allowed_changes=[]) as trainer:
            found[name] = _states(trainer)
            found[f"{name} counters"] = (trainer.counters.step, trainer.engine.optimizer.counters())
            found[f"{name} step"] = trainer.train_step().as_dict()
            found[f"{name} later"] = _states(trainer)
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, data: Path) -> list[dict[str, Any]]:
    return run_distributed(_start_late, 2, str(tmp_path_factory.mktemp("late")), str(data))


def whole(ranks: list[dict[str, Any]], name: str, kind: str) -> dict[str, Tensor]:
    return {
        key: torch.from_numpy(value) for key, value in assemble([found[name].get(kind, []) for found in ranks]).items()
    }


@pytest.mark.distributed
@pytest.mark.parametrize("name", LATE_LAYOUTS)
def test_every_tensor_where_feedback_starts_in_another_layout(
    two_ranks: list[dict[str, Any]], data: Path, name: str
) -> None:
    parallel = LATE_LAYOUTS[name]
    config = with_model(late(wsd_run(Path("unused"), data), start=4), embedding_norm=False)
    tensors = {tensor.name: tensor for tensor in logical_tensors(config.model, config.feedback)}
    fresh = {key for key, tensor in tensors.items() if tensor.feedback}
    assert fresh == {"embedding_norm.weight", "fusion.w_u.weight", "fusion.w_g.weight"}
    for kind in ("weight", "momentum", "row_moment", "exp_avg", "exp_avg_sq"):
        before, after = whole(two_ranks, parallel.precision, kind), whole(two_ranks, name, kind)
        assert fresh.isdisjoint(before)
        for key in after.keys() - fresh:
            assert torch.equal(after[key], before[key]), f"{kind} {key}"
            assert after[key].any(), f"{kind} {key} is zero: this run would not show a lost one"
        new = after.keys() & fresh
        assert after.keys() - new == before.keys()
        for key in new:
            expected = draw_tensor(tensors[key], seed=config.train.seed, init_std=config.model.init_std)
            if parallel.precision == "bf16":
                expected = expected.bfloat16().float()  # as the model is built, before there are fp32 weights
            assert torch.equal(after[key], expected if kind == "weight" else torch.zeros_like(after[key])), key
    weights = whole(two_ranks, name, "weight")
    assert weights.keys() == tensors.keys()
    assert fresh == {
        *(whole(two_ranks, name, "momentum").keys() & fresh),
        *(whole(two_ranks, name, "exp_avg").keys() & fresh),
    }


@pytest.mark.distributed
@pytest.mark.parametrize("name", LATE_LAYOUTS)
def test_the_first_step_with_feedback_in_another_layout(two_ranks: list[dict[str, Any]], name: str) -> None:
    for found in two_ranks:
        assert found[f"{name} counters"] == (4, {"adam": 4, "adam_feedback": 0})
        assert found[f"{name} step"]["step"] == 5
        assert found[f"{name} step"]["passes"] > 1
    tolerance = 1e-4 if LATE_LAYOUTS[name].precision == "fp32" else 2e-2
    reference = "tensor" if LATE_LAYOUTS[name].precision == "fp32" else "data"
    for key in ("loss", "loss_pass_1", "loss_pass_2", "grad_norm"):
        expected = two_ranks[0][f"{reference} step"][key]
        assert two_ranks[0][f"{name} step"][key] == pytest.approx(expected, rel=tolerance)
    for kind in ("weight", "momentum", "row_moment"):
        before, after = whole(two_ranks, name, kind), whole(two_ranks, f"{name} later", kind)
        assert not torch.equal(before["fusion.w_u.weight"], after["fusion.w_u.weight"]), kind


# Nothing else has state


def test_random_draws_after_a_resume_are_those_of_a_run_that_never_stopped(
    topology: ParallelTopology, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no state of a random generator to restore: each draw is a function of seed, row and pass.

    So a checkpoint holds none, and what torch's own generators did meanwhile changes nothing.
    """
    config = late(wsd_run(tmp_path / "straight", data), start=1)
    draws: list[Any] = []

    def noting(trainer: Trainer) -> None:
        add_jitter, plain_prefix = trainer.noise.add_jitter, trainer.noise.plain_prefix

        def jitter(state: Tensor, **arguments: Any) -> Tensor:
            noisy = add_jitter(state, **arguments)
            draws.append((tuple(arguments["rows"]), arguments["pass_idx"], (noisy - state).detach().clone()))
            return noisy

        def prefix(documents: Tensor, **arguments: Any) -> Tensor | None:
            plain = plain_prefix(documents, **arguments)
            draws.append((tuple(arguments["rows"]), arguments["pass_idx"], plain))
            return plain

        object.__setattr__(trainer.noise, "add_jitter", jitter)
        object.__setattr__(trainer.noise, "plain_prefix", prefix)

    def draws_of(config: RunConfig, last: int) -> list[Any]:
        draws.clear()
        with open_trainer(stopping_at(config, last), topology, allowed_changes=[]) as trainer:
            noting(trainer)
            trainer.train(StopSignal())
        return list(draws)

    straight = draws_of(config, 4)
    stopped = replace(config, train=replace(config.train, run_dir=str(tmp_path / "stopped")))
    first = draws_of(stopped, 2)
    torch.manual_seed(99)
    torch.rand(1000)
    resumed = draws_of(stopped, 4)
    assert len(straight) == len(first) + len(resumed) > len(first) > 0
    for (rows, pass_idx, values), (found_rows, found_pass, found) in zip(straight, first + resumed, strict=True):
        assert (rows, pass_idx) == (found_rows, found_pass)
        assert torch.equal(values, found)
    assert len({rows for rows, _, _ in straight}) > 4
