"""Checkpoints of a run: complete or invisible, checked before they are believed, the previous one kept until then.

A save goes to `step_N.tmp`; when every rank has written and every file is hashed, the manifest is written, the folder
is renamed to `step_N`, and only then the `latest` pointer moves and older checkpoints go. A folder without a manifest
is therefore never a checkpoint, and a name that ends in `.tmp` never counts. `step_N.old` is a checkpoint while another
of the same step takes its place.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fbt_megatron.checkpoint.logical_shards import (
    LogicalLoadPlanner,
    LogicalSavePlanner,
    LogicalShards,
    SafeFileSystemReader,
)
from fbt_megatron.checkpoint.manifest import Manifest, find_damage, hash_file
from fbt_megatron.config.schema import CheckpointConfig
from fbt_megatron.errors import CheckpointError
from fbt_megatron.files import sync_folder, write_durably
from fbt_megatron.parallel.collectives import agree_on_errors, agree_on_rank_zero, gather_objects, raise_together

LATEST_NAME = "latest"
_NO_SPACE_BYTES = 64 * 1024
_STEP_FOLDER = re.compile(r"step_(\d{8,})")
_REPLACED_SUFFIX, _TEMPORARY_SUFFIX = ".old", ".tmp"


@dataclass(frozen=True)
class SaveReport:
    """What a save wrote."""

    path: Path
    num_bytes: int
    seconds: float


class CheckpointManager:
    """Saves to and loads from one folder of checkpoints; every method is called on all ranks together."""

    def __init__(self, folder: Path, *, config: CheckpointConfig, log: Callable[[str], None]) -> None:
        self.folder = folder
        self.config = config
        self.log = log

    def prepare(self) -> None:
        """Create the folder and remove what an interrupted save left; raises CheckpointError where that fails."""
        agree_on_rank_zero(self._prepare)

    def _prepare(self) -> None:
        with _disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / LATEST_NAME).with_suffix(_TEMPORARY_SUFFIX).unlink(missing_ok=True)
            for entry in [path for path in self.folder.iterdir() if _STEP_FOLDER.fullmatch(path.stem)]:
                final = entry.with_suffix("")
                if entry.suffix == _REPLACED_SUFFIX and not final.exists():
                    entry.rename(final)  # what was to take its place has not arrived
                elif entry.suffix in (_REPLACED_SUFFIX, _TEMPORARY_SUFFIX):
                    shutil.rmtree(entry)

    def save(self, manifest: Manifest, shards: dict[str, LogicalShards]) -> SaveReport:
        """Write one checkpoint of `manifest.step`; its `files` are filled in here.

        Raises CheckpointError on every rank when a write fails on any; the checkpoints that were there stay.
        """
        start = time.monotonic()
        temporary = (self.folder / step_name(manifest.step)).with_suffix(_TEMPORARY_SUFFIX)
        agree_on_rank_zero(lambda: self._start_save(temporary))
        try:
            self._write_shards(temporary, shards)
            own = agree_on_errors(lambda: self._hash_own_files(temporary))
            files = {name: record for part in gather_objects(own) for name, record in part.items()}
            complete = replace(manifest, files=dict(sorted(files.items())))
            agree_on_rank_zero(lambda: self._publish(temporary, complete))
        except CheckpointError:
            agree_on_rank_zero(lambda: shutil.rmtree(temporary, ignore_errors=True))
            raise
        num_bytes = sum(record.bytes for record in files.values())
        return SaveReport(self.folder / step_name(manifest.step), num_bytes, time.monotonic() - start)

    def _start_save(self, temporary: Path) -> None:
        with _disk_errors(self.folder):
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir(parents=True)

    def _write_shards(self, temporary: Path, shards: dict[str, LogicalShards]) -> None:
        try:
            dcp.save(dict(shards), storage_writer=dcp.FileSystemWriter(temporary), planner=LogicalSavePlanner())
        except CheckpointException as error:  # torch gathers the failures of all ranks, so this is raised on each
            first = next(iter(error.failures.values()))[0]
            raise_together(CheckpointError(_write_failure(self.folder, first)))  # in the same words

    def _hash_own_files(self, temporary: Path) -> dict[str, Any]:
        rank = dist.get_rank()
        with _disk_errors(self.folder):
            names = [path.name for path in temporary.glob(f"__{rank}_*.distcp")]
            names += [".metadata"] if rank == 0 else []
            return {name: hash_file(temporary / name) for name in names}

    def _publish(self, temporary: Path, manifest: Manifest) -> None:
        final = self.folder / step_name(manifest.step)
        with _disk_errors(self.folder):
            manifest.write(temporary)
            replaced = final.with_suffix(_REPLACED_SUFFIX)
            if final.exists():  # a run that went back to an earlier checkpoint arrives at this step again
                final.rename(replaced)
            temporary.rename(final)
            sync_folder(self.folder)
            write_durably(self.folder / LATEST_NAME, final.name + "\n")
            shutil.rmtree(replaced, ignore_errors=True)
            self._remove_expired(final)

    def _remove_expired(self, newest: Path) -> None:
        """Remove older checkpoints that neither `keep` nor `keep_every` protects."""
        steps = [step for step, path in list_checkpoints(self.folder) if path != newest and step < step_of(newest)]
        every = self.config.keep_every
        for step in steps[max(0, self.config.keep - 1) :]:
            if every is None or step % every:
                expired = self.folder / step_name(step)
                doomed = expired.with_suffix(_TEMPORARY_SUFFIX)
                expired.rename(doomed)  # from here on it is no checkpoint, however far the removal gets
                shutil.rmtree(doomed, ignore_errors=True)  # `prepare` removes the rest

    def find_newest(self, folder: Path) -> tuple[Path, Manifest] | None:
        """The newest undamaged checkpoint of `folder`, every byte of it checked; None where there is no checkpoint.

        A damaged one is reported and the one before it taken. Raises CheckpointError when all are damaged.
        """
        reasons = []
        for path in agree_on_rank_zero(lambda: _candidates(folder)):
            manifest, damage = self._check(path)
            if manifest is not None and damage is None:
                return path, manifest
            reasons.append(f"{path.name}: {damage}")
            self.log(f"checkpoint {path} skipped: {damage}")
        if reasons:
            raise CheckpointError(
                f"No checkpoint in {folder} can be loaded ({'; '.join(reasons)}). "
                "Restore one, or start in another train.run_dir."
            )
        return None

    def check_one(self, path: Path) -> tuple[Path, Manifest]:
        """One checkpoint folder, every byte of it checked; raises CheckpointError where it is damaged."""
        manifest, damage = self._check(path)
        if manifest is None or damage is not None:
            raise CheckpointError(f"{path} cannot be loaded: {damage}")
        return path, manifest

    def _check(self, path: Path) -> tuple[Manifest | None, str | None]:
        """Manifest and first damage found; the files are divided over the ranks."""
        try:
            manifest = agree_on_errors(lambda: Manifest.read(path))
        except CheckpointError as error:
            return None, str(error)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        own = find_damage(path, manifest, list(manifest.files)[rank::world_size])
        return manifest, next((damage for damage in gather_objects(own) if damage is not None), None)


def load_shards(path: Path, shards: dict[str, LogicalShards]) -> None:
    """Read the named tensors of a checkpoint into their views, on all ranks together.

    Raises CheckpointError where one is missing or has another shape.
    """
    try:
        dcp.load(dict(shards), storage_reader=SafeFileSystemReader(path), planner=LogicalLoadPlanner())
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{path} does not fit this run: {first}") from None


def step_name(step: int) -> str:
    """Name of the folder of a step."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Step of a checkpoint folder."""
    match = _STEP_FOLDER.fullmatch(path.name)
    assert match is not None, path
    return int(match.group(1))


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints of a folder, newest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _STEP_FOLDER.fullmatch(path.name)]
    return sorted(((step_of(path), path) for path in paths), reverse=True)


def _candidates(folder: Path) -> list[Path]:
    """Checkpoints in the order in which to try them: the one that `latest` names, then older ones, newest first.

    Newer ones come last: the run went back behind them, or their save ended before the pointer moved.
    """
    found = list_checkpoints(folder)
    named = _named_by_latest(folder)
    if named is None:
        return [path for _, path in found]
    missing = [] if any(path == named for _, path in found) else [named]  # checking it says so
    newer = [path for step, path in found if step > step_of(named)]
    return missing + [path for step, path in found if step <= step_of(named)] + newer


def _named_by_latest(folder: Path) -> Path | None:
    """The checkpoint that the pointer names, which may be gone; None where the pointer is missing or damaged."""
    try:
        name = (folder / LATEST_NAME).read_text().strip()
    except (OSError, ValueError):
        return None
    return folder / name if _STEP_FOLDER.fullmatch(name) else None


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn a failing file operation into a CheckpointError that says what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(_write_failure(folder, error)) from None


def _write_failure(folder: Path, error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    # torch's writer reports a full disk as an internal check of its own, so ask the disk as well.
    if folder.exists() and shutil.disk_usage(folder).free < _NO_SPACE_BYTES:
        reason = os.strerror(errno.ENOSPC)
    complete = [path for path in _candidates(folder) if path.exists()]
    kept = f"The newest complete checkpoint is {complete[0]}." if complete else "There is no earlier checkpoint."
    remedy = "Free or change the disk (train.run_dir) and start again."
    return f"Cannot write a checkpoint to {folder}: {reason}. {kept} {remedy}"
