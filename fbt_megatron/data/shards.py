"""Where the shards of a data set are, and where the documents begin in each.

A data set is named by a folder or URL prefix, by paths or URLs of tars with brace expansion, by `pipe:` commands, or by
a list of these. Tars that a `dataset.json` beside them describes are taken with their index; others are scanned once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from braceexpand import braceexpand
from numpy.typing import NDArray

from fbt_megatron.data import storage
from fbt_megatron.data.format import (
    DATASET_FILE,
    INDEX_ENTRY_BYTES,
    DatasetInfo,
    ShardInfo,
    dataset_from_json,
    decode_index,
)
from fbt_megatron.data.samples import scan_samples
from fbt_megatron.errors import DataError


@dataclass(frozen=True)
class Shard:
    """One file of documents: a tar, or lines of JSON. Exactly one of `info` and `scanned` is set."""

    location: str
    """Path, URL or `pipe:` command."""
    info: ShardInfo | None = None
    """Its entry in `dataset.json`."""
    scanned: NDArray[np.int64] | None = None
    """[documents, 2 or more], offset and largest possible number of tokens, where there is no index."""
    sha256: str = ""
    """SHA-256 (hex) of the content of a scanned shard, where the scan has read all of it."""

    @property
    def num_documents(self) -> int:
        """Number of samples."""
        return self.info.num_documents if self.info else len(self._scan)

    @property
    def num_tokens(self) -> int:
        """Number of tokens; without an index an upper bound, of lines of JSON the bytes."""
        return self.info.num_tokens if self.info else int(self._scan[:, 1].sum())

    @property
    def identity(self) -> str:
        """What tells this shard from another of the same data set, wherever it lies."""
        return self.info.sha256 if self.info else self.sha256 or self.location.rpartition("/")[2]

    def index(self) -> NDArray[np.int64]:
        """[documents, 3]: offset of the first header, number of tokens, checksum; of a scanned shard those of its scan.

        Read anew each time: a reader needs it once per run of documents, and all of them would not fit into memory.

        Raises:
            DataError: the index file is missing or damaged.
        """
        if self.info is None:
            return self._scan
        location = storage.join(storage.parent(self.location), self.info.index)
        return decode_index(storage.read_bytes(location), self.info, location)

    def check_sizes(self) -> None:
        """Compare the sizes of the tar and its index with `dataset.json`.

        Raises:
            DataError: one is missing or has another size.
        """
        assert self.info is not None
        folder = storage.parent(self.location)
        index_bytes = self.info.num_documents * INDEX_ENTRY_BYTES
        for name, expected in ((self.info.name, self.info.bytes), (self.info.index, index_bytes)):
            location = storage.join(folder, name)
            actual = storage.size_of(location)
            if actual != expected:
                raise DataError(
                    f"{location}: has {actual} bytes, but {DATASET_FILE} asks for {expected}, so it is incomplete or "
                    "from another data set. Copy or build the data set again."
                )

    @property
    def _scan(self) -> NDArray[np.int64]:
        assert self.scanned is not None
        return self.scanned


@dataclass(frozen=True)
class Described:
    """A `dataset.json` and the folder it lies in."""

    folder: str
    info: DatasetInfo


def find_shards(
    spec: str | Sequence[str], *, key: str, check_sizes: bool = True
) -> tuple[list[Shard], Described | None]:
    """The shards that `spec` names, and the description they share, if they have one.

    Args:
        spec: value of `data.train` or `data.validation`.
        key: the name of that setting, for messages.
        check_sizes: compare local shards and indexes with the sizes in `dataset.json`.

    Raises:
        DataError: nothing is there, a shard is missing, damaged or of another size than described, or the shards do not
            belong to one kind of data set.
    """
    items = [item for text in ([spec] if isinstance(spec, str) else spec) for item in expand_braces(text, key)]
    found: list[tuple[Shard, Described | None]] = []
    by_folder: dict[str, Described | None] = {}
    for item in items:
        found.extend(_find_item(item, key, by_folder))
    if not found:
        raise DataError(f"{key}={spec!r}: names no shards. Give a folder with {DATASET_FILE} or tar files.")
    described = _common_description([description for _, description in found], key)
    for shard, _ in found:
        if check_sizes and shard.info is not None and not storage.is_remote(shard.location):
            shard.check_sizes()
    return [shard for shard, _ in found], described


def expand_braces(text: str, key: str) -> Iterator[str]:
    """The locations that `text` stands for: `a{0..2}` is three. Raises DataError where the braces make no sense."""
    try:
        yield from braceexpand(text)
    except ValueError as error:
        raise DataError(f"{key}={text}: {error}. Write a range as {{00000..00009}}.") from error


def _find_item(item: str, key: str, by_folder: dict[str, Described | None]) -> Iterator[tuple[Shard, Described | None]]:
    if storage.is_pipe(item):
        yield Shard(item, scanned=scan_samples(item)), None
    elif item.endswith(storage.SHARD_SUFFIXES):
        yield _find_tar(item, by_folder)
    else:
        yield from _find_folder(item, key, by_folder)


def _find_tar(location: str, by_folder: dict[str, Described | None]) -> tuple[Shard, Described | None]:
    """The tar at `location`, with its entry of the `dataset.json` beside it if it has one."""
    folder, _, name = location.rpartition("/")
    described = _describe(folder or ".", by_folder)
    for info in described.info.shards if described else ():
        if info.name == name:
            return Shard(location, info=info), described
    return Shard(location, scanned=scan_samples(location)), None


def _find_folder(
    folder: str, key: str, by_folder: dict[str, Described | None]
) -> Iterator[tuple[Shard, Described | None]]:
    described = _describe(folder, by_folder)
    if described:
        yield from ((Shard(storage.join(folder, shard.name), info=shard), described) for shard in described.info.shards)
        return
    if not storage.is_folder(folder):
        raise DataError(
            f"{key}={folder}: no such folder, and no {DATASET_FILE} at that prefix. Make a data set with "
            "tools/build_shards.py, or give the path of .tar files."
        )
    locations = storage.list_files(folder, storage.SHARD_SUFFIXES)
    if not locations:
        raise DataError(
            f"{key}={folder}: holds neither {DATASET_FILE} nor tar files. Make a data set with tools/build_shards.py."
        )
    yield from ((Shard(location, scanned=scan_samples(location)), None) for location in locations)


def _describe(folder: str, by_folder: dict[str, Described | None]) -> Described | None:
    """The `dataset.json` of `folder`, fetched once."""
    if folder not in by_folder:
        location = storage.join(folder, DATASET_FILE)
        text = storage.read_bytes_if_there(location)
        by_folder[folder] = None if text is None else Described(folder, dataset_from_json(text, location))
    return by_folder[folder]


def _common_description(descriptions: list[Described | None], key: str) -> Described | None:
    """The first description, if all agree on what the ids mean.

    Raises:
        DataError: they do not, or some shards have none.
    """
    first = descriptions[0]
    for other in descriptions[1:]:
        if (first is None) != (other is None):
            raise DataError(
                f"{key}: some shards are described by a {DATASET_FILE} and others are not, so their ids may differ. "
                "Build all of them with tools/build_shards.py."
            )
        if first and other and _meaning(first.info) != _meaning(other.info):
            raise DataError(
                f"{key}: {first.folder} and {other.folder} were built with different tokenizers or settings. "
                "Build both with the same ones."
            )
    return first


def _meaning(info: DatasetInfo) -> tuple[object, ...]:
    return info.tokenizer.fingerprint, info.dtype, info.vocab_size, info.add_bos, info.bos_id, info.eos_id
