"""What makes a folder a complete checkpoint: a manifest, written last, with the hash of every file and its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fbt_megatron.errors import CheckpointError
from fbt_megatron.files import write_durably

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
RUN, WEIGHTS = "run", "weights"
"""What a checkpoint holds: all that a run needs to go on, or weights alone, from which one starts."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything of a checkpoint that is not a tensor.

    `state` is the trainer's (counters, data cursors); `config` the resolved configuration, as the text of its file.
    """

    step: int
    state: dict[str, Any]
    config: str
    versions: dict[str, str]
    files: dict[str, FileRecord]
    contents: str = RUN
    """`RUN` or `WEIGHTS`."""

    def write(self, folder: Path) -> None:
        """Write to `folder` and flush to the disk."""
        content = {"format_version": FORMAT_VERSION, **asdict(self)}
        write_durably(folder / MANIFEST_NAME, json.dumps({**content, "sha256": _hash_values(content)}, indent=1))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint folder; raises CheckpointError where there is none that this version reads."""
        path = folder / MANIFEST_NAME
        try:
            content = json.loads(path.read_text())
            version, digest = content["format_version"], content.pop("sha256")
            if version != FORMAT_VERSION:
                raise CheckpointError(f"{path} has format version {version}; this version reads {FORMAT_VERSION}")
            if digest != _hash_values(content):
                raise ValueError("its own hash differs")
            del content["format_version"]
            files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
            return cls(files=files, **content)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged ({error})") from None


def _hash_values(content: dict[str, Any]) -> str:
    """SHA-256 of JSON values, however they are spaced; one flipped bit in a counter or a cursor would go unnoticed."""
    plain = json.loads(json.dumps(content))  # as they are read back: every key is text
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def hash_file(path: Path) -> FileRecord:
    """Size and SHA-256 of a file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


def find_damage(folder: Path, manifest: Manifest, names: Iterable[str]) -> str | None:
    """What is wrong with the named files of a checkpoint, or None; reads every byte of them."""
    for name in names:
        expected = manifest.files[name]
        try:
            found = hash_file(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found.bytes != expected.bytes:
            return f"{name} has {found.bytes:,} bytes instead of {expected.bytes:,}"
        if found.sha256 != expected.sha256:
            return f"{name} has changed since it was written (its hash differs)"
    return None
