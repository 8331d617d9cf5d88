"""Checkpoints of a run: saved at once or in the background, checked before they are believed.

With `checkpoint.async` training stops for a copy of the values to host memory. A thread then does what a save at once
does, through the same `CheckpointWriter`, with a process group of its own. At most one save is in the background. A
failed one is tried again with the same copies; when all tries have failed, `poll` gives the error at the next step.
"""

from __future__ import annotations

import copy
import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fbt_megatron import activity
from fbt_megatron.checkpoint.background import BackgroundWork, HostCopies
from fbt_megatron.checkpoint.folder import candidates, step_name, step_of
from fbt_megatron.checkpoint.logical_shards import LogicalLoadPlanner, LogicalShards, SafeFileSystemReader
from fbt_megatron.checkpoint.manifest import Manifest, find_damage
from fbt_megatron.checkpoint.writer import CheckpointWriter
from fbt_megatron.config.schema import CheckpointConfig
from fbt_megatron.errors import CheckpointError
from fbt_megatron.parallel.collectives import agree_on_errors, agree_on_rank_zero, gather_objects

_PAUSES_SECONDS = (0.0, 10.0, 60.0)
"""Before each further try of a save in the background; none once the run waits for it."""

_GROUP_TIMEOUT = datetime.timedelta(hours=2)
"""For ranks in the background that wait for the slowest disk: nobody else waits there."""


@dataclass(frozen=True)
class SaveReport:
    """What a save wrote. `seconds` go from its begin to its end; training stood still for `stall_seconds` of them."""

    path: Path
    num_bytes: int
    seconds: float
    stall_seconds: float


class CheckpointManager:
    """Saves to and loads from one folder of checkpoints.

    Every method is called on all ranks together; `poll` and `close` need no other ranks.
    """

    def __init__(self, folder: Path, *, config: CheckpointConfig, log: Callable[[str], None]) -> None:
        self.folder = folder
        self.config = config
        self.log = log
        self._group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT) if config.async_ else None
        self._writer = CheckpointWriter(folder, config=config, group=self._group)
        self._copies = HostCopies()
        self._saving: BackgroundWork[SaveReport] | None = None

    def prepare(self) -> None:
        """Create the folder and remove what an interrupted save left; raises CheckpointError where that fails."""
        self._writer.prepare()

    def save(self, manifest: Manifest, shards: dict[str, LogicalShards], *, started: float | None = None) -> None:
        """Save one checkpoint of `manifest.step`; its `files` are filled in here.

        `started` is the `time.monotonic()` from which training stands still (default: now). With `checkpoint.async` the
        values may change as soon as this returns; a save that is not finished yet is waited for before.
        Raises CheckpointError on every rank when a write fails on any; the checkpoints that were there stay.
        """
        started = time.monotonic() if started is None else started
        self.finish()
        if not self.config.async_:
            self._log_save(self._save(manifest, shards, started))
            return
        copies = self._copies.take(shards)
        fixed = replace(manifest, state=copy.deepcopy(manifest.state))
        stall = time.monotonic() - started
        self._saving = BackgroundWork(lambda work: self._save_persistently(work, fixed, copies, started, stall))

    def _save(
        self, manifest: Manifest, shards: dict[str, LogicalShards], started: float, stall: float | None = None
    ) -> SaveReport:
        written = self._writer.write(manifest, shards)
        num_bytes = sum(record.bytes for record in written.files.values())
        seconds = time.monotonic() - started
        return SaveReport(
            self.folder / step_name(manifest.step), num_bytes, seconds, seconds if stall is None else stall
        )

    def _save_persistently(
        self,
        work: BackgroundWork[SaveReport],
        manifest: Manifest,
        copies: dict[str, LogicalShards],
        started: float,
        stall: float,
    ) -> SaveReport:
        """In the thread: save, and where that fails try again; raises the CheckpointError of the last try."""
        for number, pause in enumerate(_PAUSES_SECONDS, start=1):
            try:
                return self._save(manifest, copies, started, stall)
            except CheckpointError as error:
                work.note(f"checkpoint of step {manifest.step}, try {number} of {len(_PAUSES_SECONDS) + 1}: {error}")
                # Rank 0 decides when, because only there it is known to all ranks alike that the run waits.
                agree_on_rank_zero(partial(work.pause, pause), group=self._group)
        return self._save(manifest, copies, started, stall)

    def poll(self) -> CheckpointError | None:
        """Log what the save in the background has to say; the error of its last try, once that has failed.

        Ranks may learn of the end of a save at different steps, but of the same end.
        """
        saving = self._saving
        if saving is None:
            return None
        ended = saving.done
        for note in saving.notes():
            self.log(note)
        if ended:
            self._saving = None
            try:
                self._log_save(saving.result())
            except CheckpointError as error:
                return error
        return None

    def finish(self) -> None:
        """Wait for the save in the background; raises its CheckpointError on every rank."""
        if self._saving is not None:
            if not self._saving.done:
                activity.advance("waiting for the one in the background")
                waited = self._saving.wait()
                self.log(f"waited {waited:.1f}s for the checkpoint that was being written")
            error = self.poll()
            if error is not None:
                raise error

    def close(self) -> None:
        """Finish the save in the background, whatever ended the run; a failure goes to the log."""
        try:
            self.finish()
        except Exception as error:  # the run ends for a reason of its own, which this must not hide
            self.log(f"the last checkpoint was not completed: {error}")

    def _log_save(self, report: SaveReport) -> None:
        text = f"checkpoint {report.path} | {report.num_bytes / 1e6:,.1f} MB in {report.seconds:.1f}s"
        self.log(f"{text}, training stood still {report.stall_seconds:.2f}s" if self.config.async_ else text)

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps: the run goes back behind them, and they are no part of it any more."""
        self.finish()
        self._writer.discard_after(step)

    def find_newest(self, folder: Path, *, last_step: int | None = None) -> tuple[Path, Manifest] | None:
        """The newest undamaged checkpoint of `folder`, every byte of it checked; None where there is no checkpoint.

        With `last_step`, the newest one that is not of a later step. A save in the background is waited for. A damaged
        checkpoint is reported and the one before it taken. Raises CheckpointError when all are damaged.
        """
        self.finish()
        reasons = []
        found = agree_on_rank_zero(lambda: candidates(folder))
        for path in [path for path in found if last_step is None or step_of(path) <= last_step]:
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
