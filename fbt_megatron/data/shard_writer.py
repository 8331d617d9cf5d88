"""Writes one shard: a USTAR file of documents, and its index."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fbt_megatron.data.chunks import data_path
from fbt_megatron.data.format import (
    METADATA_SUFFIX,
    TOKENS_SUFFIX,
    IntArray,
    ShardInfo,
    encode_index,
    tokens_checksum,
)
from fbt_megatron.errors import DataError
from fbt_megatron.files import sync_folder, write_durably

_BLOCK_BYTES = tarfile.BLOCKSIZE
_WRITE_BUFFER_BYTES = 1 << 22
_READ_BATCH_BYTES = 1 << 28


@dataclass(frozen=True)
class ShardTask:
    """One shard to write."""

    folder: Path
    number: int
    chunk_folder: Path
    marker: Path
    """Where the finished shard's description goes; tells a later run that there is nothing left to do."""
    first_key: int
    """Running number of the first document in the data set."""
    key_width: int
    """Digits of a key."""
    chunks: npt.NDArray[np.int32]
    """Chunk of each document [num_documents]."""
    documents: npt.NDArray[Any]
    """The documents' rows of their chunks' tables [num_documents]."""

    @property
    def name(self) -> str:
        """File name of the shard."""
        return f"shard-{self.number:05d}.tar"


@dataclass(frozen=True)
class _Sample:
    key: str
    metadata: bytes
    tokens: bytes


def write_shard(task: ShardTask) -> ShardInfo:
    """Write the shard and its index, each in one step, and return its description.

    Raises:
        DataError: tokens have changed on disk since their chunk was written.
    """
    path = task.folder / task.name
    partial = path.with_name(path.name + ".tmp")
    digest, offsets, offset = hashlib.sha256(), [], 0
    with partial.open("wb", buffering=_WRITE_BUFFER_BYTES) as file:
        for sample in _samples(task):
            entry = _tar_entry(sample)
            file.write(entry)
            digest.update(entry)
            offsets.append(offset)
            offset += len(entry)
        end = bytes(2 * _BLOCK_BYTES)
        file.write(end)
        digest.update(end)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(task.folder)
    index = encode_index(offsets, task.documents["num_tokens"], task.documents["checksum"])
    index_path = path.with_suffix(".index")
    write_durably(index_path, index)
    info = ShardInfo(
        name=path.name,
        bytes=offset + len(end),
        sha256=digest.hexdigest(),
        num_documents=len(task.documents),
        num_tokens=int(task.documents["num_tokens"].sum()),
        index=index_path.name,
        index_sha256=hashlib.sha256(index).hexdigest(),
    )
    write_durably(task.marker, json.dumps(asdict(info)))
    return info


def finished_shard(task: ShardTask) -> ShardInfo | None:
    """Return the description of a shard that an earlier run finished."""
    if not task.marker.exists():
        return None
    return ShardInfo(**json.loads(task.marker.read_bytes()))


def _samples(task: ShardTask) -> Iterator[_Sample]:
    """Yield the samples in order, reading a bounded number of bytes at a time."""
    sizes = task.documents["metadata_bytes"] + task.documents["token_bytes"]
    batch_of_document = np.cumsum(sizes) // _READ_BATCH_BYTES
    for batch in np.split(np.arange(len(sizes)), np.flatnonzero(np.diff(batch_of_document)) + 1):
        contents = _read_batch(task, batch)
        for position in batch.tolist():
            middle = int(task.documents["metadata_bytes"][position])
            content = contents.pop(position)
            key = f"{task.first_key + position:0{task.key_width}d}"
            sample = _Sample(key, content[:middle], content[middle:])
            if tokens_checksum(sample.tokens) != task.documents["checksum"][position]:
                raise DataError(
                    f"{data_path(task.chunk_folder, int(task.chunks[position]))}: tokens have changed on disk since "
                    "they were written. Build again with --restart, in another place if it happens again."
                )
            yield sample


def _read_batch(task: ShardTask, positions: IntArray) -> dict[int, bytes]:
    """Read documents chunk by chunk: the shuffle spreads them over all chunks, which may be thousands of files."""
    contents: dict[int, bytes] = {}
    ordered = positions[np.lexsort((task.documents["offset"][positions], task.chunks[positions]))]
    for group in np.split(ordered, np.flatnonzero(np.diff(task.chunks[ordered])) + 1):
        with data_path(task.chunk_folder, int(task.chunks[group[0]])).open("rb") as file:
            for position in group.tolist():
                document = task.documents[position]
                file.seek(int(document["offset"]))
                contents[position] = file.read(int(document["metadata_bytes"] + document["token_bytes"]))
    return contents


def _tar_entry(sample: _Sample) -> bytes:
    """Return both members of a sample, headers and padding included."""
    entry = io.BytesIO()
    for suffix, content in ((METADATA_SUFFIX, sample.metadata), (TOKENS_SUFFIX, sample.tokens)):
        header = tarfile.TarInfo(f"{sample.key}.{suffix}")
        header.size = len(content)
        entry.write(header.tobuf(tarfile.USTAR_FORMAT))
        entry.write(content)
        entry.write(bytes(-len(content) % _BLOCK_BYTES))
    return entry.getvalue()
