"""Tokenised chunks: the first half of a build, kept on disk so that neither memory nor a kill limits it.

A chunk is three files: `.data` holds per document its metadata and its tokens one behind the other, `.documents` a
table of where they lie, and `.json` the counts. The last one is written last: a chunk that has it is finished.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fbt_megatron.data.format import encode_tokens, tokens_checksum
from fbt_megatron.data.hashing import hash64
from fbt_megatron.data.sources import Document, Part, Unreadable, read_documents
from fbt_megatron.data.tokenizer import Tokenizer, encode_document, load_tokenizer
from fbt_megatron.errors import DataError
from fbt_megatron.files import write_durably

MAX_REPORTED = 5

DOCUMENT_DTYPE = np.dtype(
    [
        ("offset", "<i8"),  # of the metadata in `.data`; the tokens follow it
        ("metadata_bytes", "<i8"),
        ("token_bytes", "<i8"),
        ("num_tokens", "<i8"),
        ("text_bytes", "<i8"),
        ("text_hash", "<u8"),
        ("checksum", "<u4"),  # of the tokens
    ]
)


@dataclass(frozen=True)
class TokenizerSpec:
    """How to load the tokenizer, in any process."""

    spec: str
    eos_token: str | None = None
    bos_token: str | None = None

    def load(self) -> Tokenizer:
        """Load it; see `load_tokenizer`."""
        return load_tokenizer(self.spec, eos_token=self.eos_token, bos_token=self.bos_token)


@dataclass(frozen=True)
class ChunkTask:
    """One chunk to tokenise."""

    number: int
    parts: tuple[Part, ...]
    folder: Path
    tokenizer: TokenizerSpec
    add_bos: bool
    text_key: str
    on_error: Literal["stop", "skip"]

    @property
    def input_bytes(self) -> int:
        """Size of the chunk's inputs on disk."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class ChunkSummary:
    """Counts of a finished chunk."""

    number: int
    input_bytes: int
    num_documents: int
    num_tokens: int
    num_empty: int
    """Documents without text, left out."""
    num_skipped: int
    """Places in the input that gave no document, left out because `on_error` is `skip`."""
    skipped: tuple[str, ...]
    """The first few of them."""


@dataclass
class _Counts:
    num_empty: int = 0
    num_skipped: int = 0
    skipped: tuple[str, ...] = ()

    def skip(self, place: Unreadable) -> None:
        self.num_skipped += 1
        self.skipped = (*self.skipped, place.message)[:MAX_REPORTED]


def data_path(folder: Path, number: int) -> Path:
    """Return where a chunk's metadata and tokens lie."""
    return folder / f"chunk-{number:06d}.data"


def tokenize_chunk(task: ChunkTask) -> ChunkSummary:
    """Tokenise a chunk and write its files.

    Raises:
        DataError: a place in the input gives no document and `on_error` is `stop`, or the disk is full.
    """
    tokenizer = _cached_tokenizer(task.tokenizer)
    counts, rows, offset = _Counts(), [], 0
    path = data_path(task.folder, task.number)
    with path.open("wb") as file:
        for document in _readable(task, counts):
            ids = encode_document(tokenizer, document.text, add_bos=task.add_bos)
            if not ids:
                counts.num_empty += 1
                continue
            text = document.text.encode()
            tokens = encode_tokens(ids, tokenizer.vocab_size, document.source)
            metadata = _metadata(document.source, len(ids), len(text))
            file.write(metadata)
            file.write(tokens)
            sizes = (len(metadata), len(tokens), len(ids), len(text))
            rows.append((offset, *sizes, hash64(text), tokens_checksum(tokens)))
            offset += len(metadata) + len(tokens)
        file.flush()
        os.fsync(file.fileno())
    table = np.array(rows, dtype=DOCUMENT_DTYPE)
    summary = ChunkSummary(task.number, task.input_bytes, len(table), int(table["num_tokens"].sum()), **vars(counts))
    write_durably(path.with_suffix(".documents"), table.tobytes())
    write_durably(path.with_suffix(".json"), json.dumps(asdict(summary)))
    return summary


def finished_chunk(folder: Path, number: int) -> ChunkSummary | None:
    """Return the counts of a chunk that an earlier run finished."""
    path = data_path(folder, number).with_suffix(".json")
    if not path.exists():
        return None
    summary = json.loads(path.read_bytes())
    return ChunkSummary(**{**summary, "skipped": tuple(summary["skipped"])})


def read_table(folder: Path, number: int) -> npt.NDArray[Any]:
    """Return a finished chunk's documents as records of `DOCUMENT_DTYPE`."""
    return np.frombuffer(data_path(folder, number).with_suffix(".documents").read_bytes(), dtype=DOCUMENT_DTYPE)


@lru_cache(maxsize=1)
def _cached_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """A process works on many chunks with one tokenizer; large vocabularies take a second to load."""
    return spec.load()


def _readable(task: ChunkTask, counts: _Counts) -> Iterator[Document]:
    for document in read_documents(task.parts, task.text_key):
        if isinstance(document, Document):
            yield document
        elif task.on_error == "skip":
            counts.skip(document)
        else:
            raise DataError(f"{document.message} Or leave such places out with --on-error skip.")


def _metadata(source: str, num_tokens: int, num_bytes: int) -> bytes:
    return json.dumps({"source": source, "num_tokens": num_tokens, "num_bytes": num_bytes}).encode()
