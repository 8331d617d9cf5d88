"""Safetensors files, written and read one tensor at a time, so that a model larger than memory passes through.

A file is the length of its header (8 bytes, little-endian), the header (JSON: type, shape, place of each tensor), and
the tensors' bytes. The library that reads these files writes only what is in memory as a whole.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fbt_megatron.errors import CheckpointError
from fbt_megatron.files import write_durably

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Types that weights are exported in, by their name in `config.json`."""
PRECISION_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Key of `DTYPES` for each value of `parallel.precision`."""

_TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]
    """The values, in any floating type; called once, when it is this tensor's turn."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def write_tensors(folder: Path, entries: Sequence[Entry], *, dtype: torch.dtype, max_shard_bytes: int) -> None:
    """Write `entries` in their order, in `dtype`: one file, or as many as keep each within `max_shard_bytes`.

    A tensor that is larger has a file of its own. Several files come with an index. Raises OSError.
    """
    shards = _divide(entries, dtype.itemsize, max_shard_bytes)
    if len(shards) == 1:
        _write_file(folder / SINGLE_FILE, shards[0], dtype)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard, dtype)
        weight_map |= {entry.name: name for entry in shard}
    total = sum(entry.numel for entry in entries) * dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_durably(folder / INDEX_FILE, json.dumps(index, indent=2, sort_keys=True) + "\n")


def _divide(entries: Sequence[Entry], itemsize: int, max_shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        num_bytes = entry.numel * itemsize
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += num_bytes
    return shards


def _write_file(path: Path, entries: Sequence[Entry], dtype: torch.dtype) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.numel * dtype.itemsize
        header[entry.name] = {
            "dtype": _TYPE_NAMES[dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            _write_values(file, entry, dtype)
        file.flush()
        os.fsync(file.fileno())


def _write_values(file: IO[bytes], entry: Entry, dtype: torch.dtype) -> None:
    values = entry.load()
    assert tuple(values.shape) == entry.shape, f"{entry.name}: {tuple(values.shape)} instead of {entry.shape}"
    file.write(values.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data)


class StoredTensors:
    """The tensors of the safetensors files of a folder, read one at a time."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """A tensor, fp32."""
        return self._files[name].get_tensor(name).to(torch.float32)


@contextmanager
def open_tensors(folder: Path) -> Iterator[StoredTensors]:
    """The tensors of a folder with one safetensors file, or with several and an index.

    Raises CheckpointError where there are none, one is missing or damaged, or a tensor is in two of them.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in tensor_files(folder):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read ({error}). Copy the model again.") from None
            twice = files.keys() & opened.keys()
            if twice:
                raise CheckpointError(f"{path}: {min(twice)} is in another file of the folder as well.")
            files |= dict.fromkeys(opened.keys(), opened)
        yield StoredTensors(files)


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; raises CheckpointError where it has none, or a damaged index."""
    index = folder / INDEX_FILE
    if index.exists():
        try:
            return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is damaged ({error}). Copy the model again.") from None
    if not (folder / SINGLE_FILE).exists():
        raise CheckpointError(
            f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}. Name a folder with weights in safetensors files; "
            "files of other kinds (pickles) are not read, because that runs what is in them."
        )
    return [folder / SINGLE_FILE]
