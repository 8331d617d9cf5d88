"""The folder of a run's checkpoints: their names, their order, and the pointer to the newest. Needs no other ranks."""

from __future__ import annotations

import re
from pathlib import Path

from fbt_megatron.checkpoint.manifest import MANIFEST_NAME
from fbt_megatron.errors import CheckpointError

CHECKPOINTS_NAME = "checkpoints"
LATEST_NAME = "latest"
REPLACED_SUFFIX, TEMPORARY_SUFFIX = ".old", ".tmp"
STEP_FOLDER = re.compile(r"step_(\d{8,})")


def step_name(step: int) -> str:
    """Name of the folder of a step."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Step of a checkpoint folder."""
    match = STEP_FOLDER.fullmatch(path.name)
    assert match is not None, path
    return int(match.group(1))


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints of a folder, newest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name)]
    return sorted(((step_of(path), path) for path in paths), reverse=True)


def candidates(folder: Path) -> list[Path]:
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


def what_is_at(source: Path) -> tuple[bool, Path]:
    """Whether a path is one checkpoint, and the path or, of a run directory, the folder of checkpoints to look in."""
    if (source / MANIFEST_NAME).exists():
        return True, source
    nested = source / CHECKPOINTS_NAME
    return False, nested if nested.is_dir() else source


def find_checkpoint(source: Path) -> Path:
    """The checkpoint at `source`: a step_* folder, or the newest of a folder of checkpoints or of a run directory.

    Nothing is checked, and no other is taken in its place. Raises CheckpointError where there is none.
    """
    is_checkpoint, folder = what_is_at(source)
    if is_checkpoint or STEP_FOLDER.fullmatch(folder.name):
        return folder
    found = candidates(folder)
    if not found:
        raise CheckpointError(
            f"{source}: there is no checkpoint. Name a run directory, its checkpoints folder, or one step_* folder."
        )
    return found[0]


def _named_by_latest(folder: Path) -> Path | None:
    """The checkpoint that the pointer names, which may be gone; None where the pointer is missing or damaged."""
    try:
        name = (folder / LATEST_NAME).read_text().strip()
    except (OSError, ValueError):
        return None
    return folder / name if STEP_FOLDER.fullmatch(name) else None
