"""What a run writes about itself: strict JSON, TensorBoard, console lines, and nothing twice after a resume."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fbt_megatron.errors import RunDirError
from fbt_megatron.training.console import Console
from fbt_megatron.training.metrics import MetricsLogger, StepRecord, StepTimer, ValidationRecord

STEP = StepRecord(
    step=1,
    tokens=4096,
    trained_tokens=4000,
    passes=2,
    loss=6.0,
    losses=(2.0, 4.0),
    z_loss=0.25,
    grad_norm=0.5,
    lr_normuon=0.01,
    lr_adam=0.0005,
    weight_decay=0.01,
    skipped_steps=0,
    spikes=2,
    rewinds=1,
    epoch=3,
    skipped_documents=4,
    starts=5,
    restarts=4,
    step_seconds=2.0,
    step_tokens=4096,
    data_seconds=0.5,
    slowest_rank=7,
    slowest_rank_ratio=1.25,
)
SKIPPED = replace(STEP, grad_norm=None, skipped_steps=1, skipped=True, loss=math.inf, losses=(math.nan, math.inf))
VALIDATION = ValidationRecord(
    step=2, tokens=8192, losses=(3.0, 2.5, 2.25), bits_per_byte=(4.0, 3.5, 3.25), hidden_deltas=(0.5, 0.125)
)


class Log:
    """A metrics logger on a folder."""

    def __init__(self, folder: Path, *, enabled: bool = True, resume_step: int = 0, **options: Any) -> None:
        self.folder = folder
        self.console = Console(enabled=enabled)
        settings = {"total_steps": 100, "console_every": 10, "tensorboard": False} | options
        settings = {"passes_after": lambda step: 2 * (settings["total_steps"] - step)} | settings
        self.metrics = MetricsLogger(folder, console=self.console, resume_step=resume_step, **settings)
        self.metrics.open()

    def write(self, *records: StepRecord | ValidationRecord) -> list[dict[str, Any]]:
        """Log the records, close, and read the file back as strict JSON."""
        for record in records:
            if isinstance(record, StepRecord):
                self.metrics.step(record)
            else:
                self.metrics.validation(record)
        self.metrics.close()
        return self.read()

    def read(self) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line, parse_constant=_refuse) for line in lines]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_a_step(tmp_path: Path) -> None:
    (line,) = Log(tmp_path).write(STEP)
    expected = {
        "step": 1,
        "tokens": 4096,
        "trained_tokens": 4000,
        "passes": 2,
        "loss": 6.0,
        "loss_pass_1": 2.0,
        "loss_pass_2": 4.0,
        "z_loss": 0.25,
        "grad_norm": 0.5,
        "lr_normuon": 0.01,
        "lr_adam": 0.0005,
        "weight_decay": 0.01,
        "skipped_steps": 0,
        "spikes": 2,
        "rewinds": 1,
        "epoch": 3,
        "skipped_documents": 4,
        "starts": 5,
        "restarts": 4,
        "step_seconds": 2.0,
        "tokens_per_second": 2048.0,
        "data_seconds": 0.5,
        "slowest_rank": 7,
        "slowest_rank_ratio": 1.25,
    }
    assert list(line.items()) == list(expected.items())


def test_a_step_on_conversations_counts_those_that_were_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = Log(tmp_path).write(replace(STEP, cut_conversations=3, cut_tokens=70))
    place = list(line).index("skipped_documents")
    assert list(line.items())[place + 1 : place + 3] == [("cut_conversations", 3), ("cut_tokens", 70)]
    assert "| cut conversations 3" in capsys.readouterr().out


def test_a_validation(tmp_path: Path) -> None:
    (line,) = Log(tmp_path).write(VALIDATION)
    expected = {
        "kind": "validation",
        "step": 2,
        "tokens": 8192,
        "val_loss_pass_1": 3.0,
        "val_loss_pass_2": 2.5,
        "val_loss_pass_3": 2.25,
        "val_bpb_pass_1": 4.0,
        "val_bpb_pass_2": 3.5,
        "val_bpb_pass_3": 3.25,
        "hidden_delta_pass_2": 0.5,
        "hidden_delta_pass_3": 0.125,
    }
    assert list(line.items()) == list(expected.items())


def test_a_validation_without_bytes(tmp_path: Path) -> None:
    (line,) = Log(tmp_path).write(replace(VALIDATION, bits_per_byte=None))
    assert not [key for key in line if "bpb" in key]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    step, validation = Log(tmp_path).write(SKIPPED, replace(VALIDATION, losses=(math.nan, -math.inf)))
    nulls = ("loss", "loss_pass_1", "loss_pass_2", "grad_norm")
    assert [step[key] for key in nulls] == [None] * 4
    assert validation["val_loss_pass_1"] is None
    assert validation["val_loss_pass_2"] is None
    assert list(step) == list(Log(tmp_path).write(STEP)[0])


def test_a_line_is_in_the_file_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.metrics.step(STEP)
    assert len(log.read()) == 1
    log.metrics.close()


def test_a_single_rank_has_no_slowest(tmp_path: Path) -> None:
    alone = replace(STEP, slowest_rank=None, slowest_rank_ratio=None)
    (line,) = Log(tmp_path, tensorboard=True).write(alone)
    assert line["slowest_rank"] is None
    assert "train/slowest_rank" not in _events(tmp_path).Tags()["scalars"]


def _steps(*numbers: int) -> list[StepRecord]:
    return [replace(STEP, step=number) for number in numbers]


def test_a_resume_removes_what_came_after_its_checkpoint_and_half_a_line(tmp_path: Path) -> None:
    validation = replace(VALIDATION, step=2)
    Log(tmp_path).write(replace(VALIDATION, step=0), *_steps(1, 2), validation, *_steps(3), replace(VALIDATION, step=4))
    with (tmp_path / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"step": 2, "tokens": 40\xff')
    lines = Log(tmp_path, resume_step=2).write(*_steps(3))
    assert [(line["step"], "kind" in line) for line in lines] == [
        (0, True),
        (1, False),
        (2, False),
        (2, True),
        (3, False),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_that_begins_anew_keeps_nothing(tmp_path: Path) -> None:
    """Killed before its first checkpoint it validates again before the first step."""
    first = replace(VALIDATION, step=0)
    Log(tmp_path, tensorboard=True).write(first, *_steps(1))
    lines = Log(tmp_path, tensorboard=True).write(first, *_steps(1))
    assert [line["step"] for line in lines] == [0, 1]
    events = _events(tmp_path)
    assert [event.step for event in events.Scalars("validation/val_loss_pass_1")] == [0]
    assert [event.step for event in events.Scalars("train/loss")] == [1]


def test_a_resume_without_a_file(tmp_path: Path) -> None:
    """A run that starts from the checkpoint of another one."""
    assert [line["step"] for line in Log(tmp_path, resume_step=7).write(*_steps(8))] == [8]


def _events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard(tmp_path: Path) -> None:
    Log(tmp_path, tensorboard=True).write(STEP, replace(STEP, step=2, loss=5.0), VALIDATION)
    events = _events(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 6.0), (2, 5.0)]
    assert [(event.step, event.value) for event in events.Scalars("validation/val_loss_pass_3")] == [(2, 2.25)]
    values = STEP.as_dict()
    tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("train/")}
    assert tags == {f"train/{key}" for key in values if key != "step"}
    for key in values.keys() - {"step"}:
        assert events.Scalars(f"train/{key}")[0].value == pytest.approx(values[key], rel=1e-6)
    assert "validation/kind" not in events.Tags()["scalars"]


def test_tensorboard_after_a_resume(tmp_path: Path) -> None:
    Log(tmp_path, tensorboard=True).write(*_steps(1, 2), *[replace(STEP, step=3, loss=9.0)])
    Log(tmp_path, tensorboard=True, resume_step=2).write(replace(STEP, step=3, loss=4.0))
    found = [(event.step, event.value) for event in _events(tmp_path).Scalars("train/loss")]
    assert found == [(1, 6.0), (2, 6.0), (3, 4.0)]


def test_a_rewind_in_the_same_process(tmp_path: Path) -> None:
    """As after a resume: what was logged after the step is gone from both files."""
    log = Log(tmp_path, tensorboard=True)
    for record in [*_steps(1, 2), replace(STEP, step=3, loss=9.0)]:
        log.metrics.step(record)
    log.metrics.rewind(2)
    lines = log.write(replace(STEP, step=3, loss=4.0))
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 6.0), (2, 6.0), (3, 4.0)]
    found = [(event.step, event.value) for event in _events(tmp_path).Scalars("train/loss")]
    assert found == [(1, 6.0), (2, 6.0), (3, 4.0)]


def test_no_tensorboard(tmp_path: Path) -> None:
    Log(tmp_path).write(STEP)
    assert not (tmp_path / "tensorboard").exists()


def test_the_console_line_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Log(tmp_path).write(STEP)
    assert capsys.readouterr().out == (
        "step 1/100 | loss 6.0000 (pass 1 2.0000, pass 2 4.0000) | grad 0.500 | lr 1.00e-02 5.00e-04 | "
        "2.05k tok/s | eta 3m18s\n"
    )


def test_the_console_line_of_a_skipped_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is shown although its number is not due."""
    Log(tmp_path).write(replace(SKIPPED, step=13))
    assert capsys.readouterr().out == (
        "step 13/100 | loss inf (pass 1 nan, pass 2 inf) | SKIPPED, gradient not finite | lr 1.00e-02 5.00e-04 | "
        "2.05k tok/s | eta 2m54s | skipped 1\n"
    )


@pytest.mark.parametrize("skipped", [True, False])
def test_the_console_line_of_a_spike(tmp_path: Path, capsys: pytest.CaptureFixture[str], skipped: bool) -> None:
    Log(tmp_path).write(replace(STEP, step=13, spike=True, skipped=skipped))
    assert f"| grad 0.500, SPIKE{', SKIPPED' if skipped else ''} | lr" in capsys.readouterr().out


def test_the_console_line_of_a_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Log(tmp_path).write(VALIDATION, replace(VALIDATION, losses=(3.0,), bits_per_byte=None, hidden_deltas=()))
    assert capsys.readouterr().out == (
        "validation 2/100 | pass 1 3.0000, pass 2 2.5000, pass 3 2.2500 | bits per byte 4.0000 | "
        "hidden delta 0.500, 0.125\n"
        "validation 2/100 | pass 1 3.0000\n"
    )


def test_the_console_shows_first_due_and_last_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Log(tmp_path, total_steps=25).write(*_steps(*range(1, 26)))
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["1/25", "10/25", "20/25", "25/25"]
    assert len(lines) == 25


def test_the_remaining_time_rests_on_the_mean_of_recent_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """50 steps of 1 s and 3 s in turn, after slow ones that are forgotten: 2 s for each of the 900 left."""
    records = [replace(STEP, step=n, step_seconds=50.0 if n <= 50 else 1.0 + 2.0 * (n % 2)) for n in range(1, 101)]
    Log(tmp_path, total_steps=1000, console_every=100).write(*records)
    assert "eta 30m00s" in capsys.readouterr().out.splitlines()[-1]


def test_the_remaining_time_knows_the_passes_to_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1 s for a pass so far; 100 steps are left, of 3 passes each."""
    records = [replace(STEP, step=n, passes=1, losses=(2.0,), step_seconds=1.0) for n in range(1, 11)]
    Log(tmp_path, total_steps=110, passes_after=lambda step: 3 * (110 - step)).write(*records)
    assert "eta 5m00s" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt"])
def test_a_failing_write_is_kept_for_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Nothing raises on rank 0 alone; what went wrong can be read off the console."""
    log = Log(tmp_path)
    log.console.open_log(tmp_path / "log.txt")
    with Path("/dev/full").open("w", buffering=1) as full:  # every write to it finds a full disk
        if name == "metrics.jsonl":
            log.metrics._file = full
        else:
            log.console._log = full
        log.metrics.step(STEP)
        assert "No space left on device" in str(log.console.failure)
        assert name in str(log.console.failure)
        log.metrics.close()
        log.console.close()


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "log.txt"):
        (tmp_path / name).mkdir()
    with pytest.raises(RunDirError, match=r"metrics.jsonl cannot be written: Is a directory"):
        Log(tmp_path, resume_step=1)
    with pytest.raises(RunDirError, match=r"log.txt cannot be written: Is a directory"):
        Console(enabled=True).open_log(tmp_path / "log.txt")


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(tmp_path, enabled=False, tensorboard=True)
    log.metrics.step(STEP)
    log.metrics.validation(VALIDATION)
    log.metrics.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_a_lap_starts_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.5, 13.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    timer = StepTimer()
    assert [timer.lap(), timer.lap()] == [2.5, 0.5]
