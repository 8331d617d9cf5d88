"""Writes one checkpoint so that it is complete or invisible, and keeps the previous one until then.

A save goes to `step_N.tmp`; when every rank has written and every file is hashed, the manifest is written, the folder
is renamed to `step_N`, and only then the `latest` pointer moves and older checkpoints go. A folder without a manifest
is therefore never a checkpoint, and a name that ends in `.tmp` never counts. `step_N.old` is a checkpoint while another
of the same step takes its place.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fbt_megatron.checkpoint.folder import (
    LATEST_NAME,
    REPLACED_SUFFIX,
    STEP_FOLDER,
    TEMPORARY_SUFFIX,
    candidates,
    list_checkpoints,
    step_name,
    step_of,
)
from fbt_megatron.checkpoint.logical_shards import LogicalSavePlanner, LogicalShards
from fbt_megatron.checkpoint.manifest import Manifest, hash_file
from fbt_megatron.config.schema import CheckpointConfig
from fbt_megatron.errors import CheckpointError
from fbt_megatron.files import sync_folder, write_durably
from fbt_megatron.parallel.collectives import agree_on_errors, agree_on_rank_zero, gather_objects, raise_together

_NO_SPACE_BYTES = 64 * 1024


class CheckpointWriter:
    """Writes to one folder of checkpoints; every method is called on all ranks together.

    The ranks agree through `group`, or the default group. A writer that works in a thread has a group of its own: the
    order of collectives within a group must be the same on all ranks, and two threads have no order.
    """

    def __init__(self, folder: Path, *, config: CheckpointConfig, group: dist.ProcessGroup | None = None) -> None:
        self.folder = folder
        self._config = config
        self._group = group

    def prepare(self) -> None:
        """Create the folder and remove what an interrupted save left; raises CheckpointError where that fails."""
        agree_on_rank_zero(self._prepare, group=self._group)

    def _prepare(self) -> None:
        with _disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / LATEST_NAME).with_suffix(TEMPORARY_SUFFIX).unlink(missing_ok=True)
            for entry in [path for path in self.folder.iterdir() if STEP_FOLDER.fullmatch(path.stem)]:
                final = entry.with_suffix("")
                if entry.suffix == REPLACED_SUFFIX and not final.exists():
                    entry.rename(final)  # what was to take its place has not arrived
                elif entry.suffix in (REPLACED_SUFFIX, TEMPORARY_SUFFIX):
                    shutil.rmtree(entry)

    def write(self, manifest: Manifest, shards: dict[str, LogicalShards]) -> Manifest:
        """Write one checkpoint of `manifest.step`; returns the manifest as written, with its files.

        Raises CheckpointError on every rank when a write fails on any; the checkpoints that were there stay.
        """
        group = self._group
        temporary = (self.folder / step_name(manifest.step)).with_suffix(TEMPORARY_SUFFIX)
        agree_on_rank_zero(lambda: self._start(temporary), group=group)
        try:
            self._write_shards(temporary, shards)
            own = agree_on_errors(lambda: self._hash_own_files(temporary), group=group)
            files = {name: record for part in gather_objects(own, group=group) for name, record in part.items()}
            complete = replace(manifest, files=dict(sorted(files.items())))
            agree_on_rank_zero(lambda: self._publish(temporary, complete), group=group)
        except CheckpointError:
            agree_on_rank_zero(lambda: shutil.rmtree(temporary, ignore_errors=True), group=group)
            raise
        return complete

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps; raises CheckpointError where that fails."""
        agree_on_rank_zero(lambda: self._discard_after(step), group=self._group)

    def _discard_after(self, step: int) -> None:
        with _disk_errors(self.folder):
            for later, path in list_checkpoints(self.folder):
                if later > step:
                    _remove(path)

    def _start(self, temporary: Path) -> None:
        with _disk_errors(self.folder):
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir(parents=True)

    def _write_shards(self, temporary: Path, shards: dict[str, LogicalShards]) -> None:
        if self._config.async_:  # the values are in host memory: nothing to copy ahead, so no stream of a GPU is used
            storage = dcp.FileSystemWriter(temporary, per_thread_copy_ahead=0)
        else:
            storage = dcp.FileSystemWriter(temporary)
        try:
            dcp.save(
                dict(shards),
                storage_writer=storage,
                planner=LogicalSavePlanner(),
                process_group=self._group,
            )
        except CheckpointException as error:  # torch gathers the failures of all ranks, so this is raised on each
            first = next(iter(error.failures.values()))[0]
            failure = CheckpointError(_write_failure(self.folder, first))
            raise_together(failure, group=self._group)  # in the same words

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
            replaced = final.with_suffix(REPLACED_SUFFIX)
            if final.exists():  # a run that went back, or a try whose pointer did not move, was here before
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
            temporary.rename(final)
            sync_folder(self.folder)
            write_durably(self.folder / LATEST_NAME, final.name + "\n")
            shutil.rmtree(replaced, ignore_errors=True)
            self._remove_expired(final)

    def _remove_expired(self, newest: Path) -> None:
        """Remove older checkpoints that neither `keep` nor `keep_every` protects."""
        steps = [step for step, path in list_checkpoints(self.folder) if path != newest and step < step_of(newest)]
        every = self._config.keep_every
        for step in steps[max(0, self._config.keep - 1) :]:
            if every is None or step % every:
                _remove(self.folder / step_name(step))


def _remove(checkpoint: Path) -> None:
    doomed = checkpoint.with_suffix(TEMPORARY_SUFFIX)
    checkpoint.rename(doomed)  # from here on it is no checkpoint, however far the removal gets
    shutil.rmtree(doomed, ignore_errors=True)  # `prepare` removes the rest


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
    complete = [path for path in candidates(folder) if path.exists()]
    kept = f"The newest complete checkpoint is {complete[0]}." if complete else "There is no earlier checkpoint."
    remedy = "Free or change the disk (train.run_dir) and start again."
    return f"Cannot write a checkpoint to {folder}: {reason}. {kept} {remedy}"
