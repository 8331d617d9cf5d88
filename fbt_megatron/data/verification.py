"""Compares every byte of a finished data set with its description.

Training checks each document that it reads; this finds damage beforehand, and names the files to copy again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from fbt_megatron.data import storage
from fbt_megatron.data.format import DATASET_FILE, INDEX_ENTRY_BYTES, DatasetInfo, dataset_from_json
from fbt_megatron.data.pool import run_tasks
from fbt_megatron.data.progress import Progress
from fbt_megatron.errors import DataError

_BLOCK_BYTES = 1 << 22
_TOKEN_BYTES_ENTRY = 2


@dataclass(frozen=True)
class Verification:
    """What was found in one data set."""

    folder: str
    num_files: int
    num_bytes: int
    damaged: tuple[str, ...]
    """For each damaged file its location and what is wrong with it."""


@dataclass(frozen=True)
class _File:
    """A file as `dataset.json` describes it."""

    location: str
    num_bytes: int
    sha256: str
    num_tokens: int = 0


def verify_dataset(folder: str, *, workers: int = 1) -> Verification:
    """Read all files that `folder/dataset.json` describes; progress goes to standard error.

    Args:
        folder: folder or URL prefix.
        workers: processes that read.

    Raises:
        DataError: `workers` is below 1. What is wrong with the data set, also with `dataset.json`, is in the result.
    """
    if workers < 1:
        raise DataError(f"--workers {workers}: must be at least 1.")
    description = storage.join(folder, DATASET_FILE)
    try:
        files = list(_files(folder, dataset_from_json(storage.read_bytes(description), description)))
    except DataError as error:
        return Verification(folder, num_files=0, num_bytes=0, damaged=(str(error),))
    num_bytes = sum(file.num_bytes for file in files)
    damages: dict[_File, str] = {}
    with Progress(f"verify {folder}", num_bytes, 0, sys.stderr) as progress:
        for file, damage in run_tasks(_check, files, workers):
            progress.advance(file.num_bytes, file.num_tokens)
            if damage:
                damages[file] = damage
    damaged = tuple(f"{file.location}: {damages[file]}" for file in files if file in damages)
    return Verification(folder, len(files), num_bytes, damaged)


def _files(folder: str, info: DatasetInfo) -> Iterator[_File]:
    table_bytes = info.vocab_size * _TOKEN_BYTES_ENTRY
    yield _File(storage.join(folder, info.token_bytes), table_bytes, info.token_bytes_sha256)
    for shard in info.shards:
        index_bytes = shard.num_documents * INDEX_ENTRY_BYTES
        yield _File(storage.join(folder, shard.index), index_bytes, shard.index_sha256)
        yield _File(storage.join(folder, shard.name), shard.bytes, shard.sha256, shard.num_tokens)


def _check(file: _File) -> tuple[_File, str | None]:
    """The file and what is wrong with it, if anything."""
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with closing(storage.open_at(file.location, 0)) as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
                num_bytes += len(block)
    except FileNotFoundError:
        return file, "is missing"
    except storage.READ_ERRORS as error:
        return file, f"cannot be read ({error})"
    if num_bytes != file.num_bytes:
        return file, f"has {num_bytes:,} bytes instead of {file.num_bytes:,}"
    if digest.hexdigest() != file.sha256:
        return file, "has changed since it was written (its SHA-256 differs)"
    return file, None
