"""Whole runs: the same numbers again, on two ranks, without ZeRO, and across a stop."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.pretrain.runs import Outcome, pretrain, pretrain_and_signal, records, steps

pytestmark = pytest.mark.training


@pytest.fixture(scope="module")
def straight(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """20 steps in one process without a stop."""
    run_dir = tmp_path_factory.mktemp("straight")
    return run_dir, pretrain(config, run_dir, "logging.tensorboard=true").check()


def _tensors(run_dir: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint, through torch's own converter."""
    latest = (run_dir / "checkpoints" / "latest").read_text().strip()
    dcp_to_torch_save(run_dir / "checkpoints" / latest, scratch)
    return torch.load(scratch, weights_only=True)


def test_run_directory(straight: tuple[Path, Outcome]) -> None:
    run_dir, outcome = straight
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == "step_00000020"
    assert {path.name for path in (run_dir / "checkpoints").glob("step_*")} == {"step_00000010", "step_00000020"}
    assert (run_dir / "config.yaml").exists()
    assert "step 20/20" in (run_dir / "log.txt").read_text()
    assert list((run_dir / "tensorboard").glob("events.*"))
    assert "kernels: norm PyTorch" in outcome.output


def test_metrics_of_a_step_and_of_a_validation(straight: tuple[Path, Outcome]) -> None:
    run_dir, _ = straight
    for record in steps(run_dir):
        losses = [f"loss_pass_{k}" for k in range(1, record["passes"] + 1)]
        start, end = (
            ["step", "tokens", "trained_tokens", "passes", "loss"],
            [
                "lr_normuon",
                "lr_adam",
                "weight_decay",
                "skipped_steps",
                "spikes",
                "rewinds",
                "epoch",
                "skipped_documents",
            ],
        )
        assert list(record) == [*start, *losses, "z_loss", "grad_norm", *end]
        assert record["tokens"] == record["step"] * 8 * 64
        assert 0.5 * 8 * 64 < record["trained_tokens"] <= 8 * 64
        later = losses[1:]
        combined = record["loss_pass_1"] + (sum(record[key] for key in later) / len(later) if later else 0.0)
        assert record["loss"] == pytest.approx(combined, rel=1e-6)
    validations = [record for record in records(run_dir) if record.get("kind") == "validation"]
    assert [record["step"] for record in validations] == [0, 10, 20]
    for record in validations:
        assert {f"val_loss_pass_{k}" for k in range(1, 5)} <= record.keys()
        assert {f"val_bpb_pass_{k}" for k in range(1, 5)} <= record.keys()
        assert {f"hidden_delta_pass_{k}" for k in range(2, 5)} <= record.keys()
    assert validations[-1]["val_loss_pass_1"] < validations[0]["val_loss_pass_1"]


def test_passes_follow_the_plan(straight: tuple[Path, Outcome]) -> None:
    passes = [record["passes"] for record in steps(straight[0])]
    assert passes[:6] == [1] * 6
    late = Counter(passes[6:])
    assert all(abs(late[k] - share * 14) <= 1 for k, share in {1: 0.2, 2: 0.5, 3: 0.3}.items())


def test_z_loss_and_learning_rate_of_the_cooldown(straight: tuple[Path, Outcome]) -> None:
    for record in steps(straight[0]):
        assert (record["z_loss"] > 0) == (record["step"] > 15)
        assert record["lr_normuon"] / record["lr_adam"] == pytest.approx(20.0) if record["lr_adam"] else True
        assert record["weight_decay"] == pytest.approx(record["lr_normuon"])


def test_same_seed_gives_the_same_metrics(config: Path, straight: tuple[Path, Outcome], tmp_path: Path) -> None:
    pretrain(config, tmp_path / "again", "data.workers=2").check()
    assert records(tmp_path / "again") == records(straight[0])


def test_another_seed_gives_others(config: Path, straight: tuple[Path, Outcome], tmp_path: Path) -> None:
    pretrain(config, tmp_path / "other", "train.seed=8", "train.stop_step=1").check()
    assert steps(tmp_path / "other")[0]["loss"] != steps(straight[0])[0]["loss"]


def test_stop_and_resume_equals_straight(config: Path, straight: tuple[Path, Outcome], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    pretrain(config, run_dir, "train.stop_step=12").check()
    assert len(steps(run_dir)) == 12
    resumed = pretrain(config, run_dir, "data.workers=1").check()
    assert "resumed from" in resumed.output
    assert records(run_dir) == records(straight[0])
    expected, found = _tensors(straight[0], tmp_path / "a.pt"), _tensors(run_dir, tmp_path / "b.pt")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert {name.split("/")[0] for name in expected} == {"weights", "optimizer"}


def test_interrupted_work_after_a_checkpoint_leaves_no_trace(
    config: Path, straight: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """A killed run has metrics of steps after its last checkpoint, which the resumed run trains again."""
    run_dir = tmp_path / "run"
    killed = pretrain_and_signal(config, run_dir, when="step 13/20", number=signal.SIGKILL)
    assert killed.status == -signal.SIGKILL
    assert len(steps(run_dir)) >= 13
    pretrain(config, run_dir).check()
    assert records(run_dir) == records(straight[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_a_checkpoint(
    config: Path, straight: tuple[Path, Outcome], tmp_path: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    stopped = pretrain_and_signal(config, run_dir, when="step 4/20", number=number)
    stopped.check(128 + number)
    last = steps(run_dir)[-1]["step"]
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == f"step_{last:08d}"
    pretrain(config, run_dir).check()
    assert records(run_dir) == records(straight[0])


def test_finished_run_started_again_changes_nothing(
    config: Path, straight: tuple[Path, Outcome], tmp_path: Path
) -> None:
    before = records(straight[0])
    again = pretrain(config, straight[0]).check()
    assert "step 20 of 20" in again.output
    assert records(straight[0]) == before


@pytest.mark.parametrize("zero_stage", [0, pytest.param(1, marks=pytest.mark.smoke)])
def test_two_ranks_equal_one(config: Path, straight: tuple[Path, Outcome], tmp_path: Path, zero_stage: int) -> None:
    pretrain(config, tmp_path / "two", f"parallel.zero_stage={zero_stage}", processes=2).check()
    assert_same_records(records(tmp_path / "two"), records(straight[0]))


def assert_same_records(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Every number of every step and validation agrees to 1e-4."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            same = value if isinstance(value, str) else pytest.approx(value, rel=1e-4, abs=1e-12)
            assert ours[key] == same, (theirs.get("step"), key)


@pytest.mark.distributed
def test_tensor_times_pipeline_equals_one(config: Path, straight: tuple[Path, Outcome], tmp_path: Path) -> None:
    """One rank of four reads the data, and only the last stage has losses; all of metrics.jsonl is the same."""
    layout = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true")
    outcome = pretrain(config, tmp_path / "four", *layout, processes=4).check()
    assert outcome.output.count("embedding, fusion, layers 0 ") == 2  # the two ranks of the first stage
    assert outcome.output.count("layers 1, final norm, tied head") == 2
    assert_same_records(records(tmp_path / "four"), records(straight[0]))


@pytest.mark.distributed
def test_resume_in_other_layouts(config: Path, straight: tuple[Path, Outcome], tmp_path: Path) -> None:
    """A checkpoint of a pipeline goes on in a tensor-parallel layout, and that one's in one process."""
    run_dir = tmp_path / "run"
    pretrain(config, run_dir, "parallel.pipeline=2", "train.stop_step=8", processes=2).check()
    pretrain(config, run_dir, "parallel.tensor=2", "train.stop_step=14", processes=2).check()
    pretrain(config, run_dir).check()
    assert_same_records(steps(run_dir), steps(straight[0]))


def test_without_zero_equals_zero(config: Path, straight: tuple[Path, Outcome], tmp_path: Path) -> None:
    pretrain(config, tmp_path / "plain", "parallel.zero_stage=0").check()
    for expected, found in zip(steps(straight[0]), steps(tmp_path / "plain"), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.distributed
def test_resume_with_another_number_of_ranks(config: Path, straight: tuple[Path, Outcome], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    pretrain(config, run_dir, "train.stop_step=10", processes=2).check()
    pretrain(config, run_dir, "parallel.zero_stage=0").check()
    for expected, found in zip(steps(straight[0]), steps(run_dir), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_bf16_follows_fp32(config: Path, straight: tuple[Path, Outcome], tmp_path: Path) -> None:
    """Same run with bf16 parameters and activations: every loss within 2%, fp32 masters in the checkpoint."""
    pretrain(config, tmp_path / "bf16", "parallel.precision=bf16").check()
    for expected, found in zip(steps(straight[0]), steps(tmp_path / "bf16"), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=2e-2)
    weights = _tensors(tmp_path / "bf16", tmp_path / "weights.pt")
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())


def test_ordinary_transformer(config: Path, tmp_path: Path) -> None:
    schedule = "feedback.schedule=[{until: 1.0, mix: {1: 1.0}}]"
    options = ["feedback.fusion=none", schedule, "evaluation.extra_passes=0"]
    pretrain(config, tmp_path / "plain", *options).check()
    trained = steps(tmp_path / "plain")
    assert trained[-1]["loss"] < trained[0]["loss"]
    assert all(record["passes"] == 1 for record in trained)
