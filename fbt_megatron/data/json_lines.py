"""Files with a JSON object on each line as shards: where they are, and where their lines begin.

A file is read once as a whole, when the data set is opened. After that a reader goes to any line directly.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from fbt_megatron.data import storage
from fbt_megatron.data.shards import Shard, expand_braces
from fbt_megatron.errors import DataError

LINES_SUFFIX = ".jsonl"
LINE_COLUMNS = 4
"""Of the index: offset, bytes (in place of the number of tokens), checksum (CRC-32), number of the line from 1 on."""


def find_line_shards(spec: str | Sequence[str], *, key: str) -> list[Shard]:
    """The files that `spec` names, each with its index.

    Args:
        spec: value of `data.train` or `data.validation`: files, folders or URL prefixes with `*.jsonl`, with brace
            expansion, or a list of these.
        key: the name of that setting, for messages.

    Raises:
        DataError: nothing is there, a file cannot be read, or it is of another kind.
    """
    items = [item for text in ([spec] if isinstance(spec, str) else spec) for item in expand_braces(text, key)]
    return [scan_lines(location) for item in items for location in _find_files(item, key)]


def scan_lines(location: str) -> Shard:
    """Read a whole file and note its lines, without those that are blank.

    A scan that fails for a reason that may pass starts anew.

    Raises:
        DataError: it cannot be read.
    """
    with storage.naming_errors(location):
        return storage.persistently(location, lambda: _scan(location))


def _scan(location: str) -> Shard:
    entries, digest = array("q"), hashlib.sha256()
    offset = 0
    with closing(storage.open_once(location, 0)) as stream:
        for number, line in enumerate(stream, start=1):
            digest.update(line)
            if line.strip():
                entries.extend((offset, len(line), zlib.crc32(line), number))
            offset += len(line)
    index = np.array(entries, dtype=np.int64).reshape(-1, LINE_COLUMNS)
    return Shard(location, scanned=index, sha256=digest.hexdigest())


def _find_files(item: str, key: str) -> list[str]:
    if storage.is_pipe(item) or item.endswith((f"{LINES_SUFFIX}.gz", f"{LINES_SUFFIX}.zst")):
        raise DataError(
            f"{key}={item}: lines of JSON are read from the middle, which compressed files and commands do not allow. "
            "Decompress the file, or store the output of the command."
        )
    if item.endswith(LINES_SUFFIX):
        return [item]
    if not storage.is_folder(item):
        raise DataError(f"{key}={item}: no such folder, and not a {LINES_SUFFIX} file. Name files or folders of them.")
    locations = storage.list_files(item, (LINES_SUFFIX,))
    if not locations:
        raise DataError(f"{key}={item}: holds no {LINES_SUFFIX} files. Name the folder or the files that there are.")
    return locations
