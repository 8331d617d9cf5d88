"""Where text comes from: files, folders, JSON lines, Parquet, and the standard library of the running interpreter.

The inputs become an ordered list of files, the files an ordered list of chunks, and a chunk a stream of documents.
None of this depends on how many processes read, so neither does anything built from it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import pyarrow
import pyarrow.parquet
import zstandard

from fbt_megatron.errors import DataError

PYTHON_STDLIB = "python-stdlib"
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET_SUFFIX = ".parquet"
# fmt: off
TEXT_SUFFIXES = frozenset([
    ".txt", ".text", ".md", ".markdown", ".rst", ".org", ".tex", ".html", ".htm", ".xml",
    ".py", ".pyi", ".ipynb", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu",
    ".cuh", ".java", ".kt", ".scala", ".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".pl", ".lua",
    ".jl", ".r", ".m", ".swift", ".cs", ".hs", ".ml", ".sh",
    ".sql", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".json", ".css",
])
# fmt: on
# Tests hold odd encodings and generated tables, `encodings` is character tables; neither is prose or programs.
STDLIB_EXCLUDED = frozenset(["site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"])

_ZSTD_BLOCK_BYTES = 1 << 20
_PARQUET_BATCH_ROWS = 512


@dataclass(frozen=True)
class SourceFile:
    """One input file."""

    path: str
    label: str
    """Name in metadata and messages: relative to the input it was found under, so equal on every machine."""
    kind: Literal["text", "jsonl", "parquet"]
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Inputs:
    """All input files in reading order."""

    files: tuple[SourceFile, ...]
    num_ignored: int
    """Files in the given folders that are of no known kind."""

    @property
    def num_bytes(self) -> int:
        """Size of the files on disk."""
        return sum(file.size for file in self.files)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the names, sizes and modification times of all files."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(json.dumps([file.label, file.kind, file.size, file.mtime_ns]).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Part:
    """A stretch of one file: bytes of JSON lines, row groups of Parquet, or a whole text file."""

    file: SourceFile
    start: int
    stop: int | None
    """First byte or row group that is not read; `None`: to the end."""
    size: int
    """Bytes on disk, for progress."""


@dataclass(frozen=True)
class Document:
    """One text."""

    text: str
    source: str
    """Label of the file and, where a file has many documents, `@` and the document's byte offset or row number."""


@dataclass(frozen=True)
class Unreadable:
    """A place in the input that gives no document."""

    message: str


def find_inputs(inputs: Sequence[str]) -> Inputs:
    """List the files of `inputs` in order; inside a folder by path.

    Args:
        inputs: files, folders (searched recursively, hidden entries left out), or `python-stdlib`.

    Raises:
        DataError: an input does not exist, or there is no file of a known kind at all.
    """
    files: list[SourceFile] = []
    num_ignored = 0
    for name in inputs:
        found, ignored = _stdlib_files() if name == PYTHON_STDLIB else _files_of(Path(name))
        files += found
        num_ignored += ignored
    if not files:
        raise DataError(
            f"{' '.join(inputs)}: no input files ({num_ignored} of unknown kind). "
            f"Known are {', '.join(JSONL_SUFFIXES)}, "
            f"{PARQUET_SUFFIX} and text such as .txt, .md and .py; a text file named by itself may have any suffix."
        )
    return Inputs(tuple(files), num_ignored)


def plan_chunks(inputs: Inputs, text_key: str, chunk_bytes: int) -> list[tuple[Part, ...]]:
    """Divide the inputs into chunks of about `chunk_bytes` on disk.

    Small text files share a chunk; JSON lines that are not compressed and Parquet files are divided. A compressed
    file is one part, since it can be read from its start only.

    Raises:
        DataError: a Parquet file is damaged or has no text column `text_key`.
    """
    chunks: list[tuple[Part, ...]] = []
    pending: list[Part] = []
    pending_bytes = 0
    for part in (part for file in inputs.files for part in _parts_of(file, text_key, chunk_bytes)):
        if pending and pending_bytes + part.size > chunk_bytes:
            chunks.append(tuple(pending))
            pending, pending_bytes = [], 0
        pending.append(part)
        pending_bytes += part.size
    return [*chunks, tuple(pending)]


def read_documents(parts: Iterable[Part], text_key: str) -> Iterator[Document | Unreadable]:
    """Yield the documents of a chunk in order, and an `Unreadable` for each place that gives none.

    A text file is one document; so is each line of a JSON lines file and each row of a Parquet file, whose text is
    the value of `text_key`.
    """
    for part in parts:
        match part.file.kind:
            case "text":
                yield _read_text(part.file)
            case "jsonl":
                yield from _read_json_lines(part, text_key)
            case "parquet":
                yield from _read_parquet(part, text_key)


def _kind_of(path: Path) -> Literal["text", "jsonl", "parquet"] | None:
    name = path.name.lower()
    if name.endswith(JSONL_SUFFIXES):
        return "jsonl"
    if name.endswith(PARQUET_SUFFIX):
        return "parquet"
    return "text" if path.suffix.lower() in TEXT_SUFFIXES else None


def _files_of(path: Path) -> tuple[list[SourceFile], int]:
    if path.is_file():
        return [_source_file(path, path.name, _kind_of(path) or "text")], 0
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder. Name an existing one, or {PYTHON_STDLIB}.")
    return _files_below(path, path.resolve().name, excluded=frozenset())


def _stdlib_files() -> tuple[list[SourceFile], int]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found, _ = _files_below(root, PYTHON_STDLIB, excluded=STDLIB_EXCLUDED)
    modules = [file for file in found if file.path.endswith(".py")]
    if not modules:
        raise DataError(f"{PYTHON_STDLIB}: no .py files in {root}. Use an interpreter installed with its source.")
    return modules, 0


def _files_below(root: Path, label: str, excluded: frozenset[str]) -> tuple[list[SourceFile], int]:
    """Return the files under `root` ordered by path, and how many are of no known kind."""
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in excluded]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    found, num_ignored = [], 0
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        kind = _kind_of(path)
        if kind is None:
            num_ignored += 1
        elif path.is_file():
            found.append(_source_file(path, f"{label}/{path.relative_to(root).as_posix()}", kind))
    return found, num_ignored


def _source_file(path: Path, label: str, kind: Literal["text", "jsonl", "parquet"]) -> SourceFile:
    status = path.stat()
    return SourceFile(str(path), label, kind, status.st_size, status.st_mtime_ns)


def _parts_of(file: SourceFile, text_key: str, chunk_bytes: int) -> Iterator[Part]:
    if file.kind == "parquet":
        yield from _parquet_parts(file, text_key, chunk_bytes)
    elif file.kind == "jsonl" and file.path.lower().endswith(".jsonl"):
        for start in range(0, file.size, chunk_bytes):
            stop = min(start + chunk_bytes, file.size)
            yield Part(file, start, stop, stop - start)
    else:
        yield Part(file, 0, None, file.size)


def _read_text(file: SourceFile) -> Document | Unreadable:
    try:
        return Document(Path(file.path).read_bytes().decode("utf-8-sig"), file.label)
    except OSError as error:
        return Unreadable(f"{file.path}: cannot be read ({error.strerror}). Repair it or leave it out.")
    except UnicodeDecodeError as error:
        return Unreadable(f"{file.path}: not UTF-8 (byte {error.start}). Convert the file or leave it out.")


def _read_json_lines(part: Part, text_key: str) -> Iterator[Document | Unreadable]:
    """Yield a document per line that starts inside the part."""
    path, offset = Path(part.file.path), part.start
    try:
        with path.open("rb") as file:
            if offset > 0:  # A line that starts before the part belongs to the one before.
                file.seek(offset - 1)
                offset += len(file.readline()) - 1
            for line in _decompressed_lines(file, path):
                if part.stop is not None and offset >= part.stop:
                    return
                if line.strip():
                    yield _parse_line(line, text_key, part.file, offset)
                offset += len(line)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        yield Unreadable(
            f"{path}: cannot be read after byte {offset} of its text ({error}). Repair it or leave it out."
        )


def _decompressed_lines(file: BinaryIO, path: Path) -> Iterable[bytes]:
    name = path.name.lower()
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=file)
    if name.endswith(".zst"):
        return _join_lines(_zstd_blocks(file))
    return file


def _zstd_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Decompress all frames; unlike the library's stream reader, notice a last frame that is cut short."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    data = file.read(_ZSTD_BLOCK_BYTES)
    while data:
        frame = decompressor.decompressobj()
        while not frame.eof:
            if not data:
                raise EOFError("the file ends inside a frame")
            yield frame.decompress(data)
            data = frame.unused_data if frame.eof else file.read(_ZSTD_BLOCK_BYTES)
        data = data or file.read(_ZSTD_BLOCK_BYTES)


def _join_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


def _parse_line(line: bytes, text_key: str, file: SourceFile, offset: int) -> Document | Unreadable:
    try:
        record = json.loads(line.decode("utf-8-sig" if offset == 0 else "utf-8"))
    except ValueError as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else f"not JSON ({error})"
        return Unreadable(f"{_line_name(file, offset)}: {reason}.")
    if not isinstance(record, dict) or text_key not in record:
        keys = f"its keys are {', '.join(record)}" if isinstance(record, dict) else "it is not an object"
        return Unreadable(f"{_line_name(file, offset)}: no key {text_key!r}; {keys}. Name the key with --text-key.")
    problem = _text_problem(record[text_key])
    if problem:
        return Unreadable(f"{_line_name(file, offset)}: {text_key!r} {problem}.")
    return Document(record[text_key], f"{file.label}@{offset}")


def _text_problem(value: object) -> str | None:
    if not isinstance(value, str):
        return f"is {'null' if value is None else type(value).__name__}, not text"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"holds half of a surrogate pair (character {error.start}), which no encoding can store"
    return None


def _line_name(file: SourceFile, offset: int) -> str:
    """Name a line by its number, found by counting: only wanted for messages."""
    path, position, number = Path(file.path), 0, 1
    with path.open("rb") as raw:
        for line in _decompressed_lines(raw, path):
            position += len(line)
            if position > offset:
                break
            number += 1
    return f"{path}: line {number}"


def _parquet_parts(file: SourceFile, text_key: str, chunk_bytes: int) -> Iterator[Part]:
    try:
        with pyarrow.parquet.ParquetFile(file.path) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file.path}: not a readable Parquet file ({error}).") from error
    if text_key not in schema.names:
        raise DataError(
            f"{file.path}: no column {text_key!r}; it has {', '.join(schema.names)}. Name the column with --text-key."
        )
    kind = schema.field(text_key).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise DataError(f"{file.path}: column {text_key!r} is {kind}, not text. Name the column with --text-key.")
    start, size, num_rows = 0, 0, max(metadata.num_rows, 1)
    for group in range(metadata.num_row_groups):
        size += file.size * metadata.row_group(group).num_rows // num_rows
        if size >= chunk_bytes or group == metadata.num_row_groups - 1:
            yield Part(file, start, group + 1, size)
            start, size = group + 1, 0


def _read_parquet(part: Part, text_key: str) -> Iterator[Document | Unreadable]:
    path = part.file.path
    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            row = sum(parquet.metadata.row_group(group).num_rows for group in range(part.start))
            groups = list(range(part.start, part.stop or parquet.metadata.num_row_groups))
            for batch in parquet.iter_batches(_PARQUET_BATCH_ROWS, row_groups=groups, columns=[text_key]):
                for scalar in batch.column(0):
                    yield _parse_scalar(scalar, text_key, part.file, row)
                    row += 1
    except (pyarrow.ArrowException, OSError) as error:
        yield Unreadable(f"{path}: cannot be read from row group {part.start} on ({error}). Repair it or leave it out.")


def _parse_scalar(scalar: pyarrow.Scalar, text_key: str, file: SourceFile, row: int) -> Document | Unreadable:
    try:
        value = scalar.as_py()
    except UnicodeDecodeError:
        return Unreadable(f"{file.path}: row {row}: {text_key!r} is not UTF-8.")
    problem = _text_problem(value)
    if problem:
        return Unreadable(f"{file.path}: row {row}: {text_key!r} {problem}.")
    return Document(value, f"{file.label}@{row}")
