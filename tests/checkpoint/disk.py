"""A file system of limited size."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = 4096


class SmallDisk:
    """A file system in memory, of any number of pages."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path

    def mount(self) -> bool:
        """True where that is allowed."""
        return os.geteuid() == 0 and self._mount("size=16m")

    def resize(self, pages: int) -> None:
        assert self._mount(f"remount,size={pages * PAGE}")

    def used_pages(self) -> int:
        return shutil.disk_usage(self.path).used // PAGE

    def unmount(self) -> None:
        subprocess.run(["umount", str(self.path)], check=True)

    def _mount(self, options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.path)]
        return subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def small_disk(path: Path) -> Iterator[SmallDisk]:
    """A small disk at a new folder; the test is skipped where that is not allowed."""
    disk = SmallDisk(path)
    if not disk.mount():
        pytest.skip("a file system of limited size cannot be mounted here: that takes root")
    try:
        yield disk
    finally:
        disk.unmount()
