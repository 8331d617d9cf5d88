"""Metrics of a run: one strict JSON object per optimizer step and per validation, TensorBoard, and the console line.

Only rank 0 writes. The records hold plain numbers that are already reduced over all ranks.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fbt_megatron.files import write_durably
from fbt_megatron.training.console import Console, format_count, format_duration
from fbt_megatron.training.event_file import EventFile
from fbt_megatron.training.run_dir import writing

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. `tokens` counts rows x S of the whole run up to here, not times the passes; `trained_tokens`
    are the labels of this step that count.

    `losses` is the cross entropy of each pass per trained token, NaN where there is none; `loss` combines them, without
    `z_loss`. `grad_norm` is the norm before clipping, None where it is not finite or there is no gradient. `epoch`
    counts how often a stream has begun its data anew, `skipped_documents` those that the run has passed over because
    they cannot be read. `cut_conversations` and `cut_tokens` count up to here those that were longer than a row, and
    what was left out of them; None where the data are no conversations.

    `skipped_steps`, `spikes` and `rewinds` count what happened up to here (see `train_state.Counters`); `skipped` and
    `spike` say whether it happened in this step. `starts` counts the starts of this run, `restarts` those that its
    launcher knows of as such. `data_seconds` is the time of the rank that waited longest for its data. `slowest_rank`
    and its time over that of its peers are None where no two ranks hold the same part of the model.
    """

    step: int
    tokens: int
    trained_tokens: int
    passes: int
    loss: float
    losses: tuple[float, ...]
    z_loss: float
    grad_norm: float | None
    lr_normuon: float
    lr_adam: float
    weight_decay: float
    skipped_steps: int
    spikes: int
    rewinds: int
    epoch: int
    skipped_documents: int
    starts: int
    restarts: int
    step_seconds: float
    step_tokens: int
    data_seconds: float
    slowest_rank: int | None
    slowest_rank_ratio: float | None
    cut_conversations: int | None = None
    cut_tokens: int | None = None
    skipped: bool = False
    spike: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The keys and order of a line of `metrics.jsonl`."""
        cut = {"cut_conversations": self.cut_conversations, "cut_tokens": self.cut_tokens}
        return {
            "step": self.step,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "passes": self.passes,
            "loss": self.loss,
            **{f"loss_pass_{index}": loss for index, loss in enumerate(self.losses, start=1)},
            "z_loss": self.z_loss,
            "grad_norm": self.grad_norm,
            "lr_normuon": self.lr_normuon,
            "lr_adam": self.lr_adam,
            "weight_decay": self.weight_decay,
            "skipped_steps": self.skipped_steps,
            "spikes": self.spikes,
            "rewinds": self.rewinds,
            "epoch": self.epoch,
            "skipped_documents": self.skipped_documents,
            **({} if self.cut_conversations is None else cut),
            "starts": self.starts,
            "restarts": self.restarts,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.step_tokens / self.step_seconds,
            "data_seconds": self.data_seconds,
            "slowest_rank": self.slowest_rank,
            "slowest_rank_ratio": self.slowest_rank_ratio,
        }


@dataclass(frozen=True)
class ValidationRecord:
    """One validation. Entry k - 1 of each tuple belongs to pass k; `hidden_deltas` starts at pass 2."""

    step: int
    tokens: int
    losses: tuple[float, ...]
    bits_per_byte: tuple[float, ...] | None
    hidden_deltas: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """The keys and order of a line of `metrics.jsonl`."""
        record: dict[str, Any] = {"kind": "validation", "step": self.step, "tokens": self.tokens}
        record |= {f"val_loss_pass_{k}": value for k, value in enumerate(self.losses, start=1)}
        record |= {f"val_bpb_pass_{k}": value for k, value in enumerate(self.bits_per_byte or (), start=1)}
        return record | {f"hidden_delta_pass_{k}": value for k, value in enumerate(self.hidden_deltas, start=2)}


class MetricsLogger:
    """Writes records to `metrics.jsonl`, TensorBoard and the console of rank 0.

    `resume_step` is the step from which the run goes on: what an interrupted run wrote after it is removed, so that the
    file reads as if the run had never stopped. With `validation_due` that step's validation will be logged again.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        console: Console,
        total_steps: int,
        resume_step: int,
        console_every: int,
        tensorboard: bool,
        passes_after: Callable[[int], int],
        validation_due: bool = False,
    ) -> None:
        """`passes_after(step)` is the number of passes that the steps after `step` run, for the estimate of the end."""
        self._console = console
        self._total_steps = total_steps
        self._resume_step = resume_step
        self._validation_due = validation_due
        self._console_every = console_every
        self._tensorboard_path = run_dir / TENSORBOARD_NAME if tensorboard else None
        self._passes_after = passes_after
        self._recent: deque[tuple[float, int]] = deque(maxlen=50)  # seconds and passes of a step
        self._path = run_dir / METRICS_NAME
        self._file: IO[str] | None = None
        self._writer: EventFile | None = None

    def open(self) -> None:
        """Open the files of rank 0; raises RunDirError."""
        if not self._console.enabled:
            return
        with writing(self._path):
            if self._resume_step:
                _keep_lines_up_to(self._path, self._resume_step, its_validation=not self._validation_due)
            else:  # not even the validation before the first step: the run begins anew
                self._path.unlink(missing_ok=True)
            self._file = self._path.open("a", buffering=1)
        if self._tensorboard_path is not None:
            with writing(self._tensorboard_path):
                purge_step = self._resume_step + 1 if self._resume_step else 0
                self._writer = EventFile(self._tensorboard_path, purge_step=purge_step)

    def step(self, record: StepRecord) -> None:
        """Log one optimizer step."""
        self._recent.append((record.step_seconds, record.passes))
        self._write("train", record.as_dict())
        is_due = record.step % self._console_every == 0 or record.step in (1, self._total_steps)
        if is_due or record.skipped or record.spike:
            self._console.line(self._step_line(record))
        self._console.advance()

    def validation(self, record: ValidationRecord) -> None:
        """Log one validation."""
        self._write("validation", record.as_dict())
        losses = ", ".join(f"pass {k} {loss:.4f}" for k, loss in enumerate(record.losses, start=1))
        bits = "" if record.bits_per_byte is None else f" | bits per byte {record.bits_per_byte[0]:.4f}"
        deltas = ", ".join(f"{delta:.3f}" for delta in record.hidden_deltas)
        self._console.line(
            f"validation {record.step}/{self._total_steps} | {losses}{bits}"
            + (f" | hidden delta {deltas}" if deltas else "")
        )

    def rewind(self, step: int) -> None:
        """Remove what was logged after `step`, from which the run goes on again. On rank 0; raises RunDirError."""
        self.close()
        self._resume_step, self._validation_due = step, False
        self.open()
        self._console.rewind(done=step)

    def flush(self) -> None:
        """Bring everything to the disk: what is older than a checkpoint is never written again."""
        with self._console.noting_failures(self._path):
            if self._file is not None:
                self._file.flush()
                os.fsync(self._file.fileno())
            if self._writer is not None:
                self._writer.flush()

    def close(self) -> None:
        """Flush and close the files."""
        with self._console.noting_failures(self._path):
            if self._file is not None:
                self._file.close()
        with self._console.noting_failures(self._path):
            if self._writer is not None:
                self._writer.close()

    def _step_line(self, record: StepRecord) -> str:
        per_pass = ", ".join(f"pass {k} {loss:.4f}" for k, loss in enumerate(record.losses, start=1))
        if not record.trained_tokens:
            norm = "SKIPPED, no token is trained"
        else:
            norm = "SKIPPED, gradient not finite" if record.grad_norm is None else f"grad {record.grad_norm:.3f}"
        if record.spike:
            norm += ", SPIKE, SKIPPED" if record.skipped else ", SPIKE"
        seconds, passes = (sum(column) for column in zip(*self._recent, strict=True))
        remaining = format_duration(seconds / passes * self._passes_after(record.step))
        speed = format_count(record.step_tokens / record.step_seconds)
        skipped = f" | skipped {record.skipped_steps}" if record.skipped_steps else ""
        cut = f" | cut conversations {record.cut_conversations}" if record.cut_conversations else ""
        return (
            f"step {record.step}/{self._total_steps} | loss {record.loss:.4f} ({per_pass}) | {norm} | "
            f"lr {record.lr_normuon:.2e} {record.lr_adam:.2e} | {speed} tok/s | eta {remaining}{skipped}{cut}"
        )

    def _write(self, group: str, record: dict[str, Any]) -> None:
        with self._console.noting_failures(self._path):
            if self._file is not None:
                values = {key: _finite(value) for key, value in record.items()}
                self._file.write(json.dumps(values, allow_nan=False) + "\n")
            if self._writer is not None:
                for key, value in record.items():
                    if isinstance(value, int | float) and key != "step":
                        self._writer.add_scalar(f"{group}/{key}", value, record["step"])
                self._writer.flush()  # a full disk is noticed in this step


class StepTimer:
    """Seconds since the last call."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap (or the start), and start the next."""
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        return seconds


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _keep_lines_up_to(path: Path, step: int, *, its_validation: bool) -> None:
    """Remove records of later steps, that step's validation if it is not wanted, and a line that a kill cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["step"] < step or (record["step"] == step and (its_validation or "kind" not in record)):
            kept.append(line + "\n")
    write_durably(path, "".join(kept))
