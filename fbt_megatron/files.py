"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_durably(path: Path, content: str | bytes) -> None:
    """Replace a file at once: after a crash it holds the old content or the new one. Text is written as UTF-8.

    The content goes to `<name>.tmp` beside it first; a crash may leave that file, a full disk does not.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries (creations, renames and removals) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
