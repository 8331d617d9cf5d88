"""The folder of a run: made once, checked to be writable before any work, and held by one run at a time."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fbt_megatron.config.loader import save_config
from fbt_megatron.config.schema import RunConfig
from fbt_megatron.errors import RunDirError
from fbt_megatron.parallel.collectives import agree_on_rank_zero

CONFIG_NAME = "config.yaml"
LOG_NAME = "log.txt"
LOCK_NAME = ".lock"
STARTS_NAME = "starts.txt"


@contextmanager
def hold_run_dir(folder: Path) -> Iterator[None]:
    """Create the folder of a run and hold it for this run alone; every rank enters together.

    Raises RunDirError on every rank where the folder cannot be written or another run holds it.
    """
    locks: list[IO[str]] = []
    agree_on_rank_zero(lambda: locks.append(_lock(folder)))
    try:
        yield
    finally:
        for lock in locks:
            lock.close()


def _lock(folder: Path) -> IO[str]:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_NAME).open("w")
        try:
            # A lock of the kernel goes with its process, so a killed run leaves nothing to clean up.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirError(
                f"train.run_dir={folder}: another run is writing there. Wait for it, stop it, or choose another folder."
            ) from None
    return lock


def note_start(folder: Path, text: str) -> int:
    """Add a line to the list of starts of a run; returns how many it has. Called on rank 0; raises RunDirError.

    A checkpoint could not tell: starts that failed before they saved one would be missing.
    """
    path = folder / STARTS_NAME
    with writing(path):
        with path.open("a") as stream:
            stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        return len(path.read_text(errors="replace").splitlines())


def write_config(config: RunConfig) -> None:
    """Write the resolved configuration to the run directory. Called on rank 0; raises RunDirError."""
    path = Path(config.train.run_dir) / CONFIG_NAME
    with writing(path):
        save_config(config, path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a RunDirError that names the file or folder of a run that cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunDirError(
            f"train.run_dir: {path} cannot be written: {error.strerror or error}. Free the disk, or choose a folder "
            "that this user can write."
        ) from None
