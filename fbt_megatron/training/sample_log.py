"""Which documents each optimizer step was trained on: `samples/rank_00000.jsonl`, written by every rank that reads."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from fbt_megatron.parallel.collectives import agree_on_errors, agree_on_rank_zero
from fbt_megatron.training.console import Console
from fbt_megatron.training.run_dir import writing

SAMPLES_NAME = "samples"


class SampleLog:
    """Appends a line per step to this rank's file; a failure is kept in the console, as that of the metrics is."""

    def __init__(self, run_dir: Path, *, rank: int, enabled: bool, console: Console) -> None:
        """Nothing is written where `enabled` is false."""
        self._path = run_dir / SAMPLES_NAME / f"rank_{rank:05d}.jsonl"
        self._enabled = enabled
        self._console = console
        self._file: IO[str] | None = None

    def open(self, resume_step: int) -> None:
        """Remove the lines of steps after `resume_step` from the files of all ranks, and open this rank's.

        All ranks call this together, those that write nothing too: the run may have had other ranks before, or may have
        been logging. Raises RunDirError on all of them.
        """
        agree_on_errors(self.close)  # what another node has not written yet would arrive behind the cut
        agree_on_rank_zero(lambda: _remove_later_steps(self._path.parent, resume_step))
        agree_on_errors(self._open)

    def step(self, step: int, documents: Mapping[int, Sequence[str]]) -> None:
        """Log the keys of the documents of each row that this rank read for a step, by global row number."""
        if self._file is not None:
            with self._console.noting_failures(self._path):
                self._file.write(json.dumps({"step": step, "rows": documents}) + "\n")

    def flush(self) -> None:
        """Bring everything to the disk: what is older than a checkpoint is never written again."""
        if self._file is not None:
            with self._console.noting_failures(self._path):
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close the file."""
        if self._file is not None:
            with self._console.noting_failures(self._path):
                self._file.close()
            self._file = None

    def _open(self) -> None:
        if self._enabled:
            with writing(self._path):
                self._path.parent.mkdir(exist_ok=True)
                self._file = self._path.open("a", buffering=1)


def _remove_later_steps(folder: Path, step: int) -> None:
    """Cut every file of the folder after `step`, and after the last whole line."""
    for path in sorted(folder.glob("rank_*.jsonl")):
        with writing(path):
            size = _size_up_to(path, step)
            if size:
                os.truncate(path, size)
            else:
                path.unlink()


def _size_up_to(path: Path, step: int) -> int:
    """Bytes before the lines of later steps. Lines are in the order of steps, so only the end is read."""
    if not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
        while end:
            start = content.rfind(b"\n", 0, end - 1) + 1
            if _is_up_to(content[start:end], step):
                break
            end = start
        return end


def _is_up_to(line: bytes, step: int) -> bool:
    """Whether a line is that of a step up to `step`; a power cut can leave one that is none."""
    try:
        return bool(json.loads(line)["step"] <= step)
    except ValueError:
        return False
